"""Which code goes by name: what a process says of its main program, and what is done about other modules."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
import pytest

from remora.wire import code_by_value


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The main program of this process, as it seems."""
    path = tmp_path / "train.py"
    path.write_text("def f(): pass\n")
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(code_by_value, "_hash", "")
    monkeypatch.delattr(sys, "ps1", raising=False)
    return path


def anew() -> str:
    """What another process would say that was started now."""
    code_by_value._hash = ""
    return code_by_value.identity()


def test_the_same_text_is_the_same_program_wherever_it_is(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = code_by_value.identity()
    copy = script.with_name("elsewhere.py")
    copy.write_text(script.read_text())
    sys.modules["__main__"].__file__ = str(copy)
    assert anew() == first
    copy.write_text("def f(): return 1\n")
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    assert code_by_value.identity() == first, "it runs what it was when it began, and so does a fork of it"
    assert anew() != first


@pytest.mark.parametrize("how", ["no file", "a file that is gone", "a prompt"])
def test_what_was_typed_in_is_the_same_as_nothing_else(
    script: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    before = code_by_value.identity()
    if how == "no file":
        del sys.modules["__main__"].__file__
    elif how == "a file that is gone":
        script.unlink()
    else:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    here = anew()
    assert here not in (before, "")
    assert anew() == here, "but it is the same as itself: several workers may live in one process"
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    assert code_by_value.identity() != here, "a fork goes its own way"


@pytest.fixture
def package() -> Iterator[types.ModuleType]:
    module = types.ModuleType("of_a_while")
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[module.__name__]


def test_modules_that_are_registered(package: types.ModuleType) -> None:
    assert code_by_value.goes_by_value("of_a_while", True)
    assert code_by_value.goes_by_value("of_a_while.part.of_it", True)
    assert not code_by_value.goes_by_value("of_a_while_longer", True)
    assert not code_by_value.goes_by_value("torch", True)
    assert not code_by_value.goes_by_value(None, True)


def test_main_under_both_its_names() -> None:
    for name in code_by_value.MAIN_NAMES:
        assert code_by_value.goes_by_value(name, False)
        assert not code_by_value.goes_by_value(name, True)
        assert code_by_value.may_name(f"...{name}".encode(), False)
        assert not code_by_value.may_name(f"...{name}".encode(), True)
