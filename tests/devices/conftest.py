from __future__ import annotations

from tests.devices.pretence import module

__all__ = ["module"]
