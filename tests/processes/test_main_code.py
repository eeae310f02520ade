"""Code that was typed into `__main__`, as in a notebook: workers that do not have it run it all the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers import Workers


def cell(source: str) -> Any:
    """Run a cell of a notebook: in `__main__`, which no other worker has. What it calls `out` is the value."""
    namespace = vars(sys.modules["__main__"])
    namespace.pop("out", None)
    exec(compile("from remora import rpc\n" + source, "<cell>", "exec"), namespace)
    return namespace.get("out")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(3) as found:
        yield found


def test_functions_and_what_they_call(workers: Workers) -> None:
    found = workers.run(0, cell, """
def square(x): return x * x
def twice(x): return 2 * square(x)
class Adder:
    def __init__(self, n): self.n = n
    def __call__(self, x): return self.n + square(x)
def nested(k):
    def inner(x): return square(x) + k
    return inner
out = (
    rpc.rpc_sync("worker1", square, (3,)), rpc.rpc_async("worker1", twice, (3,)).wait(),
    rpc.remote("worker1", square, (4,)).to_here(), rpc.rpc_sync("worker1", lambda x: square(x) + 1, (3,)),
    rpc.rpc_sync("worker1", Adder(1), (3,)), rpc.rpc_sync("worker1", nested(5), (3,)),
    rpc.rpc_sync("worker1", sorted, ([3, -4, 1],), {"key": square}), rpc.rpc_sync("worker1", list, (map(square, [1, 2]),)),
)
""")
    assert found == (9, 18, 16, 10, 10, 14, [1, 3, -4], [1, 4])


def test_what_is_defined_anew_is_what_runs(workers: Workers) -> None:
    call = "out = rpc.rpc_sync('worker1', answer), rpc.rpc_sync('worker1', outer), rpc.rpc_sync('worker0', outer)"
    define = "def answer(): return {}\ndef outer(): return answer()\n"
    assert workers.run(0, cell, define.format(1) + call) == (1, 1, 1)
    assert workers.run(0, cell, "def answer(): return 2\n" + call) == (2, 2, 2)
    assert workers.run(0, cell, "answer = lambda: 3\n" + call) == (3, 3, 3)


def test_instances_in_both_directions_are_of_the_class_they_were_of(workers: Workers) -> None:
    found = workers.run(0, cell, """
import dataclasses, enum, typing
@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
    tags: list = dataclasses.field(default_factory=list)
    def norm(self): return self.x ** 2 + self.y ** 2
class Colour(enum.Enum):
    RED = 1
    BLUE = 2
class Pair(typing.NamedTuple):
    first: int
    second: int
def mirrored(p): return Point(p.y, p.x, p.tags + ["mirrored"])
point = rpc.rpc_sync("worker1", mirrored, (Point(1, 2),))
deep = rpc.rpc_sync("worker1", dict, ([("a", [Point(3)])],))
colour = rpc.rpc_sync("worker1", lambda c: Colour.BLUE if c is Colour.RED else c, (Colour.RED,))
pair = rpc.rpc_sync("worker1", Pair, (1, 2))
out = (
    type(point) is Point, point == Point(2, 1, ["mirrored"]), point.norm(), dataclasses.replace(point, x=0).x,
    type(deep["a"][0]) is Point, colour is Colour.BLUE, type(pair) is Pair and pair.second,
    rpc.rpc_sync("worker1", lambda: type(Point(1))) is Point,
)
""")
    assert found == (True, True, 5, 0, True, True, 2, True)


def test_a_class_is_not_changed_by_its_return(workers: Workers) -> None:
    """Its methods go on seeing what is defined in the notebook later."""
    found = workers.run(0, cell, """
factor = 1
class Scaled:
    limit = 1
    def value(self): return factor
method = Scaled.value
back = rpc.rpc_sync("worker1", lambda s: s, (Scaled(),))
Scaled.limit = 2
factor = 7
again = rpc.rpc_sync("worker1", lambda s: (s, s.limit, s.value()), (back,))
out = (Scaled.value is method, back.value(), Scaled.limit, again[1:], again[0].value())
""")
    assert found == (True, 7, 2, (2, 7), 7)


def test_a_third_worker_can_be_given_it(workers: Workers) -> None:
    found = workers.run(0, cell, """
class Token:
    def __init__(self, n): self.n = n
def pass_on(token):
    from remora import rpc
    return rpc.rpc_sync("worker2", lambda t: type(t)(t.n + 1), (token,))
token = rpc.rpc_sync("worker1", pass_on, (Token(1),))
out = (type(token) is Token, token.n)
""")
    assert found == (True, 2)


def test_exceptions(workers: Workers) -> None:
    found = workers.run(0, cell, """
class Refused(Exception):
    def __init__(self, why, code):
        super().__init__(why, code)
        self.code = code
def refuse(): raise Refused("no", 5)
try:
    rpc.rpc_sync("worker1", refuse)
