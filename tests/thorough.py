"""Whether tests run in full: `make test-long`, which sets REMORA_THOROUGH=1.

The short form guards every promise. The long one repeats more, draws more and other examples, and moves more bytes.
"""

from __future__ import annotations

import os

THOROUGH = os.environ.get("REMORA_THOROUGH", "0") not in ("", "0")
