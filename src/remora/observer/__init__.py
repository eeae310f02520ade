"""The view of a group from outside: the model of a snapshot, an observer's connection, and what follows from both.

Nothing here imports torch, so the command `remora` starts quickly. An observer is no member of the group. It proves the
group's secret, asks, and is answered in JSON.
"""
