"""A message that asks for a value, and says nothing sensible of its references, fails its own call with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from remora.errors import ProtocolError, SerializationError
from remora.rref.handlers import RefHandlers
from remora.vocabulary.messages import MessageType
from remora.wire.enclosed import NOTHING_ENCLOSED, Enclosed, Missing, Reason
from remora.wire.frames import Frame


class FakeRequest:
    """A request for a value, as its handler sees it."""

    def __init__(self, enclosed: Enclosed) -> None:
        self.frame = Frame(int(MessageType.PYTHON_REMOTE_CALL), 0, 1, 1, 0, 0.0, b"", 0, enclosed)
        self.caller = SimpleNamespace(name="worker1")

    def unpack(self) -> None:
        if isinstance(self.frame.enclosed.buffers, Missing):
            raise SerializationError(self.frame.enclosed.buffers.details)


def make(enclosed: Enclosed) -> None:
    ran: list[object] = []
    RefHandlers._make(cast(Any, None), lambda *args: ran.append(args), 0, cast(Any, FakeRequest(enclosed)))
    assert not ran


def test_the_error_says_what_is_wrong_with_the_references() -> None:
    with pytest.raises(SerializationError, match="its references make no sense"):
        make(Enclosed(Missing(Reason.DAMAGED, "its references make no sense")))


def test_a_request_for_a_value_without_a_reference_is_refused() -> None:
    with pytest.raises(ProtocolError, match="worker1 asked for a value, and sent no reference to it"):
        make(NOTHING_ENCLOSED)
