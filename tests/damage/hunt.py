"""A search for findings: damage after damage, until the time is over. What is found is a file, and can be done again.

Two searches take turns. *Receivers*: captured messages, damaged, given to the parsers directly. *Workers*: one unit of a
program between two workers is damaged on its way, on each road; first every bit and every limit of the headers, in an order
that the seed decides, then anything. Both run in a process of their own (`subject`).
"""

from __future__ import annotations

import ast
import hashlib
import json
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.damage import receivers, trials
from tests.damage.mutations import KINDS, LIMITS, PLAIN, WIDTHS, Mutation, apply, draw
from tests.damage.receivers import Sample
from tests.damage.sessions import PROGRAMS
from tests.damage.subject import Subject, Verdict
from tests.damage.trials import ROADS, Trial
from tests.damage.units import Unit, fields

_PICKLES = ("body", "failure")
SHORT = 1 << 17  # bytes of a sample that is damaged directly; longer ones take longer than they tell


@dataclass(frozen=True)
class Finding:
    """Something went wrong, and this is how to see it again."""

    problem: str
    sample: Sample | None = None
    trial: Trial | None = None
    mutations: tuple[Mutation, ...] = ()

    @property
    def name(self) -> str:
        """The same for findings with the same cause, as far as their text tells."""
        where = self.sample.receiver if self.sample is not None else "workers"
        last = next((line for line in reversed(self.problem.strip().splitlines()) if line.strip()), "")
        words = "".join("0" if c.isdigit() else c for c in last)
        while "00" in words:
            words = words.replace("00", "0")
        return f"{where.replace(' ', '-')}-{hashlib.sha256(words[:70].encode()).hexdigest()[:8]}"

    def write(self, folder: Path) -> Path:
        """As a file that `replay` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.to_json(), indent=1))
        return path

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"problem": self.problem, "mutations": [asdict(each) for each in self.mutations]}
        if self.sample is not None:
            sizes = None if self.sample.sizes is None else sorted(self.sample.sizes)
            buffers = [each.hex() for each in self.sample.buffers]
            found["sample"] = [self.sample.receiver, self.sample.data.hex(), buffers, sizes]
        if self.trial is not None:
            found["trial"] = asdict(self.trial)
        return found

    @classmethod
    def read(cls, path: Path) -> Finding:
        data = json.loads(path.read_text())
        mutations = tuple(Mutation(**each) for each in data["mutations"])
        if "sample" in data:
            receiver, content, buffers, sizes = data["sample"]
            known = None if sizes is None else frozenset(sizes)
            sample = Sample(receiver, bytes.fromhex(content), tuple(map(bytes.fromhex, buffers)), known)
            return cls(data["problem"], sample, None, mutations)
        fields = data["trial"]
        fields["mutations"] = tuple(Mutation(**each) for each in fields["mutations"])
        return cls(data["problem"], None, Trial(**fields), mutations)

    def again(self, subject: Subject) -> Verdict:
        """What comes of it now."""
        if self.sample is not None:
            return subject.receive(self.sample)
        return subject.ask(trials.judged, self.trial)


def captured(subject: Subject, road: str, program: str) -> list[tuple[str, Unit]]:
    """The traffic of a program over a road, recorded now."""
    verdict = subject.ask(trials.run_survey, road, program)
    if verdict.problem:
        raise AssertionError(f"{program} over {road} fails without any damage: {verdict.problem}")
    return [(direction, Unit(*unit)) for direction, *unit in ast.literal_eval(verdict.outcome)]


def samples(subject: Subject) -> list[Sample]:
    """What receivers get in sessions of all kinds. Those of shared memory are made where they are received."""
    found: dict[tuple[str, bytes], Sample] = {}
    for program in PROGRAMS:
        for sample in receivers.captured(captured(subject, "unix", program)):
            found.setdefault((sample.receiver, sample.data), sample)
    plain = [*found.values(), *receivers.handshakes(), *receivers.records(), *receivers.words()]
    return [each for each in plain if len(each.data) <= SHORT]


def damaged(sample: Sample, mutations: tuple[Mutation, ...], others: list[bytes]) -> Sample:
    """The sample after that. If nothing but numbers of a pickle changed, no storage may have another size than before."""
    numbers_only = sample.receiver == "body" and all(each.kind == "integer" for each in mutations)
    sizes = receivers.storage_sizes(sample.data, sample.buffers) if numbers_only else None
    return replace(sample, data=apply(mutations, sample.data, others), sizes=sizes)


def kinds_for(receiver: str) -> tuple[str, ...]:
    """What can happen to the bytes of a receiver."""
    return tuple(KINDS) if receiver in _PICKLES else tuple(PLAIN)


def header_trials(units: list[tuple[str, Unit]], road: str, program: str) -> Iterator[Trial]:
    """Each bit of each header flipped, and each number in it at each limit: one trial each."""
    seen: Counter[tuple[str, int]] = Counter()
    for direction, unit in units:
        ordinal = seen[direction, unit.kind]
        seen[direction, unit.kind] += 1
        if ordinal > 1:
            continue  # the third of a kind is like the second
        where = Trial(road, program, direction, unit.kind, ordinal, "header", ())
        for bit in range(8 * unit.header_size):
            yield replace(where, mutations=(Mutation("flip", bit),))
        for offset, width in fields(unit):
            if width in WIDTHS:
                for i in range(len(LIMITS)):
                    yield replace(where, mutations=(Mutation("limit", offset, i * len(WIDTHS) + WIDTHS.index(width)),))


def random_trial(chance: random.Random, units: list[tuple[str, Unit]], road: str, program: str) -> Trial:
    """Anything at all happens to one unit."""
    i = chance.randrange(len(units))
    direction, unit = units[i]
    ordinal = sum(1 for way, other in units[:i] if (way, other.kind) == (direction, unit.kind))
    part = chance.choice(("header", "body", "unit", "sealed", "sealed"))
    kinds = tuple(KINDS) if part == "sealed" else tuple(PLAIN)
    return Trial(road, program, direction, unit.kind, ordinal, part, draw(chance, kinds))


@dataclass
class Hunt:
    """One search. `say` is told what it finds, each cause once."""

    seed: int
    seconds: float
    folder: Path
    say: Callable[[str], None] = print
    tried: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    found: dict[str, Finding] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)

    def run(self, searches: tuple[str, ...] = ("receivers", "workers")) -> bool:
        """Whether nothing was found."""
        end = time.monotonic() + self.seconds
        chance = random.Random(self.seed)
        with Subject() as parsing, Subject(trials.PATIENCE) as working:
            steps: list[Iterator[None]] = []
            if "receivers" in searches:
                steps.append(self._receivers(parsing, random.Random(chance.random())))
            if "workers" in searches:
                steps.append(self._workers(working, random.Random(chance.random())))
            while time.monotonic() < end:
                for step in steps:
                    turn = min(time.monotonic() + 5.0, end)
                    while time.monotonic() < turn:
                        next(step)
        return not self.found

    def _receivers(self, subject: Subject, chance: random.Random) -> Iterator[None]:
        pool = samples(subject)
        by: dict[str, list[Sample]] = {}
        for sample in pool:
            by.setdefault(sample.receiver, []).append(sample)
        names = [name for name in by for _ in range(4 if name in ("body", "stream") else 1)]
        while True:
            sample = chance.choice(by[chance.choice(names)])
            mutations = draw(chance, kinds_for(sample.receiver))
            found = damaged(sample, mutations, [each.data for each in by[sample.receiver]])
            if found.data != sample.data:
                verdict = subject.receive(found)
                self._note(sample.receiver, verdict, Finding(verdict.problem, found, None, mutations))
            if not self.tried["receivers"] % 20:
                self._loan(subject, chance)
            yield

    def _loan(self, subject: Subject, chance: random.Random) -> None:
        mutations = draw(chance, tuple(PLAIN))
        verdict = subject.ask(receivers.borrow_damaged, mutations)
        self._note("loan", verdict, Finding(verdict.problem, Sample("loan", pickle.dumps(mutations)), None, mutations))

    def _workers(self, subject: Subject, chance: random.Random) -> Iterator[None]:
        while True:
            road, program = chance.choice(list(ROADS)), chance.choice(list(PROGRAMS))
            units = captured(subject, road, program)
            headers = list(header_trials(units, road, program))
            chosen = chance.sample(headers, min(60, len(headers)))
            chosen += [random_trial(chance, units, road, program) for _ in range(40)]
            for trial in chosen:
                verdict = subject.ask(trials.judged, trial)
                self._note("workers", verdict, Finding(verdict.problem, None, trial, trial.mutations))
                yield

    def _note(self, search: str, verdict: Verdict, finding: Finding) -> None:
        self.tried["workers" if search == "workers" else "receivers"] += 1
        self.outcomes[f"{search}: {verdict.outcome.partition(':')[0] or 'a finding'}"] += 1
        if not verdict.problem:
            return
        self.again[finding.name] += 1
        if finding.name not in self.found:
            self.found[finding.name] = finding
            path = finding.write(self.folder)
            last = verdict.problem.strip().splitlines()[-1]
            self.say(f"FOUND {path}: {finding.trial or search}: {last[:300]}")

