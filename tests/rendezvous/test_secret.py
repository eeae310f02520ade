"""Where the secret comes from, and who can read the one that is made."""

from __future__ import annotations

import os
import stat
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from remora.errors import AuthenticationError
from remora.rendezvous import secret
from remora.rendezvous.secret import Secret, find_secret, loopback_secret

LONG = "0123456789abcdef"


@pytest.fixture
def runtime(tmp_path: Path) -> dict[str, str]:
    """An environment whose runtime directory is fresh and our own."""
    tmp_path.chmod(0o700)
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def made(runtime: dict[str, str]) -> Path:
    return Path(runtime["XDG_RUNTIME_DIR"]) / "remora" / "secret"


def test_the_first_place_that_has_one_counts(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(LONG + "-option-file\n")
    two.write_text(LONG + "-env-file\n")
    env = {"REMORA_SECRET": LONG + "-env", "REMORA_SECRET_FILE": str(two)}
    expected = [("-option", (LONG + "-option", str(one), env)), ("-option-file", (None, str(one), env))]
    expected += [("-env", (None, None, env)), ("-env-file", (None, None, {"REMORA_SECRET_FILE": str(two)}))]
    for suffix, arguments in expected:
        found = find_secret(*arguments)
        assert found is not None
        assert found.value == (LONG + suffix).encode()
    assert find_secret(None, None, {}) is None


def test_bytes_are_taken_as_they_are() -> None:
    found = find_secret(b"\n\x00" * 16, None, {})
    assert found is not None
    assert found.value == b"\n\x00" * 16


@pytest.mark.parametrize("value", ["", "short", b"fifteen bytes..", "   "])
def test_a_secret_that_could_be_guessed_is_refused_with_advice(value: str | bytes) -> None:
    with pytest.raises(AuthenticationError, match=r"too short.*at least 16.*secrets.token_hex"):
        find_secret(value, None, {})


def test_an_empty_variable_is_a_mistake_and_not_the_absence_of_a_secret() -> None:
    with pytest.raises(AuthenticationError, match="REMORA_SECRET: it is too short"):
        find_secret(None, None, {"REMORA_SECRET": ""})


def test_a_file_of_white_space_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "blank").write_text(" \n" * 50)
    with pytest.raises(AuthenticationError, match="too short with 0 bytes"):
        find_secret(None, str(tmp_path / "blank"), {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "missing")
    for arguments in ((None, path, {}), (None, None, {"REMORA_SECRET_FILE": path})):
        with pytest.raises(AuthenticationError, match="missing"):
            find_secret(*arguments)


def test_a_file_that_is_far_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    with pytest.raises(AuthenticationError, match="right file"):
        find_secret(None, str(tmp_path / "large"), {})


def test_the_value_does_not_show() -> None:
    shown = repr(Secret(LONG.encode(), "the options"))
    assert LONG not in shown
    assert "the options" in shown


def test_one_is_made_and_found_again(runtime: dict[str, str]) -> None:
    first = loopback_secret(runtime)
    assert len(first) == 64
    assert loopback_secret(runtime) == first
    assert stat.S_IMODE(made(runtime).stat().st_mode) == 0o600
    assert stat.S_IMODE(made(runtime).parent.stat().st_mode) == 0o700
    assert [each.name for each in made(runtime).parent.iterdir()] == ["secret"]


def test_without_a_runtime_directory_the_temporary_one_is_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)  # others may write there, as in /tmp
    value = loopback_secret({"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "missing")})
    assert (tmp_path / f"remora-{os.getuid()}" / "secret").read_bytes() == value


def test_another_users_runtime_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "_is_ours", lambda status: False)
    assert secret.user_directory({"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}).endswith(f"-{os.getuid()}")


def test_a_place_without_user_ids_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getuid")
    monkeypatch.setattr("getpass.getuser", lambda: "Ann Ä.\\x")
    value = loopback_secret({"TMPDIR": str(tmp_path)})
    assert (tmp_path / "remora-AnnÄx" / "secret").read_bytes() == value


def test_threads_that_start_at_once_agree(runtime: dict[str, str]) -> None:
    found: list[bytes] = []
    start = threading.Barrier(16)

    def go() -> None:
        start.wait()
        found.append(loopback_secret(runtime))

    threads = [threading.Thread(target=go) for _ in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert [each.name for each in made(runtime).parent.iterdir()] == ["secret"]


ASK = """
import sys
from remora.rendezvous.secret import loopback_secret
print("ready", flush=True)
sys.stdin.read()
print(loopback_secret().decode())
"""


def test_processes_that_start_at_once_agree(runtime: dict[str, str]) -> None:
    command = [sys.executable, "-c", ASK]
    environment = {**os.environ, **runtime}
    with ExitStack() as stack:
        running = [stack.enter_context(Popen(command, env=environment, stdin=PIPE, stdout=PIPE)) for _ in range(8)]
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for process in running:
            assert process.stdin is not None
            process.stdin.close()  # the signal to go
        answers = {process.stdout.read() for process in running if process.stdout}
    assert answers == {made(runtime).read_bytes() + b"\n"}


def test_losing_the_race_means_using_the_winners(runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = secret._publish
    monkeypatch.setattr(secret, "_publish", lambda name, folder: (real(name, folder), real(name, folder)))
    assert loopback_secret(runtime) == made(runtime).read_bytes()
    assert [each.name for each in made(runtime).parent.iterdir()] == ["secret"]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_use_is_refused(runtime: dict[str, str], mode: int) -> None:
    made(runtime).parent.mkdir()
    made(runtime).parent.chmod(mode)
    with pytest.raises(AuthenticationError, match=f"can be used by others .*{mode:o}.*REMORA_SECRET"):
        loopback_secret(runtime)


def test_a_file_that_others_can_read_is_refused(runtime: dict[str, str]) -> None:
    loopback_secret(runtime)
    made(runtime).chmod(0o640)
    with pytest.raises(AuthenticationError, match="secret can be used by others"):
        loopback_secret(runtime)


def test_what_belongs_to_another_user_is_refused(runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    loopback_secret(runtime)
    folder = str(made(runtime).parent)
    monkeypatch.setattr(secret, "user_directory", lambda env: folder)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(AuthenticationError, match=r"belongs to user \d+, and this is user 4711"):
        loopback_secret(runtime)


def test_a_link_in_place_of_the_directory_is_refused(runtime: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    made(runtime).parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuthenticationError, match="is a symbolic link"):
        loopback_secret(runtime)


def test_a_link_in_place_of_the_file_is_refused(runtime: dict[str, str], tmp_path: Path) -> None:
    made(runtime).parent.mkdir(mode=0o700)
    (tmp_path / "planted").write_text("f" * 64)
    (tmp_path / "planted").chmod(0o600)
    made(runtime).symlink_to(tmp_path / "planted")
    with pytest.raises(AuthenticationError, match="symbolic links"):
        loopback_secret(runtime)


def test_a_pipe_in_place_of_the_file_does_not_hang(runtime: dict[str, str]) -> None:
    made(runtime).parent.mkdir(mode=0o700)
    os.mkfifo(made(runtime), 0o600)
    with pytest.raises(AuthenticationError, match="not a plain file"):
        loopback_secret(runtime)


def test_a_damaged_file_is_refused(runtime: dict[str, str]) -> None:
    made(runtime).parent.mkdir(mode=0o700)
    made(runtime).touch(0o600)
    with pytest.raises(AuthenticationError, match="is damaged"):
        loopback_secret(runtime)


def test_a_file_in_place_of_the_directory_is_named(runtime: dict[str, str]) -> None:
    made(runtime).parent.touch()
    with pytest.raises(AuthenticationError, match="Not a directory"):
        loopback_secret(runtime)


@pytest.mark.parametrize(("call", "number"), [("mkdir", 30), ("open", 30), ("link", 1)])
def test_a_place_that_cannot_be_written_is_named(
    runtime: dict[str, str], monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(AuthenticationError, match=f"{os.strerror(number)}.*REMORA_SECRET"):
            loopback_secret(runtime)
    folder = made(runtime).parent
    assert not folder.exists() or not list(folder.iterdir())


def test_a_full_disk_leaves_no_half_written_secret(runtime: dict[str, str], full_disk: Path) -> None:
    full_disk.chmod(0o700)
    with pytest.raises(AuthenticationError, match="No space left on device"):
        loopback_secret({"XDG_RUNTIME_DIR": str(full_disk)})
    assert not list((full_disk / "remora").iterdir())


@pytest.mark.skipif(os.name == "nt", reason="no such modes")
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o664])
def test_a_secret_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef")
    path.chmod(mode)
    for file, variables in ((str(path), {}), (None, {"REMORA_SECRET_FILE": str(path)})):
        with pytest.raises(AuthenticationError, match=rf"other users can write .*{mode:04o}.* chmod 600"):
            find_secret(None, file, variables)
    path.chmod(0o644)
    assert find_secret(None, str(path), {}) is not None


@pytest.mark.skipif(os.name == "nt", reason="no such users")
def test_a_secret_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef")
    path.chmod(0o600)
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(AuthenticationError, match="belongs to user"):
        find_secret(None, str(path), {})
