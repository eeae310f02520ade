"""The plots of a run: one PNG for each question, drawn from whatever of it was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks import bars, wording
from benchmarks.contestants import CONTESTANTS, MACHINE, REMORA, TORCH
from benchmarks.measure import Unit
from benchmarks.results import Results, Row
from benchmarks.suite.echo import size_of, words

COLOURS = {"remora": "#0f766e", "torch": "#ee4c2c", "ray": "#2563eb", "monarch": "#9333ea", "machine": "#64748b"}
TITLES = {
    "remora": "Remora",
    "torch": "torch.distributed.rpc",
    "ray": "Ray",
    "monarch": "Monarch",
}
NAMES = [who.name for who in CONTESTANTS]
PANEL = (5.6, 4.2)  # inches
FEW = 4  # so many sizes get a tick each

Panel = Callable[[Results, Axes], bool]  # says whether there was anything to draw


def draw(results: Results, folder: Path) -> Iterator[Path]:
    """Draw what can be drawn; yields each file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, panels) in FIGURES.items():
        figure = _figure(results, title, panels)
        if figure is not None:
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=130)
            yield path


def _figure(results: Results, title: str, panels: Sequence[Panel]) -> Figure | None:
    filled = [panel for panel in panels if panel(results, Figure().add_subplot())]
    if not filled:
        return None
    columns = len(filled) if len(filled) < 4 else 2
    rows = -(-len(filled) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    for index, panel in enumerate(filled):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.grid(True, which="major", color="#e2e8f0", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        panel(results, axes)
    _add_legend(figure)
    return figure


def _add_legend(figure: Figure) -> None:
    """One for all panels, unless they have their own."""
    if any(axes.get_legend() for axes in figure.axes):
        return
    named = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named), fontsize=9, frameon=False)


def distribution(benchmark: str, kind: str, title: str) -> Panel:
    """How many of the calls took no longer than that; the floor is the median of a ping-pong over the same sockets."""

    def panel(results: Results, axes: Axes) -> bool:
        row = results.rows.get((benchmark, "p50"))
        if row is None or not row.samples:
            return False
        for who in _present(row.samples):
            seconds = sorted(row.samples[who])
            shares = [(index + 1) / len(seconds) * 100 for index in range(len(seconds))]
            axes.plot(seconds, shares, color=COLOURS[who], linewidth=2, label=_with_tail(results, benchmark, who))
        for way, style in [("polling", ":"), ("blocking", "--")]:
            floor = results.median("ping-pong", f"{kind}, {way} p50", MACHINE.name)
            if floor is not None:
                label = f"bare ping-pong, {way}: {_time(floor)}"
                axes.axvline(floor, color=COLOURS["machine"], linestyle=style, label=label)
        for share in (50, 99):
            axes.axhline(share, color="#cbd5e1", linewidth=0.8)
        _title(axes, title, "time of a call", "calls that took no longer (%)")
        _by_time(axes, "x")
        axes.set_xlim(right=_percentile_of_all(row, 99.8))
        axes.set_yticks([0, 25, 50, 75, 99])
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
        return True

    return panel


def _with_tail(results: Results, benchmark: str, who: str) -> str:
    median, tail = (results.median(benchmark, metric, who) for metric in ("p50", "p99"))
    return f"{TITLES[who]}: p50 {_time(median or 0)}, p99 {_time(tail or 0)}"


def _percentile_of_all(row: Row, percent: float) -> float:
    """Where to cut the axis: a handful of slow calls would squeeze all others."""
    return 1.5 * max(sorted(row.samples[who])[int(len(row.samples[who]) * percent / 100)] for who in row.samples)


def latency_by_size(results: Results, axes: Axes) -> bool:
    """Median solid, p99 thin."""
    for percent, style in [(50, {"linewidth": 2.0, "marker": "o"}), (99, {"linewidth": 1.0, "alpha": 0.6})]:
        rows = {size_of(row.metric): row for row in results.of("echo") if row.metric.endswith(f"p{percent}")}
        for who, sizes, values in _series(rows):
            label = TITLES[who] if percent == 50 else None
            axes.plot(sizes, values, color=COLOURS[who], label=label, markersize=4, **style)  # type: ignore[arg-type]
    if not axes.lines:
        return False
    _title(axes, "Time of an echo, there and back", "size of the tensor", "time (thick: p50, thin: p99)")
    _by_size(axes, [])
    _by_time(axes, "y")
    return True


def bandwidth(benchmark: str, title: str, floor: tuple[str, str, str], scale: str) -> Panel:
    """Bytes of both directions by time; the floor is told by its words, and a benchmark and the beginning of its metrics."""
    words_of_floor, benchmark_of_floor, prefix = floor

    def panel(results: Results, axes: Axes) -> bool:
        rows = _by_size_of(results, benchmark, "")
        for who, sizes, values in _series(rows):
            values = [value / 1e9 for value in values]
            axes.plot(sizes, values, color=COLOURS[who], linewidth=2, marker="o", markersize=4, label=TITLES[who])
        if not axes.lines:
            return False
        for _, sizes, values in _series(_by_size_of(results, benchmark_of_floor, prefix), [MACHINE.name]):
            values = [value / 1e9 for value in values]
            axes.plot(sizes, values, color=COLOURS["machine"], linestyle="--", linewidth=1.5, label=words_of_floor)
        _title(axes, title, "size of the tensor", "GB/s, both directions")
        _by_size(axes, sorted(rows))
        if scale == "log":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        return True

    return panel


