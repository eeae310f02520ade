"""`remora doctor`: checks this host, or the path between two hosts. Says what is well, and what to do about what is not."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable

from remora.command.arguments import add_json, print_json
from remora.command.checks import Finding, State, findings
from remora.command.host_path import Measured, PathError, doctor_key, listen, measure
from remora.command.output import Output, make_output
from remora.command.text import duration, size
from remora.options import Settings
from remora.transport.addresses import Address, choose_bind_host, parse_ports, split_host_and_port

NAME = "doctor"
HELP = "check this host, or the path to another one"
EXAMPLE = """\
remora doctor
  remora doctor --listen 29700        (on one host: host1)
  remora doctor --with host1:29700    (on the other)"""

FAR_CLOCK = 0.1  # seconds
MANY_MESSAGES = 0.005  # seconds of a round trip that calls feel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpu", action="store_true", help="also look at the GPUs, which imports torch")
    add("--listen", nargs="?", const="0", metavar="PORT", help="wait for another host to measure the path to this one")
    add(
        "--with",
        dest="peer",
        metavar="HOST:PORT",
        help="measure the path to a host where `remora doctor --listen` runs",
    )
    add("--once", action="store_true", help="with --listen: end when one has come and gone")
    add("--host", metavar="ADDRESS", help="with --listen: where (REMORA_HOST, or what other hosts would be told)")
    add(
        "--secret-file",
        metavar="FILE",
        help="the group's secret; else REMORA_SECRET, REMORA_SECRET_FILE or this user's",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    output = make_output()
    if options.listen is not None:
        settings = Settings(host=options.host).with_environment()
        host = choose_bind_host(settings.host, settings.interface, secured=True)
        listen(host, parse_ports(options.listen), doctor_key(options.secret_file), output.line, options.once)
        return 0
    found = list(_path(options)) if options.peer else list(findings(options.gpu))
    if options.json:
        print_json([dataclasses.asdict(each) for each in found])
    else:
        show(found, output)
    return int(any(each.state is State.FAIL for each in found))


def show(found: Iterable[Finding], output: Output) -> None:
    """One line for each, and one more for what to do."""
    styles = {State.OK: "", State.WARN: "head", State.FAIL: "bad"}
    for each in found:
        output.line(f"{each.state:<5} {each.name:<14} {each.text}", styles[each.state])
        if each.advice:
            output.line(f"{'':<21}{each.advice}", "faint")


def _path(options: argparse.Namespace) -> Iterable[Finding]:
    host, port = split_host_and_port(options.peer)
    try:
        return _told(measure(Address("tcp", host=host, port=port), doctor_key(options.secret_file), 5.0))
    except PathError as error:
        return [Finding("path", State.FAIL, str(error))]


def _told(measured: Measured) -> list[Finding]:
    slow = measured.round_trip > MANY_MESSAGES
    trip = f"{duration(measured.round_trip)}; one of a hundred takes {duration(measured.slowest)} or more"
    clock = f"the other host's is {duration(abs(measured.clock))} {'ahead' if measured.clock > 0 else 'behind'}"
    far = abs(measured.clock) > FAR_CLOCK
    return [
        Finding("path", State.OK, f"connected in {duration(measured.connect)}; both ends have the same secret"),
        Finding(
            "round trip",
            State.WARN if slow else State.OK,
            trip,
            "put workers that call often on one host" if slow else "",
        ),
        Finding("throughput", State.OK, f"{size(measured.there)}/s there, {size(measured.back)}/s back"),
        Finding("clock", State.WARN if far else State.OK, clock, "synchronize the clocks" if far else ""),
    ]
