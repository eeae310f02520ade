"""Who reads a link, with one rule broken at a time, and a scenario in which that shows. Not tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from remora.protocol.reader import (
    NOTHING,
    READ,
    TO_ARM,
    TO_ARM_AND_WAKE,
    TO_GIVE_UP,
    WRITE,
    Effects,
    Reader,
    Registration,
)
from tests.model import reader_model
from tests.model.reader_model import Scenario, Thread, World


@dataclass(frozen=True)
class Mutant:
    """One change, and the promise that the explorer finds broken."""

    name: str
    breaks: str
    where: object
    attribute: str
    instead: Any
    shows_in: Scenario


one = Scenario("a call", sync=(1,))
two = Scenario("two calls", sync=(1, 2))
beside = Scenario("a call while a thread is parked", sync=(1,), asleep=2)
beside_fine = replace(beside, name="a call while a thread is parked, in fine steps", fine=True)
once = replace(beside, name="the poller tells once", lasts=False)
partly = replace(beside, name="a read leaves something", partial=True)
callback = Scenario("a call and a callback", sync=(1,), notified=(2,))
future = Scenario("a future", waits=((1,),))
future_fine = replace(future, name="a future, in fine steps", fine=True)
beside_future = Scenario("a call while a thread with a future is parked", sync=(1,), blocked=2, owned=True, patient=True)
came = Scenario("a future, and a waiter came a moment ago", waits=((1,),), came=True)
owned = Scenario("a future on a waiter-owned channel", waits=((1,),), owned=True)
left_alone = Scenario("a future that no thread waits for", sync=(1,), futures=(2,))
left_to_waiters = Scenario("a future that is left to waiters", waits=((1,),), futures=(2,), owned=True)
left_to_timer = Scenario("a future that no thread waits for, and a waiter came a moment ago", futures=(1,), came=True)
trusted = Scenario("a future beside a parked thread", waits=((1,),), blocked=2, owned=True, patient=True)
beside_sync = Scenario("a future beside a call that is parked", waits=((1,),), asleep=2, owned=True, patient=True)
several = Scenario("a thread waits for two futures", waits=((1, 2),), owned=True, patient=True)
heard = Scenario("a future, and another with a callback", waits=((1,),), callbacks=(2,), owned=True, patient=True)
two_futures = Scenario("two threads wait for futures", waits=((1,), (2,)), owned=True, patient=True)
both = Scenario("a future and a call", waits=((1,),), sync=(2,), owned=True, patient=True)
low = Scenario("a call of low priority ends", sync=(1,), asleep=2, low=(3,), expires=(3,))
cancelled = Scenario("a call is cancelled", sync=(1,), expires=(1,))
requests = Scenario("requests, and two pool threads", requests=2, pool=2)
requests_fine = replace(requests, name="requests, in fine steps", fine=True)
requests_once = Scenario("requests, and the poller tells once", requests=2, lasts=False)
requests_partly = Scenario("a read leaves a request", requests=2, partial=True)
paused = Scenario("flow control", requests=2, pauses=True)
outbox = Scenario("the kernel does not take all", sync=(1,), outbox=True)
long = Scenario("a thread waits for long", sync=(1,), asleep=2, ticks=True)
held = Scenario("a signal handler takes long", sync=(1,), asleep=2, main=1, holds=1, ticks=True)
nested = Scenario("a signal handler calls", sync=(1,), asleep=2, main=1, nested=3)
struck = Scenario("an exception strikes a reader", sync=(1,), asleep=2, main=1, strikes=1, ticks=True)
breaks = Scenario("the link breaks", sync=(1,), asleep=2, breaks=1)
closes = Scenario("the end", sync=(1,), closes=True)
closes_parked = Scenario("the end while a thread is parked", blocked=2, closes=True)
closes_owned = Scenario("the end of a waiter-owned channel", futures=(1,), closes=True, owned=True)

SMALL = [
    one, two, beside, beside_fine, once, partly, callback, future, future_fine, beside_future, came, owned,
    left_alone, left_to_timer, several, cancelled, requests, requests_fine, requests_once, requests_partly, paused,
    outbox, long, held, nested, struck, breaks, closes, closes_parked, closes_owned, trusted, beside_sync,
]  # fmt: skip
LARGE = [
    low,
    both,
    heard,
    two_futures,
    left_to_waiters,
    replace(heard, name="a future and a callback, and the waiter is forgotten", patient=False),
    replace(trusted, name="a future beside a parked thread, and the waiter is forgotten", patient=False),
    replace(held, name="a signal handler takes long, beside a callback", asleep=0, notified=(2,)),
    Scenario("an exception strikes a thread with a future", waits=((1,),), notified=(2,), main=1, strikes=1, ticks=True),
    replace(beside_future, name="the same, and the waiter is forgotten", patient=False),
    replace(closes, name="the end while threads wait", blocked=2),
    Scenario("the end of a waiter-owned channel under a call", sync=(1,), closes=True, owned=True),
    Scenario("the end while a future is waited for", waits=((1,),), closes=True, owned=True),
    Scenario("the link breaks twice", sync=(1,), notified=(2,), breaks=2),
    Scenario("the link breaks under a future", waits=((1,),), asleep=2, breaks=1),
    replace(requests, name="requests, and the poller tells once", lasts=False, pool=2, requests=3),
    replace(two, name="two calls, and two pool threads", pool=2),
    replace(breaks, name="the link breaks, in fine steps", fine=True),
]


# The poller.


def watches_beside_a_reader(self: Reader, holder: object, is_sorting: bool, has_outbox: bool, paused: bool) -> int:
    return (WRITE if has_outbox else 0) | (0 if self.unwatched or paused else READ)


def never_replaces(self: Reader, holder: object, is_sorting: bool, has_outbox: bool, paused: bool) -> int:
    return (WRITE if has_outbox else 0) | (0 if self.unwatched or paused or holder is not None else READ)


def replaces_one_that_sorts(self: Reader, holder: object, is_sorting: bool, has_outbox: bool, paused: bool) -> int:
    is_read = holder is not None and holder is not self.stalled
    return (WRITE if has_outbox else 0) | (0 if self.unwatched or paused or is_read else READ)


def forgets_what_waits_to_be_written(
    self: Reader, holder: object, is_sorting: bool, has_outbox: bool, paused: bool, wanted: Any = Reader.wanted_events
) -> int:
    return int(wanted(self, holder, is_sorting, False, paused))


def relies_on_the_last_word(self: Registration, events: int, lasts: bool) -> None:
    """Of a poller that tells once, or of a link that ended."""


def says_nothing_while_it_decides(self: Registration) -> int:
    self.unsure = False
    return self.armed


def asks_for_changes_only(self: Registration, events: int, armed: int, unread: bool) -> bool:
    return events != armed or unread


def forgets_what_is_unread(self: Registration, events: int, armed: int, unread: bool) -> bool:
    if events == armed and not self.again:
        return False
    self.again = False
    return True


def forgets_that_it_was_told(world: World, me: int, thread: Thread, _: Any) -> None:
    reader_model.go(world, me, "try_again")


def takes_one_turn_for_all_links(world: World, number: int) -> int:
    return max(world.arming)


def looks_once_at_what_is_unsure(world: World, me: int, thread: Thread, _: Any) -> None:
    assert thread.arms is not None
    world.registrations[thread.arms].armed = thread.events
    reader_model.decides(world, thread.arms, 0)
    reader_model.go(world, me, "armed", events=0, armed=0)


# Waiters.


def parks_in_silence(self: Reader) -> Effects:
    return NOTHING


def leaves_in_silence(self: Reader) -> Effects:
    return NOTHING


def leaves_others_unwatched(self: Reader) -> Effects:
    return NOTHING if self.unwatched else TO_ARM


def counts_calls_of_low_priority_late(world: World, me: int, thread: Thread, _: Any) -> None:
    """As it was: off the list first."""
    taken = thread.calls[0] in world.pending
    world.pending -= {thread.calls[0]}
    reader_model.go(world, me, "expired" if taken else "over")


def forgets_low_priority_late(world: World, me: int, thread: Thread, _: Any) -> None:
    world.machine.notify_ids.discard(thread.calls[0])
    world.machine.low_priority.discard(thread.calls[0])
    reader_model.go(world, me, "fail")


def leaves_the_parked(self: Reader, has_outbox: bool) -> Effects:
    self.unwatched = self.waiter_owned and not self.notify_ids
    return NOTHING if self.unwatched and not has_outbox else TO_ARM


def leaves_the_notified(self: Reader, has_outbox: bool) -> Effects:
    self.unwatched = self.waiter_owned and not self.parked
    return NOTHING if self.unwatched and not has_outbox else TO_ARM


def counts_on_waiters_anywhere(self: Reader, has_outbox: bool) -> Effects:
    self.unwatched = not self.notify_ids and not self.parked
    return NOTHING if self.unwatched and not has_outbox else TO_ARM


def looks_before_it_parks(world: World, me: int, thread: Thread, _: Any) -> None:
    reader_model.perform(world, me, world.machine.watch(), "parks_after")


def parks_after(world: World, me: int, thread: Thread, _: Any) -> None:
    world.machine.notify_ids.add(thread.calls[0])
    reader_model.go(world, me, "signal", port=None)


def reads_in_silence(self: Reader) -> Effects:
    return NOTHING


def sleeps_on(world: World, call: int) -> None:
    if reader_model.is_async(world, call):
        world.answered += (call,)


# The pool.


def leaves_what_was_told(
    self: Reader, registration: Registration, unread: bool, has_outbox: bool, paused: bool
) -> Effects:
    return NOTHING if registration.armed == READ else TO_ARM


def reads_no_more(
    self: Reader, registration: Registration, unread: bool, has_outbox: bool, paused: bool
) -> Effects:
    return NOTHING


def trusts_a_decision_under_way(
    self: Reader, registration: Registration, unread: bool, has_outbox: bool, paused: bool
) -> Effects:
    self.unwatched = False
    return TO_ARM if registration.again or unread or has_outbox or paused else NOTHING


def never_reads_instead(self: Reader, holder: object) -> bool:
    return False


def wakes_again_and_again(self: Reader, holder: object, has_met: bool) -> Effects:
    """As it was."""
    return TO_ARM_AND_WAKE


def never_wakes(self: Reader, holder: object, has_met: bool) -> Effects:
    return NOTHING


def sorts_at_any_time(world: World, me: int, thread: Thread, _: Any) -> None:
    world.sorting = me
    reader_model.go(world, me, "read")


def reads_before_its_turn(world: World, me: int, thread: Thread, _: Any) -> None:
    """The bytes are read first, and wait for their turn in the hands of the thread."""
    assert thread.port is not None
    link = world.links[thread.port]
    if not link.socket or reader_model.END in link.socket:
        reader_model.back(world, me)
        return
    world.links[thread.port] = link._replace(socket=())
    reader_model.go(world, me, "brings", share=link.socket)


def brings(world: World, me: int, thread: Thread, _: Any) -> None:
    if not world.sorting:
        world.sorting = me
        world.inbox += thread.share
        reader_model.go(world, me, "sort", share=())


# Replies.


def defers_for_good(world: World, me: int, thread: Thread, _: Any) -> None:
    reader_model.go(world, me, "dispose", n=thread.n + 1)


def keeps_what_is_deferred(self: Reader, closed: bool) -> bool:
    return False


# Time.


def sees_no_stall(self: Reader, holder: object) -> Effects:
    return NOTHING


def trusts_the_timer(self: Reader) -> Effects:
    self.waiter_owned = True
    return NOTHING


def gives_up_in_silence(self: Reader) -> Effects:
    self.waiter_owned = False
    return TO_GIVE_UP[:1]


def stays_owned(self: Reader) -> Effects:
    return NOTHING


# The end.


def closes_after_its_calls(world: World, me: int, thread: Thread, _: Any) -> None:
    """As it was: a call that is put on the list in between stays there."""
    if world.pending:
        call = min(world.pending)
        world.pending -= {call}
        reader_model.forget(world, call)
        reader_model.settle_failed(world, call)
    else:
        reader_model.go(world, me, "closes_late")


def closes_late(world: World, me: int, thread: Thread, _: Any) -> None:
    world.closed = True
    reader_model.go(world, me, "retire")


def stays_registered(world: World, me: int, thread: Thread, _: Any) -> None:
    reader_model.go(world, me, "close_sorting")


def stays_there(world: World, me: int, thread: Thread, _: Any) -> None:
    reader_model.go(world, me, "over")


def in_steps(name: str, breaks: str, shows_in: Scenario, **changed: Callable[..., None]) -> Mutant:
    return Mutant(name, breaks, reader_model, "STEPS", {**reader_model.STEPS, **changed}, shows_in)


MUTANTS = [
    Mutant("the poller looks while a thread reads", "R4", Reader, "wanted_events", watches_beside_a_reader, beside),
    Mutant("the poller never looks while a thread has the role", "R1", Reader, "wanted_events", never_replaces, held),
    Mutant("a reader that stopped in the midst of sorting is replaced", "R4", Reader, "wanted_events",
           replaces_one_that_sorts, held),
    Mutant("the poller does not tell of room", "R1", Reader, "wanted_events", forgets_what_waits_to_be_written, outbox),
    Mutant("what a poller said last is not asked for again", "R1", Registration, "told", relies_on_the_last_word,
           requests_once),
    Mutant("a decision under way is not said", "R1", Registration, "decide", says_nothing_while_it_decides, requests_fine),
    Mutant("a poller is asked for changes only", "R1", Registration, "must_ask", asks_for_changes_only, requests_once),
    Mutant("what is unread is not asked for", "R1", Registration, "must_ask", forgets_what_is_unread, requests_partly),
    in_steps("a pool thread that was told leaves no note", "R1", requests_fine, was_told=forgets_that_it_was_told),
    Mutant("one turn to decide for all links", "R1", reader_model, "decider", takes_one_turn_for_all_links, breaks),
    in_steps("what is unsure is decided once", "R1", beside, decided=looks_once_at_what_is_unsure),
    Mutant("a thread parks in silence", "R1", Reader, "watch", parks_in_silence, both),
    in_steps("a thread looks, and then parks", "R1", both, park=looks_before_it_parks, parks_after=parks_after),
    Mutant("a reader leaves in silence", "R1", Reader, "left", leaves_in_silence, beside),
    Mutant("a reader leaves others unwatched", "R1", Reader, "left", leaves_others_unwatched, beside),
    in_steps("a call is of low priority for longer than it is on the list", "R1", low,
             expire=counts_calls_of_low_priority_late, expired=forgets_low_priority_late),
    Mutant("a waiter leaves the parked", "R1", Reader, "left_async", leaves_the_parked, trusted),
    Mutant("a waiter leaves the notified", "R1", Reader, "left_async", leaves_the_notified, beside_sync),
    Mutant("waiters are counted on anywhere", "R1", Reader, "left_async", counts_on_waiters_anywhere,
           Scenario("two futures, and a thread waits for one", waits=((1,),), futures=(2,))),
    Mutant("a handler reads in silence", "R3", Reader, "left_to_frame_below", reads_in_silence, nested),
    Mutant("a thread whose reply was read sleeps on", "R3", reader_model, "tell", sleeps_on, beside),
    Mutant("a pool thread leaves what it was told meanwhile", "R1", Reader, "was_read", leaves_what_was_told, requests_once),
    Mutant("a pool thread reads once", "R1", Reader, "was_read", reads_no_more, once),
    Mutant("a pool thread trusts a decision under way", "R1", Reader, "was_read", trusts_a_decision_under_way,
           requests_fine),
    Mutant("no thread reads in the stead of another", "R4", Reader, "may_replace", never_reads_instead, held),
    Mutant("a reader is woken again and again", "R4", Reader, "replaced", wakes_again_and_again, held),
    Mutant("a reader that is replaced is not woken", "R3", Reader, "replaced", never_wakes, long),
    in_steps("two threads sort", "R2", long, receive=sorts_at_any_time),
    in_steps("a thread reads before it is its turn to sort", "R5", long, receive=reads_before_its_turn, brings=brings),
    in_steps("a reply is deferred, and a thread is to be told of it", "R3", heard, deferred=defers_for_good),
    Mutant("what is deferred is kept", "R3", Reader, "must_pass_on", keeps_what_is_deferred, two_futures),
    Mutant("a stall is not seen", "R1", Reader, "tick", sees_no_stall, held),
    Mutant("a call relies on a timer that has run", "R1", Reader, "owned", trusts_the_timer, left_to_timer),
    Mutant("a channel is given up in silence", "R1", Reader, "give_up", gives_up_in_silence, left_to_waiters),
    Mutant("a channel stays waiter-owned", "R1", Reader, "give_up", stays_owned, left_to_waiters),
    in_steps("a channel is closed after its calls failed", "R6", closes,
             close=closes_after_its_calls, closes_late=closes_late),
    in_steps("a channel that is closed stays registered", "R6", closes_parked, retire=stays_registered),
    in_steps("a thread that waits no longer stays parked", "R6", closes_parked, blocked=stays_there),
]  # fmt: skip
