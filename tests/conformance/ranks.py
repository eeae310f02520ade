"""How the processes of one of PyTorch's tests start and end: forked, and gone when it is over. Not what they run."""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal import common_utils
from torch.testing._internal.common_distributed import MultiProcessTestCase

from remora.options import Settings
from tests.conformance.trial import die_with_parent

_PATIENCE = 5.0
_TIME_TO_MEET = 50.0  # seconds
_log = logging.getLogger(MultiProcessTestCase.__module__)


def _meets(settings: Settings, call_timeout: float) -> float:
    """One test allows half a second for a call, and so to meet, too: not enough for four processes beside many others."""
    return max(call_timeout, _TIME_TO_MEET)


class ForkedRanks(MultiProcessTestCase):
    """The last base of a test class, in the place of PyTorch's own, which spawns (and so imports torch) four times.

    Forking is safe here: the process that forks has loaded torch and the test, and has no thread but its first.
    """

    def setUp(self) -> None:
        _log.setLevel(logging.WARNING)
        # Whether PyTorch has switched the test off in its own CI is not for us, and to ask starts CUDA: no fork after that.
        with mock.patch.object(common_utils, "check_if_enable"):
            super().setUp()
        self._spawn_processes()

    def _spawn_processes(self) -> None:
        self._start_processes(multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
        die_with_parent()
        Settings.time_to_meet = _meets  # type: ignore[method-assign]
        _log.setLevel(logging.CRITICAL)  # the traceback that it would log travels to the parent, and is shown there
        try:
            super()._run(rank, *args, **kwargs)
        except SystemExit as leaving:
            print(f"rank {rank} leaves with exit code {leaving.code}", flush=True)  # the first to fail is the cause
            raise

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        super()._check_return_codes(fn, elapsed_time)
        # PyTorch looks at rank 0 only; any other could crash unnoticed.
        codes = [rank.exitcode for rank in self.processes]
        if any(codes):
            self.fail(f"the ranks ended with exit codes {codes}")

    def tearDown(self) -> None:
        ranks = list(self.processes)
        super().tearDown()  # asks them to end, and does not wait
        for rank in ranks:
            rank.join(_PATIENCE)
            rank.kill()
            rank.join()


class RanksWithGroup(ForkedRanks):
    """For tests that use a process group beside RPC. Two things go wrong there whoever does RPC, and are kept away.

    A rank that is done with `init_process_group` asks others, by RPC, to use the group; but they may not be done with it.
    So here nobody is done before all have the group.

    A group ends with the model that uses it, by waiting for its thread while it holds the interpreter lock; the thread
    may want that lock (https://github.com/pytorch/pytorch/issues/56297). So here a group stays until the rank has ended.
    """

    @classmethod
    def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
        init_process_group, new_group = dist.init_process_group, dist.new_group
        groups: list[Any] = []

        def init_together(*group_args: Any, **group_kwargs: Any) -> None:
            init_process_group(*group_args, **group_kwargs)
            groups.append(dist.group.WORLD)
            dist.barrier()

        def new_group_to_keep(*group_args: Any, **group_kwargs: Any) -> Any:
            groups.append(new_group(*group_args, **group_kwargs))
            return groups[-1]

        dist.init_process_group, dist.new_group = init_together, new_group_to_keep
        super()._run(rank, *args, **kwargs)
