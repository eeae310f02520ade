"""A RemoteModule is called as if it were here, and refuses what it cannot do."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.nn.api.remote_module
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from remora import autograd, rpc
from remora.nn import RemoteModule
from remora.nn.api.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, _RemoteModule
from remora.optim import DistributedOptimizer
from remora.rpc import RRef
from remora.testing.world import World


class Scale(nn.Module):
    """Multiplies by a weight, twice as much while it is not in training."""

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.inner = nn.Linear(1, 1)

    def forward(self, tensor: Tensor, times: int = 1) -> Tensor:
        return tensor * self.weight * times * (1 if self.training else 2)


class Sum(nn.Module):
    """Adds up what it is given, under whatever name."""

    def forward(self, **tensors: Tensor) -> Tensor:
        return torch.stack(list(tensors.values())).sum()


class NotThatWay(nn.Module):
    """Cannot be called."""

    def forward(self, *args: Any) -> Tensor:
        raise ArithmeticError("not that way")


@pytest.fixture
def world() -> Iterator[World]:
    """Three workers; the test acts for the first."""
    with World(3) as made, made.acting(0):
        yield made


ONE = torch.ones(2)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")


# Calling.


@pytest.mark.parametrize(
    "method", ["__init__", "remote_parameters", "get_module_rref", "init_from_module_rref", "train", "eval"]
)
def test_it_is_used_like_that_of_torch(method: str) -> None:
    ours, theirs = (
        [(each.name, each.default) for each in inspect.signature(getattr(cls, method)).parameters.values()]
        for cls in (_RemoteModule, torch.distributed.nn.api.remote_module._RemoteModule)
    )
    assert ours == theirs


def test_it_is_called_in_every_way_a_module_is(world: World) -> None:
    module = RemoteModule("worker1", Scale, args=(3.0,))
    assert module(ONE).tolist() == [3.0, 3.0]
    assert module.forward(ONE, times=2).tolist() == [6.0, 6.0]
    assert module.forward_async(ONE, 3).wait().tolist() == [9.0, 9.0]


class Negated(RemoteModule):
    """Does something here with what comes back."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return -super().forward(*args, **kwargs)


def test_a_class_of_its_own_is_called_by_what_it_has_for_that(world: World) -> None:
    module = Negated("worker1", Scale)
    assert module(ONE).tolist() == module.forward(ONE).tolist() == [-2.0, -2.0]


def test_its_arguments_may_have_any_name(world: World) -> None:
    module = RemoteModule("worker1", Sum)
    words = dict.fromkeys(("rref", "moved_to", "args", "kwargs"), ONE)
    assert module(**words) == 8.0
    assert module.forward_async(**words).wait() == 8.0
    assert rpc.rpc_sync("worker2", _call_with, args=(module, words)) == 8.0


def _call_with(module: RemoteModule, words: dict[str, Tensor]) -> Tensor:
    return module.forward(**words)  # type: ignore[no-any-return]


def test_hooks_of_the_module_run_on_its_worker(world: World) -> None:
    module = RemoteModule("worker1", Scale)
    rpc.rpc_sync("worker1", _double_output, args=(module.get_module_rref(),))
    assert module(ONE).tolist() == [4.0, 4.0]


def _double_output(rref: RRef[nn.Module]) -> None:
    rref.local_value().register_forward_hook(lambda module, args, output: 2 * output)


def test_what_the_module_raises_is_raised_here(world: World) -> None:
    module = RemoteModule("worker1", NotThatWay)
    with pytest.raises(ArithmeticError, match="not that way"):
        module(ONE)
    with pytest.raises(ArithmeticError, match="not that way"):
        module.forward_async(ONE).wait()


def test_what_is_no_module_is_refused(world: World) -> None:
    module = RemoteModule("worker1", str)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"returns an instance of <class nn.Module>, but .* <class 'str'>"):
        module(ONE)


def test_it_trains(world: World) -> None:
    module = RemoteModule("worker1", Scale, kwargs={"weight": 4.0})
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(ONE).sum()])
        optimizer.step(context_id)
    assert module(ONE).tolist() == [3.0, 3.0]


