"""Explains a dump: what is wrong in it, the culprit first.

Each `Finding` is one thing, with the evidence. Their order is that of causes: a worker that died explains calls that failed,
a cycle explains calls that wait, and neither is explained by references that no program needs any more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from remora.observer.dump import Cause, Dump, WorkerDump
from remora.observer.model import (
    CallKey,
    CallStatus,
    EventKind,
    GroupSnapshot,
    Missing,
    OwnedReference,
    Stage,
    WaitKind,
    WaitStatus,
    WorkerSnapshot,
)
from remora.observer.wait_graph import Node, call_node
from remora.observer.waits import Chain, WaitGraph

STUCK = 5.0  # seconds after which a call is worth a word
MANY = 500  # references of one kind that look like a leak
FRAMES = 6  # of a stack
SOME = 6  # names of workers in one line
SERVING = "/remora/agent/serving/"
LAST_WORDS = 30  # lines
CONSEQUENCES = ("WorkerLost", "OwnerDied", "CallTimeout", "CallNotSent", "CallOutcomeUnknown", "RemoteError")


class Kind(IntEnum):
    """The subject of a finding: the more likely culprit is the smaller number."""

    DIED = 1
    CYCLE = 2
    SILENT = 3
    STUCK = 4
    POOL_FULL = 5
    TIMEOUT = 6
    CONSEQUENCE = 7  # a worker that ended because another one had
    LEAK = 8
    VERSIONS = 9
    FAULTS = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `text` is a sentence, `details` are lines of evidence."""

    kind: Kind
    text: str
    details: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    weight: float = 0.0  # among those of one kind, the heaviest comes first


def explain(dump: Dump, older_than: float = STUCK) -> list[Finding]:
    """Return what is wrong, the culprit first."""
    group = dump.group
    cycles = WaitGraph.of(group).cycles()
    found = [
        *_deaths(dump),
        *_cycles(cycles, group),
        *_silent(group),
        *_stuck(group, older_than, {node for cycle in cycles for node in cycle.nodes}),
        *_full_pools(group),
        *_timeouts(dump),
        *_leaks(group),
        *_versions(group),
        *_faults(group),
    ]
    return sorted(found, key=lambda each: (each.kind, -each.weight, each.text))


# Workers that ended.


def _deaths(dump: Dump) -> Iterator[Finding]:
    """Those that wrote last words, and those that others call dead. The first to die is named first."""
    spoke = {each.snapshot.name: each for each in dump.workers if each.cause is Cause.ERROR}
    witnesses = _witnesses(dump.group)
    for name, last in spoke.items():
        error = _error_line(last)
        because = _consequence_of(last, {*spoke, *witnesses} - {name})
        kind = Kind.CONSEQUENCE if because else Kind.DIED
        text = f"{name} ended with an error: {error}" + (f", because {because} was gone" if because else "")
        lines = [each for each in last.last_words.splitlines() if each.strip()]
        yield Finding(
            kind,
            text,
            (*_shortened(lines, LAST_WORDS), *dict.fromkeys(text for _, text in witnesses.get(name, ()))),
            (name,),
            _earlier(last.snapshot.time),
        )
    for name, told in witnesses.items():
        if name not in spoke:
            first = min(at for at, _ in told)
            details = tuple(dict.fromkeys(text for _, text in told))
            text = f"{name} died, and left no last words: it was killed, or its host is gone"
            yield Finding(Kind.DIED, text, details, (name,), _earlier(first))


def _earlier(time: float) -> float:
    """Return a weight: what happened earlier weighs more."""
    return -time


def _witnesses(group: GroupSnapshot) -> dict[str, list[tuple[float, str]]]:
    """By worker that died: when and what others say of it."""
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for missing in group.missing:
        if missing.state == "dead":
            found[missing.name].append((group.time, f"its state is {missing.state}: {missing.reason}"))
    for worker in group.workers:
        shift = group.clock_offsets.get(worker.name, 0.0)
        for event in worker.events:
            if event.kind is EventKind.DIED and event.peer:
                text = event.text or "it is dead"
                found[event.peer].append((event.time - shift, f"{worker.name} says: {text}"))
        for link in worker.links:
            if link.state == "dead":
                told = f"{worker.name} says: {link.reason or 'it is dead'}"
                found[link.peer].append((worker.time - shift, told))
    return found


