"""The harness notices what it is there to notice: a search that finds nothing would else say nothing."""

from __future__ import annotations

import os
import pickle
import random
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.wire.frames import HEADER_SIZE
from tests.damage import hunt, receivers, trials
from tests.damage.mutations import KINDS, Mutation, apply, draw
from tests.damage.receivers import Sample
from tests.damage.subject import Subject
from tests.damage.trials import Trial
from tests.damage.units import Unit, fields


@pytest.fixture
def subject() -> Iterator[Subject]:
    with Subject() as found:
        yield found


def die(number: int) -> str:
    os.kill(os.getpid(), number)
    return ""


def grow(nbytes: int) -> str:
    return str(len(b"x" * nbytes))


def lose_a_thread() -> str:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    return ""


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_the_death_of_the_process_is_a_finding(subject: Subject, number: signal.Signals) -> None:
    assert number.name in subject.ask(die, number).problem
    assert not subject.ask(grow, 10).problem, "the next question finds another process"


def test_silence_is_a_finding() -> None:
    with Subject(patience=0.5) as subject:
        subject.ask(grow, 1)
        assert "no answer" in subject.ask(time.sleep, 60).problem


def test_growth_is_a_finding(subject: Subject) -> None:
    assert "grew by" in subject.ask(grow, 2 * receivers.GROWTH).problem


def test_a_thread_that_ends_by_an_exception_is_a_finding(subject: Subject) -> None:
    assert "ZeroDivisionError" in subject.ask(lose_a_thread).problem


def test_memory_that_did_not_come_is_a_finding(subject: Subject) -> None:
    """A storage that is larger than any of the message: heap contents would be readable. That they are zero by chance does
    not count."""
    for function in ("zeros", "ones"):
        data = b"\x80\x05ctorch\n%s\nK\x40\x85R." % function.encode()
        assert not subject.receive(Sample("body", data)).problem
        assert "none of that size" in subject.receive(Sample("body", data, (), frozenset({8}))).problem


def test_zeros_from_the_system_are_no_finding_and_other_bytes_there_are(subject: Subject) -> None:
    """A zero tensor takes no bytes of the message, and no memory: see docs/security.md."""
    zeros = b"cremora.wire.tensors.rebuild\nzeros\n(X\x07\x00\x00\x00float32M\x00\x14\x85K\x00tR"
    verdict = subject.receive(Sample("body", b"\x80\x05" + zeros + b".", (), frozenset({20})))
    assert (verdict.problem, verdict.outcome) == ("", "int")
    filled = b"\x80\x05cbuiltins\ngetattr\n(" + zeros + b"X\x05\x00\x00\x00fill_tRK\x01\x85R."
    assert "none of that size" in subject.receive(Sample("body", filled, (), frozenset({20}))).problem


@pytest.mark.parametrize("memo", [b"r" + struct.pack("<I", 1 << 25), b"p%d\n" % (1 << 25)], ids=["LONG_BINPUT", "PUT"])
def test_memory_for_a_memo_is_beyond_us_where_python_unpickles_and_nowhere_else(subject: Subject, memo: bytes) -> None:
    data = b"\x80\x05]" + memo + b"."
    assert subject.receive(Sample("body", data)).outcome == "beyond us"
    inside = pickle.dumps(("worker1", "ValueError()", "", (), (data, ())))
    assert subject.receive(Sample("failure", inside)).outcome == "beyond us", "in a pickle inside of a pickle, too"
    preamble = struct.pack("<IB", len(data), 0) + data
    assert subject.receive(Sample("preamble", preamble)).outcome == "SerializationError"
    assert subject.receive(Sample("manifest", data + struct.pack("<I", len(data)))).outcome == "SerializationError"


def test_an_error_that_says_nothing_is_a_finding(subject: Subject) -> None:
    assert "KeyError" in subject.ask(raise_from, "stream").problem
    assert not subject.ask(raise_from, "body").problem, "who unpickles tells every error"


def raise_from(receiver: str) -> str:
    from tests.damage import subject as inside

    def planted(sample: Sample) -> object:
        raise KeyError("planted")

    kept = receivers.RECEIVERS[receiver]
    receivers.RECEIVERS[receiver] = planted
    try:
        return inside.receive(Sample(receiver, b""))
    finally:
        receivers.RECEIVERS[receiver] = kept


def test_a_finding_can_be_done_again(tmp_path: Path, subject: Subject) -> None:
    trial = Trial("unix", "calls", "out", 0x102, 1, "header", (Mutation("flip", 3),))
    for finding in (
        hunt.Finding("a problem", Sample("ids", b"x" * 15, (b"y",), frozenset({1})), None, (Mutation("cut", 1, 2),)),
        hunt.Finding("another", None, trial, trial.mutations),
    ):
        assert hunt.Finding.read(finding.write(tmp_path)) == finding
    assert hunt.Finding.read(next(tmp_path.glob("ids*"))).again(subject).outcome == "ProtocolError"


@pytest.mark.parametrize("kind", KINDS)
def test_mutations_take_any_bytes_and_depend_on_nothing_else(kind: str) -> None:
    chance = random.Random(1)
    for size in (0, 1, 2, 7, 60):
        data = chance.randbytes(size)
        for _ in range(20):
            (mutation,) = draw(chance, (kind,), most=1)
            assert mutation(data, [data]) == mutation(data, [data])


def test_every_bit_of_a_header_is_flipped_once() -> None:
    unit = Unit(bytes(HEADER_SIZE), 0x102)
    flips = [each for each in hunt.header_trials([("out", unit)], "unix", "calls") if each.mutations[0].kind == "flip"]
    assert len({apply(each.mutations, unit.data) for each in flips}) == len(flips) == 8 * HEADER_SIZE
    assert sum(width for _, width in fields(unit)) == HEADER_SIZE


def test_a_wrong_value_and_a_late_one_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not notice damage: here the proxy itself answers in its place."""
    trial = Trial("inproc", "functions", "out", 0x102, 0, "header", (Mutation("flip", 3),))
    monkeypatch.setitem(trials.sessions.PROGRAMS, "functions", lambda: trials.sessions.functions() and False)
    try:
        with pytest.raises(AssertionError, match="wrong value"):
            trials.try_out(trial)
        monkeypatch.setattr(trials, "LIMIT", 0.0)
        with pytest.raises(AssertionError, match="it took"):
            trials.try_out(trial)
    finally:
        trials.close()
