"""A function is named once, and goes by its number from then on; what has no name goes as ever."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from remora import autograd, rpc
from remora.agent.channel.function_table import FUNCTION, LONGEST, MOST, MOST_BYTES, SLACK, Announced, Heard
from remora.agent.channel.outbox import Outbox
from remora.agent.serving import dispatch
from remora.errors import ProtocolError
from remora.options import FAST_PATHS
from remora.rpc import api, request_builder
from remora.testing.world import World
from remora.vocabulary.messages import MessageType
from remora.wire.packed import Packed
from tests.faults.trials import QUICK, quick_time

pytestmark = pytest.mark.skipif(not FAST_PATHS.function_numbers, reason="turned off")


class Line:
    """What was said ahead of calls."""

    def __init__(self) -> None:
        self.said: list[tuple[int, int, bytes]] = []

    def enqueue(self, kind: int, call: int, body: bytes) -> None:
        self.said.append((kind, call, body))


def double(x: int) -> int:
    return 2 * x


def triple(x: int) -> int:
    return 3 * x


NAME = f"{__name__}\ndouble".encode()


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """One that comes and goes."""
    found = types.ModuleType("remora_test_functions_of_a_while")
    exec("def greet(): return 'hello'", vars(found))
    found.greet.__module__ = found.__name__
    sys.modules[found.__name__] = found
    yield found
    sys.modules.pop(found.__name__, None)


def test_the_name_is_told_once() -> None:
    line = Line()
    announced = Announced(line)
    assert [announced.target(double) for _ in range(3)] == [1, 1, 1]
    assert line.said == [(FUNCTION, 1, NAME)]
    assert announced.target(triple) == 2


def test_two_threads_that_announce_at_the_same_time_give_two_numbers() -> None:
    class Interrupted(Line):
        def enqueue(self, kind: int, call: int, body: bytes) -> None:
            if not self.said:
                super().enqueue(kind, call, body)
                other.append(announced.target(triple))  # as if another thread came in between

    announced = Announced(Interrupted())
    other: list[object] = []
    assert announced.target(double) != other[0]
    assert [announced.target(double), announced.target(triple)] == [1, 2]


class Doubler:
    def __call__(self, x: int) -> int:
        return 2 * x

    def method(self, x: int) -> int:
        return 2 * x


def test_what_cannot_be_found_by_its_name_alone_goes_as_it_is() -> None:
    def nested(x: int) -> int:
        return x

    line = Line()
    announced = Announced(line)
    others: list[Any] = [nested, lambda: None, len, Doubler(), Doubler().method, Doubler.method, Doubler]
    assert [announced.target(other) for other in others] == others
    assert line.said == []


def test_a_function_that_another_one_has_taken_the_place_of(module: types.ModuleType) -> None:
    announced = Announced(Line())
    greet = module.greet
    assert announced.target(greet) == 1
    module.greet = lambda: "somebody else"
    assert announced.target(greet) is greet
    module.greet = greet
    assert announced.target(greet) == 1


def test_there_is_an_end_to_it(module: types.ModuleType) -> None:
    line = Line()
    announced = Announced(line)
    for number in range(MOST + 5):
        code: dict[str, Any] = {"__name__": module.__name__}
        exec(f"def f{number}(): pass", code)
        setattr(module, f"f{number}", code[f"f{number}"])
    targets = [announced.target(getattr(module, f"f{number}")) for number in range(MOST + 5)]
    assert targets[:MOST] == list(range(1, MOST + 1))
    assert targets[MOST:] == [getattr(module, f"f{number}") for number in range(MOST, MOST + 5)]
    assert len(line.said) == MOST


def test_names_are_bounded_in_bytes_and_the_functions_go_as_they_are(module: types.ModuleType) -> None:
    line = Line()
    announced = Announced(line)
    names = [f"f{number}_" + "x" * (LONGEST - 100) for number in range(MOST_BYTES // (LONGEST - 100) + 5)] + ["y" * LONGEST]
    for name in names:
        code: dict[str, Any] = {"__name__": module.__name__}
        exec(f"def {name}(): pass", code)
        setattr(module, name, code[name])
    targets = [announced.target(getattr(module, name)) for name in names]
    assert sum(len(body) for _, _, body in line.said) <= MOST_BYTES
    assert targets[-1] is getattr(module, names[-1])
    assert 0 < sum(isinstance(target, int) for target in targets) < len(names)


@pytest.mark.parametrize("size", [20, LONGEST, 100 * LONGEST])
def test_what_a_callee_keeps_of_a_caller_that_names_without_end_is_bounded(size: int) -> None:
    heard = Heard()
    for number in range(10 * MOST):
        heard.listen(number, b"module\n" + b"f" * (size - 7))
    kept = sum(len(module) + len(name) for module, name in heard._names.values())
    assert kept <= MOST_BYTES + SLACK * LONGEST
    assert len(heard._names) == len(heard.bare) <= MOST + SLACK
    with pytest.raises(ProtocolError, match=f"function {10 * MOST - 1} .* no name here"):
        heard.find(10 * MOST - 1)


def test_a_number_keeps_its_first_meaning_and_any_bytes_are_a_name(module: types.ModuleType) -> None:
    heard = Heard()
    heard.listen(7, f"{module.__name__}\ngreet".encode())
    heard.listen(7, b"os\nabort")
    heard.listen(8, b"\xff\xfe")
    assert heard.find(7)() == "hello"
    with pytest.raises(Exception, match=r".+"):
        heard.find(8)


def test_no_part_of_a_name_is_run_as_a_pickle() -> None:
    heard = Heard()
    heard.listen(1, b"os\ngetcwd\n)R")  # read as opcodes, the last two call the function
    with pytest.raises(AttributeError, match="Can't get attribute"):
        heard.find(1)


def test_the_callee_finds_what_has_that_name_now(module: types.ModuleType) -> None:
    heard = Heard()
    heard.listen(7, f"{module.__name__}\ngreet".encode())
    assert heard.find(7)() == "hello"
    module.greet = lambda: "good bye"
    assert heard.find(7)() == "good bye"


def test_a_name_that_the_callee_does_not_have_is_explained(module: types.ModuleType) -> None:
    heard = Heard()
    heard.listen(1, f"{module.__name__}\ngreet".encode())
    del module.greet
    with pytest.raises(AttributeError, match=r"Can't get attribute 'greet'.*Ensure that UDFs are defined on both"):
        heard.find(1)
    del sys.modules[module.__name__]
    with pytest.raises(ModuleNotFoundError, match="Ensure that UDFs are defined on both"):
        heard.find(1)


def test_a_module_that_the_callee_has_not_loaded_is_loaded() -> None:
    heard = Heard()
    heard.listen(1, b"this\nc")  # a module of the standard library that nobody loads
    sys.modules.pop("this", None)
    assert heard.find(1) == 97


def test_a_number_that_nobody_gave() -> None:
    with pytest.raises(ProtocolError, match="function 3"):
        Heard().find(3)


def five() -> int:
    return 5


@rpc.functions.async_execution
def six() -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(6)
    return future


class Unreadable:
    """Stands for pickle, and fails."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise AssertionError("this was to be done without pickle")


