"""Workers that call each other and share references while they are killed, frozen, restarted and cut off.

    python -m tests.chaos --seconds 60 --seed 7

`life` is what goes on inside a worker, `fate` what is done to it from outside, `ledger` what was written down and whether
it adds up: every call ended, none without an outcome, none ran twice, and what was said not to have run has not.
"""
