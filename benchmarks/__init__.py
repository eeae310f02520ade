"""Remora side by side with torch.distributed.rpc, in one run: `make bench`, or `python -m benchmarks --help`.

Both contestants get process groups of their own and take turns within each round, so that a busy machine is busy for
both. A benchmark is one file in `suite/` and one line in `suite/__init__.py`.
"""
