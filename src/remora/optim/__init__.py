"""Optimizers for parameters that live on other workers."""

from __future__ import annotations

from remora.optim.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
