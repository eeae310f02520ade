"""The name of `torch.distributed.rpc.rref_proxy`: a proxy made by hand, as `RRef.rpc_sync()` makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remora.rpc.constants import UNSET_RPC_TIMEOUT
from remora.rref.proxy import Proxy
from remora.rref.rref import RRef


class RRefProxy(Proxy):
    """Calls methods of the value by `rpc_sync`, `rpc_async` or `remote`, whichever function it is given."""

    __slots__ = ()

    def __init__(self, rref: RRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        super().__init__(rref, rpc_api, timeout)


__all__ = ["RRefProxy"]
