"""Turns exceptions to bytes and back: what a function raised on the callee is raised on the caller. No calls, no futures.

What arrives is an exception of the original type that is also a `RemoteError`: an instance of a class made on the fly
from both, with the remote traceback chained as its cause. Where that cannot be, because the exception does not pickle
or its class is missing here, a `RemoteError` says what happened in words; so it does for SystemExit and its like.
"""

from __future__ import annotations

import pickle
import traceback
import types
import weakref
from typing import Any, TypeVar

from remora.errors import RemoteError
from remora.vocabulary.messages import Failure
from remora.wire.message_codec import decode, to_value
from remora.wire.pack_scope import PackScope
from remora.wire.pickler import pack, unpack
from remora.wire.raw_memory import from_bytes

_TEXT_LIMIT = 1 << 16
_WORDS = "_remora_words"  # the text of an exception whose constructor was not run, if it is to be torch's
speaks_like_torch = False  # programs written for torch's RPC look for torch's text in place of an exception's own
_OUR_ATTRIBUTES = {_WORDS, "worker", "remote_traceback"}

_E = TypeVar("_E", bound=Exception)

# How to build an exception, as its own `__reduce__` says: a callable, its arguments, and the state to set after.
_Recipe = tuple[Any, tuple[Any, ...], Any]


