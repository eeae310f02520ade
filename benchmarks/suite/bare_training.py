"""The training step of `training` without any RPC: raw bytes on a Unix socket, nothing pickled, numbered or checked.

No RPC in Python can be faster at this step than that; and below it, the same step in one process.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.measure import Reading, Setting, latencies, time_each
from benchmarks.sockets import END_TIMEOUT, receive_blocking, unix_pair
from benchmarks.suite.training import BATCH, WIDTH, Network

FORWARD, BACKWARD, STEP = b"f", b"b", b"s"
DONE = b"."
NBYTES = BATCH * WIDTH * 4


def measure(setting: Setting) -> Iterator[Reading]:
    """Two processes, and one."""
    with owner() as link:
        yield from _timed(setting, _stepper(link), "by bare socket ")
    yield from _timed(setting, _in_one_process(), "in one process ")


def _timed(setting: Setting, step: Callable[[], None], name: str) -> list[Reading]:
    time_each(step, setting.effort(40, 20))
    return latencies(time_each(step, setting.effort(250, 150)), name)


@contextmanager
def owner() -> Iterator[socket.socket]:
    """A process that has the network; yields the link to it."""
    ours, theirs = unix_pair()
    code = f"from benchmarks.suite.bare_training import serve; serve({theirs.fileno()})"
    with ours, theirs, subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        try:
            yield ours
            ours.shutdown(socket.SHUT_WR)
            process.wait(END_TIMEOUT)
        finally:
            process.kill()


def _stepper(link: socket.socket) -> Callable[[], None]:
    batch, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def step() -> None:
        link.sendall(FORWARD + _bytes(batch))
        output = _tensor(link).requires_grad_()
        (gradient,) = torch.autograd.grad(torch.nn.functional.mse_loss(output, target), output)
        link.sendall(BACKWARD + _bytes(gradient))
        link.recv(1)
        link.sendall(STEP)
        link.recv(1)

    return step


def serve(descriptor: int) -> None:
    """The life of the other process."""
    network = Network()
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.001)
    output = torch.empty(0)
    with socket.socket(fileno=descriptor) as link:
        while wanted := link.recv(1):
            if wanted == FORWARD:
                output = network(_tensor(link))
                link.sendall(_bytes(output.detach()))
            elif wanted == BACKWARD:
                gradients = torch.autograd.grad([output], parameters, [_tensor(link)])
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                link.sendall(DONE)
            else:
                optimizer.step()
                optimizer.zero_grad()
                link.sendall(DONE)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _tensor(link: socket.socket) -> torch.Tensor:
    buffer = bytearray(NBYTES)
    receive_blocking(link, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch.float32).view(BATCH, WIDTH)


def _in_one_process() -> Callable[[], None]:
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001)
    batch, target = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def step() -> None:
        torch.nn.functional.mse_loss(network(batch), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step
