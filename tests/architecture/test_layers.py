"""The layers of the house: imports point down and never in circles, and each layer keeps to its own means."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.architecture.source import PACKAGE, Module, layer_of, read_source

# Lowest first. A layer may import those of lower lines, and itself.
LAYERS = [
    {""},  # remora/__init__.py, which says what version this is
    {"vocabulary", "errors", "clock"},
    {"long_wait"},
    {"options"},
    {"names", "recorder"},
    {"protocol"},
    {"devices"},
    {"wire"},
    {"transport"},
    {"faults"},
    {"rendezvous"},
    {"observer"},
    {"agent"},
    {"rref"},
    {"autograd"},
    {"introspection"},
    {"worker"},
    {"rpc"},
    {"observe"},
    {"optim", "nn"},
    {"compat"},
    {"supervision"},  # starts processes, and needs nothing of what they do
    {"launch"},
    {"dashboard"},
    {"command"},  # imports in each verb what that needs
    {"__main__"},
    {"testing"},  # may import anything; nothing may import it
]
RANK = {layer: rank for rank, layers in enumerate(LAYERS) for layer in layers}

# These compute and nothing else: no I/O, no threads, no clock, no torch.
PURE = ("remora.vocabulary", "remora.protocol", "remora.errors", "remora.autograd.ledger")
PURE_STDLIB = {
    "__future__", "abc", "binascii", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum", "functools",
    "hashlib", "heapq", "hmac", "itertools", "json", "math", "operator", "re", "string", "struct", "textwrap", "types",
    "typing",
}  # fmt: skip

OWN_THREADS = (
    "remora.agent", "remora.autograd", "remora.introspection", "remora.transport", "remora.faults.injector",
    "remora.testing",
)  # fmt: skip
THREAD_NAMES = {
    "threading": {"Thread", "Timer", "Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"},
    "_thread": {"start_new_thread", "allocate_lock", "RLock", "LockType"},
    "queue": {"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue"},
    "concurrent.futures": {"ThreadPoolExecutor"},
}
OPEN_SOCKETS = ("remora.transport", "remora.testing")
SOCKET_NAMES = {
    "socket": {"socket", "socketpair", "create_connection", "create_server", "fromfd"},
    "asyncio": {"open_connection", "start_server", "open_unix_connection", "start_unix_server"},
}
OWN_VARIABLES = ("remora.options",)

# (module, what it imports or uses) -> why it may. An exception that is no longer needed fails, too.
EXCEPTIONS = {
    ("remora.compat.children", "REMORA_COMPAT"): "sets it for the processes that this one starts",
    ("remora.compat.startup.sitecustomize", "REMORA_COMPAT"): "runs before anything of Remora can be imported",
    ("remora.observer.group_observer", "concurrent.futures.ThreadPoolExecutor"): "asks all workers at once",
    ("remora.optim.local", "threading.Lock"): "steps of several trainers on a parameter come one after the other",
    ("remora.protocol.observing", "secrets"): "a nonce must be unpredictable",
    ("remora.protocol.handshake", "secrets"): "a nonce must be unpredictable; tests pass their own",
    ("remora.rendezvous.group", "threading.Lock"): "any thread that calls a worker nobody told of looks it up",
    ("remora.supervision.supervisor", "REMORA_RESTARTS"): "sets it for the processes that it starts",
    ("remora.supervision.prefixed_output", "threading.Thread"): "reads what processes print, however the supervisor is busy",
    ("remora.rpc.all_gather", "threading.Event"): "AllGatherStates.proceed_signal is an Event for programs that look",
}


@pytest.fixture(scope="module")
def source() -> dict[str, Module]:
    return read_source()


def test_every_package_has_a_layer(source: dict[str, Module]) -> None:
    unknown = {module.layer for module in source.values()} - RANK.keys()
    assert not unknown, f"give these a line in LAYERS: {sorted(unknown)}"


def test_imports_point_down(source: dict[str, Module]) -> None:
    assert_only_exceptions(upward_imports, source)


def test_no_module_imports_itself_through_others(source: dict[str, Module]) -> None:
    assert not list(import_circles(source)), "these import each other, if only for types or in a function"


def test_pure_modules_compute_and_nothing_else(source: dict[str, Module]) -> None:
    assert_only_exceptions(impure_imports, source)


def test_threads_and_locks_live_where_they_belong(source: dict[str, Module]) -> None:
    assert_only_exceptions(stray_threads, source)


def test_only_transports_open_sockets(source: dict[str, Module]) -> None:
    assert_only_exceptions(stray_sockets, source)


def test_variables_of_the_environment_are_read_in_one_place(source: dict[str, Module]) -> None:
    assert_only_exceptions(stray_variables, source)


def test_no_exception_outlived_its_need(source: dict[str, Module]) -> None:
    rules = (upward_imports, impure_imports, stray_threads, stray_sockets, stray_variables)
    found = {(module, what) for rule in rules for module, what, _ in rule(source)}
    assert not EXCEPTIONS.keys() - found


# --- the rules: each yields (module, what it should not, line) ---

Breach = tuple[str, str, int]


def upward_imports(source: dict[str, Module]) -> Iterator[Breach]:
    for module in source.values():
        for each in module.imports(set(source)):
            if is_ours(each.target) and not may_import(module.layer, layer_of(each.target)):
                yield module.name, each.target, each.line


def may_import(layer: str, target: str) -> bool:
    return layer == target or RANK.get(layer, -1) > RANK.get(target, -1)


def import_circles(source: dict[str, Module]) -> list[set[str]]:
    """The sets of modules that import each other. An import counts wherever it stands and whatever it is for: a reader has
    to know both modules to understand one."""
    names = set(source)
    graph = {
        module.name: {each.target for each in module.imports(names) if each.target in names} - {module.name}
        for module in source.values()
    }
    circles: list[set[str]] = []
    for name in sorted(names):
        if not any(name in circle for circle in circles):
            circle = {other for other in reachable(graph, name) if name in reachable(graph, other)}
            circles += [circle] if circle else []
    return circles


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Every module that `start` imports, through others or not."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        more = graph[ahead.pop()] - found
        found |= more
        ahead += more
    return found


def impure_imports(source: dict[str, Module]) -> Iterator[Breach]:
    for module in belonging(source, PURE):
        for each in module.imports(set(source)):
            if not (each.target.split(".")[0] in PURE_STDLIB or within(each.target, PURE)):
                yield module.name, each.target, each.line


def stray_threads(source: dict[str, Module]) -> Iterator[Breach]:
    return strays(source, THREAD_NAMES, OWN_THREADS)


def stray_sockets(source: dict[str, Module]) -> Iterator[Breach]:
    return strays(source, SOCKET_NAMES, OPEN_SOCKETS)


def stray_variables(source: dict[str, Module]) -> Iterator[Breach]:
    """Names of variables as they are where one is read or set; texts that speak of one have more in them."""
    for module in source.values():
        if not within(module.name, OWN_VARIABLES):
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Constant) and re.fullmatch(r"REMORA_[A-Z_]+", str(node.value)):
                    yield module.name, str(node.value), node.lineno


def strays(source: dict[str, Module], names: dict[str, set[str]], homes: tuple[str, ...]) -> Iterator[Breach]:
    for module in source.values():
        if not within(module.name, homes):
            for library, members in names.items():
                yield from ((module.name, what, line) for what, line in module.uses(library, members))


def is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def within(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(f"{home}.") for home in homes)


def belonging(source: dict[str, Module], homes: tuple[str, ...]) -> list[Module]:
    return [module for module in source.values() if within(module.name, homes)]


def assert_only_exceptions(
    rule: Callable[[dict[str, Module]], Iterator[Breach]], source: dict[str, Module]
) -> None:
    breaches = [
        f"{module}, line {line}: {what}" for module, what, line in rule(source) if (module, what) not in EXCEPTIONS
    ]
    assert not breaches, "\n".join(["against the layering of docs/architecture.md:", *breaches])


# --- the rules can fail ---


def made_of(**files: str) -> dict[str, Module]:
    names = {name: name.replace("__", ".") for name in files}
    return {name: Module(name, files[key]) for key, name in names.items()}


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (upward_imports, "import remora.agent.calls.call"),
        (upward_imports, "def f():\n    from remora.agent.calls import call as calls"),
        (upward_imports, "from ..agent import calls"),
        (impure_imports, "import time"),
        (impure_imports, "from torch import Tensor"),
        (impure_imports, "from remora.wire import frames"),
        (stray_threads, "import threading\nlock = threading.Lock()"),
        (stray_threads, "from threading import Thread"),
        (stray_threads, "import concurrent.futures\npool = concurrent.futures.ThreadPoolExecutor()"),
        (stray_sockets, "import socket\nopened = socket.socketpair()"),
        (stray_variables, "import os\nfound = os.environ.get('REMORA_HOST')"),
    ],
)
def test_each_rule_sees_what_it_forbids(rule: Callable[[dict[str, Module]], Iterator[Breach]], text: str) -> None:
    source = made_of(remora__protocol__session=text, remora__agent__calls="", remora__wire__frames="")
    assert [module for module, _, _ in rule(source)] == ["remora.protocol.session"]


@pytest.mark.parametrize(
    "back",
    [
        "import remora.wire.a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import remora.wire.a",
        "def f():\n    from remora.wire import a",
        "import remora.wire.c",
    ],
)
def test_circles_are_found_wherever_the_import_stands(back: str) -> None:
    there, further = "from remora.wire import b", "from remora.wire.a import x"
    found = import_circles(made_of(remora__wire__a=there, remora__wire__b=back, remora__wire__c=further))
    assert len(found) == 1
    assert found[0] >= {"remora.wire.a", "remora.wire.b"}
    assert not import_circles(made_of(remora__wire__a=there, remora__wire__b="", remora__wire__c=further))


def test_the_pure_standard_library_exists() -> None:
    assert sys.stdlib_module_names >= PURE_STDLIB