def _error_line(last: WorkerDump) -> str:
    lines = [line for line in last.last_words.splitlines() if line and not line[0].isspace()]
    return lines[-1] if lines else last.text or "it said nothing"


def _consequence_of(last: WorkerDump, gone: set[str]) -> str:
    """The worker whose end is the cause of this one's, if the error says so."""
    error = _error_line(last)
    if any(each in error.partition(":")[0] for each in CONSEQUENCES) or "lost" in error:
        return next((name for name in sorted(gone, key=len, reverse=True) if _mentions(error, name)), "")
    return ""


def _mentions(text: str, name: str) -> bool:
    at = text.find(name)
    return at >= 0 and not text[at + len(name) : at + len(name) + 1].isalnum()


# Workers that say nothing.


def _silent(group: GroupSnapshot) -> Iterator[Finding]:
    for missing in group.missing:
        if missing.state in ("silent", "unreachable", "refused"):
            waiting = _waiting_for(group, missing.name)
            text = f"{missing.name} is {missing.state}: {missing.reason or 'it did not answer'}"
            text += f"; {_waiting(waiting, 'call')} for it" if waiting else ""
            details = tuple(_shortened(missing.stacks.splitlines(), LAST_WORDS))
            yield Finding(Kind.SILENT, text, details, (missing.name,), waiting)


def _waiting_for(group: GroupSnapshot, name: str) -> int:
    return sum(call.callee == name for worker in group.workers for call in worker.calls)


# Calls that wait for each other, and calls that take long.


def _cycles(cycles: list[Chain], group: GroupSnapshot) -> Iterator[Finding]:
    for cycle in cycles:
        names = tuple(dict.fromkeys(node.worker for node in cycle.nodes))
        nodes = set(cycle.nodes)
        details = [
            line
            for worker in group.workers
            for call in worker.calls
            if call.stage is Stage.RUNNING and call_node(call.key) in nodes
            for line in (f"{worker.name}, {call.function}:", *_Stacks(worker).of(call))
        ]
        yield Finding(Kind.CYCLE, cycle.text, tuple(details), names, cycle.age)


def _stuck(group: GroupSnapshot, older_than: float, in_cycles: set[Node]) -> Iterator[Finding]:
    """Functions that run for long and wait for no other call: what all the others wait for in the end."""
    children, waits, parents = _parents(group), _waits_of_calls(group), _parent_of(group)
    alike: dict[tuple[str, ...], list[tuple[Finding, CallStatus]]] = defaultdict(list)
    for worker in group.workers:
        stacks = _Stacks(worker)
        for call in worker.calls:
            if call.stage is not Stage.RUNNING or call.age < older_than or call.key in children:
                continue
            if call_node(call.key) in in_cycles:
                continue  # that is told already
            waiting = _depth(call.key, parents)
            told = waits.get((worker.name, call.key))
            if told is not None and told.kind is WaitKind.REFERENCE and call.thread is None:
                continue  # a fetch: what makes the value is told
            text = f"{call.function} has run on {worker.name} for {call.age:.1f} s, called by {call.key.caller}"
            text += f", and waits for {told.text}" if told is not None else ""
            text += f"; {_waiting(waiting, 'more call')} for it" if waiting else ""
            found = Finding(Kind.STUCK, text, tuple(stacks.of(call)), (worker.name,), 1e9 * waiting + call.age)
            what = (worker.name, call.function, call.key.caller, str(waiting), told.text if told is not None else "")
            alike[*what, *found.details[1:]].append((found, call))
    for those in alike.values():
        found, _ = max(those, key=lambda each: each[1].age)
        more = f" (and {len(those) - 1:,} more calls like this)" if len(those) > 1 else ""
        yield replace(found, text=found.text + more)
    yield from _unanswered(group, older_than)


