"""Finds the group's secret: in the options, a file, the environment, or one made for this user on this host.

A process that knows the secret can run any code on the workers of the group, so the secret is never printed, logged or
written to the store. `remora.protocol.handshake` uses it.
"""

from __future__ import annotations

import getpass
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from remora.errors import AuthenticationError
from remora.options import secret_of_environment

MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 64 * 1024
_MADE_BYTES = 32
_FILE_NAME = "secret"
_MAKE_ONE = 'Make one with: python -c "import secrets; print(secrets.token_hex(32))"'
_OR_ELSE = "Correct that, or set a secret for the workers (REMORA_SECRET, REMORA_SECRET_FILE or the options)."


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret and where it was found. The value is left out of `repr`, so that it does not end up in a log."""

    value: bytes = field(repr=False)
    origin: str


def find_secret(
    options_secret: str | bytes | None, secret_file: str | None, env: Mapping[str, str] = os.environ
) -> Secret | None:
    """Return the configured secret: from the options, a file, the environment or a file named there, in this order."""
    if options_secret is not None:
        return _checked(options_secret, "the secret given in the options")
    if secret_file is not None:
        return _from_file(secret_file, f"the secret in {secret_file!r}")
    secret, path = secret_of_environment(env)
    if secret is not None:
        return _checked(secret, "the secret in REMORA_SECRET")
    if path is not None:
        return _from_file(path, f"the secret in {path!r} (see REMORA_SECRET_FILE)")
    return None


def _from_file(path: str, origin: str) -> Secret:
    try:
        with open(path, "rb") as file:
            _check_writers(os.fstat(file.fileno()), path, origin)
            content = file.read(_MAX_SECRET_BYTES + 1)
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"Cannot read {origin}: {error}.") from error
    if len(content) > _MAX_SECRET_BYTES:
        raise AuthenticationError(f"Refusing {origin}: more than {_MAX_SECRET_BYTES} bytes. Is it the right file?")
    return _checked(content.strip(), origin)  # editors and `echo` end a file with a newline, which is not part of it


def _check_writers(status: os.stat_result, path: str, origin: str) -> None:
    """Raise if another user can write the file: that user would choose the secret, and could run code as this one. (Others
    may be able to read it: files that container platforms mount are like that.)"""
    if os.name == "nt":
        return
    if status.st_uid not in (os.getuid(), os.geteuid(), 0):
        raise AuthenticationError(
            f"Refusing {origin}: the file belongs to user {status.st_uid}, who can change it; this is user {os.getuid()}. "
            "Copy it to a file of this user's."
        )
    if status.st_mode & 0o022:
        raise AuthenticationError(
            f"Refusing {origin}: other users can write the file (its mode is {stat.S_IMODE(status.st_mode):04o}). If its "
            f"content is what you wrote, run: chmod 600 {path!r}"
        )


def _checked(value: str | bytes, origin: str) -> Secret:
    secret = value.encode() if isinstance(value, str) else bytes(value)
    if len(secret) < MIN_SECRET_BYTES:
        # A short secret can be guessed offline, from one recorded handshake.
        raise AuthenticationError(
            f"Refusing {origin}: it is too short with {len(secret)} bytes; it needs at least {MIN_SECRET_BYTES}, and "
            f"random ones. {_MAKE_ONE}"
        )
    return Secret(secret, origin)


def loopback_secret(env: Mapping[str, str] = os.environ) -> bytes:
    """Return the secret of this user on this host; the first call makes it. Only this user can read it."""
    directory = user_directory(env)
    path = os.path.join(directory, _FILE_NAME)
    try:
        with private_directory(directory) as folder:
            name = _FILE_NAME if folder is not None else path
            while (content := _read(name, folder, path)) is None:
                _publish(name, folder)
            return content
    except OSError as error:
        fault = f"{path}: {error.strerror or error}"
        raise AuthenticationError(f"Cannot keep a secret for this host in {fault}. {_OR_ELSE}") from error


def user_directory(env: Mapping[str, str] = os.environ) -> str:
    """Return where this user's workers on this host keep what only they may read. It need not exist."""
    runtime = env.get("XDG_RUNTIME_DIR", "")
    # After su or sudo it may name the directory of another user, who could not use what we leave there.
    if runtime and os.path.isdir(runtime) and _is_ours(os.stat(runtime)):
        return os.path.join(runtime, "remora")
    temporary = env.get("TMPDIR", "")
    return os.path.join(temporary if os.path.isdir(temporary) else tempfile.gettempdir(), f"remora-{_user()}")


def _user() -> str:
    if hasattr(os, "getuid"):
        return str(os.getuid())
    return "".join(c for c in getpass.getuser() if c.isalnum()) or "user"


def _is_ours(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


@contextmanager
def private_directory(path: str) -> Iterator[int | None]:
    """Make a directory if it is not there; yield its descriptor, which was checked and cannot be swapped for another. None
    where there are no descriptors of directories."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.name == "nt":  # no descriptors of directories there; the temporary directory is the user's own
        yield None
        return
    if os.path.islink(path):
        raise _unsafe(path, "is a symbolic link")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_private(os.fstat(folder), path)
        yield folder
    finally:
        os.close(folder)


def _check_private(status: os.stat_result, path: str) -> None:
    if os.name == "nt":
        return
    if not _is_ours(status):
        raise _unsafe(path, f"belongs to user {status.st_uid}, and this is user {os.getuid()}")
    if status.st_mode & 0o077:
        raise _unsafe(path, f"can be used by others (its mode is {stat.S_IMODE(status.st_mode):04o})")


def _unsafe(path: str, fault: str) -> AuthenticationError:
    return AuthenticationError(f"Refusing the secret kept for the workers on this host: {path} {fault}. {_OR_ELSE}")


def _read(name: str, folder: int | None, path: str) -> bytes | None:
    try:
        file = os.open(name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), dir_fd=folder)
    except FileNotFoundError:
        return None
    with open(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _unsafe(path, "is not a plain file")
        _check_private(status, path)
        content = opened.read(_MAX_SECRET_BYTES).strip()
    if len(content) < 2 * _MADE_BYTES:
        raise _unsafe(path, "is damaged")
    return content


def _publish(name: str, folder: int | None) -> None:
    """Put a new secret in place atomically, unless another process was faster: then that secret counts."""
    draft = f"{name}.{os.getpid()}.{secrets.token_hex(8)}"
    try:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        with open(file, "wb") as opened:
            opened.write(secrets.token_hex(_MADE_BYTES).encode())
        if os.name == "nt":
            os.rename(draft, name)  # fails there if the name is taken; elsewhere it would replace the file
        else:
            os.link(draft, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        pass
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
