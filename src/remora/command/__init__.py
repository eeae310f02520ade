"""The command `remora`: shows what the workers do, starts them, checks hosts.

One file per verb, each with `NAME`, `HELP`, `EXAMPLE`, `add_arguments(parser)` and `run(options)`, which returns the exit
code:

    0   fine
    1   something is wrong: a cycle was found, a worker is silent or dead
    2   wrong usage, or nothing was found

A verb imports what is large (torch, textual, a web server) in `run`, so that no other verb waits for it.
"""
