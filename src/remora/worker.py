"""One worker: an agent, its place in a group, and the layers above, wired together. Only this file knows them all."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
import weakref
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from remora.agent.agent import Agent
from remora.agent.calls.blocking import going_down
from remora.agent.calls.call import current_serving
from remora.agent.calls.call_context import current_call_context
from remora.agent.calls.collect import teach_torch
from remora.agent.hooks import Hooks
from remora.agent.memory.routing import DeviceRouting
from remora.agent.memory.shared import credentials
from remora.agent.peers.greeting import greet_neighbours
from remora.agent.peers.group_membership import Membership
from remora.agent.peers.handshake_client import HandshakeClient
from remora.agent.peers.manager import Peer
from remora.agent.runtime.current import reset_in_fork
from remora.autograd.engine import Engine
from remora.autograd.rref_backward import RRefBackward
from remora.devices.maps import DeviceMap, Wishes
from remora.errors import RendezvousError, WorkerNotFound
from remora.faults.worker_faults import WorkerFaults
from remora.introspection import endings, entries, stack_signal
from remora.introspection.dumps import AutomaticDumps
from remora.introspection.observer_server import ObserverServer
from remora.introspection.questions import OBSERVERS, Questions
from remora.introspection.subject import Subject
from remora.long_wait import listed
from remora.observer import meeting
from remora.observer.directory import WorkerEntry, host_name
from remora.options import TRANSPORTS, Settings
from remora.protocol.handshake import Home
from remora.protocol.member_rules import Member
from remora.protocol.observing import observer_key
from remora.rendezvous.group import DynamicGroup, Group, StaticGroup
from remora.rendezvous.record import WorkerRecord
from remora.rendezvous.seal import RecordSeal
from remora.rendezvous.secret import find_secret, loopback_secret
from remora.rref.codec import arrive
from remora.rref.handlers import RefHandlers
from remora.rref.references import Calls, References
from remora.transport import addresses, sockets
from remora.vocabulary.ids import WorkerInfo
from remora.wire import code_by_value

log = logging.getLogger("remora")

NO_WISHES = Wishes()
_OF_THIS_USER = "no secret was given, so that of this user on its host counts"
JOIN_TRIES = 3  # others may be about to make room for us


class Worker:
    """A worker of this process."""

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int | None,
        store: Any,
        timeout: float,
        threads: int,
        settings: Settings,
        calls: Calls,
        wishes: Wishes = NO_WISHES,
    ) -> None:
        self._me = WorkerInfo(name, rank)
        self.is_static_group = bool(world_size)
        self.leaks: list[str] = []  # values that a worker held when no call was under way any more
        self.calls_made = 0  # by the program; shutdown waits until no worker makes any more
        settings = settings.with_environment()
        bringup = settings.time_to_meet(timeout)
        secret, bind_host, kind = _protection(settings, _master_host(store))
        faults = WorkerFaults()
        handshake_client = self.handshake_client = HandshakeClient(
            self._me, secrets.token_hex(8), settings, secret, kind == _OF_THIS_USER, faults
        )
        self._device_routing = routing = DeviceRouting(name, wishes, settings.auto_device_map)
        self.agent = Agent(self._me, threads, timeout, settings, handshake_client, routing, faults, self._hooks())
        self.clock = settings.clock
        self._questions = Questions()
        self.observers = ObserverServer(
            name,
            observer_key(secret),
            self._questions.answer,
            of_this_user=kind == _OF_THIS_USER,
            remove_expired=self._questions.remove_expired,
        )
        self._dump_folder = settings.dump_folder
        self._dumps: AutomaticDumps | None = None
        self._entry: WorkerEntry | None = None  # among the workers of this user on this host, while it runs
        first_id = 0 if world_size else time.time_ns() // 1000 % 2**46  # of what it numbers; a former one's are smaller
        self.group: Group
        try:
            seal = RecordSeal(secret, kind)
            if world_size:
                self.group = StaticGroup(store, world_size, bringup, handshake_client.has_ended, seal)
            else:
                self.group = DynamicGroup(store, seal)
            found = self.agent.listener.listen(bind_host)
            host, about = addresses.host_identity(), {"first_id": first_id, "pid": os.getpid()}
            extra = {**credentials(), **self._device_routing.credentials(), **about}
            extra[code_by_value.MAIN] = code_by_value.identity()
            if settings.observers:
                wanted = settings.transports or TRANSPORTS, bind_host, settings.port, handshake_client.incarnation
                extra |= {OBSERVERS: self.observers.listen(*wanted), "host": host_name()}
            self.record = WorkerRecord(name, rank, handshake_client.incarnation, host, tuple(found), extra)
            members = self._join()
            check_devices = self._device_routing.check_group if world_size else self._device_routing.check_alone
            check_devices(members)
            handshake_client.joined(self.group.group_id, Home(self.record.host, self.record.addresses))
            log.info("%s joined %r: %s", name, self.group, listed([each.name for each in members]))
        except BaseException:
            self.agent.discard()
            self.observers.stop()
            raise
        for record in members:
            self.agent.peers.add(record)
        self.agent.peers.add_me(self.record)
        self.static_names = [record.name for record in members] if world_size else []
        self._bringup = bringup
        self._members = members
        self.autograd = Engine(self.agent, first_id)
        self.references = References(
            self.agent,
            first_id,
            not world_size,
            calls,
            lambda *given: self._rref_backward.backward(*given),
            settings.record_sites,
        )
        RefHandlers(self.references)
        self._rref_backward = RRefBackward(self.autograd, self.references)
        table = self.references.table
        self.membership = Membership(
            self.agent, self.group, self.record, not world_size, table.heard, table.tell_heard
        )
        self.subject = self._questions.subject = Subject(
            self.agent, self.references, self.autograd, self.record, self.group.group_id
        )
        _workers.add(self)

    def _hooks(self) -> Hooks:
        """Return the functions of the layers above, which are made after the agent."""
        return Hooks(
            worker=self,
            arrived=lambda peer, body: arrive(self.references, peer, body),
            find_context=lambda header: self.autograd.contexts.find(header),
            spread_loss=lambda peer, silent_for: self.membership.spread(peer, silent_for),
            is_listed=lambda record: self.membership.is_listed(record),
        )

    def _let_observers_in(self) -> None:
        """Answer observers, and be found by them: on this host by an entry, elsewhere by what the store has."""
        found = self.record.extra.get(OBSERVERS)
        if not isinstance(found, list) or not found:
            return
        self.observers.start(self.handshake_client.identity)
        meeting.leave_addresses(self.group.publish, self._me.id, found)
        self._entry = entries.enter(self.record, self.group.group_id, tuple(found), self.observers.key)

    def _join(self) -> list[WorkerRecord]:
        """Join the group. In a dynamic one the place of a worker that is no longer there may be taken."""
        for _ in range(JOIN_TRIES - 1):
            try:
                return self.group.join(self.record)
            except RendezvousError:
                if self.is_static_group or not self._remove_predecessors():
                    raise
        return self.group.join(self.record)

    def _remove_predecessors(self) -> bool:
        """Remove workers that have our name or id at the store and are gone. Return True if none is left that has them."""
        rivals = self.group.holders(self.record)
        dead = [each for each in rivals if self.handshake_client.is_gone(each)]
        for each in dead:
            self.group.leave(each)
        return len(dead) == len(rivals)

    def start(self, greet: bool = True) -> None:
        """Begin to serve, and see that the others can be talked to."""
        teach_torch()
        self.agent.start()
        self._let_observers_in()
        if self._dump_folder is not None:
            self._dumps = AutomaticDumps(self._dump_folder, self.subject)
        if greet and self.is_static_group:
            greet_neighbours(self.agent, self.record, self._bringup)
        elif greet:
            self.membership.greet([each for each in self._members if each.name != self._me.name])

    # The members of the group.

    def peer(self, to: str | int | WorkerInfo) -> Peer:
        """The peer that a destination means: a name, an id or a WorkerInfo."""
        if sys.is_finalizing():
            raise going_down(f"call to {to}")
        peers = self.agent.peers
        known = peers.by_name.get(to) if type(to) is str else None
        if known is not None:
            return known
        key = to.id if isinstance(to, WorkerInfo) else to  # (the id may be a number of numpy's)
        if key is to and not isinstance(to, str) and type(to) is not int:
            raise ValueError(f"Cannot get WorkerInfo from name {to!r}: give a worker's name, its id or a WorkerInfo")
        try:
            return peers.find(key)
        except WorkerNotFound:
            if self.is_static_group:
                raise
            return self._newcomer(key)

    def _newcomer(self, key: str | int) -> Peer:
        """Find a worker of a dynamic group of which this one has not heard yet."""
        try:
            self.membership.refresh()
        except RendezvousError as error:  # the store is gone: known workers can still be called
            log.info("%s cannot look for workers it has never heard of: %s", self._me, error)
        try:
            return self.agent.peers.find(key)
        except WorkerNotFound as error:
            text = str(error) if str(error).endswith("?") else f"{error}."
            raise WorkerNotFound(
                f"{text} It may still join: this group is dynamic, because init_rpc was given no world_size. Give it one to "
                "wait for all workers."
            ) from None

    def get_worker_info(self, to: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Name and id of a worker; of this one by default."""
        return self._me if to is None else self.peer(to).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers of the group that have not left or died."""
        return sorted((peer.info for peer in self.agent.peers.all() if not peer.gone), key=lambda info: info.id)

    def members(self) -> list[Member]:
        """Every worker that is known, and what is known of it: also those that left or died lately."""
        peers = sorted(self.agent.peers.all(), key=lambda peer: (peer.id, peer.name))
        return [Member(peer.info, peer.condition, peer.reason or peer.suspicion) for peer in peers]

    def leave(self, timeout: float) -> None:
        """Leave a dynamic group: let calls under way end, then tell the others."""
        self.membership.leave(timeout)

    # The end.

    def stop(self, graceful: bool = False) -> None:
        """Stop serving. Safe to call twice."""
        self.references.table.close()
        try:
            if graceful:
                self.agent.drain(1.0)
            self.agent.stop(graceful=graceful)
        finally:
            self.references.table.end()
            self._turn_observers_out()
        _workers.discard(self)

    def kill(self) -> None:
        """For tests: end as if the process had been killed."""
        self._turn_observers_out()
        self.agent.kill()

    def abandon(self) -> None:
        """In a forked child: close our copies of the parent's descriptors, and touch nothing else of its."""
        self.agent.abandon()
        self.observers.abandon()
        self._dumps = None  # its thread is the parent's

    def _turn_observers_out(self) -> None:
        dumps, self._dumps = self._dumps, None
        if dumps is not None:
            dumps.close()
        self.observers.stop()
        self._questions.close()
        entry, self._entry = self._entry, None
        if entry is not None:
            entries.leave(entry)

    # What PyTorch's agents offer.

    def shutdown(self) -> None:
        """Stop serving."""
        self.stop()

    def sync(self) -> None:
        """Nothing to do: PyTorch's agent has it, too."""

    def get_device_map(self, to: str | int | WorkerInfo) -> DeviceMap:
        """Return the map from devices of this worker to those of another one."""
        return self._device_routing.map_for(self.peer(to).name)

    _get_device_map = get_device_map

    def enable_gil_profiling(self, flag: bool) -> None:
        """Measure how long requests wait for the interpreter lock."""
        self.agent.gil_profiling = flag

    def get_debug_info(self) -> dict[str, str]:
        """Counters, as strings, under PyTorch's names."""
        return {key: str(value) for key, value in self.agent.counters().items()}

    def __repr__(self) -> str:
        return f"<Worker {self._me.name} id={self._me.id} of {len(self.agent.peers.all())}>"


