"""The list of messages in docs/wire.md, made from the classes of `remora.vocabulary.messages`.

    python -m tests.architecture.message_list      write it anew
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from remora.vocabulary.messages import MESSAGES, REQUEST, RESERVED, RESPONSE, Layout, Message

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"
BEGIN, END = "<!-- messages -->\n", "<!-- end of messages -->\n"


def message_list() -> str:
    """The tables: requests with their answers, the answers themselves, words, and codes that are not used."""
    requests = [kind for kind in MESSAGES.values() if kind.type & REQUEST]
    answers = [kind for kind in MESSAGES.values() if kind.type & RESPONSE]
    words = [kind for kind in MESSAGES.values() if not kind.type & (REQUEST | RESPONSE)]
    reserved = ", ".join(f"{kind.name} ({kind:#x})" for kind in sorted(RESERVED))
    return "\n".join(
        [
            *table(("request", "code", "payload", "body", "answer", ""), map(request, ordered(requests))),
            "",
            *table(("answer", "code", "payload", "body", ""), map(answer, ordered(answers))),
            "",
            *table(("word", "code", "payload", "body", "numbered", ""), map(word, ordered(words))),
            "",
            f"Reserved, and never sent: {reserved}.",
            "",
        ]
    )


def ordered(kinds: Iterable[type[Message]]) -> list[type[Message]]:
    return sorted(kinds, key=lambda kind: kind.type)


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def request(kind: type[Message]) -> tuple[str, ...]:
    answered = "none" if kind.answered_by is None else kind.answered_by.name
    return kind.type.name, f"{kind.type:#x}", payload(kind), body(kind), answered, meaning(kind)


def answer(kind: type[Message]) -> tuple[str, ...]:
    return kind.type.name, f"{kind.type:#x}", payload(kind), body(kind), meaning(kind)


def word(kind: type[Message]) -> tuple[str, ...]:
    numbered = "yes" if kind.numbered else "no"
    return kind.type.name, f"{kind.type:#x}", payload(kind), body(kind), numbered, meaning(kind)


def payload(kind: type[Message]) -> str:
    return ", ".join(f"`{each.name}`" for each in dataclasses.fields(kind))  # type: ignore[arg-type]


def body(kind: type[Message]) -> str:
    return {Layout.BINARY: kind.order, Layout.EMPTY: "none"}.get(kind.layout, kind.layout.value)


def meaning(kind: type[Message]) -> str:
    """The first sentence of its docstring."""
    words = " ".join((kind.__doc__ or "").split())
    return re.split(r"(?<=[a-z)`])\.(?: |$)", words, maxsplit=1)[0]


def written(document: str) -> str:
    """The list as a document has it."""
    return document.partition(BEGIN)[2].partition(END)[0]


def renewed(document: str) -> str:
    """A document with the list as it should be."""
    before, _, rest = document.partition(BEGIN)
    return before + BEGIN + message_list() + END + rest.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(DOCUMENT.read_text()))
