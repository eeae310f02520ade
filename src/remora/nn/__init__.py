"""Modules that live on other workers."""

from __future__ import annotations

from remora.nn.api.remote_module import RemoteModule

__all__ = ["RemoteModule"]