def _protection(settings: Settings, master_host: str | None) -> tuple[bytes, str, str]:
    """(the group's secret, the host to listen on, what kind of secret it is). Refuses to be reached by strangers without a
    secret."""
    given = find_secret(settings.secret, settings.secret_file)
    secured = given is not None or settings.insecure
    bind_host = addresses.choose_bind_host(settings.host, settings.interface, secured=secured, master_host=master_host)
    addresses.check_exposure(master_host, bind_host, given.value if given else None, settings.insecure)
    if given is not None:
        return given.value, bind_host, "a secret was given"
    if settings.insecure:
        return b"", bind_host, "no secret, and insecure"
    return loopback_secret(), bind_host, _OF_THIS_USER


def _master_host(store: Any) -> str | None:
    """The host where the workers meet, if it is a matter of hosts."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _forget_workers() -> None:
    """In a forked child: the parent's workers are not ours. Close our copies of their descriptors, so that peers notice
    the parent's end, and forget them, so that this process may start a worker of its own."""
    reset_in_fork()
    current_serving.set(None)  # it may have been forked in the midst of a call
    current_call_context.set(None)
    for worker in list(_workers):
        worker.abandon()
    _workers.clear()
    stack_signal.process.abandon()
    endings.process.abandon()
    sockets.forget_inproc()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)
