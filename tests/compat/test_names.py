"""Every name that programs find in torch's modules is found in ours; what is left out on purpose is listed, with the reason.

The list only gets shorter: a name on it that has been added is taken off, and `MOST` says how long it may be.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
import typing
from collections.abc import Iterator

import pytest

import remora.autograd
from remora import rpc
from remora.compat import replacements
from remora.testing.world import World

PACKAGES = ["torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.optim", "torch.distributed.nn"]

# By reason: names below torch.distributed. What `rpc` offers may be had from its modules, and from torch's compiled ones,
# too: one line is enough for all of them.
LEFT_OUT = {
    "an entry into torch's compiled agent, which is not there": """
        rpc._cleanup_python_rpc_handler rpc._destroy_rref_context rpc._disable_jit_rref_pickle rpc._enable_jit_rref_pickle
        rpc._invoke_remote_builtin rpc._invoke_remote_python_udf rpc._invoke_remote_torchscript rpc._invoke_rpc_builtin
        rpc._invoke_rpc_python_udf rpc._invoke_rpc_torchscript
    """,
    "the profiler's compiled state; remora.rpc.profiler.spans brings the events of other workers": """
        rpc.RemoteProfilerManager rpc._set_profiler_node_id rpc._enable_server_process_global_profiler
        rpc._disable_server_process_global_profiler rpc.api._enable_rpc_profiler rpc.api._get_should_profile
        rpc.internal._start_record_function
    """,
    "left behind by a loop that makes methods of RRef": """
        rpc.method_factory rpc.new_method rpc.api.method rpc.api.method_name rpc.api.docstring
    """,
    "how PyTorch serves a call, or keeps count of its workers; nothing of that kind is here": """
        rpc._init_counter rpc._validate_rpc_args rpc.api._all_gather_sequence_id rpc.api._all_gather_sequence_id_to_states
        rpc.api._ALL_WORKER_NAMES rpc.api._init_rpc_states rpc.api._invoke_rpc rpc.api._rref_typeof_on_owner
        rpc.api._rref_typeof_on_user rpc.internal.RemoteException rpc.internal._handle_exception rpc.internal._run_function
        rpc.rref_proxy._invoke_rpc rpc.rref_proxy._local_invoke rpc.rref_proxy._local_invoke_async_execution
    """,
    "how TensorPipe is started; remora.rpc.backends starts ours": """
        rpc._utils rpc.api._group_membership_management rpc.api._update_group_membership
        rpc.backend_registry._group_membership_management rpc.backend_registry._update_group_membership
        rpc.backend_registry._backend_type_doc rpc.backend_registry._backend_type_repr
        rpc.backend_registry._create_device_list rpc.backend_registry._create_reverse_mapping
        rpc.backend_registry._get_device_infos rpc.backend_registry._init_process_group
        rpc.backend_registry._set_devices_and_reverse_device_map
        rpc.backend_registry._tensorpipe_construct_rpc_backend_options_handler
        rpc.backend_registry._tensorpipe_exchange_and_check_all_device_maps
        rpc.backend_registry._tensorpipe_init_backend_handler rpc.backend_registry._tensorpipe_validate_devices
        rpc.backend_registry._validate_device_maps
    """,
    "defined elsewhere, and to be had there": """
        rpc.internal._get_current_rpc_agent rpc.rref_proxy.rpc_async optim.optimizer.functional_optim_map
    """,
    "how PyTorch's optimizer works on the owners; ours is in remora.optim.local": """
        optim.optimizer._LocalOptimizer optim.optimizer._ScriptLocalOptimizer optim.optimizer._ScriptLocalOptimizerInterface
        optim.optimizer._local_optimizer_step optim.optimizer._new_local_optimizer
        optim.optimizer._new_script_local_optimizer optim.optimizer._script_local_optimizer_step
        optim.optimizer._wait_for_all
    """,
    "how PyTorch's RemoteModule is put together from templates, and taken apart to travel": """
        nn.api.remote_module._REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING nn.api.remote_module._SerializedRemoteModule
        nn.api.remote_module._create_module_with_interface nn.api.remote_module._instantiate_template
        nn.api.remote_module._recursive_script_module_receiver nn.api.remote_module._recursive_script_module_reducer
        nn.api.remote_module._remote_module_receiver nn.api.remote_module._remote_module_reducer
        nn.RemoteModule._check_attribute_picklability nn.RemoteModule._init_template
        nn.RemoteModule._install_generated_methods nn.RemoteModule._prepare_init
    """,
    "how PyTorch's pickler takes things apart; remora.wire does": """
        rpc.internal._InternalRPCPickler._py_rref_receiver rpc.internal._InternalRPCPickler._py_rref_reducer
        rpc.internal._InternalRPCPickler._rref_reducer rpc.internal._InternalRPCPickler._script_module_receiver
        rpc.internal._InternalRPCPickler._script_module_reducer rpc.internal._InternalRPCPickler._tensor_receiver
        rpc.internal._InternalRPCPickler._tensor_reducer
    """,
    "how PyTorch's Python drives its compiled agent; see init_rpc, shutdown and _get_debug_info": """
        rpc.TensorPipeAgent._get_backend_options rpc.TensorPipeAgent._update_group_membership rpc.TensorPipeAgent.get_metrics
        rpc.TensorPipeAgent.join rpc.TensorPipeAgent.store rpc.RpcAgent.get_metrics rpc.RpcAgent.join
    """,
}
ABSENT = {name for group in LEFT_OUT.values() for name in group.split()}
MOST = 91

CLASSES = [
    "rpc.RRef", "rpc.WorkerInfo", "rpc.BackendType", "rpc.api.AllGatherStates",
    "rpc.internal._InternalRPCPickler", "rpc.internal.PythonUDF", "rpc.internal.RPCExecMode", "rpc.rref_proxy.RRefProxy",
    "autograd.DistAutogradContext", "optim.DistributedOptimizer", "nn.RemoteModule",
]  # fmt: skip
INSTANCES: dict[str, object] = {  # of classes whose attributes are made by their constructors
    "rpc.RpcBackendOptions": rpc.RpcBackendOptions(),
    "rpc.TensorPipeRpcBackendOptions": rpc.TensorPipeRpcBackendOptions(),
}


def modules() -> Iterator[str]:
    """Those of torch that we stand in for, wholly or in part."""
    for package in PACKAGES:
        yield package
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if replacements.counterpart(info.name) is not None:
                yield info.name
    yield from replacements.COMPILED


def short(name: str) -> str:
    return name.removeprefix("torch.distributed.").removeprefix("torch._C.")


def own_names(module: str) -> Iterator[str]:
    """What a module of torch offers: what it defines, and if it is a package, what it takes from elsewhere in torch.

    Other modules, and what comes from the standard library, are no offer.
    """
    found = importlib.import_module(module)
    for name, value in vars(found).items():
        home = getattr(value, "__module__", None) or module
        foreign = isinstance(value, types.ModuleType | typing.TypeVar | typing.ParamSpec) or not home.startswith("torch")
        elsewhere = not replacements.is_replaced(home) and not hasattr(found, "__path__")
        if foreign or elsewhere or name.startswith("__") or name == "TYPE_CHECKING":
            continue
        if replacements.is_replaced(f"{module}.{name}"):  # of packages that hold other things, too, the rest stays torch's
            yield name


def missing_in(module: str) -> set[str]:
    return {short(f"{module}.{name}") for name in own_names(module) if not is_here(f"{module}.{name}")}


def is_here(dotted: str) -> bool:
    try:
        replacements.find(dotted)
    except LookupError:
        return False
    return True


@pytest.mark.parametrize("module", modules())
def test_a_name_that_torch_has_is_here_or_left_out_for_a_reason(module: str) -> None:
    if replacements.counterpart(module) and not is_here(module):
        assert short(module) in ABSENT
    else:
        assert {name for name in missing_in(module) if not {name, offered_as(name)} & ABSENT} == set()


def offered_as(name: str) -> str:
    """Where `rpc` itself would offer it."""
    return f"rpc.{name.rpartition('.')[2]}" if name.startswith(("rpc.", "_distributed_rpc.")) else name


@pytest.mark.parametrize("name", [*CLASSES, *INSTANCES])
def test_what_an_object_of_torch_has_one_of_ours_has(name: str) -> None:
    theirs = pkgutil.resolve_name(f"torch.distributed.{name}")
    ours = INSTANCES.get(name) or replacements.find(f"torch.distributed.{name}")
    members = {member for member in dir(theirs) if not member.startswith("__") and member != "_pybind11_conduit_v1_"}
    assert {f"{name}.{member}" for member in members if not hasattr(ours, member)} - ABSENT == set()


@pytest.mark.parametrize("name", ["TensorPipeAgent", "RpcAgent"])
def test_what_an_agent_of_torch_has_one_of_ours_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with World(1) as world, world.acting(0):
        monkeypatch.setitem(INSTANCES, f"rpc.{name}", rpc.api._get_current_rpc_agent())
        test_what_an_object_of_torch_has_one_of_ours_has(f"rpc.{name}")


def test_the_list_has_only_what_is_absent_and_does_not_grow() -> None:
    present = {name for name in ABSENT if is_here(f"torch.distributed.{name}")}
    assert present == set(), "take these off the list"
    assert len(ABSENT) <= MOST


def test_every_module_is_looked_at() -> None:
    assert sum(len(list(own_names(module))) for module in modules()) > 200


def test_what_says_whether_it_is_available_says_that_it_is() -> None:
    assert remora.autograd.is_available()
    assert rpc.is_available()


def test_a_context_is_one() -> None:
    with World(1) as world, world.acting(0), remora.autograd.context() as context_id:
        assert isinstance(remora.autograd._retrieve_context(context_id), remora.autograd.DistAutogradContext)
