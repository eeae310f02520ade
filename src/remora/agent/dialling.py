"""Getting a link to a peer, and what to make of it when there is none to be had.

    nobody listens at its address             its process is gone: dead, at once
    its host does not answer                  cut off or switched off: dead when `reconnect_timeout` has passed
    its host answers, and the worker does not busy or frozen: suspected, dead after `silence_limit`
    it says that we are not welcome           it gave us up, or another one took its place: dead for us
    it does not know the secret               the calls that wait fail, and the next one tries again

It blocks: a thread of the crew does it, and comes back at once when the worker stops.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from remora.agent.introduction import GivenUp, Introduction, PeerRefused, PeerSilent
from remora.agent.peer import Peer, State
from remora.agent.timers import Timers
from remora.errors import AuthenticationError, CallNotSent, CallOutcomeUnknown, ProtocolError
from remora.options import Settings
from remora.transport.stream import StreamLink

log = logging.getLogger("remora")

LEFT = "it left the group"
LEAVING = "this worker is shutting down"  # what such a worker answers
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
LAST_TRY = 1.0  # however long a host has not been heard of, it gets this long to answer a new connection


class Judge(Protocol):
    """Who acts on what was found out (`agent.peers`)."""

    parting: bool  # we have begun to tell the others that we leave

    def give_up(self, peer: Peer, reason: str, state: State = "dead") -> None: ...
    def suspect(self, peer: Peer, reason: str) -> None: ...
    def trust(self, peer: Peer) -> None: ...


class Dialling:
    """See the head of this file."""

    def __init__(self, judge: Judge, introduction: Introduction, settings: Settings, timers: Timers) -> None:
        self._judge = judge
        self._introduction = introduction
        self._settings = settings
        self._timers = timers
        self._clock = settings.clock
        self.stopping = threading.Event()

    def dial(self, peer: Peer) -> None:
        """Give a peer's outgoing channel a link, or find out why not."""
        started = self._clock.now()
        doubt = self._timers.at(started + self._settings.suspect_after, lambda: self._wonder(peer, started))
        try:
            pause = FIRST_PAUSE
            while not self.stopping.is_set() and not peer.gone and not self._try(peer, started):
                self._clock.block(self.stopping.wait, self._clock.now() + pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            doubt.cancel()

    def stop(self) -> None:
        """Dial no more; whoever is at it comes back at once."""
        self.stopping.set()
        self._introduction.stop()

    def _wonder(self, peer: Peer, started: float) -> None:
        """Still no link, after a while."""
        if not self.stopping.is_set() and peer.outgoing.link is None:
            self._judge.suspect(peer, f"no connection with it could be made for {self._clock.now() - started:.0f} s")

    def _try(self, peer: Peer, started: float) -> bool:
        """Dial once. Whether that settled it."""
        since = started if peer.unreachable_since is None else peer.unreachable_since
        until = max(since + self._settings.reconnect_timeout, started + LAST_TRY)
        try:
            found = self._introduction.to(peer.record, peer.outgoing, until)
        except PeerRefused as error:
            peer.gave_us_up = isinstance(error, GivenUp)
            if LEAVING in str(error):
                self._judge.give_up(peer, LEFT, "left")
            if peer.gave_us_up and self._judge.parting:
                self._has_heard_our_farewell(peer)
            else:
                self._judge.give_up(peer, str(error))
        except (ConnectionRefusedError, FileNotFoundError) as error:
            if peer.leaving:
                self._judge.give_up(peer, LEFT, "left")
            self._judge.give_up(peer, f"nobody listens at its address any more (Connection closed by peer: {error})")
        except PeerSilent as error:
            peer.unreachable_since = None
            return self._is_silent(peer, started, error)
        except OSError as error:
            return self._is_unreachable(peer, until, error)
        except (AuthenticationError, ProtocolError) as error:
            peer.outgoing.fail_pending(lambda call, error=error: type(error)(f"{call.what}: {error}"))  # type: ignore[misc]
        except Exception as error:
            log.exception("cannot connect to %s", peer.name)
            what = f"{type(error).__name__} while connecting: {error}"
            peer.outgoing.fail_pending(lambda call: CallOutcomeUnknown(f"{call.what}: {what}"))
        else:
            self._use(peer, *found)
        return True

    def _has_heard_our_farewell(self, peer: Peer) -> None:
        """It does not talk to us any more, and lives: what we still wanted of it has come too late."""
        kind = CallOutcomeUnknown if peer.outgoing.ever_connected else CallNotSent
        peer.outgoing.fail_pending(lambda call: kind(f"{call.what}: this worker is leaving, and {peer.name} has heard so"))

    def _use(self, peer: Peer, link: StreamLink, arrived: int, leftover: bytes) -> None:
        if self.stopping.is_set():
            link.close()
            return
        peer.unreachable_since = None
        try:
            peer.outgoing.attach(link, arrived, leftover)
        except BaseException:
            link.close()
            raise
        self._judge.trust(peer)

    def _is_silent(self, peer: Peer, started: float, error: OSError) -> bool:
        silence = self._clock.now() - started
        if silence < self._settings.silence_limit:
            return False
        self._judge.give_up(peer, f"it has been silent for {silence:.0f} s: {error}")
        return True

    def _is_unreachable(self, peer: Peer, until: float, error: OSError) -> bool:
        if self._clock.now() + FIRST_PAUSE < until:
            return False
        self._judge.give_up(peer, f"it cannot be reached: {error}")
        return True
