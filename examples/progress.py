"""What an example shows of its training: a bar that moves, the curve at the end, a verdict. Knows nothing of training.

With rich installed the bar moves; without, or where lines cannot move, a plain line now and then. With matplotlib the curve
is saved as a picture; without, a line says so.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

LINES = 10  # how many plain lines a training is worth
BLOCKS = "▁▂▃▄▅▆▇█"


class Show(Protocol):
    """Called after each step, with figures to show."""

    def __call__(self, step: int, **figures: float) -> None: ...


def options(description: str | None, steps: int, **more: Any) -> argparse.Namespace:
    """The options that all examples have, and their values; `more` are numbers that an example has besides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help=f"how long to train (default: {steps})")
    parser.add_argument("--seed", type=int, default=0, help="for the data and the first weights (default: 0)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="where to save the curve (default: beside the script)")
    for name, value in more.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"(default: {value})")
    return parser.parse_args()


@contextmanager
def progress(title: str, steps: int) -> Iterator[Show]:
    """A bar, or plain lines."""
    if importlib.util.find_spec("rich") is None:
        yield _plain(title, steps)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(highlight=False)
    if not console.is_terminal:
        yield _plain(title, steps)
        return
    columns = (
        SpinnerColumn(style="cyan"), TextColumn("{task.description}"), BarColumn(bar_width=30, complete_style="cyan"),
        TextColumn("{task.completed}/{task.total}"), TextColumn("[dim]{task.fields[figures]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=steps, figures="")
        yield lambda step, **figures: bar.update(task, completed=step, figures=_words(figures))


def _plain(title: str, steps: int) -> Show:
    shown = 0

    def show(step: int, **figures: float) -> None:
        nonlocal shown
        if step * LINES // steps > shown:
            shown = step * LINES // steps
            print(f"{title}  {step:>{len(str(steps))}}/{steps}  {_words(figures)}", flush=True)

    return show


def _words(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3g}" for name, value in figures.items())


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The curve in one line of text."""
    if not values:
        return ""
    width = min(width, len(values))
    chosen = [values[i * (len(values) - 1) // max(1, width - 1)] for i in range(width)]
    low, high = min(chosen), max(chosen)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in chosen)


def save_curve(path: Path, title: str, unit: str, **curves: Sequence[float]) -> None:
    """Save the curves in a picture, and say where."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed (pip install 'remora[examples]')")
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, label=name)
    axes.set(title=title, xlabel="step", ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"curve saved in {path}")


def verdict(well: bool, text: str) -> int:
    """Say whether it has learned; the exit code."""
    print(f"{'✓' if well else '✗'} {text}")
    return 0 if well else 1
