"""What is stuck, in the order in which it began: each worker told its ages at another moment, by another clock."""

from __future__ import annotations

from dataclasses import replace

from remora.observe.stuck import find_stuck
from remora.observer.model import Stage
from tests.observer.snapshots import call, group, key, worker

SENT, RUNNING = Stage.SENT, Stage.RUNNING


def test_calls_are_told_in_the_order_in_which_they_began() -> None:
    """The second worker answered a second later, and its clock is ten seconds ahead."""
    first = worker("w0", calls=(call("w0#1", "w1", "old", SENT, age=5.0), call("w0#2", "w1", "new", SENT, age=2.0)))
    second = worker("w1", time=111.0, calls=(call("w1#1", "w2", "between", SENT, age=5.5),))
    found = find_stuck(group(first, second, clock_offsets={"w0": 0.0, "w1": 10.0}))
    assert [each.function for each in found.calls] == ["old", "between", "new"]


def test_a_call_is_told_behind_the_one_that_made_it() -> None:
    """Clocks are known to a millisecond, perhaps, and a nested call is made sooner than that."""
    outer = call("w0#1", "w1", "outer", RUNNING, age=5.0)
    inner = replace(call("w1#7", "w2", "inner", RUNNING, age=5.001), parent=key("w0#1"))
    innermost = replace(call("w2#3", "w0", "innermost", SENT, age=5.002), parent=key("w1#7"))
    found = find_stuck(group(worker("w2", calls=(inner, innermost)), worker("w1", calls=(outer, replace(inner, age=5.0)))))
    assert [each.function for each in found.calls] == ["outer", "inner", "innermost"]


def test_calls_that_name_each_other_as_parent_are_told_all_the_same() -> None:
    one = replace(call("w0#1", "w1", "one", SENT), parent=key("w1#1"))
    other = replace(call("w1#1", "w0", "other", SENT), parent=key("w0#1"))
    assert len(find_stuck(group(worker("w0", calls=(one,)), worker("w1", calls=(other,)))).calls) == 2
