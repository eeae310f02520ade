"""Remora side by side with torch.distributed.rpc, and with Ray and Monarch where they are installed: `make bench`.

The contestants get process groups of their own and take turns within each round, so that a busy machine is busy for
all. A benchmark is one file in `suite/` and one line in `suite/__init__.py`; docs/performance.md says what they do.
"""