# Where it is.


@pytest.mark.parametrize("place", ["worker2", "worker2/cpu", "rank:2", "rank:2/cpu"])
def test_its_place_is_given_by_name_or_rank(world: World, place: str) -> None:
    module = RemoteModule(place, Scale)
    assert module.module_rref.owner_name() == "worker2"
    assert module.device == "cpu"
    assert module.on == (2 if place.startswith("rank") else "worker2")
    assert not module.is_device_map_set
    assert "worker2" in repr(module) or "on=2" in repr(module)


@pytest.mark.parametrize("place", ["", "/", "/cpu", "worker1/cuda:0/cuda:1"])
def test_a_place_that_cannot_be_read_is_refused(world: World, place: str) -> None:
    with pytest.raises(ValueError, match="Could not parse remote_device"):
        RemoteModule(place, Scale)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("worker1/", "Device string must not be empty"),
        ("worker1/cpu2", "Invalid device string: 'cpu2'"),
        ("worker1/foo", "Expected one of .+ device type at start of device string"),
    ],
)
def test_a_device_that_does_not_exist_is_an_error_of_its_worker(world: World, place: str, text: str) -> None:
    module = RemoteModule(place, Scale)
    with pytest.raises(RuntimeError, match=text):
        module(ONE)


def test_an_unknown_worker_is_an_error_at_once(world: World) -> None:
    with pytest.raises(RuntimeError, match="nobody"):
        RemoteModule("nobody/cpu", Scale)


def test_tensors_go_to_the_device_of_the_module_and_results_come_back(world: World) -> None:
    module = RemoteModule("worker1/meta", Devices)
    devices, result = rpc.rpc_sync("worker1", _call_and_see, args=(module, {"deep": [ONE]}, ONE))
    assert devices == ["meta", "meta"]
    assert result == "meta"  # back to the CPU is not possible from there; see _call_and_see


class Devices(nn.Module):
    """Says where its arguments are."""

    def forward(self, tree: dict[str, list[Tensor]], tensor: Tensor) -> tuple[list[str], Tensor]:
        return [tree["deep"][0].device.type, tensor.device.type], tensor


def _call_and_see(module: RemoteModule, *args: Any) -> tuple[list[str], str]:
    """As with a device map, results stay where they are; on the owner itself that is possible."""
    module.is_device_map_set = True
    devices, tensor = RemoteModule.forward(module, *args)
    return devices, tensor.device.type


# Its parts.


def test_its_parameters_are_references(world: World) -> None:
    module = RemoteModule("worker1", Scale)
    assert [rref.to_here().shape for rref in module.remote_parameters()] == [(), (1, 1), (1,)]
    assert len(module.remote_parameters(recurse=False)) == 1
    assert all(rref.owner_name() == "worker1" for rref in module.remote_parameters())


def test_its_mode_is_set_where_it_is(world: World) -> None:
    module = RemoteModule("worker1", Scale)
    assert module.train(False) is module
    assert module(ONE).tolist() == [4.0, 4.0]
    assert module.train() is module
    assert module(ONE).tolist() == [2.0, 2.0]
    assert module.eval() is module
    assert module(ONE).tolist() == [4.0, 4.0]


def test_the_mode_of_a_module_it_is_part_of_is_its_own(world: World) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.remote = RemoteModule("worker1", Scale)

    outer = Outer()
    outer.eval()
    assert outer.remote(ONE).tolist() == [4.0, 4.0]


def test_what_it_cannot_do_is_refused(world: World) -> None:
    module: Any = RemoteModule("worker1", Scale)
    with pytest.raises(ValueError, match=r"``parameters`` not supported.*``remote_parameters``"):
        module.parameters()
    names = ("to", "cuda", "state_dict", "named_modules", "register_forward_hook", "zero_grad", "extra_repr")
    later = ("register_full_backward_pre_hook", "register_state_dict_pre_hook", "get_parameter", "to_empty", "compile")
    for name in (*names, *later):  # torch has had some of them only since RemoteModule was made
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)()


# From hand to hand.


