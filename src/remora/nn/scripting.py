"""Remote modules inside TorchScript: a module that compiles, and that leaves the call itself to Python.

TorchScript's own RPC operators know torch's agent and no other. But compiled code may call Python, if it knows the types,
and a module interface gives them. So this module writes the source of a module whose methods have the interface's signature.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import typing
from typing import Any, Protocol, cast

import torch
from torch.jit.annotations import try_ann_to_type

_NAMES: dict[str, Any] = {
    "torch": torch, "Tensor": torch.Tensor, "Future": torch.jit.Future,
    **{name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Tuple", "Union")},
}  # fmt: skip

_SOURCE = """\
class {name}(torch.nn.Module):
    target: Future[Any]

    @torch.jit.ignore
    def _call(self, {parameters}) -> {result}:
        return self.target.value().forward({names})

    @torch.jit.ignore
    def _call_async(self, {parameters}) -> Future[{result}]:
        return for_torchscript(self.target.value().forward_async({names}))

    def forward(self, {parameters}) -> {result}:
        return self._call({names})

    @torch.jit.export
    def forward_async(self, {parameters}) -> Future[{result}]:
        return self._call_async({names})

    @torch.jit.export
    def __getstate__(self) -> int:
        assert False, "Passing a script RemoteModule over RPC is not supported. Others can only be pickled when using RPC."
        return 0

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        pass
"""


class Target(Protocol):
    """The object that a compiled module calls."""

    def forward(self, *args: Any) -> Any: ...

    def forward_async(self, *args: Any) -> torch.futures.Future[Any]: ...


def scriptable(interface: Any, target: Target) -> torch.nn.Module:
    """Return a module for `torch.jit.script` that has the `forward` of the interface, and leaves the call to the target."""
    module: Any = _module_class(interface)()
    module.target = torch.futures.Future()  # of Python objects, a compiled module keeps futures and no others
    module.target.set_result(target)
    return cast(torch.nn.Module, module)


def _for_torchscript(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """Return a future whose error compiled code sees, too: it reads C++ state, which only a failing callback can set."""
    done: torch.futures.Future[None] = torch.futures.Future()
    outcome: torch.futures.Future[Any] = done.then(lambda _: future.value())
    future.add_done_callback(lambda _: done.set_result(None))
    return outcome


@functools.cache
def _module_class(interface: Any) -> type[torch.nn.Module]:
    signature = inspect.signature(interface.forward, eval_str=True)
    given = list(signature.parameters.values())[1:]
    source = _SOURCE.format(
        name=f"Remote{interface.__name__}",
        parameters=", ".join(_declaration(each) for each in given),
        names=", ".join(each.name for each in given),
        result=_type_name(signature.return_annotation),
    )
    file = f"<remote module for {interface.__module__}.{interface.__qualname__} {id(interface)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # TorchScript reads the source
    names = {**_NAMES, "for_torchscript": _for_torchscript}
    exec(compile(source, file, "exec", dont_inherit=True), names)  # annotations are types, not text
    made: type[torch.nn.Module] = names[f"Remote{interface.__name__}"]
    return made


def _declaration(parameter: inspect.Parameter) -> str:
    text = f"{parameter.name}: {_type_name(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}"


def _type_name(annotation: Any) -> str:
    """Return the name of a type in TorchScript."""
    known = try_ann_to_type(annotation, None)  # type: ignore[no-untyped-call]
    if known is None:
        raise TypeError(f"TorchScript has no type for {annotation!r}")
    name: str = known.annotation_str
    return name
