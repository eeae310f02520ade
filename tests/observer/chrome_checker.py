"""Reads a timeline as a viewer does, and says what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

Entry = dict[str, Any]


def faults_of(trace: dict[str, Any]) -> list[str]:
    """What a viewer could not show: slices that overlap, arrows without an end, asynchronous slices that do not end."""
    entries = trace["traceEvents"]
    return [*_unplaced(entries), *_overlapping(entries), *_loose_arrows(entries), *_unpaired(entries), *_unnamed(entries)]


def slices(trace: dict[str, Any], category: str) -> dict[str, Entry]:
    """By the name of the call: the slices of one end, complete or asynchronous, with `begin` and `end` in nanoseconds."""
    found: dict[str, Entry] = {}
    ends = {entry["id"]: nano(entry["ts"]) for entry in trace["traceEvents"] if entry["ph"] == "e"}
    for entry in trace["traceEvents"]:
        if entry.get("cat") == category and entry["ph"] in "Xb":
            begin = nano(entry["ts"])
            end = begin + nano(entry["dur"]) if entry["ph"] == "X" else ends[entry["id"]]
            found[entry["args"]["call"]] = {**entry, "begin": begin, "end": end}
    return found


def outside_of_their_calls(trace: dict[str, Any]) -> list[str]:
    """Functions that run when their caller does not wait for them. Those whose caller gave up may run on."""
    calls, runs = slices(trace, "call"), slices(trace, "run")
    return [
        f"{key}: runs from {run['begin']} to {run['end']}, and its call is from {call['begin']} to {call['end']}"
        for key, run in runs.items()
        if (call := calls.get(key)) is not None
        and (run["begin"] < call["begin"] or (run["end"] > call["end"] and call["args"].get("end") != "failed"))
    ]


def nano(microseconds: float) -> int:
    return round(microseconds * 1000)


def _unplaced(entries: list[Entry]) -> Iterator[str]:
    for entry in entries:
        if not (entry["ts"] >= 0 and entry.get("dur", 1) > 0 and entry["pid"] > 0 and isinstance(entry["tid"], int)):
            yield f"no place: {entry}"
        if not all(each.isprintable() for each in entry["name"]):
            yield f"a control character: {entry['name']!r}"


def _overlapping(entries: list[Entry]) -> Iterator[str]:
    """In the order of the file, as viewers read them."""
    around: dict[tuple[int, int], list[int]] = {}
    for entry in entries:
        if entry["ph"] == "X":
            stack = around.setdefault((entry["pid"], entry["tid"]), [])
            begin = nano(entry["ts"])
            end = begin + nano(entry["dur"])
            while stack and stack[-1] <= begin:
                stack.pop()
            if stack and end > stack[-1]:
                yield f"overlaps with the slice before it: {entry}"
            stack.append(end)
    times = [entry["ts"] for entry in entries if entry["ph"] != "M"]
    if times != sorted(times):
        yield "not in the order of time"


def _loose_arrows(entries: list[Entry]) -> Iterator[str]:
    begins = {
        (entry["pid"], entry["tid"], nano(entry["ts"])) for entry in entries if entry["ph"] == "X"
    }
    ends = Counter((entry["id"], entry["ph"]) for entry in entries if entry["ph"] in "sf")
    when: dict[int, dict[str, float]] = {}
    for entry in entries:
        if entry["ph"] in "sf":
            when.setdefault(entry["id"], {})[entry["ph"]] = entry["ts"]
            if (entry["pid"], entry["tid"], nano(entry["ts"])) not in begins:
                yield f"an arrow ends where no slice begins: {entry}"
    for number, both in when.items():
        if ends[number, "s"] != 1 or ends[number, "f"] != 1:
            yield f"arrow {number} has not two ends"
        elif both["s"] > both["f"]:
            yield f"arrow {number} points back in time"


def _unpaired(entries: list[Entry]) -> Iterator[str]:
    open_slices: dict[tuple[str, str], float] = {}
    for entry in entries:
        if entry["ph"] == "b":
            if (entry["cat"], entry["id"]) in open_slices:
                yield f"begins twice: {entry}"
            open_slices[entry["cat"], entry["id"]] = entry["ts"]
        elif entry["ph"] == "e" and open_slices.pop((entry["cat"], entry["id"]), entry["ts"]) >= entry["ts"]:
            yield f"ends before it begins: {entry}"
    yield from (f"never ends: {each}" for each in open_slices)


def _unnamed(entries: list[Entry]) -> Iterator[str]:
    named = {(entry["pid"], entry["tid"]) for entry in entries if entry["name"] == "thread_name"}
    processes = {entry["pid"] for entry in entries if entry["name"] == "process_name"}
    for entry in entries:
        if entry["pid"] not in processes or (entry["ph"] in "Xsf" and (entry["pid"], entry["tid"]) not in named):
            yield f"its track has no name: {entry}"
