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
from krnet.data import registry
from krnet.protocol import TaskSplit

SPECIAL = ("__getitem__", "__array__")  # methods of Recording that a caller reaches by recording[...] and numpy.asarray
# The example of such a class makes the object that those of its methods and properties use.
CLASSES = {"krnet.Recording": krnet.Recording, "krnet.Run": krnet.Run, "krnet.protocol.TaskSplit": TaskSplit}
PROTOCOL = ("TaskSplit", "class_order", "split", "subset")  # of krnet.protocol, as on the API page


def public_calls() -> dict[str, Any]:
    """All functions, classes, methods and properties that the API page lists; modules and errors aside."""
    calls = {f"krnet.{name}": getattr(krnet, name) for name in krnet.__all__}
    calls |= {f"krnet.data.{name}": getattr(krnet.data, name) for name in krnet.data.__all__}
    calls |= {f"krnet.protocol.{name}": getattr(krnet.protocol, name) for name in PROTOCOL}
    for class_name, owner in CLASSES.items():
        own = {name: value for name, value in vars(owner).items() if not name.startswith("_") or name in SPECIAL}
        calls |= {f"{class_name}.{name}": value for name, value in own.items()}
    is_error = lambda value: isinstance(value, type) and issubclass(value, Exception)  # noqa: E731
    return {name: call for name, call in calls.items() if not isinstance(call, ModuleType) and not is_error(call)}


def names_of_example(owner: type) -> dict[str, Any]:
    """The names that an example leaves behind."""
    names: dict[str, Any] = {"krnet": krnet, "torch": torch, "numpy": numpy}
    exec(doctest.script_from_examples(inspect.getdoc(owner) or ""), names)
    return names


@pytest.fixture(scope="module")
def run_names() -> dict[str, Any]:
    return names_of_example(krnet.Run)  # once: it takes a second


@pytest.fixture
def names(request, tmp_path, monkeypatch) -> dict[str, Any]:
    """What an example may use: the modules and, of a method, what the example of its class makes.

    Other examples may use the recording of the example of Recording.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "LOADERS", dict(registry.LOADERS))
    torch.manual_seed(0)
    name = request.node.callspec.params["name"]
    if name.startswith("krnet.Run."):
        return dict(request.getfixturevalue("run_names"))
    return names_of_example(CLASSES.get(name.rpartition(".")[0], krnet.Recording))


@pytest.mark.parametrize("name", sorted(public_calls()))
def test_a_public_call_has_an_example_that_runs(name, names):
    call = public_calls()[name]
    text = inspect.getdoc(call) or ""
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert test.examples, f"{name} has no example (>>>) in its docstring"
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert not printed, "".join(printed)


def test_the_calls_are_those_of_the_api_page():
    from test_docs import page

    listed = {line.split()[1] for line in page("api").splitlines() if line.startswith("::: krnet.")}
    assert listed - {"krnet.errors"} <= set(public_calls())
