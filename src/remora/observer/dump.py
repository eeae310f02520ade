"""Dumps: what the workers of a group say of themselves, in a file that can be read when they are gone.

A dump of a group is a zip: `manifest.json` (the format, its version, when and by which Remora), `group.json` (a
`GroupSnapshot` without its workers), `workers/….json` (a `WorkerDump` each) and `stacks/….txt` for people. What a worker
writes by itself (docs/observing.md) is one `WorkerDump` in a folder, `remora-….json`. `read_dump` reads both.

A file appears when it is complete, and only its user can read it. What is read is not trusted: it is bounded in size, and
refused with a clear `UnreadableDump` if it is no dump.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import IO, Any

from remora.errors import RemoraError
from remora.observer.model import (
    GroupSnapshot,
    Missing,
    ThreadStatus,
    UnknownVersion,
    WorkerSnapshot,
)
from remora.observer.snapshot_json import from_json, to_json

FORMAT = "remora dump"
VERSION = 1
PREFIX, SUFFIX = "remora-", ".json"  # of the files that workers write by themselves
MAX_BYTES = 256 << 20  # of one part
MOST_KEPT = 100  # dumps of workers of one name in a folder
MAX_PARTS = 10_000
_STATES = {"dead": "dead", "left": "left", "suspected": "silent"}  # of a peer: what it is as a missing worker


class UnreadableDump(RemoraError):
    """A file is no dump, is damaged, or was written by another version."""


class Cause(StrEnum):
    """The reason of a dump."""

    ASKED = "asked for"
    TIMEOUT = "a call timed out"
    PEER_LOST = "a peer was lost"
    SIGNAL = "a signal came"
    ERROR = "the program ended with an error"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDump:
    """The snapshot of one worker at one moment, with the reason for it."""

    cause: Cause
    snapshot: WorkerSnapshot
    text: str = ""  # more of the cause, such as the error of the call
    last_words: str = ""  # ERROR: the traceback
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """All that a file or a folder has of one group. `group.workers` are the latest snapshots."""

    group: GroupSnapshot
    workers: tuple[WorkerDump, ...]
    unreadable: tuple[str, ...] = ()  # files of a folder that could not be read, and why
    other_groups: tuple[str, ...] = ()  # of which the folder has dumps, too


# Writing.


def write_group_dump(path: str, group: GroupSnapshot, made_by: str) -> None:
    """Write the zip."""
    dumps = [WorkerDump(cause=Cause.ASKED, snapshot=each) for each in group.workers]
    manifest = {"format": FORMAT, "version": VERSION, "made by": made_by, "time": group.time}

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("manifest.json", _text(manifest))
            archive.writestr("group.json", _text(to_json(replace(group, workers=()))))
            for dump in dumps:
                part = _file_name(dump.snapshot)
                archive.writestr(f"workers/{part}.json", _text(_marked(dump)))
                archive.writestr(f"stacks/{part}.txt", stacks_text(dump.snapshot.threads))
            for n, missing in enumerate(group.missing):
                if missing.stacks:
                    archive.writestr(f"stacks/missing-{n}.txt", missing.stacks)

    _write_whole(path, write)


def write_worker_dump(folder: str, dump: WorkerDump) -> str:
    """Write a dump of one worker into the folder, which is made if it is not there. Return the path. Of workers of one name
    the newest dumps stay there: one that is started again and again must not fill the disk."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    name = f"{PREFIX}{_file_name(dump.snapshot)}-{dump.snapshot.pid}-{secrets.token_hex(4)}{SUFFIX}"
    path = os.path.join(folder, name)
    _write_whole(path, lambda file: file.write(_text(_marked(dump)).encode()))
    _remove_oldest(folder, f"{PREFIX}{_file_name(dump.snapshot)}-")
    return path


def _remove_oldest(folder: str, prefix: str) -> None:
    name = re.compile(re.escape(prefix) + r"\d+-[0-9a-f]{8}" + re.escape(SUFFIX))
    with os.scandir(folder) as entries:
        dumps = [each.path for each in entries if name.fullmatch(each.name)]
    if len(dumps) > MOST_KEPT:
        with suppress(OSError):  # another worker removes it, too; or it is not ours
            for path in sorted(dumps, key=os.path.getmtime)[:-MOST_KEPT]:
                os.unlink(path)


def stacks_text(threads: Iterable[ThreadStatus]) -> str:
    """The stacks of threads, for people: the innermost frame last."""
    lines: list[str] = []
    for each in threads:
        lines += [f"{each.name} ({each.role})", *(f"  {line}" for line in each.stack), ""]
    return "\n".join(lines)


def _write_whole(path: str, write: Callable[[IO[bytes]], object]) -> None:
    """Have the file appear when it is complete. Nothing is left of one that could not be completed."""
    draft = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{secrets.token_hex(4)}.part")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(file, "wb") as opened:
            write(opened)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _marked(dump: WorkerDump) -> dict[str, Any]:
    return {"format": FORMAT, **to_json(dump)}


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _file_name(snapshot: WorkerSnapshot) -> str:
    """A name of a file for a worker, whatever the worker is called."""
    return f"{snapshot.rank:04d}-" + re.sub(r"[^A-Za-z0-9_.-]", "_", snapshot.name)[:60]


# Reading.


