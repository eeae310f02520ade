from __future__ import annotations

from tests.devices.pretence import module
from tests.gpu.conftest import gpu

__all__ = ["gpu", "module"]
