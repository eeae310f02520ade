"""Who is measured: a module with the names of torch.distributed.rpc, and how it spells each transport."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

Transport = Literal["default", "tcp"]


@dataclass(frozen=True)
class Contestant:
    """One implementation of RPC."""

    name: str
    module: str
    options_class: str
    transports_option: str
    tcp: str

    def options(self, init_method: str, transport: Transport) -> Any:
        """Options with which it uses this transport; the default is whatever it chooses by itself."""
        options_class = getattr(importlib.import_module(self.module), self.options_class)
        return options_class(init_method=init_method, **self._transports(transport))

    def _transports(self, transport: Transport) -> dict[str, list[str]]:
        return {self.transports_option: [self.tcp]} if transport == "tcp" else {}

    def why_absent(self) -> str | None:
        """None when it can be measured here."""
        try:
            rpc = importlib.import_module(self.module)
        except ImportError as error:
            return str(error)
        return None if hasattr(rpc, "init_rpc") else f"{self.module} has no init_rpc"


REMORA = Contestant("remora", "remora.rpc", "RemoraRpcBackendOptions", "transports", "tcp")
TORCH = Contestant("torch", "torch.distributed.rpc", "TensorPipeRpcBackendOptions", "_transports", "uv")
CONTESTANTS = (REMORA, TORCH)
MACHINE = Contestant("machine", "", "", "", "")  # nobody: what the machine does without RPC
