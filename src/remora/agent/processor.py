"""How long a thread has waited for a processor: ready to run, while others ran. Linux tells; elsewhere nobody knows."""

from __future__ import annotations


def waited(thread: int) -> float:
    """Seconds that a thread of this process (by its native id) was ready to run and did not; 0 if that is not known."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb", 0) as file:
            return int(file.read(100).split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
