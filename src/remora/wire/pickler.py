"""Turns values to bytes and back: pickle, with tensors beside it, and code by value where a name would not do. No I/O.

`pack` runs the C pickler with a dispatch table of ours. Only when something in the value cannot go by name (see
`code_by_value`), it runs cloudpickle's instead. The table is the costly part, so it is kept for the next message.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit._script import RecursiveScriptModule
from torch.jit._trace import TopLevelTracedModule, TracedModule

from remora.options import FAST_PATHS
from remora.wire import callables, code_by_value, fast_pickle, large_bytes
from remora.wire.pack_scope import BEGINNING, Mark, PackScope, UnpackScope, current_unpack_scope, incoming
from remora.wire.packed import DEVICE_BUFFERS, Packed
from remora.wire.raw_memory import buffer_of
from remora.wire.tensors import reducers
from remora.wire.tensors.storages import ROOM, Outgoing, Reduced

__all__ = ["PackScope", "Packed", "UnpackScope", "current_unpack_scope", "pack", "register_reducer", "unpack"]

_PROTOCOL = 5
_inference: Callable[[], bool] = torch._C.is_inference_mode_enabled
_NOT_BY_NAME = (pickle.PicklingError, AttributeError, TypeError)  # what pickle raises for code it has no name for
_MISSING_CODE = (
    "Default RPC pickler does not serialize function code. "
    "Ensure that UDFs are defined on both caller and callee modules."
)
_SEND_MODULE = " To send its code along, call cloudpickle.register_pickle_by_value(module) on the sender."
_MOVE_TO_TOP = (
    " If both workers run the same main program, its code goes by name, and this name is not defined there (yet): define it"
    ' at the top of the program, before init_rpc and not under `if __name__ == "__main__"`. Else this is an object that'
    " pickle knows by its name alone: define it in a module that both workers have."
)

Reduce = Callable[[Any, PackScope], Reduced]

_OURS: dict[type, Callable[[Outgoing, Any], Reduced | str]] = {
    torch.Tensor: reducers.reduce_tensor,
    torch.nn.Parameter: reducers.reduce_parameter,
    torch.UntypedStorage: reducers.reduce_storage,
    torch.TypedStorage: reducers.reduce_typed_storage,
    FakeTensor: reducers.refuse_fake,
    BuiltinFunctionType: callables.reduce_builtin,
    OpOverload: callables.reduce_overload,
    OpOverloadPacket: callables.reduce_operator,
    RecursiveScriptModule: callables.reduce_script_module,
    TopLevelTracedModule: callables.reduce_script_module,
    TracedModule: callables.reduce_script_module,
}
_registered: dict[type, Reduce] = {}
_pickled = fast_pickle.pickled if FAST_PATHS.stencils else fast_pickle.pickled_if_plain
_idle: list[_Packer] = []  # one for each thread that ever packed at the same time as the others


def register_reducer(cls: type, reduce: Reduce) -> bool:
    """Let `reduce(obj, scope)` reduce instances of exactly `cls` from now on. False if another one does already."""
    return cls not in _OURS and _registered.setdefault(cls, reduce) is reduce


def pack(value: object, scope: PackScope | None = None, *, by_value: bool = True, simple: bool = True) -> Packed:
    """Turn `value` into bytes. A value that cannot be pickled raises pickle's error, after everything was undone.

    Code goes by name if the receiver has it, else by value, unless `by_value` is false. `simple`: try `pack_simply` first; a
    caller that has tried it passes False.
    """
    if scope is None:
        scope = PackScope()
    if simple:
        packed = pack_simply(value, scope.route is None or not scope.route.moves_cpu, scope)
        if packed is not None:
            return packed
    mark = scope.mark()
    try:
        packer = _idle.pop()
    except IndexError:
        packer = _Packer()
    try:
        packed = packer.pack(value, scope)
    except _NOT_BY_NAME as error:
        packer.roll_back(mark, error)
        if not by_value:
            raise
        return _pack_by_value(value, scope, mark, error)
    except BaseException as error:
        packer.roll_back(mark, error)
        raise
    names_may_differ = not scope.shares_main or code_by_value.registered
    if by_value and names_may_differ and code_by_value.may_name(packed.body, scope.shares_main):
        scope.roll_back(mark)
        return _pack_by_value(value, scope, mark)
    return packed


def pack_simply(value: object, tensors: bool, scope: PackScope | None = None) -> Packed | None:
    """Do what `pack` does for most small calls: plain values, and with `tensors` also tensors that stay on the CPU. None if
    something in it needs more than that. Raises NeedsScope if it needs only a scope (see `fast_pickle`)."""
    large: list[fast_pickle.Large] = []
    mark = BEGINNING if scope is None else scope.mark()
    try:
        if tensors:
            body = _pickled(value, large, None if scope is None else scope.links, scope)
        else:
            body = fast_pickle.pickled_if_plain(value)
    except _NOT_BY_NAME:
        body = None  # a function without a name: as any other value
    except BaseException as error:
        if scope is not None:
            scope.roll_back(mark, error)
        raise
    if body is None or (len(body) >= fast_pickle.LARGE_BYTES and fast_pickle.has_large_text(value)):
        if scope is not None:
            scope.roll_back(mark)  # all of it is found again
        return None
    if not large:
        return Packed(body, [], [], [])
    packed = Packed(body, [], [], [])
    for tensor, storage, view in large:
        packed.buffers.append(view)
        packed.keepalive.append(storage)
        packed.tensors.append(tensor)
    return packed


def _pack_by_value(value: object, scope: PackScope, mark: Mark, plain: Exception | None = None) -> Packed:
    packer = _Packer(by_value=True, shares_main=scope.shares_main)
    try:
        return packer.pack(value, scope)
    except BaseException as error:
        packer.roll_back(mark, error)
        if plain is None:
            raise
        if (type(error), str(error)) == (type(plain), str(plain)):
            raise plain from None
        raise error from plain  # code by value was not the only obstacle; this is the other
    finally:
        # The pickler knows the packer, and an error knows this frame: the value would wait for the garbage collector.
        del packer.pickler, plain


def unpack(
    body: bytes | bytearray | memoryview, buffers: Sequence[torch.UntypedStorage] = (), scope: UnpackScope | None = None
) -> Any:
    """Rebuild the value. Its tensors take over the memory of `buffers`. Most messages have neither buffers nor scope."""
    try:
        if _inference():
            # Autograd could never use tensors that are made in inference mode. A received value must not depend on the
            # thread that happens to unpickle it.
            with torch.inference_mode(False):
                return _unpack_with(body, buffers, scope)
        if scope is None and not buffers:
            return pickle.loads(body)
        return _unpack_with(body, buffers, scope)
    except (AttributeError, ModuleNotFoundError) as error:
        _explain(error)
        raise


def _unpack_with(
    body: bytes | bytearray | memoryview, buffers: Sequence[torch.UntypedStorage], scope: UnpackScope | None
) -> Any:
    outer = incoming.frame
    incoming.frame = (buffers, scope)
    try:
        if buffers:
            return pickle.loads(body, buffers=map(buffer_of, reversed(buffers)))
        return pickle.loads(body)
    finally:
        incoming.frame = outer


def _explain(error: AttributeError | ModuleNotFoundError) -> None:
    missing = isinstance(error, ModuleNotFoundError)
    if missing or str(error).startswith("Can't get attribute"):
        in_main = any(f"<module '{name}'" in str(error) for name in code_by_value.MAIN_NAMES)
        advice = _SEND_MODULE if missing else _MOVE_TO_TOP if in_main else ""
        text = f"{error}. {_MISSING_CODE}{advice}"
        error.args = (text,)
        if isinstance(error, ModuleNotFoundError):
            error.msg = text


class _Packer:
    """A pickler and the lists it writes to. Used by one `pack` at a time, then kept for the next."""

    __slots__ = ("by_value", "chunks", "copied", "known", "out", "pickler", "shares_main", "table", "write")

    def __init__(self, by_value: bool = False, shares_main: bool = True) -> None:
        self.by_value = by_value
        self.shares_main = shares_main
        self.out = Outgoing()
        self.chunks: list[bytes] = []
        self.write = self.chunks.append  # this object is the pickler's file
        self.table: dict[type, Callable[[Any], Any]] = {}
        self._learn()
        self.pickler = self._new_pickler()

    def pack(self, value: object, scope: PackScope) -> Packed:
        """Write one value. After an exception the caller rolls back and does not use this packer again."""
        if self.known != len(_registered) or self.copied != copyreg.dispatch_table:
            self._learn()
        out, chunks = self.out, self.chunks
        out.scope = scope
        out.room = ROOM
        out.moves_cpu = scope.route is not None and scope.route.moves_cpu
        self.pickler.dump(value)
        if len(chunks) > 1:
            large_bytes.set_beside(chunks, out)
        device_buffers = out.device_buffers
        manifest = None if device_buffers is None else out.unload()
        if manifest is not None:
            chunks.append(manifest)
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if out.buffers or out.foreign or out.tensors:
            # Pickle takes foreign buffers one after the other and ours are found by index: foreign ones from the end.
            packed = Packed(body, out.buffers + out.foreign[::-1], out.keepalive, out.tensors, out.untracked)
            packed.loading = out.loading
            if out.loading is not None and out.loading.download.small:
                packed.complete()
            out.reset()
        else:
            packed = Packed(body, [], [], [])
            out.seen.clear()
            out.device_buffers = out.loading = None
        if device_buffers is not None:
            packed.flags = DEVICE_BUFFERS
            packed.lent = device_buffers.lent
            packed.undo = scope.undo
        if not self.by_value:
            self._retire()
        return packed

    def _retire(self) -> None:
        self.out.scope = None
        # Not `clear_memo`: it drops objects while they are still in the table, and a garbage collection that runs in one of
        # their destructors, on any thread, follows a dangling pointer. To drop the whole pickler is safe.
        self.pickler = self._new_pickler()
        _idle.append(self)

    def roll_back(self, mark: Mark, error: BaseException) -> None:
        """Undo what the reducers did, and drop what they were given."""
        if self.out.scope is not None:
            self.out.scope.roll_back(mark, error)
        self.pickler = self._new_pickler()
        self.out.reset()

    def _new_pickler(self) -> pickle.Pickler:
        if self.by_value:
            return _ByValuePickler(self, self.table, self._take_buffer)
        pickler = pickle.Pickler(self, _PROTOCOL, buffer_callback=self._take_buffer)
        pickler.dispatch_table = self.table
        return pickler

    def _learn(self) -> None:
        """Bind all reducers to this packer. The pickler holds the table itself, so it is changed in place."""
        self.copied, self.known = copyreg.dispatch_table.copy(), len(_registered)
        if not self.by_value:  # cloudpickle has a table of its own, which knows copyreg's
            self.table.update(self.copied)
        self.table.update({cls: MethodType(reduce, self.out) for cls, reduce in _OURS.items()})
        self.table.update({cls: _with_scope(reduce, self.out) for cls, reduce in _registered.items()})

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer of a type that is not ours from pickle. Return True to put it into the pickle."""
        raw = buffer.raw()
        if self.out.fits(raw.nbytes):
            return True
        self.out.foreign.append(raw)
        self.out.untracked = self.out.untracked or type(raw.obj) is not bytes
        return False


