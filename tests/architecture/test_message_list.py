"""The list of messages in docs/wire.md is the one that the types make."""

from __future__ import annotations

from remora.vocabulary.messages import MessageType
from tests.architecture.message_list import BEGIN, DOCUMENT, END, message_list, renewed, written


def test_the_list_is_not_stale() -> None:
    assert written(DOCUMENT.read_text()) == message_list(), "run: python -m tests.architecture.message_list"


def test_every_type_is_in_it() -> None:
    listed = message_list()
    assert all(f"{kind.name} " in listed and f"{kind:#x}" in listed for kind in MessageType)


def test_a_document_is_renewed_in_its_place() -> None:
    document = f"before\n{BEGIN}old\n{END}after\n"
    assert renewed(document) == f"before\n{BEGIN}{message_list()}{END}after\n"
    assert written(renewed(document)) == message_list()
