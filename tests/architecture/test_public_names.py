"""Programs written for torch.distributed.rpc can call what they find in remora.rpc the same way.

That they find every name is seen to by tests/compat/test_names.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, get_type_hints

import pytest
import torch.distributed.rpc as theirs

import remora
from remora.options import Settings, SettingsByName

ours: Any = pytest.importorskip("remora.rpc")

SAME_SIGNATURE = ["init_rpc", "rpc_sync", "rpc_async", "remote", "shutdown", "get_worker_info"]


@pytest.mark.parametrize("name", SAME_SIGNATURE)
def test_the_signature_is_the_same(name: str) -> None:
    assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))


def test_what_is_announced_is_there() -> None:
    missing = [name for name in ours.__all__ if not hasattr(ours, name)]
    assert not missing


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def test_a_different_default_would_be_seen() -> None:
    def shutdown(graceful: bool = True, timeout: int = 1) -> None: ...

    assert parameters(shutdown) != parameters(theirs.shutdown)


def test_importing_remora_rpc_touches_no_agent_of_torch() -> None:
    importlib.import_module("remora.rpc")
    assert not theirs.api._is_current_rpc_agent_set()  # type: ignore[attr-defined]


def test_looking_around_shows_public_names_only() -> None:
    shown = dir(ours)
    assert {"init_rpc", "rpc_sync", "rpc_async", "remote", "RRef", "Future", "shutdown"} <= set(shown)
    assert set(shown) <= set(ours.__all__)
    assert not [name for name in shown if name.startswith("_")]


def test_looking_around_in_the_package_shows_what_programs_use_and_not_its_rooms() -> None:
    shown = {name for name in dir(remora) if not name.startswith("__")}
    assert "rpc" in shown
    assert not shown & {"agent", "wire", "transport", "protocol", "vocabulary", "worker", "options"}
    assert all(f"remora.{name}" in (remora.__doc__ or "") for name in shown), "each is in the package's docstring"
    assert "__version__" in dir(remora)


def test_the_package_says_what_it_is_and_which() -> None:
    assert "remora.rpc" in (remora.__doc__ or "")
    assert remora.__version__.count(".") == 2


def test_every_setting_has_a_type_and_a_description_where_it_is_given() -> None:
    names = {field.name for field in dataclasses.fields(Settings)}
    assert set(get_type_hints(SettingsByName)) == names
    assert get_type_hints(SettingsByName) == get_type_hints(Settings)
    for name in names:
        assert f" {name}: " in (ours.RemoraRpcBackendOptions.__doc__ or ""), name