def test_it_can_be_made_from_a_reference(world: World) -> None:
    first = RemoteModule("worker1", Scale)
    second = rpc.rpc_sync("worker2", RemoteModule.init_from_module_rref, args=("worker2", first.get_module_rref()))
    assert isinstance(second, RemoteModule)
    assert second.on == "worker2"  # as it was told; calls go to the owner all the same
    assert second(ONE).tolist() == [2.0, 2.0]


def test_it_can_be_sent_and_arrives_with_nothing_else(world: World) -> None:
    module = RemoteModule("worker1", Scale)
    module.note = "stays here"  # type: ignore[assignment]
    names, found = rpc.rpc_sync("worker2", _look_at, args=(module,))
    assert names == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    assert found == [[2.0, 2.0]] * 3


def _look_at(module: RemoteModule) -> tuple[list[str], list[list[float]]]:
    results = [module(ONE), module.forward(ONE), module.forward_async(ONE).wait()]
    return list(vars(module)), [result.tolist() for result in results]


def test_only_calls_can_pickle_it(world: World) -> None:
    module = RemoteModule("worker1", Scale)
    for attempt in (pickle.dumps, copy.deepcopy, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
            attempt(module)


def test_the_module_goes_with_the_last_that_refers_to_it(world: World) -> None:
    module = RemoteModule("worker1", Scale)
    rpc.rpc_sync("worker2", _look_at, args=(module,))
    gc.disable()  # no cycle may keep it
    try:
        del module
        world.wait_until(lambda: world[1].references.table.counts()["num_owner_rrefs"] == 0)
    finally:
        gc.enable()


# TorchScript.


@torch.jit.interface
class ScaleInterface:
    def forward(self, tensor: Tensor, times: int = 1) -> Tensor:  # type: ignore[empty-body]
        pass


def scripted_scale(weight: float) -> torch.jit.ScriptModule:
    made: torch.jit.ScriptModule = torch.jit.script(Scale(weight))
    return made


@torch.jit.script
def call_twice(module: ScaleInterface, tensor: Tensor) -> Tensor:
    return module.forward(module.forward(tensor, 1), 10)


def test_a_scripted_module_is_called_by_compiled_code_too(world: World) -> None:
    module = _RemoteModule("worker1", scripted_scale, (3.0,), _module_interface_cls=ScaleInterface)
    assert module(ONE, 2).tolist() == [6.0, 6.0]
    scripted = torch.jit.script(module)
    del module
    assert scripted(ONE).tolist() == [3.0, 3.0]
    assert scripted.forward_async(ONE, 5).wait().tolist() == [15.0, 15.0]
    assert call_twice(scripted, ONE).tolist() == [90.0, 90.0]


def test_errors_reach_compiled_code(world: World) -> None:
    module = torch.jit.script(_RemoteModule("worker1", NotThatWay, _module_interface_cls=ScaleInterface))
    with pytest.raises(Exception, match="not that way"):
        module(ONE)
    with pytest.raises(Exception, match="not that way"):
        module.forward_async(ONE).wait()


def test_gradients_flow_through_compiled_code(world: World) -> None:
    module = _RemoteModule("worker1", scripted_scale, (3.0,), _module_interface_cls=ScaleInterface)
    scripted, weight = torch.jit.script(module), module.remote_parameters()[0]
    with autograd.context() as context_id:
        autograd.backward(context_id, [call_twice(scripted, ONE).sum()])
        assert rpc.rpc_sync("worker1", _gradient_of, args=(weight, context_id)) == 2 * 2 * 3.0 * 10


def _gradient_of(weight: RRef[Tensor], context_id: int) -> float:
    return autograd.get_gradients(context_id)[weight.local_value()].item()


def test_a_module_with_an_interface_cannot_be_sent(world: World) -> None:
    module = _RemoteModule("worker1", scripted_scale, (3.0,), _module_interface_cls=ScaleInterface)
    with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
        torch.save(module, io.BytesIO())
    with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
        torch.save(torch.jit.script(module), io.BytesIO())
    sent = RemoteModule.init_from_module_rref("worker1", module.get_module_rref(), ScaleInterface)
    with pytest.raises(RuntimeError, match="Passing a script RemoteModule over RPC is not supported"):
        rpc.rpc_sync("worker2", _look_at, args=(sent,))


def test_without_an_interface_it_cannot_be_scripted(world: World) -> None:
    with pytest.raises(RuntimeError, match="with a module interface"):
        torch.jit.script(RemoteModule("worker1", Scale))


# Hooks and tracing.


class Scaled(nn.Module):
    """Has remote modules among its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = RemoteModule("worker1", Scale, args=(3.0,))
        self.second = RemoteModule("worker2", Scale, args=(5.0,))

    def forward(self, tensor: Tensor) -> Tensor:
        return self.second(self.first(tensor), times=2)  # type: ignore[no-any-return]


class LeavesRemoteModules(torch.fx.Tracer):
    """Does not look into them; nor can it."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, RemoteModule)


def test_fx_sees_each_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # fx wants the names of all modules. PyTorch refuses these two, so programs that trace do this meanwhile.
    monkeypatch.setattr(RemoteModule, "named_modules", nn.Module.named_modules)
    monkeypatch.setattr(RemoteModule, "named_children", nn.Module.named_children)
    model = Scaled()
    graph = LeavesRemoteModules().trace(model)
    assert [(node.op, node.target) for node in graph.nodes] == [
        ("placeholder", "tensor"),
        ("call_module", "first"),
        ("call_module", "second"),
        ("output", "output"),
    ]
    assert torch.fx.GraphModule(model, graph)(ONE).tolist() == model(ONE).tolist() == [30.0, 30.0]


def test_forward_hooks_run_here(world: World) -> None:
    """As with PyTorch, `nn.Module` takes them, and a RemoteModule by itself refuses them."""
    module, seen = RemoteModule("worker1", Scale), []
    before, after = partial(nn.Module.register_forward_pre_hook, module), partial(nn.Module.register_forward_hook, module)
    handles = [
        before(lambda module, args: (args[0] + 1, *args[1:])),
        before(lambda module, args, kwargs: (args, {"times": 3, **kwargs}), with_kwargs=True),
        after(lambda module, args, output: seen.append(output.tolist())),
        after(lambda module, args, kwargs, output: output - kwargs["times"], with_kwargs=True),
    ]
    assert module(ONE).tolist() == [9.0, 9.0]
    assert seen == [[12.0, 12.0]]
    assert module.forward(ONE).tolist() == [2.0, 2.0]
    for handle in handles:
        handle.remove()
    assert module(ONE).tolist() == [2.0, 2.0]


def test_a_hook_that_is_always_called_hears_of_failures(world: World) -> None:
    module, seen = RemoteModule("worker1", NotThatWay), []
    nn.Module.register_forward_hook(module, lambda *args: seen.append(len(args)), always_call=True)
    with pytest.raises(ArithmeticError, match="not that way"):
        module(ONE)
    assert seen == [3]


@pytest.mark.parametrize("arrived", [False, True])
def test_hooks_of_all_modules_run_for_a_remote_one(world: World, arrived: bool) -> None:
    module, seen = RemoteModule("worker1", Negate), []
    handles = [
        register_module_forward_pre_hook(lambda module, args: seen.append("before") if _is_remote(module) else None),
        register_module_forward_hook(lambda module, args, output: 10 * output if _is_remote(module) else None),
    ]
    try:
        result = rpc.rpc_sync("worker2", _call, args=(module,)) if arrived else module(ONE)
    finally:
        for handle in handles:
            handle.remove()
    assert result.tolist() == [-10.0, -10.0]
    assert seen == ["before"]


def _is_remote(module: nn.Module) -> bool:
    """The hooks are those of a process, and so of all workers in it: of the module on its own worker, too."""
    return isinstance(module, RemoteModule)


def _call(module: RemoteModule) -> Tensor:
    return module(ONE)  # type: ignore[no-any-return]


class Negate(nn.Module):
    """Does as it says."""

    def forward(self, tensor: Tensor) -> Tensor:
        return -tensor