def _by_size_of(results: Results, benchmark: str, prefix: str) -> dict[int, Row]:
    found = [row for row in results.of(benchmark) if row.unit is Unit.BYTES_PER_SECOND and row.metric.startswith(prefix)]
    return {size_of(row.metric.removeprefix(prefix)): row for row in found}


def throughput(benchmark: str, title: str, across: str) -> Panel:
    """Calls a second, by a number."""

    def panel(results: Results, axes: Axes) -> bool:
        rows = {int(row.metric): row for row in results.of(benchmark)}
        for who, numbers, values in _series(rows):
            axes.plot(numbers, values, color=COLOURS[who], linewidth=2, marker="o", markersize=4, label=TITLES[who])
        if not rows:
            return False
        _title(axes, title, across, "calls a second")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(rows), [f"{number}" for number in sorted(rows)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_ylim(bottom=0)
        return True

    return panel


def ratios(results: Results, axes: Axes) -> bool:
    """How many times better than torch; a tick where the bar is."""
    beats = [bar for bar in bars.BARS if isinstance(bar, bars.Beats) and bar.judge(results)][::-1]
    for index, bar in enumerate(beats):
        ratio = results.rows[bar.benchmark, bar.metric].ratio(REMORA.name, TORCH.name) or 0.0
        axes.barh(index, ratio, color=COLOURS["remora"], height=0.6)
        axes.plot([bar.times] * 2, [index - 0.4, index + 0.4], color="#0f172a", linewidth=2)
        axes.annotate(f" {wording.of_ratio(ratio)}", (max(ratio, bar.times), index), va="center", fontsize=8)
    if not beats:
        return False
    axes.axvline(1, color=COLOURS["torch"], linewidth=1.5, label="torch.distributed.rpc")
    axes.plot([], [], color="#0f172a", linewidth=2, label="wanted")
    axes.set_yticks(range(len(beats)), [bar.name for bar in beats], fontsize=9)
    axes.margins(x=0.12)
    axes.set_xlabel("times the speed of torch.distributed.rpc")
    return True


def bars_of(benchmark: str, title: str, metrics: Sequence[str] | None = None) -> Panel:
    """Groups of bars, one group for each metric."""

    def panel(results: Results, axes: Axes) -> bool:
        rows = [row for row in results.of(benchmark) if row.metric in (metrics or [row.metric])]
        names = _present({who for row in rows for who in row.values})
        if not names:
            return False
        for position, who in enumerate(names):
            places = [index + (position - (len(names) - 1) / 2) * 0.8 / len(names) for index in range(len(rows))]
            heights = [row.median(who) or 0.0 for row in rows]
            axes.bar(places, heights, width=0.76 / len(names), color=COLOURS[who], label=TITLES[who])
            for place, height in zip(places, heights, strict=True):
                text = wording.of_value(height, rows[0].unit)
                axes.annotate(text, (place, max(height, 0)), ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(rows)), [row.metric for row in rows], fontsize=8)
        axes.set_title(title, fontsize=11, loc="left")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: wording.of_value(value, rows[0].unit)))
        axes.margins(y=0.12)
        return True

    return panel


def _series(
    rows: dict[int, Row], names: Sequence[str] = tuple(NAMES)
) -> Iterator[tuple[str, list[int], list[float]]]:
    """For each contestant, the medians along the numbers."""
    for who in names:
        points = [(number, median) for number, row in sorted(rows.items()) if (median := row.median(who)) is not None]
        if points:
            yield who, [number for number, _ in points], [value for _, value in points]


def _present(names: dict[str, list[float]] | set[str]) -> list[str]:
    return [who for who in NAMES if who in names]


def _title(axes: Axes, title: str, across: str, upwards: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(across)
    axes.set_ylabel(upwards)


def _time(seconds: float) -> str:
    return wording.of_value(seconds, Unit.SECONDS)


def _by_time(axes: Axes, which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: _time(value)))


def _by_size(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log")
    if 0 < len(sizes) <= FEW:
        axes.set_xticks(sizes)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words(int(value)) if value >= 1 else ""))


FIGURES: dict[str, tuple[str, list[Panel]]] = {
    "ratios": ("Remora against torch.distributed.rpc", [ratios]),
    "latency": (
        "A call that does nothing",
        [distribution("noop", "Unix", "On one host, as it comes"), distribution("noop-tcp", "TCP", "Over TCP")],
    ),
    "bulk": (
        "Tensors there and back",
        [
            latency_by_size,
            bandwidth("echo", "Bandwidth on one host", ("warm memory copy", "memcpy", ""), "log"),
            bandwidth("echo-tcp", "Bandwidth over TCP loopback", ("raw socket", "socket-copy", "TCP "), "linear"),
        ],
    ),
    "throughput": (
        "Many calls at once",
        [
            throughput("concurrency", "One caller", "calls kept in flight"),
            throughput("callers", "Many callers, one callee", "callers, each with one call at a time"),
        ],
    ),
    "work": (
        "Larger pieces of work",
        [
            bars_of("nested", "Calls within calls, p50", ["a → b → a p50", "a → b → c p50"]),
            bars_of("training", "A training step"),
            bars_of("startup", "Start-up"),
        ],
    ),
    "costs": (
        "What it costs to be there",
        [
            bars_of("references", "100,000 references, memory for one", ["holder's memory", "owner's memory"]),
            bars_of("references", "100,000 references, time for one", ["make one", "drop one"]),
            bars_of("memory", "Memory held after many echoes of 16 MB"),
            bars_of("idle", "CPU of an idle worker"),
        ],
    ),
}
