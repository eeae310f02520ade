"""Whether what the workers wrote down adds up. Reads their books, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Ledger:
    """All books together. Calls are named `rank.life.thread.number`: by who made them, in which of its lives."""

    asked: dict[str, str] = field(default_factory=dict)  # call -> callee
    got: dict[str, tuple[str, str]] = field(default_factory=dict)  # call -> (verdict, words)
    ran: Counter[str] = field(default_factory=Counter)

    def read(self, folder: Path) -> Ledger:
        for book in folder.glob("book-*"):
            for line in book.read_text().splitlines():
                what, key, *rest = line.split(" ", 3)
                if what == "asked":
                    self.asked[key] = rest[0]
                elif what == "ran":
                    self.ran[key] += 1
                else:
                    self.got[key] = (rest[0], rest[1] if len(rest) > 1 else "")
        return self

    def verdicts(self) -> Counter[str]:
        return Counter(verdict for verdict, _ in self.got.values())

    def errors(self) -> Counter[str]:
        return Counter(words for verdict, words in self.got.values() if verdict not in ("right", "wrong"))

    def repeated(self) -> list[str]:
        return [key for key, times in self.ran.items() if times > 1]

    def without_outcome(self, ended: set[str]) -> list[str]:
        """Calls nobody heard of again, made in lives (`rank.life`) that were not cut short."""
        return [key for key in self.asked if key not in self.got and ".".join(key.split(".")[:2]) not in ended]

    def wrong(self) -> list[str]:
        return [f"{key}: {words}" for key, (verdict, words) in self.got.items() if verdict == "wrong"]

    def untrue(self) -> list[str]:
        """Said not to have run, and did; or answered without having run."""
        found = [f"{key} was said to be unsent, and ran" for key in self.ran if self.got.get(key, ("",))[0] == "unsent"]
        found += [
            f"{key} was answered and did not run"
            for key, (verdict, _) in self.got.items()
            if verdict == "right" and not self.ran[key]
        ]
        return found