def _with_scope(reduce: Reduce, out: Outgoing) -> Callable[[Any], Reduced]:
    def bound(obj: Any) -> Reduced:
        assert out.scope is not None, "something is being packed"
        return reduce(obj, out.scope)

    return bound


def _reduce_file(file: io.TextIOWrapper) -> Any:
    """Refuse text files: cloudpickle sends their content, and a StringIO arrives. It refuses other files itself."""
    if file in (sys.stdout, sys.stderr):  # what functions and handlers name by these names
        return cloudpickle.Pickler.dispatch_table[io.TextIOWrapper](file)
    raise TypeError(f"cannot pickle {type(file).__module__ + '.' + type(file).__qualname__!r} object")


_FILES: dict[type, Callable[[Any], Any]] = {io.TextIOWrapper: _reduce_file}


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler with our table, and only for code that does not go by name."""

    def __init__(
        self, file: _Packer, table: dict[type, Any], buffer_callback: Callable[[pickle.PickleBuffer], bool]
    ) -> None:
        self.dispatch_table = ChainMap(table, _FILES, cloudpickle.Pickler.dispatch_table)  # read once, by the next line
        self.shares_main = file.shares_main
        super().__init__(file, _PROTOCOL, buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, FunctionType | type):
            if isinstance(obj, code_by_value.CACHED) and code_by_value.goes_by_value(obj.__module__, self.shares_main):
                return code_by_value.reduce_cached(obj)
            if type(obj) in code_by_value.TYPE_NAMES and code_by_value.goes_by_value(obj.__module__, self.shares_main):
                return code_by_value.reduce_type_name(obj)
            return super().reducer_override(obj)
        by_value = code_by_value.goes_by_value(obj.__module__, self.shares_main)
        if not by_value and code_by_value.has_name(obj):
            return NotImplemented
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and by_value:  # in a process that multiprocessing started, main has another name
            reduced = code_by_value.reduce_named(self, obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == 6:
            return code_by_value.keep_home(obj, reduced)
        return reduced