def _unanswered(group: GroupSnapshot, older_than: float) -> Iterator[Finding]:
    """Calls of which the callee, which answered, knows nothing."""
    served = {call.key for worker in group.workers for call in worker.calls if call.key.caller != worker.name}
    served |= {call.key for worker in group.workers for call in worker.calls if call.callee == worker.name}
    present = {worker.name for worker in group.workers}
    for worker in group.workers:
        lost: dict[tuple[str, str, Stage], list[float]] = defaultdict(list)
        for call in worker.calls:
            mine = call.key.caller == worker.name and call.stage in (Stage.UNSENT, Stage.SENT)
            if mine and call.age >= older_than and call.callee in present and call.key not in served:
                lost[call.callee, call.function, call.stage].append(call.age)
        for (callee, function, stage), ages in lost.items():
            where = "was not sent" if stage is Stage.UNSENT else "was sent, and the callee knows nothing of it"
            text = f"{_counted(len(ages), 'call')} of {function} from {worker.name} to {callee}: {where} ({max(ages):.1f} s)"
            yield Finding(Kind.STUCK, text, (), (worker.name, callee), max(ages))


def _parents(group: GroupSnapshot) -> set[CallKey]:
    return {call.parent for worker in group.workers for call in worker.calls if call.parent is not None}


def _waits_of_calls(group: GroupSnapshot) -> dict[tuple[str, CallKey], WaitStatus]:
    return {
        (worker.name, wait.serving): wait for worker in group.workers for wait in worker.waits if wait.serving is not None
    }


def _parent_of(group: GroupSnapshot) -> dict[CallKey, CallKey]:
    return {call.key: call.parent for worker in group.workers for call in worker.calls if call.parent is not None}


def _depth(key: CallKey, parents: dict[CallKey, CallKey]) -> int:
    """Count the calls that wait for this one, in a row."""
    seen = {key}
    while (above := parents.get(key)) is not None and above not in seen:
        seen.add(above)
        key = above
    return len(seen) - 1


class _Stacks:
    """The stacks of what a worker runs, by call."""

    def __init__(self, worker: WorkerSnapshot) -> None:
        self._by_id = {each.id: each for each in worker.threads}
        self._by_call = {each.serving: each for each in worker.threads if each.serving is not None}

    def of(self, call: CallStatus) -> list[str]:
        """The thread or coroutine that runs a call, and its innermost frames."""
        thread = self._by_id.get(call.thread) if call.thread is not None else None
        thread = thread or self._by_call.get(call.key)
        if thread is None:
            return []
        ours = [n for n, line in enumerate(thread.stack) if SERVING in line]  # that lead to the function of the program
        stack = thread.stack[ours[-1] + 1 if ours else 0 :]
        noun = "" if thread.role == "coroutine" else "thread "
        return [f"{noun}{thread.name}:", *(f"  {line}" for line in stack[-FRAMES:])]


def _full_pools(group: GroupSnapshot) -> Iterator[Finding]:
    for worker in group.workers:
        pool = worker.pool
        if pool.queued and 0 < pool.limit <= pool.running:
            running = Counter(call.function for call in worker.calls if call.stage is Stage.RUNNING)
            text = f"{_waiting(pool.queued, 'call')} for a thread of {worker.name}: "
            text += f"all {pool.limit} are taken (num_worker_threads)"
            details = tuple(f"{count} x {function}" for function, count in running.most_common(5))
            yield Finding(Kind.POOL_FULL, text, details, (worker.name,), pool.queued)


def _timeouts(dump: Dump) -> Iterator[Finding]:
    told = Counter((each.snapshot.name, each.text) for each in dump.workers if each.cause is Cause.TIMEOUT)
    for (name, text), count in told.items():
        times = f" ({count} dumps)" if count > 1 else ""
        yield Finding(Kind.TIMEOUT, f"on {name} a call timed out: {text}{times}", (), (name,), count)


# What grows.


