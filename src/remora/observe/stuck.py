"""The calls and waits of a group that have lasted for long, oldest first, and silent workers. For people."""

from __future__ import annotations

from dataclasses import dataclass, replace

from remora.observer.model import CallKey, CallStatus, GroupSnapshot, Missing, Stage, WaitStatus


@dataclass(frozen=True)
class Stuck:
    """All that is stuck in a group. It is false if nothing is, and it prints."""

    calls: tuple[CallStatus, ...]  # of each call one end: that of the callee, if it knows the call
    waits: tuple[tuple[str, WaitStatus], ...]  # with the worker that waits
    missing: tuple[Missing, ...]  # workers that are silent, or dead

    def __bool__(self) -> bool:
        return bool(self.calls or self.waits or self.missing)

    def __str__(self) -> str:
        lines = [_call(each) for each in self.calls]
        lines += [f"{worker} waits{_since(wait.age)} for {wait.text}" for worker, wait in self.waits]
        lines += [f"{each.name} is {each.state}: {each.reason}" for each in self.missing]
        return "\n".join(lines) or "nothing is stuck"


def find_stuck(group: GroupSnapshot) -> Stuck:
    """Return the calls and waits that a snapshot has, which was asked for old ones. Waits of unknown age count, if their
    worker has a call that is as old."""
    calls: dict[CallKey, CallStatus] = {}
    began: dict[CallKey, float] = {}
    for worker in group.workers:
        now = worker.time - group.clock_offsets.get(worker.name, 0.0)  # each worker told its ages at another moment
        for call in worker.calls:
            known = calls.get(call.key)
            if known is None:
                calls[call.key] = call
            else:  # of its two ends the callee knows how far it is, and its caller what it is
                far, named = (known, call) if call.key.caller == worker.name else (call, known)
                calls[call.key] = far if far.function else replace(far, function=named.function)
            began[call.key] = min(began.get(call.key, now - call.age), now - call.age)
    waits = [
        (worker.name, wait)
        for worker in group.workers
        for wait in worker.waits
        if wait.age is not None or worker.calls
    ]
    return Stuck(
        calls=tuple(sorted(calls.values(), key=lambda call: _place(call, calls, began))),
        waits=tuple(sorted(waits, key=lambda each: -(each[1].age or 0.0))),
        missing=tuple(each for each in group.missing if each.state != "left"),
    )


def _place(call: CallStatus, calls: dict[CallKey, CallStatus], began: dict[CallKey, float]) -> tuple[float, int]:
    """Return by what a call is sorted: when it began, and a call that another one made behind that, as clocks differ."""
    at, above, depth = began[call.key], call.parent, 0
    while above is not None and above in calls and depth < len(calls):
        at, above, depth = max(at, began[above]), calls[above].parent, depth + 1
    return at, depth


def _call(call: CallStatus) -> str:
    what = f"{call.function or 'a call'} of {call.key.caller} on {call.callee}"
    parent = f", made while {call.parent} was served" if call.parent is not None else ""
    how = "has not begun" if call.stage is Stage.QUEUED else call.stage.value
    return f"{what}: {how}{_since(call.age)} ({call.key}){parent}"


def _since(age: float | None) -> str:
    return "" if age is None else f" since {age:.1f} s"
