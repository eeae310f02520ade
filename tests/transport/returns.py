"""What a borrower gives back, as a message would."""

from __future__ import annotations

from remora.transport.shm.borrower import Borrower


def returns(borrower: Borrower) -> list[int]:
    """Return the numbers of the loans that the borrower has done with since the last time."""
    unused = list(borrower.unused)
    numbers = borrower.ended(unused)
    borrower.note_returned(unused)
    return numbers
