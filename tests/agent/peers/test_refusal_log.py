"""The log of refused connections has a bounded number of lines, and tells all of them."""

from __future__ import annotations

import logging
import re

import pytest

from remora.agent.peers.refusal_log import IN_FULL, RefusalLog
from remora.protocol.conversation import MAX_BODY, Kind, Why, header, is_unfinished
from remora.protocol.handshake import Identity, Initiator
from remora.recorder import Recorder


def test_many_refusals_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "remora")
    refusals = RefusalLog("worker0", Recorder(10, 0))
    for half_second in range(40):
        for number in range(1000):
            refusals.refused(f"kind {number % 2}", f"stranger {number}")
        refusals.tick(1000.0 + half_second / 2)
    refusals.tick(1100.0)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) < 20
    assert lines[0] == "worker0 refused a connection: stranger 0"
    told = sum(int(found[1]) for line in lines if (found := re.search(r"refused (\d+) more", line)))
    assert told + sum("refused a connection:" in line for line in lines) == 40_000


def test_a_kind_that_comes_later_has_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog("worker0", Recorder(10, 0))
    for _ in range(100):
        refusals.refused("garbage", "garbage")
    refusals.refused("secret", "another secret")
    assert "another secret" in caplog.text
    assert caplog.text.count("garbage") == IN_FULL


def test_what_is_unfinished() -> None:
    hello = Initiator(Identity("a", 0, "i", "g"), "s", 0, b"0123456789abcdef").start()
    assert all(is_unfinished(hello[:size]) for size in range(len(hello)))
    assert not is_unfinished(hello)
    assert not is_unfinished(hello + b"x")
    oversize = header(Kind.HELLO, True, MAX_BODY + 1)
    out_of_turn = header(Kind.PROOF, True, 2)
    for strange in (b"G", b"RMRX", b"GET / HTTP/1.1", b"RMRA\x09", oversize, out_of_turn):
        assert not is_unfinished(strange)


def test_a_member_that_dials_a_worker_which_leaves_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog("worker0", Recorder(10, 0))
    with caplog.at_level(logging.INFO, "remora"):
        log.refused(Why.LEAVING.value, "this worker is shutting down")
        log.refused(Why.GROUP.value, "it is of another group")
    assert [each.levelno for each in caplog.records] == [logging.INFO, logging.WARNING]