def test_a_call_without_arguments_is_a_number_and_nothing_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, bytes]] = []

    def call() -> Any:
        return rpc.rpc_sync("worker1", five), rpc.rpc_async("worker1", five).wait()

    with World(2) as world:
        assert world.run(0, call) == (5, 5)
        send = Outbox.send

        def see(outbox: Outbox, kind: int, call: int, body: bytes, flags: int = 0, timeout: float = 0.0) -> None:
            sent.append((kind, body))
            send(outbox, kind, call, body, flags, timeout)

        monkeypatch.setattr(Outbox, "send", see)
        monkeypatch.setattr(request_builder, "pack_for", Unreadable())
        monkeypatch.setattr(dispatch, "unpack", Unreadable())
        assert world.run(0, call) == (5, 5)
    assert [body for kind, body in sent if kind == MessageType.PYTHON_CALL] == [pickle.dumps(1, 5)] * 2


def test_what_else_such_a_call_may_be() -> None:
    def marked() -> Any:
        return rpc.rpc_sync("worker1", six)

    def recorded() -> Any:
        with autograd.context():
            return rpc.rpc_sync("worker1", five)

    def with_arguments_of_no_kind() -> Any:
        return rpc.rpc_sync("worker1", five, args=[], kwargs={}), rpc.rpc_sync("worker1", five, (), {})

    with World(2) as world:
        assert world.run(0, marked) == 6
        assert world.run(0, recorded) == 5
        assert world.run(0, with_arguments_of_no_kind) == (5, 5)


def test_a_bare_number_that_nobody_gave_is_refused() -> None:
    def call() -> Any:
        peer = api._get_current_rpc_agent().peer("worker1")
        number = Packed(pickle.dumps(77, 5), [], [], [])
        return api._get_current_rpc_agent().agent.caller.call(peer, int(MessageType.PYTHON_CALL), number, 0, 10.0, "77")

    with World(2) as world, pytest.raises(ProtocolError, match="function 77"):
        world.run(0, call)


@pytest.mark.parametrize("deed", ["drop", "duplicate", "reorder", "corrupt"])
def test_the_name_is_there_before_the_call_whatever_happens_to_it(deed: str) -> None:
    def call_many() -> list[Any]:
        return [call.wait(20) for call in [rpc.rpc_async("worker1", double, (n,)) for n in range(20)]]

    with quick_time(), World(2, faults=f"{deed} FUNCTION * #1", **QUICK) as world:
        assert world.run(0, call_many) == [2 * n for n in range(20)]
        assert [record.deed for record in world.faults.report().records] == [deed]


def test_the_value_of_a_reference_is_made_by_number_too() -> None:
    def make(n: int) -> Any:
        return rpc.remote("worker1", triple, (n,)).to_here()

    with quick_time(), World(2, faults="", **QUICK) as world:
        assert [world.run(0, make, n) for n in range(3)] == [0, 3, 6]
        assert world.faults.messages()["worker0", "worker1", MessageType.FUNCTION] == 1


def test_a_reference_fails_if_its_owner_does_not_have_the_function(module: types.ModuleType) -> None:
    def make() -> Any:
        greet = module.greet
        made = rpc.remote("worker1", greet)
        del module.greet  # (the two workers of this world are one process: the owner looks when it runs it)
        return made.to_here()

    late = "delay PYTHON_REMOTE_CALL * 100ms"
    missing = pytest.raises(AttributeError, match="Can't get attribute 'greet'")
    with quick_time(), World(2, faults=late, **QUICK) as world, missing:
        world.run(0, make)
