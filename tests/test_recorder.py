"""The recorder: bounded whatever comes, exact in its counts, and no thing of the program lives longer because of it."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from remora import recorder as recording
from remora import rpc
from remora.recorder import DENSE, ENOUGH, MADE, MOST_NOTES, MOST_TALLIES, OTHERS, SERVED, SOME, UNFOLDED, Recorder
from remora.testing.world import World
from tests.eventually import eventually
from tests.systematic.tracing import SIGNALS, AtPlace, places_of, raising

FAILED = 4


def entry(
    end: int = MADE, name: Any = "f", peer: str = "w1", seconds: float = 1.0, queued: float = 0.0, flags: int = 0
) -> Any:
    return (end, peer, 7, "m", name, 10.0, 10.0 + queued, 10.0 + queued + seconds, 1, flags, 0, None)


def remember(recorder: Recorder, *entries: Any) -> None:
    for each in entries:
        _number(recorder, each)
        recorder.remember(each)


def _number(recorder: Recorder, each: Any) -> int:
    return recorder.number_made() if each[0] == MADE else recorder.number_served()


def end(recorder: Recorder, each: Any) -> None:
    """As a call does that ends: of a flood not all are remembered."""
    if (
        not _number(recorder, each) & recorder.sampling
        or each[9] & FAILED
        or each[7] - each[6] > (recorder.longest_made if each[0] == MADE else recorder.longest_served)
    ):
        recorder.remember(each)


def test_it_is_bounded_while_many_threads_add_and_others_fold_and_look() -> None:
    recorder = Recorder(100, FAILED)
    threads, each = 6, 3000
    go_on = True

    def add() -> None:
        for n in range(each):
            remember(recorder, entry(name=f"f{n % 3}"))

    def look(doing: Callable[[], object]) -> Callable[[], None]:
        def again() -> None:
            while go_on:
                doing()

        return again

    adders = [threading.Thread(target=add) for _ in range(threads)]
    lookers = [threading.Thread(target=look(each)) for each in (recorder.fold, recorder.calls, recorder.tallies)]
    for thread in adders + lookers:
        thread.start()
    for thread in adders:
        thread.join()
    go_on = False
    for thread in lookers:
        thread.join()
    assert len(recorder._fresh) <= UNFOLDED * 100
    assert len(recorder.calls()) == 100
    counted = sum(tally.count for _, tally in recorder.tallies())
    assert 100 <= counted <= recorder.made == threads * each


def test_what_comes_between_two_folds_is_counted_to_the_last() -> None:
    recorder = Recorder(1000, FAILED)
    adders = [
        threading.Thread(target=lambda: remember(recorder, *(entry() for _ in range(500)))) for _ in range(UNFOLDED * 2)
    ]
    for thread in adders:
        thread.start()
    for thread in adders:
        thread.join()
    recorder.fold()
    assert recorder.made == 500 * UNFOLDED * 2


def test_histograms_are_what_counting_by_hand_gives() -> None:
    chance = random.Random(1)
    recorder = Recorder(10_000, FAILED)
    expected: dict[tuple[str, str, str], list[tuple[float, bool]]] = defaultdict(list)
    for _ in range(3000):
        name, peer = chance.choice("fg"), chance.choice(["w1", "w2"])
        seconds, queued = 10 ** chance.uniform(-9, 2), 10 ** chance.uniform(-7, 0)
        failed = chance.random() < 0.1
        end = chance.choice((MADE, SERVED))
        made = entry(end, name, peer, seconds, queued, FAILED if failed else 1)
        took, waited = made[7] - made[6], made[6] - made[5]
        if end == MADE:
            expected["call", name, peer].append((took, failed))
        else:
            expected["run", name, peer].append((took, failed))
            expected["queue", name, peer].append((waited, False))
        remember(recorder, made)
        if len(recorder._fresh) == DENSE:
            recorder.fold()
    found = {(measure, name, peer): tally for (measure, _, name, peer), tally in recorder.tallies()}
    assert found.keys() == expected.keys()
    for key, tally in found.items():
        times = [took for took, _ in expected[key]]
        assert tally.count == len(times)
        assert tally.failed == sum(failed for _, failed in expected[key])
        assert tally.total == pytest.approx(sum(times))
        assert tally.longest == max(times)
        by_hand = Counter(next(k for k in range(64) if took < 2.0 ** (k + 1) * 1e-9) for took in times)
        assert {k: n for k, n in enumerate(tally.buckets) if n} == dict(by_hand)


def test_of_a_flood_a_sample_is_counted_and_totals_are_exact() -> None:
    recorder = Recorder(20_000, FAILED)
    many = DENSE * 40
    came = [entry(name="fg"[n % 2], seconds=float(1 + n % 2), flags=FAILED if n % 100 == 7 else 0) for n in range(many)]
    remember(recorder, *came)
    tallies = {name: tally for (_, _, name, _), tally in recorder.tallies()}
    assert sum(tally.count for tally in tallies.values()) == recorder.made == many
    for tally in tallies.values():  # they take turns: to draw each fortieth would have found one of the two
        assert 0.3 * many < tally.count < 0.7 * many
    assert (tallies["f"].failed, tallies["g"].failed) == (0, sum(1 for each in came if each[9]))
    assert tallies["f"].total == pytest.approx(tallies["f"].count)
    assert tallies["g"].buckets[30] == tallies["g"].count


def test_of_a_flood_few_are_remembered_and_all_that_fail_or_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LEAST_TIME", 0.0)
    monkeypatch.setattr(recording, "RATE", 0.001)
    recorder = Recorder(5000, FAILED)
    assert recorder.sampling == 0
    end(recorder, entry())
    end(recorder, entry(SERVED))
    recorder.fold()
    assert recorder.sampling > 1000
    assert recorder.longest_made == recorder.longest_served == 1.0
    for n in range(2000):
        end(recorder, entry(seconds=0.5))
        end(recorder, entry(SERVED, seconds=2.0 if n % 100 == 0 else 0.5, flags=FAILED if n % 100 == 1 else 0))
    before = len(recorder._fresh)
    assert 40 <= before < 60
    recorder.sampling = 1023  # some quick ones are drawn, for which the rest is counted
    for _ in range(2048):
        end(recorder, entry(seconds=0.5))
        end(recorder, entry(SERVED, seconds=0.5))
    assert before + 4 <= len(recorder._fresh) <= before + 6
    tallies = {measure: tally for (measure, _, _, _), tally in recorder.tallies()}
    assert (recorder.made, recorder.served, recorder.failures) == (4049, 4049, 20)
    assert tallies["call"].count == tallies["run"].count == 4049
    assert tallies["run"].buckets[30] == 20  # those of two seconds, each for itself
    assert tallies["run"].failed == 20


def test_a_trace_wants_all_of_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LEAST_TIME", 0.0)
    monkeypatch.setattr(recording, "RATE", 0.001)
    recorder = Recorder(5000, FAILED)
    end(recorder, entry())
    recorder.fold()
    heard: list[Any] = []
    recorder.subscribe(heard.extend)
    for _ in range(3):
        for _ in range(100):
            end(recorder, entry())
        recorder.fold()
    assert len(heard) == 300


def test_a_trace_that_begins_while_a_sample_is_decided_on_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_trace(batch: list[Any], which: int) -> float:
        recorder.subscribe(heard.extend)
        return 0.0

    monkeypatch.setattr(recording, "LEAST_TIME", 0.0)
    monkeypatch.setattr(recording, "RATE", 0.001)
    monkeypatch.setattr(recording, "_longest", begin_trace)
    recorder, heard = Recorder(5000, FAILED), list[Any]()
    end(recorder, entry())
    recorder.fold()
    assert recorder.sampling == 0


def test_what_takes_long_is_remembered_from_the_first_flood_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(5000, FAILED)
    monkeypatch.setattr(recording, "LEAST_TIME", 0.0)
    monkeypatch.setattr(recording, "RATE", 1e9)
    end(recorder, entry(seconds=0.1))
    recorder.fold()
    assert (recorder.sampling, recorder.longest_made) == (0, pytest.approx(0.1))
    for _ in range(ENOUGH + 1):
        end(recorder, entry(seconds=0.1))
    assert recorder.sampling == SOME - 1
    before = len(recorder._fresh)
    for _ in range(20):
        end(recorder, entry(seconds=0.2))
    assert len(recorder._fresh) == before + 20


def test_a_flood_of_calls_is_counted_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "RATE", 10.0)
    with World(2) as world, world.acting(0):
        mine, theirs = (worker.agent.recorder for worker in world.workers)
        eventually(lambda: rpc.rpc_sync("worker1", work, args=(1,)) and min(mine.sampling, theirs.sampling) > 7)
        before = mine.made, theirs.served
        remembered = len(mine.calls()), len(theirs.calls())
        for n in range(200):
            if n % 50:
                rpc.rpc_async("worker1", work, args=(1,)).wait()
            else:
                with pytest.raises(ValueError, match="on purpose"):
                    rpc.rpc_sync("worker1", fail)
        eventually(lambda: (mine.fold(), mine.made, theirs.fold(), theirs.served)[1::2] > (before[0] + 199, before[1] + 199))
        assert (mine.failures, theirs.failures) == (4, 4)
        assert len(mine.calls()) < remembered[0] + 150
        assert len(theirs.calls()) < remembered[1] + 150


def test_the_edges_of_buckets() -> None:
    recorder = Recorder(10, FAILED)
    took = [0.0, -1.0, 1e-9, 2e-9, 1e300]
    for seconds in took:
        remember(recorder, (MADE, "w", 1, "m", "f", 0.0, 0.0, seconds, 1, 0, 0, None))
    ((_, tally),) = recorder.tallies()
    assert {k: n for k, n in enumerate(tally.buckets) if n} == {0: 3, 1: 1, 63: 1}
    assert tally.count == len(took)


def test_functions_without_end_share_one_histogram() -> None:
    recorder = Recorder(MOST_TALLIES * 2, FAILED)
    for n in range(MOST_TALLIES + 50):
        remember(recorder, entry(name=f"f{n}"))
        recorder.fold()
    names = {key[2]: tally.count for key, tally in recorder.tallies()}
    assert len(names) == MOST_TALLIES + 1
    assert names[OTHERS[1]] == 50


def test_a_name_that_is_no_text_does_no_harm() -> None:
    recorder = Recorder(10, FAILED)
    remember(recorder, entry(name=[1]), entry(name=None), entry())
    assert {key[2]: tally.count for key, tally in recorder.tallies()} == {OTHERS[1]: 2, "f": 1}


def test_notes_are_bounded() -> None:
    recorder = Recorder(10, FAILED)
    for n in range(MOST_NOTES + 5):
        recorder.note("joined", f"w{n}")
    notes = recorder.notes()
    assert len(notes) == MOST_NOTES
    assert notes[-1].peer == f"w{MOST_NOTES + 4}"


def test_turned_off_it_records_nothing() -> None:
    recorder = Recorder(0, FAILED)
    recorder.note("joined")
    remember(recorder, entry())
    assert (recorder.fold(), recorder.calls(), recorder.notes(), recorder.tallies()) == (0, [], [], [])


# On the path of calls.


def work(x: int) -> int:
    return x


def fail() -> None:
    raise ValueError("on purpose")


async def later(x: int) -> int:
    return x


def test_each_end_of_each_kind_of_call_is_recorded_once() -> None:
    with World(2) as world, world.acting(0):
        rpc.rpc_sync("worker1", work, args=(1,))
        rpc.rpc_async("worker1", work, args=(1,)).wait()
        rpc.rpc_sync("worker1", later, args=(1,))
        rpc.remote("worker1", work, args=(1,)).to_here()
        rpc.rpc_sync("worker1", pow, args=(2, 3))
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync("worker1", fail)
        mine, theirs = (worker.agent.recorder for worker in world.workers)
        eventually(lambda: len(mine.calls()) == 7 and len(theirs.calls()) == 6)
        made = Counter((each.name, bool(each.flags & mine._failed)) for each in mine.calls())
        fine = {("work", False): 3, ("later", False): 1, ("pow", False): 1, ("fail", True): 1}
        assert made == {**fine, ("to_here()", False): 1}
        run = Counter((each.name, bool(each.flags & mine._failed)) for each in theirs.calls())
        assert run == fine
        ends = {each.id: each for each in mine.calls()}
        for each in theirs.calls():
            caller = ends[each.id]
            assert caller.began <= each.came <= each.began <= each.ended <= caller.ended + 1e-3
        assert (mine.made, mine.failures, theirs.served, theirs.failures) == (7, 1, 6, 1)


def test_a_nested_call_knows_the_call_it_was_made_for() -> None:
    with World(3) as world, world.acting(0):
        rpc.rpc_sync("worker1", pass_on)
        (outer,) = world[0].agent.recorder.calls()
        (inner,) = [each for each in world[1].agent.recorder.calls() if each.end == MADE]
        assert inner.parent is not None
        assert inner.parent[1:] == ("worker0", outer.id)
        assert outer.parent is None


def pass_on() -> int:
    return rpc.rpc_sync("worker2", work, args=(1,))


class Callable_:
    def __call__(self) -> int:
        return 1


def test_nothing_of_the_program_lives_longer() -> None:
    with World(2) as world, world.acting(0):

        def local() -> int:
            return 1

        target = Callable_()
        gone: list[Callable[[], object]] = [weakref.ref(local), weakref.ref(target)]
        rpc.rpc_sync("worker1", local)
        rpc.rpc_async("worker1", target).wait()
        del local, target
        gc.collect()
        eventually(lambda: gc.collect() is not None and all(each() is None for each in gone))
        names = {each.name for each in world[0].agent.recorder.calls()}
        assert {name.rpartition(".")[2] for name in names} == {"local", "Callable_"}


class Struck(BaseException):
    """What the signal handler of a program raises."""


def test_a_strike_while_the_main_thread_folds_does_not_end_the_folding() -> None:
    def fold() -> None:
        remember(recorder, *(entry() for _ in range(DENSE + 10)))
        recorder.fold()

    recorder = Recorder(1000, FAILED)
    places = [each for each in dict.fromkeys(places_of(fold, SIGNALS)) if each.file == "recorder.py"]
    assert len(places) > 5
    for place in places:
        with contextlib.suppress(Struck), AtPlace(place, raising(Struck), SIGNALS):
            fold()
        remember(recorder, entry())
        assert recorder.fold() > 0, place