def read_dump(path: str, group: str | None = None) -> Dump:
    """Read a zip, a dump of one worker, or a folder of those. `group`: the first letters of the one that is meant, where a
    folder has several; else that of the latest dump. UnreadableDump, or UnknownVersion, says what is wrong."""
    if os.path.isdir(path):
        return _read_folder(path, group)
    if not os.path.exists(path):
        raise UnreadableDump(f"there is no file or folder {path!r}")
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UnreadableDump(f"{path!r} is no plain file")
    if zipfile.is_zipfile(path):
        return _read_zip(path)
    return _joined([_read_worker_dump(path)], None, ())


def _read_folder(path: str, group: str | None) -> Dump:
    dumps: list[WorkerDump] = []
    unreadable: list[str] = []
    for name in sorted(os.listdir(path)):
        if name.startswith(PREFIX) and name.endswith(SUFFIX):
            try:
                dumps.append(_read_worker_dump(os.path.join(path, name)))
            except (UnreadableDump, UnknownVersion) as error:
                unreadable.append(str(error))
    if not dumps:
        more = f": {unreadable[0]}" if unreadable else f" ({PREFIX}….json)"
        raise UnreadableDump(f"the folder {path!r} has no dump that can be read{more}")
    return _joined(dumps, group, tuple(unreadable))


def _joined(dumps: list[WorkerDump], group: str | None, unreadable: tuple[str, ...]) -> Dump:
    """Dumps that workers wrote at different moments, as one: of each worker the latest is what is known of it."""
    groups = {each.snapshot.group for each in dumps}
    dumps = sorted(dumps, key=lambda each: each.snapshot.time)
    chosen = [each for each in dumps if each.snapshot.group.startswith(group or "")]
    if not chosen:
        raise UnreadableDump(f"there is no dump of a group {group!r}; there are: {', '.join(sorted(groups))}")
    meant = chosen[-1].snapshot.group
    chosen = [each for each in chosen if each.snapshot.group == meant]
    latest = {each.snapshot.name: each.snapshot for each in chosen}
    snapshots = tuple(sorted(latest.values(), key=lambda each: each.rank))
    missing = tuple(_those_without(snapshots))
    found = GroupSnapshot(group=meant, time=chosen[-1].snapshot.time, workers=snapshots, missing=missing)
    return Dump(group=found, workers=tuple(chosen), unreadable=unreadable, other_groups=tuple(sorted(groups - {meant})))


def _those_without(snapshots: tuple[WorkerSnapshot, ...]) -> list[Missing]:
    """The workers of which only others speak, and not well. (One that lives and had no reason to write a dump is not
    missing.)"""
    names = {each.name for each in snapshots}
    found: dict[str, Missing] = {}
    for snapshot in snapshots:
        for link in snapshot.links:
            state = _STATES.get(link.state)
            if link.peer not in names and state is not None and (link.peer not in found or state == "dead"):
                found[link.peer] = Missing(name=link.peer, rank=None, state=state, reason=link.reason)
    return list(found.values())


def _read_worker_dump(path: str) -> WorkerDump:
    with open(path, "rb") as file:
        return _worker_dump(_parsed(file.read(MAX_BYTES + 1), path), path)


def _read_zip(path: str) -> Dump:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if "manifest.json" not in names or "group.json" not in names or len(names) > MAX_PARTS:
                raise UnreadableDump(f"{path!r} is a zip, but no dump of Remora: it has no manifest")

            def part(name: str) -> Any:
                with archive.open(name) as file:
                    return _parsed(file.read(MAX_BYTES + 1), f"{path}: {name}")

            _check_format(part("manifest.json"), path)
            group = _read(GroupSnapshot, part("group.json"), path)
            workers = [
                _worker_dump(part(name), path) for name in sorted(names) if re.fullmatch(r"workers/[^/]+\.json", name)
            ]
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, RemoraError):
            raise
        raise UnreadableDump(f"{path!r} is damaged: {error}") from None
    except Exception as error:  # what zlib and lzma raise has no common class
        if type(error).__module__ in ("zlib", "_lzma", "lzma", "struct"):
            raise UnreadableDump(f"{path!r} is damaged: {error}") from None
        raise
    return Dump(group=replace(group, workers=tuple(each.snapshot for each in workers)), workers=tuple(workers))


def _parsed(content: bytes, place: str) -> Any:
    if len(content) > MAX_BYTES:
        raise UnreadableDump(f"{place} has more than {MAX_BYTES >> 20} MiB: it is no dump, or one of something else")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):  # not UTF-8 is a ValueError, too
        raise UnreadableDump(f"{place} is damaged or no dump: it is not JSON") from None


def _worker_dump(data: Any, place: str) -> WorkerDump:
    _check_format(data, place)
    _read(WorkerSnapshot, data.get("snapshot"), place)  # it has a version of its own
    found: WorkerDump = _read(WorkerDump, data, place)
    return found


def _check_format(data: Any, place: str) -> None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UnreadableDump(f"{place} is no dump of Remora")
    if data.get("version") != VERSION:
        raise UnknownVersion(
            f"{place} has version {str(data.get('version'))[:20]!r} of the format of dumps, and this Remora reads "
            f"{VERSION}: use the version of Remora that wrote it"
        )


def _read(kind: type[Any], data: Any, place: str) -> Any:
    try:
        return from_json(kind, data)
    except ValueError as error:
        raise UnreadableDump(f"{place} is damaged: {error}") from None
    except UnknownVersion as error:
        raise UnknownVersion(f"{place}: {error}") from None
