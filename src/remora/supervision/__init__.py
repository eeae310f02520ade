"""Starts the worker processes of a program on this host, restarts those that fail, and ends them all together.

    from remora.supervision import RestartPolicy, Supervisor

    if __name__ == "__main__":  # each child loads this file, too, to have what is defined in it
        with Supervisor(RestartPolicy("on-failure", limit=5)) as supervisor:
            for rank in range(4):
                supervisor.start(f"worker{rank}", main, rank)  # a function, or a command as a list of texts
            outcomes = supervisor.wait()

`python -m remora.launch` does the same from the command line.
"""

from __future__ import annotations

from remora.supervision.policy import RestartPolicy
from remora.supervision.supervisor import Outcome, Supervisor

__all__ = ["Outcome", "RestartPolicy", "Supervisor"]