except Refused as error:
    out = (str(error), error.code, "worker1" in error.worker)
""")
    assert found == ("('no', 5)", 5, True)


def test_references_to_objects_of_such_classes(workers: Workers) -> None:
    found = workers.run(0, cell, """
class Counter:
    def __init__(self, n=0): self.n = n
    def add(self, k): self.n += k; return self.n
counter = rpc.remote("worker1", Counter, (10,))
own = rpc.RRef(Counter(5))
out = (
    counter.rpc_sync().add(1), counter.rpc_async().add(1).wait(), counter.remote().add(1).to_here(),
    type(counter.to_here()) is Counter and counter.to_here().n,
    rpc.rpc_sync("worker1", lambda r: r.to_here().n, (own,)), rpc.rpc_sync("worker1", lambda r: r.rpc_sync().add(2), (own,)),
    own.local_value().n,
)
""")
    assert found == (11, 12, 13, 13, 5, 7, 7)


def test_the_result_may_be_of_a_class_of_the_callees_main(workers: Workers) -> None:
    workers.run(1, cell, "class Theirs:\n    n = 4\n    def double(self): return 2 * self.n\ndef make(): return Theirs()")
    found = workers.run(0, cell, """
import subprocess
import sys
def make_there():
    import sys
    return sys.modules["__main__"].make()
theirs = rpc.rpc_sync("worker1", make_there)
out = theirs.double(), rpc.rpc_sync("worker1", lambda t: type(t) is __import__("sys").modules["__main__"].Theirs, (theirs,))
""")
    assert found == (8, True)


def test_a_module_that_is_registered_goes_by_value(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("n = 3\nclass Thing:\n    def get(self): return n\ndef triple(x): return n * x\n")
    found = workers.run(0, cell, f"""
import subprocess
import sys
sys.path.insert(0, {str(tmp_path)!r})
import cloudpickle, only_here
try:
    rpc.rpc_sync("worker1", only_here.triple, (2,))
except ModuleNotFoundError as error:
    before = str(error)
cloudpickle.register_pickle_by_value(only_here)
try:
    out = (
        rpc.rpc_sync("worker1", only_here.triple, (2,)), rpc.rpc_sync("worker1", lambda t: t.get(), (only_here.Thing(),)),
        type(rpc.rpc_sync("worker1", only_here.Thing)) is only_here.Thing, before,
    )
    only_here.n = 4
    out += (rpc.rpc_sync("worker1", only_here.triple, (2,)),)
finally:
    cloudpickle.unregister_pickle_by_value(only_here)
    sys.path.pop(0)
""")
    assert found[:3] == (6, 3, True)
    assert found[4] == 8
    assert "register_pickle_by_value" in found[3]


def test_a_function_under_a_cache_is_that_of_the_caller(workers: Workers) -> None:
    """pickle knows it by its name, which means another function there. Its own calls to itself go through its cache."""
    theirs = "import functools\n@functools.lru_cache\ndef {}(x): return 'theirs'"
    for name in ("cached", "fibonacci"):
        workers.run(1, cell, theirs.format(name))
    found = workers.run(0, cell, """
import functools
@functools.lru_cache(maxsize=3, typed=True)
def cached(x): return x + 1
@functools.lru_cache
def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
@functools.cache
def only_here(x): return x * 2
class Series:
    @functools.lru_cache
    def at(self, n): return n - 1
class Given:
    def __init__(self, f): self.f = f
out = (
    rpc.rpc_sync("worker1", cached, (1,)), rpc.rpc_sync("worker1", lambda: cached(2)),
    rpc.rpc_sync("worker1", only_here, (4,)), rpc.rpc_sync("worker1", lambda given: given.f(3), (Given(cached),)),
    rpc.rpc_sync("worker1", lambda s: s.at(1), (Series(),)), rpc.rpc_sync("worker1", fibonacci, (50,)),
    rpc.rpc_sync("worker1", lambda: cached.cache_parameters()), cached.cache_info().currsize,
)
""")
    assert found == (2, 3, 8, 4, 0, 12586269025, {"maxsize": 3, "typed": True}, 0)


def test_instances_with_slots_in_both_directions(workers: Workers) -> None:
    """cloudpickle makes such a class anew without its slots: what came back had a `__dict__`, which has no place."""
    found = workers.run(0, cell, """
import dataclasses
class Boxed:
    __slots__ = ("x",)
    def __init__(self, x=1): self.x = x
class Sub(Boxed):
    pass
class More(Boxed):
    __slots__ = "y"
    def __init__(self, x, y): super().__init__(x); self.y = y
class Hidden:
    __slots__ = ("__secret", "__weakref__")
    def __init__(self, n): self.__secret = n
    def get(self): return self.__secret
@dataclasses.dataclass(slots=True)
class Point:
    x: int
    y: int = 0
same = lambda value: value
def refused(box):
    try:
        box.unknown = 1
    except AttributeError:
        return not hasattr(box, "__dict__")