def _leaks(group: GroupSnapshot) -> Iterator[Finding]:
    """References by the function that made them and by who holds them."""
    for worker in group.workers:
        alike: dict[tuple[str, str, tuple[str, ...]], list[OwnedReference]] = defaultdict(list)
        for each in worker.owned:
            alike[each.function or each.type, each.type, each.holders].append(each)
        cut = worker.left_out.get("owned", 0)
        for (function, kind, holders), references in alike.items():
            if len(references) >= MANY:
                yield _leak(worker, function, kind, holders, references, cut)
        if cut and not any(len(each) >= MANY for each in alike.values()):
            text = f"{worker.name} owns {len(worker.owned) + cut:,} values that references point to, of many kinds"
            yield Finding(Kind.LEAK, text, (), (worker.name,), cut)


def _leak(
    worker: WorkerSnapshot, function: str, kind: str, holders: tuple[str, ...], references: list[OwnedReference], cut: int
) -> Finding:
    sites = Counter(each.site for each in references if each.site)
    size = sum(each.bytes or 0 for each in references)
    held = " and ".join(holders) or "no worker that is known"
    more = f" or more (the dump leaves {cut:,} out)" if cut else ""
    text = f"{len(references):,}{more} references to values that {function} made on {worker.name} are held by {held}"
    details = [f"type {kind}, oldest {max(each.age for each in references):.0f} s", *([f"{size:,} bytes"] if size else [])]
    details += [f"{count:,} made at {site}" for site, count in sites.most_common(3)]
    return Finding(Kind.LEAK, text, tuple(details), (worker.name, *holders), len(references) + cut)


# What differs.


def _versions(group: GroupSnapshot) -> Iterator[Finding]:
    for part in sorted({name for worker in group.workers for name in worker.versions}):
        found: dict[str, list[str]] = defaultdict(list)
        for worker in group.workers:
            found[worker.versions.get(part, "none")].append(worker.name)
        if len(found) > 1:
            said = "; ".join(f"{version} on {_some(names)}" for version, names in sorted(found.items()))
            yield Finding(Kind.VERSIONS, f"the workers have different versions of {part}: {said}")


def _faults(group: GroupSnapshot) -> Iterator[Finding]:
    for worker in group.workers:
        told = Counter(event.text for event in worker.events if event.kind is EventKind.FAULT)
        if told:
            details = tuple(f"{count} x {text}" for text, count in told.most_common(5))
            text = f"a fault plan injected {_counted(sum(told.values()), 'fault')} on {worker.name}"
            yield Finding(Kind.FAULTS, text, details, (worker.name,))


# Words.


def summary(dump: Dump) -> list[str]:
    """Describe the origin of the dump."""
    group = dump.group
    head = f"group {group.group}: {_counted(len(group.workers), 'worker')} in the dump"
    missing = f", {len(group.missing)} not: {_some([_with_state(each) for each in group.missing])}"
    lines = [head + missing if group.missing else head]
    causes = Counter((each.snapshot.name, each.cause) for each in dump.workers if each.cause is not Cause.ASKED)
    lines += [f"{name} wrote {_counted(count, 'dump')}: {cause}" for (name, cause), count in sorted(causes.items())]
    lines += [f"not read: {each}" for each in dump.unreadable]
    lines += [f"not looked at: dumps of the group {each} (--group)" for each in dump.other_groups]
    return lines


def _with_state(missing: Missing) -> str:
    return f"{missing.name} ({missing.state})"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _waiting(number: int, noun: str) -> str:
    return f"{_counted(number, noun)} {'waits' if number == 1 else 'wait'}"


def _some(names: list[str]) -> str:
    more = [f"{len(names) - SOME} more"] if len(names) > SOME else []
    return ", ".join([*names[:SOME], *more])


def _shortened(lines: Iterable[str], limit: int) -> list[str]:
    """The last lines, and how many there are before them."""
    found = list(lines)
    return found if len(found) <= limit else [f"… {len(found) - limit} lines", *found[-limit:]]
