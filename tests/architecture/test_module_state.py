"""The state of a worker is in the worker. Modules hold what a process has one of: each is listed here, with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source import Module, read_source

CONTAINERS = {
    "dict", "list", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict", "SimpleQueue", "WeakSet",
    "WeakKeyDictionary", "WeakValueDictionary", "WeakTensorKeyDictionary",
}  # fmt: skip
THREADING = {"local", "Lock", "RLock", "Condition", "count"}
CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "setdefault", "update",
}  # fmt: skip
# Reason -> names below `remora`. A name that is no longer needed fails, too.
STATE = {
    "the current worker of the process, that of a thread, and the workers to abandon in a forked child": """
        agent.runtime.current.process_state agent.runtime.current.thread_state worker._workers""",
    "a counter: its numbers are unique in the process": """
        agent.calls.call.next_call_id agent.memory.device._numbers optim.local._numbers optim.optimizer._next_number
        rpc.profiler.spans._next_ticket rpc.profiler.profiler_trace._next_id rref.state._serial
        transport.cuda_ipc.exporter._numbers transport.shm.lender._numbers""",
    "the state of one thread, while it packs, unpacks, profiles or gathers calls": """
        rpc.api._thread_local_var rpc.profiler.profiler_trace._thread wire.pack_scope.incoming""",
    "what a forked child must close or leave alone": """
        agent.runtime.try_lock._MAIN transport.fault_pump._pumps transport.shm.borrower._arenas
        transport.shm.borrower._parting transport.shm.mapping._mappings""",
    "places where workers of one process find each other": """
        agent.memory.device._here transport.sockets._inproc testing.world._worlds""",
    "torch has one of it for the process: leaves and their accumulators, streams, defaults of threads, stores": """
        agent.runtime.clean_state._default_dtypes agent.runtime.clean_state._home autograd.claims._changed
        autograd.claims._claims autograd.claims._inside autograd.claims._sleepers autograd.graph._all_ends
        autograd.graph.looking devices.streams.watched optim.local._claiming optim.local._claims rendezvous.store._hosted
        rendezvous.store_table._probes transport.cuda_ipc.deferred_free._left transport.cuda_ipc.deferred_free._lock""",
    "filled once, while modules are imported": """
        introspection.wait_finder._EXPLANATIONS wire.fast_pickle._writers wire.pickler._registered""",
    "a process has one of it: handlers of signals, ways to end, torch's profiler": """
        introspection.endings.process introspection.operators._one_at_a_time introspection.stack_signal.process""",
    "a constant; its class has names that it sets nowhere": """
        rref.handle.TO_HERE""",
    "a constant: it is empty, and no part adds to it": """
        rref.create._EMPTY""",
    "a cache or a pool: nothing but speed depends on it": """
        wire.buffer_pool.spare_buffers wire.fast_pickle._stencils wire.pickler._idle wire.tensors.rebuild.prototypes""",
    "of classes and of the main file, which are the process's": """
        wire.code_by_value._defined_here wire.code_by_value._hash wire.code_by_value._made_here
        wire.exceptions._remote_types""",
    "of one worker, optimizer or call, kept by a layer that those do not know": """
        optim.optimizer._of_this_process rpc.all_gather._gatherings rpc.profiler.callee_events._kept
        rpc.server_process_global_profiler._profiles""",
    "who waits below a signal handler or a destructor: such code has no object in hand": """
        agent.runtime.try_lock._needed agent.calls.unseen_failures.unseen_failures""",
    "torch has it in its module, and programs replace it there": """
        rpc.api._default_pickler""",
    "the names of torch's modules are redirected for the whole process": """
        compat.children._before compat.redirection._current""",
}
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def state_of(module: Module, classes: set[str]) -> Iterator[str]:
    """The names at the top of a module whose value changes: bound anew by a function, or to an object that is changed."""
    changed = {name for node in ast.walk(module.tree) if isinstance(node, ast.Global) for name in node.names}
    changed.update(_changed_in_place(module))
    known = {name for name, made in _names_of(module).items() if made in classes}
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and (target.id in changed or _is_state(node.value, target.id, known)):
                    yield f"{module.name}.{target.id}"


def _names_of(module: Module) -> dict[str, str]:
    """What the names of a module stand for, if they are classes of ours."""
    own = {node.name: f"{module.name}.{node.name}" for node in module.tree.body if isinstance(node, ast.ClassDef)}
    imports = [node for node in module.tree.body if isinstance(node, ast.ImportFrom)]
    return own | {each.asname or each.name: f"{node.module}.{each.name}" for node in imports for each in node.names}


def _is_state(value: ast.expr, name: str, classes: set[str]) -> bool:
    if isinstance(value, ast.Attribute):  # `count().__next__`
        value = value.value
    if isinstance(value, DISPLAYS):
        return not name.isupper() and name != "__all__"  # (a constant, unless it is seen to be changed)
    if not isinstance(value, ast.Call):
        return False
    maker = ast.unparse(value.func).rpartition(".")[2]
    return maker in CONTAINERS | THREADING or maker in classes


def _changed_in_place(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield ast.unparse(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield ast.unparse(node.func.value)


def changing_classes(source: dict[str, Module]) -> set[str]:
    """The classes of ours whose objects change: a container by itself, of a thread, or set by a method or from outside."""
    return {
        f"{module.name}.{node.name}"
        for module in source.values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and _changes(node)
    }


def _changes(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases}
    if bases & (CONTAINERS | THREADING):
        return True
    # Values of the class that stand for those of an object which sets its own later.
    defaults = any(isinstance(each, ast.AnnAssign) and each.value is not None for each in node.body)
    return any(map(_sets, node.body)) or (defaults and not node.bases and not node.decorator_list)


def _sets(method: ast.stmt) -> bool:
    """True if a method sets attributes, or a constructor makes containers."""
    if not isinstance(method, ast.FunctionDef):
        return False
    for node in ast.walk(method):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own = any(isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self" for each in targets)
            if own and (method.name != "__init__" or (node.value is not None and _is_state(node.value, "", set()))):
                return True
    return False


def module_state(source: dict[str, Module]) -> set[str]:
    classes = changing_classes(source)
    return {name for module in source.values() for name in state_of(module, classes)}


def test_modules_hold_no_other_state() -> None:
    listed = {f"remora.{name}" for names in STATE.values() for name in names.split()}
    found = module_state(read_source())
    assert not found - listed, "state of a module: move it into an object that a constructor makes, or list it with a reason"
    assert not listed - found, "gone, or constant: take these off the list"


@pytest.mark.parametrize(
    "text",
    [
        "x = {}",
        "x: dict[int, str] = dict()",
        "x = collections.deque()",
        "x = itertools.count(1).__next__",
        "x = 1\ndef f():\n    global x\n    x = 2",
        "x = None\nx = threading.local()",
        "X = {}\ndef f():\n    X[1] = 2",
        "X = []\ndef f():\n    X.append(1)",
        "class C:\n    def add(self):\n        self.n += 1\nx = C()",
        "class C:\n    def __init__(self):\n        self.n = []\nx = C()",
        "class C(threading.local):\n    n = 1\nx = C()",
        "class C:\n    n: int = 1\nx = C()",
    ],
)
def test_state_is_seen(text: str) -> None:
    found = module_state({"remora.wire": Module("remora.wire", text)})
    assert {name.lower() for name in found} == {"remora.wire.x"}


@pytest.mark.parametrize(
    "text",
    [
        "X = {1: 2}\ndef f():\n    return X[1]",
        "x = frozenset([1])",
        "@dataclass(frozen=True)\nclass C:\n    n: int = 1\nx = C()",
        "class C:\n    def __init__(self, n):\n        self.n = n\nx = C(1)",
        "__all__ = ['f']",
    ],
)
def test_constants_are_no_state(text: str) -> None:
    assert module_state({"remora.wire": Module("remora.wire", text)}) == set()
