"""`python -m tests.switches`: what turns each fast path off, one to a line, as `make paths` wants it."""

from remora.options import FastPaths

if __name__ == "__main__":
    for variable, off in FastPaths.turned_off().values():
        print(f"{variable}={off}")
