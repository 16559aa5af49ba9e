"""Every public call has an example in its docstring, and it runs and prints what it says."""

from __future__ import annotations

import doctest
import inspect
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch

import krnet

SPECIAL = ("__getitem__", "__array__")  # methods of Recording that a caller reaches by recording[...] and numpy.asarray


def public_calls() -> dict[str, Any]:
    """Functions and classes of krnet.__all__, and the methods and properties of Recording; modules and errors aside."""
    calls = {f"krnet.{name}": getattr(krnet, name) for name in krnet.__all__}
    own = {name: value for name, value in vars(krnet.Recording).items() if not name.startswith("_") or name in SPECIAL}
    calls |= {f"krnet.Recording.{name}": value for name, value in own.items()}
    is_error = lambda value: isinstance(value, type) and issubclass(value, Exception)  # noqa: E731
    return {name: call for name, call in calls.items() if not isinstance(call, ModuleType) and not is_error(call)}


@pytest.fixture
def names(tmp_path, monkeypatch) -> dict[str, Any]:
    """What an example may use: the modules, and the recording that the example of Recording makes."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"krnet": krnet, "torch": torch, "numpy": numpy}
    source = doctest.script_from_examples(inspect.getdoc(krnet.Recording) or "")
    exec(source, names)
    return names


@pytest.mark.parametrize("name", sorted(public_calls()))
def test_a_public_call_has_an_example_that_runs(name, names):
    call = public_calls()[name]
    text = inspect.getdoc(call) or ""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert test.examples, f"{name} has no example (>>>) in its docstring"
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert not printed, "".join(printed)
