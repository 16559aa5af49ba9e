"""Files of networks that would run code: torch runs it, krnet refuses the file, and nothing has run."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from krnet.errors import InputError, UnsafeNetworkError
from krnet.nn import exported
from krnet.nn.loaded import read_head, read_trunk

CPU = torch.device("cpu")
SAMPLE_INPUTS, GRAPH = "data/sample_inputs/model.pt", "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"


class Shell:
    """Unpickled, it runs a command."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


class Pooled(nn.Module):
    """A module of many kinds of operators: a size that varies, a text, a constant, no gradient within."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4)
        self.scale = torch.rand(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = torch.nn.functional.gelu(self.norm(self.conv(x)), approximate="tanh")
        x = torch.einsum("bchw,c->bchw", x, self.scale).reshape(x.shape[0], -1, 2)
        return x.flatten(1) + torch.tensor(1.0)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("networks") / "good.pt2"
    torch.manual_seed(0)
    dynamic = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(Pooled().eval(), (torch.rand(4, 3, 8, 8),), dynamic_shapes=dynamic)
    torch.export.save(program, path)
    return path


def rewrite(good: Path, path: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """A copy of an archive whose members, by their names without the archive's folder, `change` has edited."""
    with zipfile.ZipFile(good) as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(f"net/{name}", content)
    return path


def edit_json(members: dict[str, bytes], name: str, change: Callable[[Any], object]) -> None:
    value = json.loads(members[name])
    change(value)
    members[name] = json.dumps(value).encode()


def pickled(value: Any) -> bytes:
    target = io.BytesIO()
    torch.save(value, target)
    return target.getvalue()


def graph_of(program: Any) -> Any:
    return program["graph_module"]["graph"]


def some_expression(program: Any) -> Any:
    return next(
        size["as_expr"] for meta in graph_of(program)["tensor_values"].values() for size in meta["sizes"]
        if "as_expr" in size
    )  # fmt: skip


def weight_as_pickle(members: dict[str, bytes], command: str) -> None:
    def change(config: Any) -> None:
        meta = next(iter(config["config"].values()))
        meta["use_pickle"] = True
        members[f"data/weights/{meta['path_name']}"] = pickled(Shell(command))

    edit_json(members, WEIGHTS, change)


def old_weights(members: dict[str, bytes], command: str) -> None:
    members["data/weights/model.pt"] = pickled({"w": Shell(command)})


def expression(members: dict[str, bytes], command: str) -> None:
    text = f"__import__('os').system({command!r})"
    edit_json(members, GRAPH, lambda program: some_expression(program).update(expr_str=text))


def hidden_expression(members: dict[str, bytes], command: str) -> None:
    """sympy evaluates a text within an expression, too."""
    inner = f"__import__('os').system({command!r})"
    text = f"Add({inner!r}, Integer(1))"
    edit_json(members, GRAPH, lambda program: some_expression(program).update(expr_str=text))


def function(members: dict[str, bytes], command: str) -> None:
    call = {
        "target": "torch.os.system", "outputs": [], "metadata": {}, "name": "run",
        "inputs": [{"name": "", "arg": {"as_string": command}, "kind": 1}],
    }  # fmt: skip
    edit_json(members, GRAPH, lambda program: graph_of(program)["nodes"].insert(0, call))


def guard(members: dict[str, bytes], command: str) -> None:
    code = f"__import__('os').system({command!r}) == 0"
    edit_json(members, GRAPH, lambda program: program.update(guards_code=[code]))


def placeholder(members: dict[str, bytes], command: str) -> None:
    """The name of an input becomes a part of the code that torch makes of the graph."""
    name = json.loads(members[GRAPH])["graph_module"]["graph"]["inputs"][-1]["as_tensor"]["name"]
    evil = f"{name}=__import__('os').system({command!r})"
    members[GRAPH] = members[GRAPH].replace(json.dumps({"name": name}).encode(), json.dumps({"name": evil}).encode())


def imported(members: dict[str, bytes], command: str) -> None:
    def change(program: Any) -> None:
        enum = json.dumps({"__enum__": True, "fqn": "antigravity:x", "name": "y"})
        tree = {"type": "builtins.dict", "context": enum, "children_spec": []}
        program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps([1, tree])

    edit_json(members, GRAPH, change)


def library(members: dict[str, bytes], command: str) -> None:
    members["data/aotinductor/model/model.so"] = b"\x7fELF"


def opaque(members: dict[str, bytes], command: str) -> None:
    members["data/constants/opaque_obj_0"] = pickle.dumps(Shell(command))


def huge(members: dict[str, bytes], command: str) -> None:
    def change(config: Any) -> None:
        meta = next(iter(config["config"].values()))
        meta["tensor_meta"]["sizes"] = [{"as_int": 2**40}]
        members[f"data/weights/{meta['path_name']}"] = b""

    edit_json(members, WEIGHTS, change)


def file_operator(members: dict[str, bytes], command: str) -> None:
    edit_json(members, GRAPH, lambda p: graph_of(p)["nodes"][0].update(target="torch.ops.aten.from_file.default"))


def method_of_a_namespace(members: dict[str, bytes], command: str) -> None:
    edit_json(members, GRAPH, lambda p: graph_of(p)["nodes"][0].update(target="torch.ops.aten.__class__.mro"))


def tower(members: dict[str, bytes], command: str) -> None:
    edit_json(members, GRAPH, lambda p: some_expression(p).update(expr_str="Pow(Integer(9), Integer(999999999))"))


def deep(members: dict[str, bytes], command: str) -> None:
    members[GRAPH] = b"[" * 100_000 + b"]" * 100_000


