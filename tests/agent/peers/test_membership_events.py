"""Listeners hear everything, in order, one at a time, and never on the thread that has the news."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from remora.agent.peers.membership_events import MembershipEvents
from remora.protocol.member_rules import Died, Joined, Left, MembershipEvent
from remora.vocabulary.ids import WorkerInfo

ANN = WorkerInfo("ann", 1)


class WorkerPool:
    """Runs what it is given when told to."""

    def __init__(self) -> None:
        self.services: list[Callable[[], None]] = []

    def submit_system(self, service: Callable[[], None]) -> None:
        self.services.append(service)

    def work(self) -> None:
        while self.services:
            self.services.pop(0)()


def start() -> tuple[MembershipEvents, WorkerPool]:
    pool: Any = WorkerPool()
    return MembershipEvents(pool), pool


def test_news_waits_for_the_pool_and_keeps_its_order() -> None:
    news, pool = start()
    heard: list[MembershipEvent] = []
    news.publish(Joined(ANN))  # nobody listens yet
    news.subscribe(heard.append)
    events = [Joined(ANN), Left(ANN), Joined(ANN), Died(ANN, "of age")]
    for event in events:
        news.publish(event)
    assert heard == []
    assert len(pool.services) == 1, "one thread is enough"
    pool.work()
    assert heard == events


def test_what_happens_while_a_listener_runs_comes_after() -> None:
    news, pool = start()
    heard: list[MembershipEvent] = []

    def listen(event: MembershipEvent) -> None:
        heard.append(event)
        if isinstance(event, Joined):
            news.publish(Left(ANN))
            assert pool.services == []

    news.subscribe(listen)
    news.publish(Joined(ANN))
    pool.work()
    assert heard == [Joined(ANN), Left(ANN)]


def test_a_listener_that_fails_or_leaves_disturbs_nobody() -> None:
    news, pool = start()
    heard: list[str] = []

    def fail(event: MembershipEvent) -> None:
        heard.append("fails")
        raise ValueError

    def leave(event: MembershipEvent) -> None:
        heard.append("leaves")
        leaving.cancel()
        leaving.cancel()

    news.subscribe(fail)
    leaving = news.subscribe(leave)
    with news.subscribe(lambda event: heard.append("stays")):
        news.publish(Joined(ANN))
        news.publish(Left(ANN))
        pool.work()
        assert heard == ["fails", "leaves", "stays", "fails", "stays"]
    news.publish(Joined(ANN))
    pool.work()
    assert heard[-1] == "fails"


def test_many_threads_may_publish() -> None:
    news, pool = start()
    heard: list[MembershipEvent] = []
    news.subscribe(heard.append)
    threads = [threading.Thread(target=lambda: [news.publish(Joined(ANN)) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        pool.work()
    pool.work()
    assert len(heard) == 2000
