"""The thread that answers observers: it answers the proven, and none of the others costs it anything lasting."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from remora.errors import AuthenticationError, ObserverError
from remora.introspection import observer_server as server_module
from remora.introspection import visitors
from remora.introspection.observer_server import MOST, STRANGERS, ObserverServer
from remora.introspection.visitors import Later
from remora.observer.client import ObserverLink, Unanswered
from remora.protocol.handshake import Identity
from remora.protocol.observing import MAX_QUESTION, Observer, frame, observer_key
from remora.transport import sockets
from remora.transport.addresses import Address
from tests.eventually import eventually

KEY = observer_key(b"a secret that is long enough")
ME = Identity("worker1", 1, "incarnation", "group")


def answer(question: str, arguments: dict[str, Any]) -> Any:
    if question == "echo":
        return arguments
    if question == "large":
        return "x" * arguments["size"]
    if question == "later":
        return Later(arguments["seconds"], lambda: "now")
    if question == "late failure":
        return Later(0.0, lambda: 1 / 0)
    if question == "no json":
        return object()
    raise ValueError(f"no question {question!r}")


class Served:
    """A server, and where it is."""

    def __init__(
        self, transports: tuple[str, ...] = ("unix", "tcp"), of_this_user: bool = True, start: bool = True
    ) -> None:
        self.due: list[float] = []  # when what questions left behind is to be removed; the last counts
        self.removed: list[float] = []
        self.server = ObserverServer("worker1", KEY, answer, of_this_user=of_this_user, remove_expired=self._remove)
        self.addresses = self.server.listen(transports, "127.0.0.1", None, f"test{os.getpid()}{time.monotonic_ns()}")
        if start:
            self.server.start(ME)

    def _remove(self) -> float:
        while self.due and self.due[-1] <= time.monotonic():
            self.removed.append(self.due.pop())
        return self.due[-1] if self.due else float("inf")

    def link(self, n: int = 0, key: bytes = KEY, timeout: float = 10.0) -> ObserverLink:
        return ObserverLink(self.addresses[n], key, group="group", timeout=timeout)

    def stranger(self) -> socket.socket:
        return sockets.connect(Address.parse(self.addresses[0]), 10.0)

    @property
    def visitors(self) -> int:
        return len(self.server._visitors)


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.server.stop()


def closed(sock: socket.socket) -> bool:
    """Wait for the other end to close."""
    sock.settimeout(20.0)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("n", [0, 1])
def test_questions_are_answered_in_order_on_each_transport(served: Served, n: int) -> None:
    link = served.link(n)
    assert link.identity == ME
    for number in range(20):
        assert link.ask("echo", number=number) == {"number": number}
    link.close()
    eventually(lambda: served.visitors == 0)


def test_what_a_question_leaves_behind_is_removed_though_no_observer_comes_any_more(served: Served) -> None:
    link = served.link()
    served.due.append(time.monotonic() + 0.3)
    link.ask("echo")
    link.close()
    eventually(lambda: served.removed)
    assert served.due == []


def test_large_answers_come_whole(served: Served) -> None:
    link = served.link()
    assert link.ask("large", size=5_000_000, timeout=30.0) == "x" * 5_000_000
    assert link.ask("echo") == {}
    link.close()


def test_a_question_that_fails_is_an_error_and_the_next_is_answered(served: Served) -> None:
    link = served.link()
    for question, said in (("what", "no question 'what'"), ("no json", "cannot be told"), ("late failure", "division")):
        with pytest.raises(ObserverError, match=said):
            link.ask(question)
    assert link.ask("echo") == {}
    link.close()


def test_what_takes_time_holds_no_other_observer_up(served: Served) -> None:
    one, other = served.link(), served.link()
    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.append(one.ask("later", seconds=0.5, timeout=20.0)))
    began = time.monotonic()
    thread.start()
    eventually(lambda: any(each.waits for each in served.server._visitors.values()))
    assert other.ask("echo") == {}
    assert not told
    thread.join()
    assert told == ["now"]
    assert time.monotonic() - began >= 0.5
    one.close()
    other.close()


def test_an_observer_that_leaves_before_its_late_answer(served: Served) -> None:
    link = served.link()
    link._send(frame({"question": "later", "arguments": {"seconds": 0.1}}))
    eventually(lambda: any(each.waits for each in served.server._visitors.values()))
    link.close()
    eventually(lambda: served.visitors == 0)


def test_the_wrong_secret_is_refused_at_both_ends(served: Served) -> None:
    with pytest.raises(AuthenticationError, match="do not have the same secret"):
        served.link(key=observer_key(b"another secret, also long"))
    eventually(lambda: served.visitors == 0)


def test_another_group_is_refused(served: Served) -> None:
    with pytest.raises(ObserverError, match="another group"):
        ObserverLink(served.addresses[0], KEY, group="elsewhere", timeout=10.0)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 200, b"RMRA" + b"\xff" * 100])
def test_garbage_is_refused_at_once(served: Served, said: bytes) -> None:
    with served.stranger() as stranger:
        stranger.sendall(said)
        assert closed(stranger)
    eventually(lambda: served.visitors == 0)


@pytest.mark.parametrize(
    "said",
    [
        struct.pack(">I", MAX_QUESTION + 1),
        frame([1, 2, 3]),
        frame({"question": 5}),
        struct.pack(">I", 3) + b"abc",
    ],
)
def test_a_proven_observer_that_makes_no_sense_is_sent_away(served: Served, said: bytes) -> None:
    link = served.link()
    link._send(said)
    with pytest.raises(ObserverError, match="closed the connection"):
        link._receive()
    link.close()
    eventually(lambda: served.visitors == 0)


@pytest.mark.parametrize("nonsense", [struct.pack(">I", MAX_QUESTION + 1), struct.pack(">I", 3) + b"abc"])
def test_nonsense_behind_a_question_that_takes_time_costs_no_other_observer_anything(
    served: Served, nonsense: bytes
) -> None:
    """It is read when the late answer has been sent, by the clock and not by the socket."""
    other, link = served.link(), served.link()
    link._send(frame({"question": "later", "arguments": {"seconds": 0.05}}) + nonsense)
    while (told := link._reader.next()) is None:
        link._reader.feed(link._receive())
    assert told == ({"answer": "now"},)
    with pytest.raises(ObserverError, match="closed the connection"):
        link._receive()
    assert other.ask("echo", timeout=20.0) == {}
    other.close()
    link.close()


def test_many_questions_at_once_are_answered_in_turn_with_those_of_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = 1500
    eager, other = served.link(), served.link()
    eager._send(b"".join(frame({"question": "echo", "arguments": {"number": each}}) for each in range(questions)))
    assert other.ask("echo", timeout=20.0) == {}
    for number in range(questions):
        while (told := eager._reader.next()) is None:
            eager._reader.feed(eager._receive())
        assert told == ({"answer": {"number": number}},)
    eager.close()
    other.close()


def test_questions_without_arguments_that_make_sense(served: Served) -> None:
    link = served.link()
    link._send(frame({"question": "echo", "arguments": [1]}))
    while (told := link._reader.next()) is None:
        link._reader.feed(link._receive())
    assert told == ({"answer": {}},)
    link.close()


def test_silent_strangers_have_a_bounded_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "PROOF_TIME", 0.1)
    with served.stranger() as stranger:
        assert closed(stranger)


def test_a_stranger_who_dawdles_has_no_more_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "PROOF_TIME", 0.3)
    hello = Observer(KEY).start()
    with served.stranger() as stranger:
        began = time.monotonic()
        try:
            for byte in hello:
                stranger.sendall(bytes([byte]))
                time.sleep(0.02)
        except OSError:
            pass
        assert closed(stranger)
    assert time.monotonic() - began < 10.0
    eventually(lambda: served.visitors == 0)


def test_too_many_strangers_make_room_and_a_proven_observer_stays(served: Served) -> None:
    link = served.link()
    strangers = [served.stranger() for _ in range(STRANGERS + 5)]
    assert link.ask("echo", timeout=20.0) == {}
    eventually(lambda: served.visitors == STRANGERS - STRANGERS // 4 + 1)  # (all are of one process)
    newcomer = served.link(timeout=20.0)
    assert newcomer.ask("echo", timeout=20.0) == {}
    for stranger in strangers:
        stranger.close()
    link.close()
    newcomer.close()
    eventually(lambda: served.visitors == 0)
    assert not len(served.server._strangers)


def say(stranger: socket.socket, data: bytes) -> bytes:
    stranger.settimeout(20.0)
    stranger.sendall(data)
    return stranger.recv(4096)


def test_one_that_has_greeted_keeps_its_place_and_one_that_repeats_a_greeting_does_not(served: Served) -> None:
    machine = Observer(KEY)
    greeting = machine.start()
    slow = served.stranger()
    proof = machine.receive(say(slow, greeting))
    replays = [served.stranger() for _ in range(3)]
    for each in replays:
        assert say(each, greeting)
    others = [served.stranger() for _ in range(STRANGERS + 5)]
    assert all(closed(each) for each in replays)
    machine.receive(say(slow, proof))
    assert machine.result == ME
    for each in (slow, *replays, *others):
        each.close()
    eventually(lambda: served.visitors == 0)


class Lacking:
    """A listening socket in a process that has no descriptor left."""

    def __init__(self, sock: socket.socket, tries: list[float]) -> None:
        self._sock = sock
        self._tries = tries

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> Any:
        self._tries.append(time.monotonic())
        raise OSError(errno.EMFILE, "too many open files")

    def close(self) -> None:
        self._sock.close()


def test_without_descriptors_callers_wait_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "remora")
    tries: list[float] = []
    served = Served(("unix",), start=False)
    (door,) = served.server._listening
    served.server._listening[:] = [Lacking(door, tries)]  # type: ignore[list-item]
    served.server.start(ME)
    with served.stranger():
        eventually(lambda: len(tries) > 5)
    served.server.stop()
    assert tries[5] - tries[0] > 4 * server_module.WINDOW
    assert len([each for each in caplog.records if "cannot take connections" in each.message]) == 1


def test_a_greeting_gives_a_stranger_no_more_time(served: Served) -> None:
    """It may have been overheard."""
    stranger = served.stranger()
    eventually(lambda: served.visitors == 1)
    (visitor,) = served.server._visitors.values()
    before = visitor.deadline
    assert say(stranger, Observer(KEY).start())
    assert visitor.deadline == before
    stranger.close()
    eventually(lambda: served.visitors == 0)


def test_strangers_have_a_part_of_a_processor_and_newcomers_get_in(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "WINDOW", 0.02)
    monkeypatch.setattr(server_module, "SHARE", 1e-6)  # one look at a socket is too much
    rested: list[bool] = []
    strangers = []
    for _ in range(60):
        strangers.append(served.stranger())
        rested.append(served.server._resting)
    newcomer = served.link(timeout=20.0)
    assert newcomer.ask("echo", timeout=20.0) == {}
    eventually(lambda: served.server._resting or any(rested))
    for each in (*strangers, newcomer):
        each.close()
    eventually(lambda: served.visitors == 0)


def test_of_too_many_observers_the_one_silent_for_longest_goes(served: Served) -> None:
    links = [served.link() for _ in range(MOST)]
    for link in links[1:]:
        link.ask("echo")
    links.append(served.link())
    with pytest.raises(ObserverError):
        links[0].ask("echo")
    for link in links[1:]:
        assert link.ask("echo") == {}
        link.close()
    eventually(lambda: served.visitors == 0)


def test_an_observer_that_takes_no_answer_is_dropped_and_holds_no_other_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors, "TAKE_TIME", 0.2)
    slow, other = served.link(), served.link()
    for _ in range(3):
        slow._send(frame({"question": "large", "arguments": {"size": 20_000_000}}))
    assert other.ask("echo", timeout=20.0) == {}
    eventually(lambda: served.visitors == 1)
    other.close()
    slow.close()


def test_no_more_than_one_answer_is_kept_for_an_observer(served: Served) -> None:
    link = served.link()
    for _ in range(5):
        link._send(frame({"question": "large", "arguments": {"size": 10_000_000}}))
    eventually(lambda: any(each.writes for each in served.server._visitors.values()))
    (visitor,) = served.server._visitors.values()
    assert len(visitor._unsent) <= 10_000_100
    link.close()
    eventually(lambda: served.visitors == 0)


def test_a_worker_that_does_not_answer_is_told_from_one_that_is_not_there() -> None:
    sock, address = sockets.listen_unix(f"deaf{os.getpid()}")
    with sock, pytest.raises(Unanswered, match="did not answer in time"):
        ObserverLink(str(address), KEY, timeout=0.2)
    with pytest.raises(ObserverError, match="nothing listens"):
        ObserverLink(str(address), KEY, timeout=0.2)


def lying_worker(told: bytes) -> tuple[threading.Thread, str]:
    """A worker that proves itself, and answers the first question with these bytes."""
    from remora.protocol.observing import Observed

    sock, address = sockets.listen_unix(f"liar{time.monotonic_ns()}")

    def serve() -> None:
        with sock, sock.accept()[0] as visitor:
            machine = Observed(ME, KEY)
            while not machine.welcomed:
                visitor.sendall(machine.receive(visitor.recv(4096)))
            visitor.recv(4096)
            visitor.sendall(told)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread, str(address)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (frame({"neither": 1}), "another form"),
        (frame([]), "another form"),
        (struct.pack(">I", 0xFFFFFFFF), "cannot be read"),
        (struct.pack(">I", 4) + b"\x00\x01\x02\x03", "cannot be read"),
        (b"\x00", "closed the connection"),
        (frame({"error": "\x1b[31mred\nline"}), r"\?\[31mred\?line"),
    ],
)
def test_a_worker_that_lies_is_an_error_of_the_observer(told: bytes, said: str) -> None:
    thread, address = lying_worker(told)
    link = ObserverLink(address, KEY, timeout=10.0)
    with pytest.raises(ObserverError, match=said):
        link.ask("echo", timeout=10.0)
    link.close()
    thread.join()


def test_other_users_are_sent_away(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "peer_process", lambda sock: (os.getuid() + 1, 1))
    with pytest.raises(ObserverError, match=r"closed|broke"):
        served.link()


def test_a_server_of_nothing_has_no_thread() -> None:
    served = Served(("inproc",))
    assert served.addresses == []
    assert served.server._thread is None
    served.server.stop()


def test_it_stops_twice_and_with_observers_in_the_midst() -> None:
    served = Served()
    link = served.link()
    stranger = served.stranger()
    threads = [threading.Thread(target=served.server.stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    served.server.stop()
    with pytest.raises(ObserverError):
        link.ask("echo")
    link.close()
    stranger.close()


def test_one_that_never_started_is_closed() -> None:
    server = ObserverServer("worker1", KEY, answer, of_this_user=True)
    assert server.listen(("unix",), "", None, f"never{os.getpid()}")
    server.stop()


def test_in_a_forked_child_nothing_of_it_is_left() -> None:
    served = Served()
    link = served.link()
    assert link.ask("echo") == {}
    child = os.fork()
    if child == 0:
        descriptors = {sock.fileno() for sock in served.server._listening}
        descriptors |= {each.sock.fileno() for each in served.server._visitors.values()}
        served.server.abandon()
        os._exit(any(os.path.exists(f"/proc/self/fd/{each}") for each in descriptors))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert link.ask("echo") == {}
    link.close()
    served.server.stop()
