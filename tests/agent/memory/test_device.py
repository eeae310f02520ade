"""Who is lent device memory, and what becomes of it: within a process, and between two that are one here."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import pytest
import torch

from remora.agent.memory import device
from remora.agent.memory.device import DEVICE, REFUSED, THERE, DeviceExchange
from remora.errors import SerializationError
from tests.devices.pretence import CPU, PLACE

META = torch.device("meta")


class Exporter:
    """Of `remora.transport.cuda_ipc`: numbers, and what they stand for."""

    lent: dict[int, list[Any]] = {}
    fenced: list[int] = []

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def export(self, regions: Any) -> bytes | None:
        if sum(nbytes for _, _, nbytes in regions) > self.limit:
            return None
        number = len(self.lent) + 1
        self.lent[number] = [storage for storage, _, _ in regions]
        return number.to_bytes(8, "little")

    def give_back(self, numbers: Any) -> None:
        for number in numbers:
            self.lent.pop(number, None)

    def fence(self, number: int) -> None:
        self.fenced.append(number)

    def forget(self) -> None:
        self.lent.clear()


class Importer:
    refuses = False

    def __init__(self, process: int) -> None:
        self.process = process

    def fetch(self, reference: bytes, device: torch.device) -> Any:
        if self.refuses:
            raise OSError("no way")
        return Exporter.lent[int.from_bytes(reference, "little")]


@pytest.fixture(autouse=True)
def transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exporter, "lent", {})
    monkeypatch.setattr(Exporter, "fenced", [])
    monkeypatch.setattr(device.cuda_ipc, "Exporter", Exporter)
    monkeypatch.setattr(device.cuda_ipc, "Importer", Importer)
    monkeypatch.setattr(device.cuda_ipc, "available", lambda device: "")
    monkeypatch.setattr(device.cuda_ipc, "reachable", lambda theirs: "" if theirs == "near" else "it is far away")
    monkeypatch.setattr(device.cuda_ipc, "number_of", lambda reference: int.from_bytes(reference, "little"))


class Two:
    """A worker that lends and one that is lent to, in other processes, it is said."""

    def __init__(self, place: str = "near", limit: int = 1 << 20) -> None:
        self.unused: deque[int] = deque()
        self.lender = DeviceExchange("receiver", limit, deque[int]().append)
        self.receiver = DeviceExchange("lender", limit, self.unused.append)
        self.lender.learn({"process": "another", "ipc": place})

    def lend(self, *tensors: torch.Tensor) -> bytes | None:
        return self.lender.lend([(each.untyped_storage(), 0, each.nbytes) for each in tensors], META)

    def deliver(self) -> None:
        self.lender.take_back(list(self.unused))
        self.unused.clear()


def test_nothing_is_lent_before_a_trial() -> None:
    two = Two()
    assert two.lend(torch.ones(3)) is None
    probe = two.lender.probe(CPU)
    assert probe is not None
    assert two.lender.probe(CPU) is None  # one is enough
    assert two.lend(torch.ones(3)) is None
    two.receiver.try_out(probe, CPU)
    two.deliver()
    assert Exporter.lent == {}
    reference = two.lend(torch.ones(3), torch.zeros(2))
    assert reference is not None
    found = two.receiver.fetch(reference, CPU)
    assert [each.nbytes() for each in found] == [12, 8]


def test_what_is_lent_is_a_copy() -> None:
    two = proven()
    tensor = torch.ones(3)
    reference = two.lend(tensor)
    tensor.zero_()
    assert reference is not None
    assert bytes(two.receiver.fetch(reference, CPU)[0]) == bytes(torch.ones(3).untyped_storage())


def test_to_who_is_waited_for_the_memory_itself_is_lent() -> None:
    two = proven()
    tensor = torch.ones(3)
    reference = two.lender.lend([(tensor.untyped_storage(), 0, 12)], META, in_place=True)
    assert reference is not None
    assert two.receiver.fetch(reference, CPU)[0].data_ptr() == tensor.data_ptr()  # (which would copy it)
    assert Exporter.fenced == []
    two.lender.fence([reference])
    assert len(Exporter.fenced) == 1


def proven() -> Two:
    two = Two()
    probe = two.lender.probe(CPU)
    assert probe is not None
    two.receiver.try_out(probe, CPU)
    two.deliver()
    return two


def test_who_cannot_open_it_is_lent_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Importer, "refuses", True)
    two = Two()
    probe = two.lender.probe(CPU)
    assert probe is not None
    with pytest.raises(SerializationError, match=r"could not open the device memory of .*no way"):
        two.receiver.try_out(probe, CPU)
    with caplog.at_level(logging.WARNING, "remora"):
        two.deliver()
    assert "receiver cannot open device memory of this worker" in caplog.text
    assert Exporter.lent == {}
    assert two.lend(torch.ones(3)) is None
    assert two.lender.probe(CPU) is None


def test_the_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    two = Two("far")
    with caplog.at_level(logging.INFO, "remora"):
        assert two.lender.probe(CPU) is None
        assert two.lender.probe(CPU) is None
    assert caplog.text.count("go to receiver over the host: it is far away") == 1


def test_too_much_goes_over_the_host() -> None:
    two = proven()
    assert two.lend(torch.ones(1 << 20)) is None
    assert two.lend(torch.ones(3)) is not None


def test_no_memory_for_a_copy_means_over_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    two = proven()

    def full(*region: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device.copies, "snapshot", full)
    assert two.lend(torch.ones(3)) is None


def test_what_is_dropped_or_not_sent_comes_back() -> None:
    two = proven()
    reference = two.lend(torch.ones(3))
    assert reference is not None
    two.receiver.give_back(reference)
    assert two.unused[0] & DEVICE
    assert not two.unused[0] & REFUSED
    two.deliver()
    assert Exporter.lent == {}
    again = two.lend(torch.ones(3))
    assert again is not None
    two.lender.retract(again)
    assert Exporter.lent == {}


def test_a_trial_that_was_not_sent_is_made_again() -> None:
    two = Two()
    probe = two.lender.probe(CPU)
    assert probe is not None
    assert probe.startswith(THERE)
    two.lender.retract(probe)
    assert two.lender.probe(CPU) is not None


def test_a_trial_that_was_dropped_proves_nothing() -> None:
    two = Two()
    probe = two.lender.probe(CPU)
    assert probe is not None
    two.receiver.give_back(probe)
    two.deliver()
    assert two.lend(torch.ones(3)) is None
    assert two.lender.probe(CPU) is not None


def test_too_little_memory_at_the_receiver_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    two = proven()
    reference = two.lend(torch.ones(3))
    assert reference is not None

    def full(self: Importer, reference: bytes, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Importer, "fetch", full)
    with pytest.raises(torch.OutOfMemoryError):
        two.receiver.fetch(reference, CPU)
    two.deliver()
    assert Exporter.lent == {}
    assert two.lend(torch.ones(3)) is not None


def test_nothing_is_lent_if_the_program_says_so() -> None:
    assert Two(limit=0).lender.probe(CPU) is None


def test_within_a_process_it_is_handed_over() -> None:
    here = DeviceExchange("me", 1 << 20, deque[int]().append)
    here.learn(device.identity())
    tensor = torch.ones(3)
    reference = here.lend([(tensor.untyped_storage(), 0, 12)], META)
    tensor.zero_()
    assert reference is not None
    (found,) = here.fetch(reference, CPU)
    assert bytes(found) == bytes(torch.ones(3).untyped_storage())
    dropped = here.lend([(tensor.untyped_storage(), 0, 12)], META)
    assert dropped is not None
    here.give_back(dropped)
    forgotten = here.lend([(tensor.untyped_storage(), 0, 12)], META)
    retracted = here.lend([(tensor.untyped_storage(), 0, 12)], META)
    assert forgotten is not None
    assert retracted is not None
    here.retract(retracted)
    here.forget()
    assert device._here == {}
    assert here.lend([(tensor.untyped_storage(), 0, 12)], PLACE) is None  # to the CPU it goes in buffers
