"""The reference protocol with one promise broken at a time, and a world in which that shows. Not tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from remora.protocol.holder import Held, Holder
from remora.protocol.owner import Owned, Owner
from remora.vocabulary.effects import AskSurvivors, Effect, ForkId, Free, Goodbye, NeverMade, RRefId, TellParent, Worker
from tests.model import reference_explorer
from tests.model.reference_driver import Driver, promise
from tests.model.reference_moves import Move, choices
from tests.model.reference_scenarios import ASKED_FOR, NOT_ASKED_FOR, OWN, A, B, C, D, call, failing, reply, scenario
from tests.model.reference_state import Message, Scenario, Site, World, shared_fork
from tests.model.reference_steps import Step


@dataclass(frozen=True)
class Mutant:
    """One change, named after the promise it takes back."""

    name: str
    breaks: str  # the promise that the explorer finds broken
    where: object
    attribute: str
    instead: Callable[..., Any]
    shows_in: Scenario


chain = scenario("chain", 3, (ASKED_FOR,), call(B, C))
chain_with_loss = scenario("chain, 1 loss", 3, (ASKED_FOR,), call(B, C), losses=1)
own_chain_with_loss = scenario("own chain, 1 loss", 3, (OWN,), call(A, B), call(B, C), losses=1)
own_chain_in_replies = scenario("own chain in replies, 1 loss", 3, (OWN,), call(A, B), reply(B, C), losses=1)
own_chain_of_4 = scenario("own chain of 4, 1 loss", 4, (OWN,), call(A, B), call(B, C), call(C, D), losses=1)
own_chain_2_losses = scenario("own chain, 2 losses", 4, (OWN,), call(A, B), call(B, C), losses=2)
out_in_reply = scenario("out in a reply, 1 loss", 2, (OWN,), reply(A, B), losses=1)
home_in_reply = scenario("home in a reply", 2, (ASKED_FOR,), reply(B, A))
home = scenario("home", 3, (ASKED_FOR,), call(B, C), call(C, A))
home_and_out = scenario("home and out, 1 loss", 3, (ASKED_FOR,), call(B, C), call(C, A), call(A, C), losses=1)
not_asked_for = scenario("not asked for", 3, (NOT_ASKED_FOR,), call(B, C))
not_asked_for_twice = scenario("not asked for, shared twice", 3, (NOT_ASKED_FOR,), call(B, C), call(B, C))
fetched = scenario("fetched", 2, (OWN,), call(A, B), fetches=(B,))
not_sent = scenario("not sent", 2, (OWN,), failing(A, B))
not_handed_on = scenario("not handed on", 3, (ASKED_FOR,), failing(B, C))

# The holder.


def leaves_before_its_children(self: Holder, fork: ForkId, held: Held) -> list[Effect]:
    if held.in_use or not held.confirmed:
        return []
    self.forget(fork)
    return [Goodbye(held.owner, held.rref, fork)]


def leaves_unconfirmed(self: Holder, fork: ForkId, held: Held) -> list[Effect]:
    if held.in_use or held.children:
        return []
    del self.forks[fork]
    return [Goodbye(held.owner, held.rref, fork)]


def leaves_unconfirmed_but_tells_its_parent(self: Holder, fork: ForkId, held: Held) -> list[Effect]:
    told = held.parent is None or held.confirmed or held.in_use or bool(held.children)
    parent: list[Effect] = [] if told or held.parent is None else [TellParent(held.parent, fork)]
    return parent + leaves_unconfirmed(self, fork, held)


def leaves_twice(self: Holder, fork: ForkId, held: Held, leave: Any = Holder._leave) -> list[Effect]:
    goodbye: list[Effect] = leave(self, fork, held)
    return goodbye + goodbye


def waits_for_the_lost(self: Holder, worker: Worker) -> tuple[list[ForkId], list[Effect]]:
    worthless = [fork for fork, held in self.forks.items() if held.owner == worker]
    for fork in worthless:
        self.forget(fork)
    return worthless, []


def shares_with_the_lost(self: Holder, fork: ForkId, child: ForkId, to: Worker) -> None:
    self.forks[fork].children[child] = to
    self.parents[child] = fork


def keeps_what_a_lost_owner_had(self: Holder, worker: Worker) -> tuple[list[ForkId], list[Effect]]:
    self.gone.add(worker)
    waiting = [child for held in self.forks.values() for child, to in held.children.items() if to == worker]
    return [], [effect for child in waiting for effect in self.accepted(child)]


def tells_no_parent(self: Holder, fork: ForkId, confirm: Any = Holder.confirm) -> list[Effect]:
    return [effect for effect in confirm(self, fork) if not isinstance(effect, TellParent)]


def sees_what_is_not_counted(self: Site, fork: ForkId, held: Held) -> bool:
    return held.in_use and fork not in self.spoilt


# The owner.


def frees_what_others_hold(self: Owner, rref: RRefId, owned: Owned) -> list[Effect]:
    del self.values[rref]
    return [Free(rref)]


def frees_twice(self: Owner, rref: RRefId, owned: Owned, settle: Any = Owner._settle) -> list[Effect]:
    free: list[Effect] = settle(self, rref, owned)
    return free + free


def buries_without_asking(self: Owner, worker: Worker, survivors: set[Worker], lost: Any = Owner.lost) -> Any:
    return lost(self, worker, set())


def waits_for_answers_of_the_dead(self: Owner, worker: Worker, survivors: set[Worker]) -> list[Effect]:
    if worker in self.confirmed_losses or worker in self.unconfirmed_losses:
        return []
    self.unconfirmed_losses[worker] = set(survivors) if self._concerns(worker) else set()
    asked: list[Effect] = [AskSurvivors(worker, frozenset(survivors))] if self.unconfirmed_losses[worker] else []
    return asked + self._drop_when_confirmed(worker)


def asks_the_dead(self: Owner, worker: Worker, survivors: set[Worker], lost: Any = Owner.lost) -> list[Effect]:
    effects: list[Effect] = lost(self, worker, survivors)
    if worker in self.unconfirmed_losses:
        self.unconfirmed_losses[worker] = set(survivors)
    return effects


def counts_the_lost(self: Owner, rref: RRefId, fork: ForkId, holder: Worker) -> list[Effect]:
    return []


def ignores_requests_after_the_burial(self: Owner, rref: RRefId, owned: Owned) -> list[Effect]:
    return []


def tells_nobody(self: Owner, rref: RRefId, owned: Owned, give_up: Any = Owner._give_up) -> list[Effect]:
    return [effect for effect in give_up(self, rref, owned) if not isinstance(effect, NeverMade)]


def takes_shared_for_made(self: Owner, rref: RRefId, fork: ForkId, holder: Worker) -> list[Effect]:
    owned = self.values.setdefault(rref, Owned())
    owned.made = True
    owned.forks[fork] = holder
    return self._drop_if_lost(rref, fork, holder)


def forgets_what_is_not_made(self: Owner, rref: RRefId, fork: ForkId) -> list[Effect]:
    owned = self.values.get(rref)
    if owned is None or owned.made:
        return self.delete(rref, fork)
    owned.forks.pop(fork, None)
    return self._give_up(rref, owned)


def remembers_only_what_nobody_asked_for(self: Owner, rref: RRefId, fork: ForkId, real: Any = Owner.never_made) -> Any:
    asked = rref in self.values
    effects = real(self, rref, fork)
    if asked:
        self.unmade.discard(rref)
    return effects


# What drives them.


def keeps_nothing_for_itself(self: Driver, site: Site, got: Message) -> None:
    promise(got.rref in site.table, "S1: {} came home and is not there", got.rref)
    site.handles[got.rref] = site.handles.get(got.rref, 0) + 1
    if got.told:
        self.send("child accept", got.target, got.source, fork=got.fork)


def hears_out_of_order(self: Driver, worker: int, owner: int, lost: int) -> None:
    if lost not in self.site(worker).lost:
        self.learn(worker, lost)
    self.let_loose("heard", worker, owner, about=lost)


def hears_before_it_learns(self: Driver, worker: int, owner: int, lost: int) -> None:
    self.send("heard", worker, owner, about=lost)


def takes_nothing_back(self: Step, worker: int, rref: RRefId, child: ForkId) -> None:
    self.site(worker).unsent -= {(rref, child)}


def goes_home_without_a_child(self: Step, number: int, rref: RRefId, parent: Any, share: Any = Step.share) -> None:
    script = self.scenario.shares[number]
    if parent is None or script.target != self.scenario.values[rref.local_id].owner:
        share(self, number, rref, parent)
    else:
        self.used |= {("share", number)}
        self._post(script, rref, shared_fork(self.scenario, number), told=False)


def drops_while_fetching(world: World) -> Iterator[Move]:
    yield from choices(world)
    for worker in world.alive:
        for fork, held in world.sites[worker].holder.forks.items():
            if held.in_use and (held.rref, fork) in world.sites[worker].fetching:
                yield "drop", worker, fork


HARMLESS = Mutant(
    "H2: goodbye before it is counted, its parent told all the same", "", Holder, "_leave",
    leaves_unconfirmed_but_tells_its_parent, chain_with_loss,
)  # fmt: skip

MUTANTS = [
    Mutant("H1: goodbye twice", "H1", Holder, "_leave", leaves_twice, chain),
    Mutant("H2: goodbye before it is counted", "L1", Holder, "_leave", leaves_unconfirmed, chain),
    Mutant("H3: goodbye before its children are counted", "S1", Holder, "_leave", leaves_before_its_children, chain),
    Mutant("H4: children on a lost worker are waited for", "L1", Holder, "lost", waits_for_the_lost, own_chain_with_loss),
    Mutant("H4: so are those made for it later", "L1", Holder, "share", shares_with_the_lost, own_chain_in_replies),
    Mutant("H4: forks of a lost owner are kept", "L2", Holder, "lost", keeps_what_a_lost_owner_had, own_chain_with_loss),
    Mutant("the parent is not told", "L1", Holder, "confirm", tells_no_parent, chain),
    Mutant("programs see what is not counted", "S1", Site, "sees", sees_what_is_not_counted, own_chain_of_4),
    Mutant("O1: freed while others hold it", "S1", Owner, "_settle", frees_what_others_hold, chain),
    Mutant("O1: freed twice", "S2", Owner, "_settle", frees_twice, chain),
    Mutant("O2: a lost worker's forks are forgotten at once", "S1", Owner, "lost", buries_without_asking,
           own_chain_with_loss),
    Mutant("O2: the answer of a survivor that died is waited for", "L1", Owner, "lost", waits_for_answers_of_the_dead,
           own_chain_2_losses),
    Mutant("O2: or of one that was dead already", "L1", Owner, "lost", asks_the_dead, own_chain_2_losses),
    Mutant("O2: a worker whose loss is confirmed is counted", "O2", Owner, "_drop_if_lost", counts_the_lost, out_in_reply),
    Mutant("O2: the loss is confirmed out of order", "S1", Driver, "asked_about", hears_out_of_order,
           own_chain_with_loss),
    Mutant("O2: the loss is confirmed before it is known", "S1", Driver, "asked_about", hears_before_it_learns,
           own_chain_with_loss),
    Mutant("O3: nobody is told", "L2", Owner, "_give_up", tells_nobody, chain_with_loss),
    Mutant("O3: nor those who ask later", "L2", Owner, "_give_up_if_doomed", ignores_requests_after_the_burial,
           chain_with_loss),
    Mutant("O3: what is shared is taken for made", "L2", Owner, "share", takes_shared_for_made, home_and_out),
    Mutant("O3: what is not made is forgotten", "L2", Owner, "never_made", forgets_what_is_not_made, not_asked_for),
    Mutant("O3: or forgotten once somebody asked", "L2", Owner, "never_made", remembers_only_what_nobody_asked_for,
           not_asked_for_twice),
    Mutant("O4: the owner keeps nothing for itself", "L2", Driver, "received_by_owner", keeps_nothing_for_itself, home),
    Mutant("O4: nor waits for what comes home first", "S1", Driver, "received_by_owner", keeps_nothing_for_itself,
           home_in_reply),
    Mutant("home in a reply without a child", "S1", Step, "share", goes_home_without_a_child, home_in_reply),
    Mutant("what was not sent is not taken back, by the owner", "L1", Step, "undo", takes_nothing_back, not_sent),
    Mutant("what was not sent is not taken back, by a holder", "L1", Step, "undo", takes_nothing_back, not_handed_on),
    Mutant("a fetch does not keep the reference", "S1", reference_explorer, "choices", drops_while_fetching, fetched),
]  # fmt: skip