sub = Sub(3)
sub.z = 4
boxed, sub, more, point = (rpc.rpc_sync("worker1", same, (v,)) for v in (Boxed(2), sub, More(5, 6), Point(7)))
out = (
    type(boxed) is Boxed and boxed.x, type(sub) is Sub and (sub.x, sub.z), type(more) is More and (more.x, more.y),
    type(point) is Point and point == Point(7),
    rpc.rpc_sync("worker1", Boxed).x, rpc.rpc_sync("worker1", lambda b: b.x, (Boxed(8),)),
    rpc.rpc_sync("worker1", refused, (Boxed(),)), rpc.rpc_sync("worker1", lambda h: h.get(), (Hidden(9),)),
    rpc.rpc_sync("worker1", same, (Hidden(10),)).get(),
)
""")
    assert found == (2, (3, 4), (5, 6), True, 1, 8, True, 9, 10)


TYPE_NAMES = """
import sys, typing
module = sys.modules[{module!r}]
T, P, Ts = typing.TypeVar("T", bound=int), typing.ParamSpec("P"), typing.TypeVarTuple("Ts")
UserId = typing.NewType("UserId", int)
class Box(typing.Generic[T]):
    def __init__(self, x): self.x = x
for thing in (T, P, Ts, UserId, Box):
    thing.__module__ = {module!r}
    setattr(module, thing.__name__, thing)
same = lambda value: value
box = rpc.rpc_sync("worker1", same, (Box(1),))
out = (
    [rpc.rpc_sync("worker1", same, (thing,)) is thing for thing in (T, P, Ts, UserId, Box)],
    rpc.rpc_sync("worker1", same, (Box[T],)) == Box[T], type(box) is Box and box.x,
    rpc.rpc_sync("worker1", lambda: (T.__bound__ is int, UserId(3), P.__name__)),
    rpc.rpc_sync("worker1", same, ([typing.Callable[P, T], {{"t": T}}],)) == [typing.Callable[P, T], {{"t": T}}],
)
"""


@pytest.mark.parametrize("module", ["__main__", "__mp_main__"])
def test_type_variables_and_new_types(workers: Workers, module: str) -> None:
    """typing pickles them by name, and the callee's main does not have it. (The second name: multiprocessing's.)"""
    if module != "__main__":
        workers.run(0, cell, "import sys, types\nsys.modules.setdefault('__mp_main__', types.ModuleType('__mp_main__'))")
    found = workers.run(0, cell, TYPE_NAMES.format(module=module))
    assert found == ([True] * 5, True, 1, (True, 3, "P"), True)


def run_script(path: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(path), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, printed
    return printed


TRAIN = """
import sys
from remora.supervision import RestartPolicy, Supervisor

calls = 0

def count():
    global calls
    calls += 1
    return calls

class Box:
    pass

def is_box(x):
    return type(x) is Box

def work(rank, where):
    from remora import rpc
    options = rpc.RemoraRpcBackendOptions(init_method=where)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        boxes = [rpc.rpc_sync("worker1", is_box, (Box(),)), is_box(rpc.rpc_sync("worker1", Box))]
        print([rpc.rpc_sync("worker1", f) for f in (count, count, lambda: count())], calls, boxes, sys.argv[1])
    rpc.shutdown()

if __name__ == "__main__":
    def only_here(text):
        print(text)

    if sys.argv[1] == "directly":
        work(1, sys.argv[2])
        sys.exit()
    with Supervisor(RestartPolicy("never")) as supervisor:
        supervisor.start("zero", work, 0, sys.argv[2])
        supervisor.start("other", only_here, __name__)
        sys.exit(max(outcome.code for outcome in supervisor.wait(timeout=50).values()))
"""


def test_what_both_ends_run_goes_by_name(tmp_path: Path) -> None:
    """As under torchrun, here with copies of the script in two places. The child of a Supervisor knows it, too."""
    (tmp_path / "elsewhere").mkdir()
    paths = [tmp_path / "train.py", tmp_path / "elsewhere" / "train.py"]
    for path in paths:
        path.write_text(TRAIN)
    where = f"file://{tmp_path}/meeting"
    processes = [run_script(path, how, where) for path, how in zip(paths, ["supervised", "directly"], strict=True)]
    texts = [finish(process) for process in processes]
    assert sorted(texts[0].splitlines()) == ["[1, 2, 3] 0 [True, True] supervised", "__main__"]
    assert texts[1] == ""


def test_a_program_that_starts_children_when_it_is_loaded_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "endless.py"
    path.write_text("""
from remora.supervision import RestartPolicy, Supervisor
with Supervisor(RestartPolicy("never")) as supervisor:
    supervisor.start("one", print, 1)
    assert supervisor.wait(timeout=50)["one"].code == 1
""")
    assert 'Start processes under `if __name__ == "__main__":`' in finish(run_script(path))
