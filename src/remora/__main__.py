"""`python -m remora`: the same as the command `remora`."""

from __future__ import annotations

import sys

from remora.command.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