class RemoteTraceback(Exception):
    """The cause of an exception that came from another worker: the stack there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}" if self.args else ""


class _EndsProcesses(Exception):
    """The original is not an `Exception`: SystemExit, KeyboardInterrupt and the like are not raised here."""


def describe(exc: BaseException, worker: str, stack: str | None = None, shares_main: bool = True) -> Failure:
    """Return the failure that tells the caller of `exc`, raised on `worker`. `stack`: where, if `exc` has no traceback.
    `shares_main`: see `PackScope`. Never raises."""
    summary = _shorten(_printable(exc))
    text = f"On {worker}:\n{summary}\n{_shorten(stack_of(exc) if stack is None else stack)}"
    recipe, left_out = _packed_recipe(exc, shares_main)
    if left_out:
        text += f"\n(Not sent, because they cannot be pickled: {', '.join(left_out)}.)"
    return Failure(worker, summary, text, _notes(exc), recipe)


def dump(failure: Failure) -> bytes:
    """The failure as the body of an EXCEPTION."""
    return pickle.dumps(to_value(failure), 5)


def load(data: bytes | bytearray | memoryview, sender: str = "another worker") -> Exception:
    """The exception to raise on the caller, of the original type if possible. ProtocolError if the data is no body of an
    EXCEPTION."""
    failure = decode(Failure, data, sender)
    if failure.recipe is None:
        return _in_words(failure, "it cannot be pickled")
    body, buffers = failure.recipe
    try:
        recipe = unpack(body, [from_bytes(buffer) for buffer in buffers])
        return _revive(recipe, failure.worker, failure.traceback, failure.notes)
    except _EndsProcesses:
        text = (
            f"{failure.summary} was raised on {failure.worker}. It arrives as a RemoteError, because it would end "
            f"this process; that worker goes on.\n{failure.traceback}"
        )
        return _signed(RemoteError(text), failure.worker, failure.traceback, failure.notes)
    except Exception as error:
        return _in_words(failure, _printable(error))


# On the callee.


def _printable(exc: BaseException) -> str:
    try:
        return repr(exc)
    except Exception:
        return f"{type(exc).__qualname__}(<its repr raised>)"


def _notes(exc: BaseException) -> tuple[str, ...]:
    try:
        return tuple(note for note in getattr(exc, "__notes__", ()) if type(note) is str)
    except Exception:
        return ()


def stack_of(exc: BaseException) -> str:
    """Return the printed traceback, with the causes."""
    try:
        return "".join(traceback.format_exception(exc))
    except Exception as error:
        return f"(Its traceback could not be printed: {type(error).__qualname__})"


def _shorten(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half} characters left out] ...\n{text[-half:]}"


def _packed_recipe(exc: BaseException, shares_main: bool) -> tuple[tuple[bytes, tuple[bytes, ...]] | None, list[str]]:
    """Return the packed recipe without the attributes that cannot be packed, and the names of those."""
    try:
        build, args, state = _recipe(exc)
        try:
            return _packed((build, args, state), shares_main), []
        except Exception:
            kept = {name: value for name, value in state.items() if _can_pack(value, shares_main)}
            return _packed((build, args, kept), shares_main), sorted(state.keys() - kept.keys())
    except Exception:
        return None, []


def _recipe(exc: BaseException) -> _Recipe:
    """Return the recipe to build `exc` again, with the class it had before it ever travelled."""
    reduced = exc.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or len(reduced) > 3:
        raise TypeError(f"{type(exc).__qualname__} reduces to something that is not a callable with arguments")
    build, args, state = (*reduced, None)[:3]
    if build is _revive:  # it came from another worker
        recipe: _Recipe = args[0]
        return recipe
    return build, args, state


def _packed(recipe: _Recipe, shares_main: bool) -> tuple[bytes, tuple[bytes, ...]]:
    packed = pack(recipe, PackScope(shares_main=shares_main))
    return packed.body, tuple(bytes(buffer) for buffer in packed.buffers)


def _can_pack(value: object, shares_main: bool) -> bool:
    try:
        pack(value, PackScope(shares_main=shares_main))
    except Exception:
        return False
    return True


# On the caller.


def _in_words(failure: Failure, why: str) -> RemoteError:
    error = RemoteError(_words(why, failure.summary, failure.traceback))
    return _signed(error, failure.worker, failure.traceback, failure.notes)


def _words(why: str, summary: str, text: str) -> str:
    return f"Failed to create original exception type: {why}. Original exception on remote side was {summary}\n{text}"


def _revive(recipe: _Recipe, worker: str, text: str, notes: tuple[str, ...]) -> Exception:
    """Follow a recipe, with a class that is also a `RemoteError` in place of the original one."""
    build, args, state = recipe
    if isinstance(build, type):
        error: Any = _construct(_remote_type(build), args, text)
    else:
        error = build(*args)
        error.__class__ = _remote_type(type(error))
    if state and type(error).__setstate__ is BaseException.__setstate__:
        for name, value in state.items():
            _set(error, name, value)
    elif state is not None:
        error.__setstate__(state)
    revived: Exception = _signed(error, worker, text, notes)
    return revived


def _construct(cls: Any, args: tuple[Any, ...], text: str) -> Any:
    try:
        return cls(*args)
    except TypeError as refused:
        # The constructor wants other arguments than it passed on to `args`. Its work is in the state, which comes next.
        error = cls.__new__(cls, *args)
        if speaks_like_torch:
            _set(error, _WORDS, _words(str(refused), f"{cls.__qualname__}{args!r}", text))
        return error


def _signed(error: _E, worker: str, text: str, notes: tuple[str, ...]) -> _E:
    """Add the worker, the traceback and the notes to `error`."""
    _set(error, "worker", worker)
    _set(error, "remote_traceback", text)
    error.__cause__ = RemoteTraceback(text)
    if notes:
        _set(error, "__notes__", list(notes))
    return error


_set = object.__setattr__  # an exception may be a frozen dataclass


_remote_types: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _remote_type(original: type) -> Any:
    """Return the subclass of `original` that is also a `RemoteError`; the first call makes it."""
    if issubclass(original, RemoteError):
        return original
    if not issubclass(original, Exception):
        raise _EndsProcesses
    known = _remote_types.get(original)
    made = known() if known is not None else None
    if made is None:
        made = _make_remote_type(original)
        _remote_types[original] = weakref.ref(made)  # weak, or classes sent by value would stay for ever
    return made


def _make_remote_type(original: type) -> Any:
    # RemoteError is itself a RuntimeError and an Exception, and a class cannot come before its own subclass.
    bases = (RemoteError,) if issubclass(RemoteError, original) else (original, RemoteError)
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__str__": lambda self: self.__dict__.get(_WORDS) or _own_text(super(made, self), self),
        "__reduce_ex__": lambda self, protocol: _reduce_remote(
            self, super(made, self).__reduce_ex__(protocol), original
        ),
    }
    made: Any = types.new_class(original.__name__, bases, exec_body=lambda body: body.update(namespace))
    return made


def _own_text(original: Any, error: BaseException) -> str:
    try:
        return str(original.__str__())
    except Exception:  # it needs what was not sent
        return BaseException.__str__(error)


def _reduce_remote(error: Any, reduced: tuple[Any, ...], original: type) -> tuple[Any, ...]:
    """Reduce such an exception to a recipe for the original, so that copying and sending it on work."""
    build, args, state = (*reduced, None)[:3]
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name not in _OUR_ATTRIBUTES}
    recipe = (original if build is type(error) else build, args, state)
    return _revive, (recipe, error.worker, error.remote_traceback, _notes(error))
