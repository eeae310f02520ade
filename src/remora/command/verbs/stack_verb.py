"""`remora stack`: where all threads of all workers are. Threads with the same stack are shown together, and each that is
blocked with the call that it serves and what it waits for."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator

from remora.command.arguments import (
    add_group,
    add_json,
    add_watch,
    check_worker,
    find_group,
    print_json,
    repeat,
    tell_missing,
    troubles,
)
from remora.command.native_stacks import native_stacks
from remora.command.output import Output, lines
from remora.command.text import counted, duration
from remora.observer.model import (
    CallKey,
    GroupSnapshot,
    Query,
    ThreadStatus,
    WaitKind,
    WaitStatus,
    WorkerSnapshot,
)
from remora.observer.snapshot_json import to_json

NAME = "stack"
HELP = "where all threads are, equal stacks together"
EXAMPLE = "remora stack worker1"

QUERY = Query(parts=("threads", "calls", "waits"), limit=10_000)

TOLD = 10  # threads with the same stack of which is said what they do

_STARTS = re.compile(
    r"/threading\.py:\d+ Thread\._?(bootstrap|bootstrap_inner|run)$|/multiprocessing/|^<string>:1 <module>$"
)
_OURS = re.compile(r"/remora/(agent|autograd|rpc|rref|transport|wire|optim|nn|faults)/")

Place = tuple[WorkerSnapshot, ThreadStatus]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", nargs="?", help="only this one")
    parser.add_argument("--all", action="store_true", help="also threads of Remora that have nothing to do")
    add_group(parser)
    add_json(parser)
    add_watch(parser)


def run(options: argparse.Namespace) -> int:
    with find_group(options) as group:
        return repeat(options, lambda output: _once(options, group.snapshot(QUERY, options.timeout), output))


def _once(options: argparse.Namespace, snapshot: GroupSnapshot, output: Output) -> int:
    check_worker(snapshot, options.worker)
    if options.json:
        print_json(to_json(snapshot), indent=options.watch is None)
        return int(bool(troubles(snapshot)))
    show_stacks(snapshot, output, options.worker, options.all, native=True)
    return tell_missing(snapshot, output)


def show_stacks(
    snapshot: GroupSnapshot, output: Output, name: str | None = None, everything: bool = True, native: bool = False
) -> None:
    """Print the threads of a group, or of one worker; then what the others wrote whose interpreter does not answer.
    `native`: also what py-spy says of those, which takes a moment."""
    places = [(worker, each) for worker in snapshot.workers if name in (None, worker.name) for each in worker.threads]
    busy = [(worker, thread) for worker, thread in places if everything or not is_idle(worker, thread)]
    for stack, alike in grouped(busy):
        output.line(_heading(alike), "head")
        for worker, thread in alike[:TOLD]:
            lines(output, (f"  {text}" for text in matters(snapshot, worker, thread, len(alike) > 1)))
        if len(alike) > TOLD:
            output.line(f"  … and {len(alike) - TOLD:,} more", "faint")
        frames = stack if everything else shortened(stack)
        lines(output, (f"    {frame}" for frame in frames or ("(no stack)",)))
        output.line()
    if len(busy) < len(places):
        output.line(f"{counted(len(places) - len(busy), 'idle thread')} of Remora not shown (--all)", "faint")
    cut = sum(worker.left_out.get("threads", 0) for worker in snapshot.workers if name in (None, worker.name))
    if cut:
        output.line(f"{cut:,} more threads and coroutines not shown", "faint")
    for missing in snapshot.missing:
        if missing.stacks and name in (None, missing.name):
            output.line(f"{missing.name} does not answer. Its process wrote:", "head")
            told = missing.stacks.splitlines()
            if native and missing.pid is not None:  # of this host: only of such a process there are stacks
                told += native_stacks(missing.pid)
            lines(output, (f"    {text}" for text in told))


def grouped(places: list[Place]) -> list[tuple[tuple[str, ...], list[Place]]]:
    """By stack: those of the program first, then the largest groups."""
    groups: dict[tuple[str, ...], list[Place]] = defaultdict(list)
    for worker, thread in places:
        groups[thread.stack].append((worker, thread))
    return sorted(groups.items(), key=lambda each: (not any(_is_program(place) for place in each[1]), -len(each[1])))


def shortened(stack: tuple[str, ...]) -> list[str]:
    """A stack without what starts each thread, and with a word in the place of several frames of Remora."""
    frames = list(stack)
    while len(frames) > 1 and _STARTS.search(frames[0]):
        del frames[0]
    found: list[str] = []
    ours: list[str] = []
    for frame in [*frames, ""]:
        if frame and _OURS.search(frame):
            ours.append(frame)
            continue
        found += ours if len(ours) < 3 else [f"… {len(ours)} frames of Remora, the last: {ours[-1].rpartition('/')[2]}"]
        found += [frame] if frame else []
        ours.clear()
    return found


def is_idle(worker: WorkerSnapshot, thread: ThreadStatus) -> bool:
    """True of Remora's own threads that serve nothing and wait for nothing."""
    blocked = any(wait.thread == thread.id for wait in worker.waits)
    return thread.role not in ("main", "program") and thread.serving is None and thread.task is None and not blocked


def _is_program(place: Place) -> bool:
    return place[1].role in ("main", "program") or place[1].serving is not None


def _heading(alike: list[Place]) -> str:
    names = [f"{worker.name} {thread.name}" for worker, thread in alike]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")
    return shown if len(names) == 1 else f"{len(names)} threads: {shown}"


def matters(group: GroupSnapshot, worker: WorkerSnapshot, thread: ThreadStatus, named: bool) -> Iterator[str]:
    """Yield a sentence for each thing that a thread serves or waits for."""
    subject = f"{worker.name} {thread.name} " if named else ""
    serving = thread.serving or next((each.serving for each in worker.waits if each.thread == thread.id), None)
    if serving is not None:
        yield f"{subject}serves {_function(group, serving)} for {serving.caller} ({serving})"
    for wait in worker.waits:
        coroutine = thread.role == "coroutine" and wait.thread is None and wait.serving == thread.serving is not None
        if wait.thread == thread.id or coroutine:
            age = "" if wait.age is None else f", for {duration(wait.age)}"
            yield f"{subject}waits for {_what(group, worker, wait)}{age}"


def _what(group: GroupSnapshot, worker: WorkerSnapshot, wait: WaitStatus) -> str:
    if wait.kind is WaitKind.LOCK and wait.call is not None:
        return f"{wait.text or 'a lock'}, which {_function(group, wait.call)} ({wait.call}) holds"
    if wait.call is not None:
        return f"{wait.text or _function(group, wait.call)} ({wait.call})"
    if wait.kind is WaitKind.LOCK and wait.holder is not None:
        holder = next((each.name for each in worker.threads if each.id == wait.holder), str(wait.holder))
        return f"{wait.text or 'a lock'}, which {holder} holds" if holder not in wait.text else wait.text
    return wait.text or str(wait.kind)


def _function(group: GroupSnapshot, key: CallKey) -> str:
    return next((call.function for worker in group.workers for call in worker.calls if call.key == key), f"call {key}")
