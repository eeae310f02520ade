"""Which of PyTorch's tests are not expected to pass, and what is wrong when that is not what happens. Runs nothing.

`expected.toml` says it. A test that it does not name must pass; one that it names must not, or the entry has to go. Where
there are fewer GPUs than a test needs, it is as if it were named. A suite that needs what Remora does not have is not run at
all, until Remora has it.
"""

from __future__ import annotations

import pkgutil
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.trial import Outcome

EXPECTED = Path(__file__).with_name("expected.toml")


@dataclass(frozen=True)
class Expectations:
    """`failing`: test -> reason. `absent`: suite -> reason. `needs`: suite -> the name that Remora does not have."""

    failing: dict[str, str]
    absent: dict[str, str]
    needs: dict[str, str]

    def stale(self, suites: Iterable[str], tests: Iterable[str]) -> list[str]:
        """Entries that speak of what does not exist, or of what exists by now."""
        unknown = [f"{name}: no such suite" for name in self.absent.keys() - set(suites)]
        unknown += [f"{name}: no such test" for name in self.failing.keys() - set(tests)]
        here = [f"{suite}: listed as absent, but {name} is there" for suite, name in self.needs.items() if exists(name)]
        return sorted(unknown + here)

    def is_met(self, outcome: Outcome) -> bool:
        return (outcome.status == "passed") != (outcome.test in self.failing)

    def complaint(self, outcome: Outcome) -> str:
        """What is wrong with an outcome that does not meet the expectation."""
        if outcome.test in self.failing:
            return f"{outcome.test} passed: its entry in {EXPECTED.name} has to go ({self.failing[outcome.test]})"
        return f"{outcome.test} {'was skipped' if outcome.status == 'skipped' else outcome.status}: {gist(outcome.why)}"


def load(path: Path = EXPECTED, gpus: int = 0) -> Expectations:
    """Read the list, for a machine with so many GPUs. An entry without a reason, or a name that stands there twice, is an
    error."""
    tables = tomllib.loads(path.read_text())
    failing = _by_name(tables.get("failing", []) + _too_few(tables.get("gpus", []), gpus), "tests", "reason")
    absent = _by_name(tables.get("absent", []), "suites", "reason")
    return Expectations(failing, absent, _by_name(tables.get("absent", []), "suites", "needs"))


def _too_few(entries: list[dict[str, object]], gpus: int) -> list[dict[str, object]]:
    """The tests that need more GPUs than there are, each entry with that as its reason."""
    needed = [(entry, entry.get("needed")) for entry in entries]
    if not all(isinstance(number, int) for _, number in needed):
        raise ValueError(f"an entry of `gpus` wants `needed`, a number: {entries}")
    return [
        {**entry, "reason": f"needs {number} GPUs, and there are {gpus}"}
        for entry, number in needed
        if isinstance(number, int) and number > gpus
    ]


def _by_name(entries: list[dict[str, object]], names: str, value: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in entries:
        text, listed = entry.get(value), entry.get(names)
        if not (isinstance(text, str) and text.strip() and isinstance(listed, list) and listed):
            raise ValueError(f"an entry wants `{names}` and `{value}`: {entry}")
        for name in listed:
            if name in found:
                raise ValueError(f"{name} is listed twice")
            found[name] = text
    return found


def exists(name: str) -> bool:
    """Whether the module or attribute of that dotted name is there."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def gist(why: str) -> str:
    """The line of a long text that says most: the first error, since those after it are mostly its consequences."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    errors = [line for line in lines if _names_an_error(line)]
    return (errors or lines[-1:] or ["no reason given"])[0][:300]


def _names_an_error(line: str) -> bool:
    kind = line.partition(":")[0].rpartition(".")[2]
    is_relayed = "exited with error code" in line  # PyTorch's words around what a rank raised
    return kind.isidentifier() and kind.endswith(("Error", "Exception", "Lost", "Died")) and not is_relayed
