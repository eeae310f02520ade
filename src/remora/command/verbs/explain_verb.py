"""`remora explain`: what a dump, or a folder of dumps, says is wrong."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from remora.command.arguments import add_json, print_json, seconds
from remora.command.output import make_output
from remora.observer.dump import read_dump
from remora.observer.explain import STUCK, explain, summary

NAME = "explain"
HELP = "say what is wrong in a dump, the culprit first"
EXAMPLE = "remora explain d.zip\n  remora explain /tmp/dumps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("dump", metavar="FILE|FOLDER", help="what `remora dump` wrote, or the workers themselves")
    parser.add_argument("--group", metavar="NAME", help="the group, where a folder has several (its first letters)")
    parser.add_argument(
        "--older", type=seconds, default=STUCK, metavar="TIME", help="calls at least so old are worth a word (5s)"
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Read and explain. 1 if something is wrong."""
    dump = read_dump(options.dump, options.group)
    findings = explain(dump, options.older)
    if options.json:
        print_json({
            "group": dump.group.group,
            "summary": summary(dump),
            "findings": [{**asdict(each), "kind": each.kind.name.lower().replace("_", " ")} for each in findings],
        })  # fmt: skip
        return int(bool(findings))
    output = make_output()
    for line in summary(dump):
        output.line(line, "faint")
    output.line()
    if not findings:
        output.line("Nothing is wrong in it, as far as can be seen.", "good")
    for n, finding in enumerate(findings, start=1):
        output.line(f"{n}. {finding.text}", "bad" if n == 1 else "head")
        for line in finding.details:
            output.line(f"     {line}")
    return int(bool(findings))
