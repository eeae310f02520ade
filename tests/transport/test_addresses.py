"""Where a worker listens, how the place is written, and when it refuses to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.errors import AuthenticationError, RendezvousError
from remora.transport import addresses
from remora.transport.addresses import (
    Address,
    advertised_host,
    check_exposure,
    choose_bind_host,
    host_and_port,
    host_identity,
    interface_address,
    is_loopback,
    is_own_address,
    parse_ports,
    reachable_host,
    split_host_and_port,
)

SECRET = b"0123456789abcdef"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names and their addresses, instead of asking whoever answers for this host. Addresses stand for themselves."""
    known: dict[str, list[str]] = {"localhost": ["127.0.0.1", "::1"]}
    real = socket.getaddrinfo

    def resolve(host: str, port: None, **options: object) -> object:
        if host in known:
            return [entry for address in known[host] for entry in real(address, None, type=socket.SOCK_STREAM)]
        return real(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "this-host")
    return known


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses that this host has."""
    mine = {"127.0.0.1", "::1"}
    monkeypatch.setattr(addresses, "_can_bind", lambda address: address in mine)
    return mine


# --- writing an address down ---


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://10.0.0.1:4000", Address("tcp", "10.0.0.1", 4000)),
        ("tcp://[::1]:4000", Address("tcp", "::1", 4000)),
        ("tcp://[fe80::1%eth0]:1", Address("tcp", "fe80::1%eth0", 1)),
        ("tcp://host-1.example:0", Address("tcp", "host-1.example", 0)),
        ("unix://@remora-abc", Address("unix", path="@remora-abc")),
        ("unix:///run/user/1/x.sock", Address("unix", path="/run/user/1/x.sock")),
        ("inproc://abc", Address("inproc", path="abc")),
    ],
)
def test_an_address_reads_as_it_writes(text: str, address: Address) -> None:
    assert str(address) == text
    assert Address.parse(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "tcp://", "tcp://host", "tcp://host:", "tcp://:80", "tcp://host:65536", "tcp://host:x", "tcp://::1:80",
     "tcp://[::1]", "tcp://[::1:80", "tcp://h:80/path", "tcp://u@h:80", "unix://", "unix://@", "unix://relative", "inproc://",
     "http://h:80", "h:80"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Not a"):
        Address.parse(text)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address_survives(ip: object, port: int) -> None:
    assert split_host_and_port(host_and_port(str(ip), port)) == (str(ip), port)


# --- ports ---


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ("29600-29650", range(29600, 29651)),
        ("29600", range(29600, 29601)),
        (29600, range(29600, 29601)),
        (" 7 - 9 ", range(7, 10)),
        ("65535", range(65535, 65536)),
        (0, range(1)),
        ("0", range(1)),
    ],
)
def test_ports(ports: str | int, expected: range) -> None:
    assert parse_ports(ports) == expected


@pytest.mark.parametrize("ports", ["", "x", "5-", "-5", "9-7", "0-9", "65536", "1-65536", "1-2-3", -1, "\u0661"])
def test_what_is_no_port_is_refused(ports: str | int) -> None:
    with pytest.raises(ValueError, match="29600-29650"):
        parse_ports(ports)


def test_any_port_will_do_if_none_is_told() -> None:
    assert parse_ports(None) == range(1)


# --- who shares this host ---


def test_processes_of_this_host_have_one_identity() -> None:
    program = "from remora.transport.addresses import host_identity; print(host_identity())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == host_identity()


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces")
def test_another_network_namespace_is_another_host() -> None:
    program = "from remora.transport.addresses import host_identity; print(host_identity())"
    command = ["unshare", "--net", sys.executable, "-c", program]
    other = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if other.returncode:
        pytest.skip(f"cannot make a network namespace here: {other.stderr.strip()}")
    assert other.stdout.strip() != host_identity()
    assert other.stdout.partition("/")[0] == host_identity().partition("/")[0]


def test_elsewhere_the_identity_is_the_hosts_name_and_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", fail)
    assert host_identity().startswith(f"{socket.gethostname()}/")


# --- interfaces ---


def test_the_loopback_interface_has_the_loopback_address() -> None:
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    assert is_loopback(interface_address(name))


def test_an_unknown_interface_is_refused_with_those_that_exist() -> None:
    with pytest.raises(RendezvousError) as caught:
        interface_address("eth99")
    assert "'eth99'" in str(caught.value)
    assert all(name in str(caught.value) for _, name in socket.if_nameindex())


def test_an_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "tun7")])
    with pytest.raises(RendezvousError, match=r"no address.*REMORA_HOST"):
        interface_address("tun7")


TABLE = """\
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
fd000000000000000000000000000002 04 40 00 82     eth0
fe8000000000000000fc00fffe000003 05 40 20 80     eth1
"""


@pytest.mark.parametrize(("name", "address"), [("eth0", "fd00::2"), ("eth1", "fe80::fc:ff:fe00:3%eth1")])
def test_an_interface_may_have_ipv6_only(
    name: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "if_inet6").write_text(TABLE)
    monkeypatch.setattr("builtins.open", lambda path, real=open: real(tmp_path / os.path.basename(path)))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0"), (2, "eth1")])
    monkeypatch.setattr(addresses, "_ipv4_of", lambda name: None)
    assert interface_address(name) == address


# --- where to listen ---


def test_without_a_secret_it_is_loopback(names: dict[str, list[str]], own: set[str]) -> None:
    names["this-host"] = ["10.1.2.3"]
    own.add("10.1.2.3")
    env = {"GLOO_SOCKET_IFNAME": "eth99", "TP_SOCKET_IFNAME": "eth99"}  # hints for others, not orders to us
    assert choose_bind_host(None, None, env, secured=False) == "127.0.0.1"


def test_with_a_secret_it_is_the_address_of_the_host(names: dict[str, list[str]], own: set[str]) -> None:
    names["this-host"] = ["10.9.9.9", "10.1.2.3"]
    own.add("10.1.2.3")
    assert choose_bind_host(None, None, {}, secured=True) == "10.1.2.3"


@pytest.mark.parametrize("known", [None, "10.9.9.9"])
def test_a_name_that_leads_nowhere_means_loopback(
    known: str | None, names: dict[str, list[str]], own: set[str]
) -> None:
    if known:
        names["this-host"] = [known]
    assert choose_bind_host(None, None, {}, secured=True) == "127.0.0.1"


def test_a_name_that_means_loopback_yields_to_the_way_to_the_master(
    names: dict[str, list[str]], own: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names["this-host"] = ["127.0.1.1"]
    own.add("127.0.1.1")
    monkeypatch.setattr(addresses, "_address_toward", lambda host: "10.1.2.3")
    assert reachable_host() == "127.0.1.1"
    assert reachable_host("127.0.0.1") == "127.0.1.1"
    assert choose_bind_host(None, None, {}, secured=True, master_host="10.1.2.4") == "10.1.2.3"


def test_the_way_to_a_host_starts_at_one_of_our_addresses() -> None:
    assert addresses._address_toward("127.0.0.1") == "127.0.0.1"
    assert addresses._address_toward("not a host") is None


def test_order_of_what_is_told(names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "interface_address", lambda name: f"<{name}>")
    env = {"TP_SOCKET_IFNAME": "eth3", "GLOO_SOCKET_IFNAME": "eth4, eth5"}
    assert choose_bind_host("10.0.0.1", "eth1", env, secured=True) == "10.0.0.1"
    assert choose_bind_host(None, "eth1", env, secured=True) == "<eth1>"
    for answer, variable in zip(["<eth3>", "<eth4>"], list(env), strict=True):
        assert choose_bind_host(None, None, env, secured=True) == answer
        del env[variable]


def test_a_host_is_told_by_name_or_address(names: dict[str, list[str]]) -> None:
    names["box"] = ["fd00::1", "10.0.0.7"]
    assert choose_bind_host("box", None, {}, secured=False) == "10.0.0.7"
    assert choose_bind_host("[::1]", None, {}, secured=False) == "::1"
    assert choose_bind_host("0.0.0.0", None, {}, secured=False) == "0.0.0.0"
    with pytest.raises(RendezvousError, match="'nowhere'"):
        choose_bind_host("nowhere", None, {}, secured=False)


def test_all_interfaces_are_advertised_as_one_address(names: dict[str, list[str]], own: set[str]) -> None:
    names["this-host"] = ["10.1.2.3"]
    own.add("10.1.2.3")
    assert advertised_host("0.0.0.0") == advertised_host("::") == "10.1.2.3"
    assert advertised_host("10.7.7.7") == "10.7.7.7"


# --- what is loopback, what is ours ---


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback(host: str, names: dict[str, list[str]]) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "", "unknown", "fe80::1%lo", "mixed"])
def test_not_loopback(host: str, names: dict[str, list[str]]) -> None:
    names["mixed"] = ["127.0.0.1", "10.0.0.1"]
    assert not is_loopback(host)


def test_own_addresses_are_those_one_can_listen_on() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("203.0.113.77")
    assert not is_own_address("0.0.0.0")
    assert not is_own_address("")


# --- the refusal ---


@pytest.mark.parametrize(
    ("master", "bind", "reason"),
    [
        (None, "10.0.0.1", "'10.0.0.1', where other hosts can reach it"),
        ("127.0.0.1", "0.0.0.0", "'0.0.0.0', where other hosts can reach it"),
        ("127.0.0.1", "", "all interfaces"),
        ("10.0.0.9", "127.0.0.1", "meets on another host, '10.0.0.9'"),
        ("unknown-host", "127.0.0.1", "meets on another host, 'unknown-host'"),
    ],
)
def test_exposure_without_a_secret_is_refused_and_says_what_to_set(
    master: str | None, bind: str, reason: str, names: dict[str, list[str]], own: set[str]
) -> None:
    with pytest.raises(AuthenticationError) as caught:
        check_exposure(master, bind, None, False)
    for part in (reason, "REMORA_SECRET", "REMORA_SECRET_FILE", "insecure=True", "token_hex"):
        assert part in str(caught.value)
    check_exposure(master, bind, SECRET, False)
    check_exposure(master, bind, None, True)
    with pytest.raises(AuthenticationError):
        check_exposure(master, bind, b"", False)


@pytest.mark.parametrize("master", [None, "", "localhost", "::1", "10.1.2.3", "this-host"])
def test_a_group_of_this_host_needs_no_secret(master: str | None, names: dict[str, list[str]], own: set[str]) -> None:
    own.add("10.1.2.3")
    names["this-host"] = ["10.1.2.3"]
    check_exposure(master, "127.0.0.1", None, False)