ATTACKS = (
    weight_as_pickle, old_weights, expression, hidden_expression, function, guard, placeholder, imported, library,
    opaque, huge, file_operator, method_of_a_namespace, tower, deep,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attack", [expression, guard, weight_as_pickle])
def test_torch_itself_runs_these_files(good, tmp_path, attack):
    """Otherwise the tests below would hold without any check."""
    marker = tmp_path / "marker"
    path = rewrite(good, tmp_path / "evil.pt2", lambda members: attack(members, f"touch {marker}"))
    with contextlib.suppress(Exception):
        torch.export.load(path).module()(torch.rand(4, 3, 8, 8))
    assert marker.exists()


@pytest.mark.parametrize("read", [read_head, read_trunk])
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_archive_that_would_run_code_is_refused_and_runs_nothing(good, tmp_path, attack, read):
    marker = tmp_path / "marker"
    path = rewrite(good, tmp_path / "evil.pt2", lambda members: attack(members, f"touch {marker}"))
    if attack is guard:  # dropped, not refused
        read(path, CPU)(torch.rand(4, 3, 8, 8))
    else:
        with pytest.raises(UnsafeNetworkError, match="not loaded"):
            read(path, CPU)
    assert not marker.exists()


def test_hostile_sample_inputs_are_left_out(good, tmp_path):
    marker = tmp_path / "marker"
    evil = pickled((Shell(f"touch {marker}"),))
    path = rewrite(good, tmp_path / "evil.pt2", lambda members: members.update({SAMPLE_INPUTS: evil}))
    logging.disable()  # torch's message of this has a fault of its own
    try:
        torch.export.load(path)
    finally:
        logging.disable(logging.NOTSET)
    assert marker.exists(), "torch does not run them any more"
    marker.unlink()
    x = torch.rand(5, 3, 8, 8)
    assert torch.equal(read_trunk(path, CPU)(x), read_trunk(good, CPU)(x))
    assert not marker.exists()


def test_a_program_computes_what_it_did_before_it_was_saved(good):
    torch.manual_seed(0)
    module, x = Pooled().eval(), torch.rand(6, 3, 8, 8)
    trunk = read_trunk(good, CPU)
    assert trunk.fixed_batch is None
    assert torch.allclose(trunk(x), module(x), atol=1e-6)


def test_weights_as_torch_2_8_wrote_them_are_read(good, tmp_path):
    program = torch.export.load(good)

    def change(members: dict[str, bytes]) -> None:
        members["data/weights/model.pt"] = pickled(dict(program.state_dict))
        members["data/constants/model.pt"] = pickled(dict(program.constants))

    x = torch.rand(4, 3, 8, 8)
    old = rewrite(good, tmp_path / "old.pt2", change)
    assert torch.equal(read_trunk(old, CPU)(x), read_trunk(good, CPU)(x))


def test_a_module_of_a_real_network_passes(tmp_path):
    from krnet.nn import backbones

    trunk, tail = backbones.cut(backbones.build("resnet32", in_channels=3).eval(), 21)
    maps = trunk(torch.rand(2, 3, 32, 32))
    for name, module, example in (("trunk", trunk, torch.rand(2, 3, 32, 32)), ("tail", tail, maps)):
        program = torch.export.export(
            copy.deepcopy(module).eval(), (example,), dynamic_shapes=({0: torch.export.Dim("n")},)
        )
        torch.export.save(program, tmp_path / f"{name}.pt2")
        loaded = read_trunk(tmp_path / f"{name}.pt2", CPU)
        with torch.no_grad():
            assert torch.allclose(loaded(example), module(example), atol=1e-5)


# ------------------------------------------------------------------ TorchScript


class Saves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, "marker")
        return x


class Maps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = torch.from_file
        return x + read("marker", True, 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", [Saves(), Maps()])
def test_torchscript_that_touches_files_is_refused(tmp_path, monkeypatch, module):
    monkeypatch.chdir(tmp_path)
    torch.jit.script(module).save("evil.pt")
    with pytest.raises(UnsafeNetworkError, match="touches files"):
        read_trunk("evil.pt", CPU)
    assert not Path("marker").exists()


@pytest.mark.filterwarnings("ignore")
def test_torchscript_whose_pickle_names_a_python_function_runs_nothing(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "good.pt")
    marker = tmp_path / "marker"
    evil = pickle.dumps(Shell(f"touch {marker}"), protocol=2)
    for member in ("data.pkl", "constants.pkl"):
        path = rewrite(tmp_path / "good.pt", tmp_path / "evil.pt", lambda m, name=member: m.update({name: evil}))
        with pytest.raises(InputError, match="does not load"):
            read_head(path, CPU)
    assert not marker.exists()


@pytest.mark.parametrize(
    "text", ["s3", "s3 + 2*s4", "Symbol('s31', positive=True, integer=True)", "Add(Symbol('s1'), Integer(-1))",
             "FloorDiv(Symbol('s1'), Integer(2)) >= 3", "Pow(Symbol('s1'), Integer(2))", "Float('0.5', precision=53)"],
)  # fmt: skip
def test_expressions_of_sizes_pass(text):
    exported.check_expression(Path("x.pt2"), text)


@pytest.mark.parametrize(
    "text", ["__import__('os')", "s1.func", "(lambda: 1)()", "[x for x in (1,)]", "Symbol(__import__)",
             "Add(x='a')", "Integer(*s1)", "Add('s1', 's2')", "9**9**9", "s1[0]", "f'{s1}'", "s" * 3000, "open('x')",
             "Symbol('a b')"],
)  # fmt: skip
def test_other_expressions_are_refused(text):
    with pytest.raises(UnsafeNetworkError):
        exported.check_expression(Path("x.pt2"), text)
