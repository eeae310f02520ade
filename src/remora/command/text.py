"""Times, sizes and names as a terminal shows them. What workers say of themselves is never trusted: see `clean`."""

from __future__ import annotations

import re
import unicodedata

_UNPRINTABLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, formats (bidi overrides among them), separators
_PLAIN = re.compile(r"[ -~]*")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def clean(text: str) -> str:
    """Without anything that a terminal would obey: escape sequences, line ends, overrides of direction."""
    if _PLAIN.fullmatch(text):
        return text
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) in _UNPRINTABLE else c for c in text)


def duration(seconds: float | None) -> str:
    """Such as 12.3 s, 4 m 05 s, 3 d 4 h; nothing for None."""
    if seconds is None:
        return ""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else "1.0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def size(count: float | None) -> str:
    """Such as 512 B, 1.5 MiB; nothing for None."""
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.95 or (unit == "B" and abs(count) < 1024):
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds_of(text: str) -> float:
    """The reverse of `duration` for one number: 5, 5s, 200ms, 3m, 1h. ValueError says what is wrong."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a time: {text!r}. Give seconds, or 200ms, 5s, 3m, 1h.")
    return float(match[1]) * _UNITS[match[2] or "s"]


def counted(count: int, noun: str, plural: str = "") -> str:
    """Such as 1 call, 3 calls."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
