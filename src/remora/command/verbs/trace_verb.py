"""`remora trace`: a timeline of what the workers do from now on."""

from __future__ import annotations

import argparse
import time

from remora.command.arguments import add_group, add_json, find_group, print_json, seconds
from remora.command.output import make_output
from remora.command.text import counted
from remora.observer.group_trace import GroupTrace
from remora.observer.trace import write_trace

NAME = "trace"
HELP = "record what all workers do for some seconds, as a timeline for Perfetto or chrome://tracing"
EXAMPLE = "remora trace --seconds 5 -o t.json      # then open t.json at ui.perfetto.dev"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    add_group(parser)
    add = parser.add_argument
    add("--seconds", type=seconds, default=5.0, metavar="TIME", help="how long: 500ms, 5s, 1m (5s)")
    add("-o", "--output", default="trace.json", metavar="FILE", help="where to write it (trace.json)")
    add("--torch", action="store_true", help="run torch's profiler on each worker, too, and merge its operators in")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Record, and write the file."""
    with find_group(options) as group:
        trace = GroupTrace(group, options.seconds, options.torch)
        try:
            time.sleep(options.seconds)
        except KeyboardInterrupt:
            pass  # enough: what there is is written
        timeline = trace.end()
    write_trace(options.output, timeline)
    slices = sum(entry["ph"] in "Xb" for entry in timeline["traceEvents"])
    lost = timeline["otherData"].get("events lost", {})
    if options.json:
        told = {"file": options.output, "slices": slices, "problems": trace.problems, "events lost": lost}
        print_json({**told, "clock corrections": timeline["otherData"]["clock corrections"]})
        return int(bool(trace.problems))
    output = make_output()
    output.line(f"{options.output}: {counted(slices, 'slice')}. Open it at ui.perfetto.dev or chrome://tracing.")
    for name, number in sorted(lost.items()):
        output.line(f"{name} made more calls than a trace keeps: {number:,} ends of calls are not in it.", "bad")
    for name, problem in sorted(trace.problems.items()):
        output.line(f"{name}: {problem}", "bad")
    return int(bool(trace.problems))
