"""PyTorch's test classes: where they are, which tests they hold, and how one becomes a test case. Runs none.

Import what is here after `remora.compat.install()` only.
"""

from __future__ import annotations

import importlib
import unittest
from dataclasses import dataclass
from typing import Any

_HOME = "torch.testing._internal.distributed"
_TENSORPIPE = f"{_HOME}.rpc.tensorpipe_rpc_agent_test_fixture:TensorPipeRpcAgentTestFixture"
_FAULTY = f"{_HOME}.rpc.faulty_rpc_agent_test_fixture:FaultyRpcAgentTestFixture"


@dataclass(frozen=True)
class Suite:
    """One class of tests: its name, the module it is in, the fixture that gives it an agent, which tests if not all, the
    class that starts its processes, and whether it is for machines with a GPU."""

    name: str
    module: str
    fixture: str = _TENSORPIPE
    only: tuple[str, ...] = ()
    ranks: str = "ForkedRanks"
    gpu: bool = False

    def tests(self) -> list[UpstreamTest]:
        """Its tests; ImportError says what Remora lacks."""
        names = self.only or unittest.defaultTestLoader.getTestCaseNames(self.cls())
        return [UpstreamTest(self, name) for name in names]

    def cls(self) -> Any:
        return _find(f"{self.module}:{self.name}")


@dataclass(frozen=True)
class UpstreamTest:
    """One test of a suite."""

    suite: Suite
    name: str

    def __str__(self) -> str:
        return f"{self.suite.name}.{self.name}"

    def case(self) -> unittest.TestCase:
        """Itself, ready to run. To be called in the process that runs it: a fixture may register a backend."""
        bases = (self.suite.cls(), _find(self.suite.fixture), _find(f"tests.conformance.ranks:{self.suite.ranks}"))
        made: unittest.TestCase = type(self.suite.name, bases, {"__module__": __name__})(self.name)
        return made


def _find(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)


SUITES = [
    Suite("RpcTest", f"{_HOME}.rpc.rpc_test"),
    Suite("TensorPipeAgentRpcTest", f"{_HOME}.rpc.rpc_test"),
    # The one test among those for GPUs (below) that needs none.
    Suite("TensorPipeAgentCudaRpcTest", f"{_HOME}.rpc.rpc_test", only=("test_device_map_cpu",)),
    Suite("FaultyAgentRpcTest", f"{_HOME}.rpc.faulty_agent_rpc_test", _FAULTY),
    Suite("ParameterServerTest", f"{_HOME}.rpc.examples.parameter_server_test"),
    Suite("ReinforcementLearningRpcTest", f"{_HOME}.rpc.examples.reinforcement_learning_rpc_test"),
    Suite("DistAutogradTest", f"{_HOME}.rpc.dist_autograd_test"),
    Suite("TensorPipeAgentDistAutogradTest", f"{_HOME}.rpc.dist_autograd_test"),
    Suite("FaultyAgentDistAutogradTest", f"{_HOME}.rpc.dist_autograd_test", _FAULTY),
    Suite("DistOptimizerTest", f"{_HOME}.rpc.dist_optimizer_test"),
    Suite("RemoteModuleTest", f"{_HOME}.nn.api.remote_module_test"),
    Suite("ThreeWorkersRemoteModuleTest", f"{_HOME}.nn.api.remote_module_test"),
    Suite("DdpUnderDistAutogradTest", f"{_HOME}.ddp_under_dist_autograd_test", ranks="RanksWithGroup"),
    Suite("DdpComparisonTest", f"{_HOME}.ddp_under_dist_autograd_test", ranks="RanksWithGroup"),
    Suite("JitRpcTest", f"{_HOME}.rpc.jit.rpc_test"),
    Suite("JitDistAutogradTest", f"{_HOME}.rpc.jit.dist_autograd_test"),
    Suite("JitFaultyAgentRpcTest", f"{_HOME}.rpc.jit.rpc_test_faulty", _FAULTY),
    Suite("CudaRpcTest", f"{_HOME}.rpc.rpc_test", gpu=True),
    Suite("TensorPipeAgentCudaRpcTest", f"{_HOME}.rpc.rpc_test", gpu=True),
    Suite("CudaDistAutogradTest", f"{_HOME}.rpc.dist_autograd_test", gpu=True),
    Suite("TensorPipeCudaDistAutogradTest", f"{_HOME}.rpc.dist_autograd_test", gpu=True),
    Suite("CudaRemoteModuleTest", f"{_HOME}.nn.api.remote_module_test", gpu=True),
    Suite("CudaDdpComparisonTest", f"{_HOME}.ddp_under_dist_autograd_test", ranks="RanksWithGroup", gpu=True),
]
