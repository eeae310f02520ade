"""The specification of messages is whole, and agrees with itself."""

from __future__ import annotations

import dataclasses
import re

import pytest

from remora.vocabulary.messages import MESSAGES, REQUEST, RESERVED, RESPONSE, Layout, Message, MessageType

ONE_FIELD = (Layout.VALUE,)
NO_FIELD = (Layout.EMPTY, Layout.NONE)


def test_every_type_has_a_payload_or_is_reserved() -> None:
    assert set(MESSAGES) | RESERVED == set(MessageType)
    assert not set(MESSAGES) & RESERVED


@pytest.mark.parametrize("kind", MESSAGES.values(), ids=lambda kind: kind.type.name)
def test_a_payload_is_frozen_documented_and_named_after_its_type(kind: type[Message]) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert kind.__doc__
    assert not kind.__doc__.startswith(f"{kind.__name__}("), "this is what dataclasses write"
    if kind.type is not MessageType.EXCEPTION:  # whose name Python has taken
        assert kind.__name__.lower() == kind.type.name.replace("_", "").lower()
    assert bool(kind.order) == (kind.layout is Layout.BINARY)
    count = len(dataclasses.fields(kind))
    assert count == 1 if kind.layout in ONE_FIELD else not count if kind.layout in NO_FIELD else count


@pytest.mark.parametrize("kind", MESSAGES.values(), ids=lambda kind: kind.type.name)
def test_codes_say_whether_a_message_is_answered(kind: type[Message]) -> None:
    if kind.answered_by is not None:
        assert kind.type & REQUEST
        assert kind.answered_by in MESSAGES
        assert kind.answered_by & RESPONSE
    else:
        assert not kind.type & REQUEST or kind.type is MessageType.CLEANUP_AUTOGRAD_CONTEXT_REQ
    assert kind.numbered or not kind.type & (REQUEST | RESPONSE)


def test_types_that_a_docstring_names_exist() -> None:
    for kind in MESSAGES.values():
        for name in re.findall(r"\b[A-Z]+_[A-Z_]+\b", kind.__doc__ or ""):
            assert name in MessageType.__members__
