"""What functions raise is printed where they run: once, and a count of those that raise the same."""

from __future__ import annotations

import pytest

from remora import rpc
from remora.agent.serving import error_log
from remora.agent.serving.error_log import Raised
from remora.testing.world import World
from tests.eventually import eventually


def fail(number: int) -> None:
    raise ValueError(number)


def fail_elsewhere() -> None:
    raise ValueError


def raised_by(function: object, *args: object) -> BaseException:
    try:
        function(*args)  # type: ignore[operator]
    except ValueError as error:
        return error
    raise AssertionError


class Now:
    """Stands in the place of the module `time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(error_log, "time", self)

    def monotonic(self) -> float:
        return self.now


def test_many_failures_of_a_function_are_one_traceback_and_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    seen = ""
    with World(2) as world:
        futures = [world.run(0, rpc.rpc_async, "worker1", fail, args=(number,)) for number in range(200)]
        for number, future in enumerate(futures):
            with pytest.raises(ValueError, match=f"^{number}$"):
                future.wait()

        def reported() -> int:
            nonlocal seen
            seen += capsys.readouterr().err
            counts = [line.split()[2] for line in seen.splitlines() if line.startswith("ValueError: raised ")]
            return sum(map(int, counts))

        eventually(lambda: reported() == 199)
    assert seen.count("Traceback") == 1
    assert "test_error_log.py:" in seen.splitlines()[-1]
    assert seen.endswith(", in fail)\n")


def test_what_is_not_reported_yet_is_when_the_worker_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with World(1) as world:
        for number in range(2):
            with pytest.raises(ValueError, match=str(number)):
                world.run(0, rpc.rpc_sync, "worker0", fail, args=(number,))
    assert capsys.readouterr().err.count("ValueError: raised 1 more time (") == 1


def test_different_errors_are_all_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Raised()
    shown.show(raised_by(fail, 1))
    shown.show(raised_by(fail_elsewhere))
    assert capsys.readouterr().err.count("Traceback") == 2


def test_counts_come_less_and_less_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    time, shown = Now(monkeypatch), Raised()
    for _ in range(100):
        shown.show(raised_by(fail, 1))
        time.now += 0.1
        if shown.due:
            shown.report()
    text = capsys.readouterr().err
    assert text.count("Traceback") == 1
    assert text.count("ValueError: raised") == 4  # after 0.5, 1.5, 3.5 and 7.5 s


def test_after_a_while_it_is_printed_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    time, shown = Now(monkeypatch), Raised()
    for _ in range(2):
        shown.show(raised_by(fail, 1))
        assert capsys.readouterr().err.count("Traceback") == 1
        assert not shown.due
        time.now += 0.6
        assert shown.due
        shown.report()
        assert not shown.due
        assert capsys.readouterr().err == ""


def test_errors_beyond_a_number_are_printed_one_by_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_log, "KEPT", 0)
    shown = Raised()
    for _ in range(3):
        shown.show(raised_by(fail, 1))
    assert capsys.readouterr().err.count("Traceback") == 3


def test_what_cannot_be_printed_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    shown = Raised()
    for _ in range(2):
        shown.show(raised_by(fail, 1))
    shown.report(at_once=True)
    assert not shown.due
