from __future__ import annotations

from tests.devices.conftest import gpu, module

__all__ = ["gpu", "module"]
