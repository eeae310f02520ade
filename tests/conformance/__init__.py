"""PyTorch's own RPC tests, from the installed wheel and unchanged, run against Remora.

    python -m tests.conformance [-k REGEX] [--cuda] [--repeat N] [--jobs N]

Which of them are not expected to pass, and why, is in `expected.toml`.
"""
