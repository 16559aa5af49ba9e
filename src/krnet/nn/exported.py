"""Read a network's file without running anything that the file brings along.

    x.pt2 -> members -> check_program, check_payloads -> a copy without pickles -> torch.export.load -> program
    x.pt  (TorchScript) -> check_script -> torch.jit.load may have it

torch.export.load trusts its file: it unpickles the sample inputs, evaluates the expressions of symbolic sizes as
Python, looks up any function below `torch` (torch.os.system is one), imports modules that a tree of inputs names, runs
guards as code, and loads compiled libraries. So the archive is taken apart here. Of its members only the graph and the
bytes of the tensors are kept; in the graph every name, operator and expression has to be of a known, harmless kind.

TorchScript has a language and an unpickler of its own, which know no Python. Its operators that touch files or other
machines are refused by name.

What is left can compute whatever torch's operators compute, in any time and memory.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from krnet.errors import UnsafeNetworkError

GRAPH = "models/model.json"
PAYLOADS = ("data/weights", "data/constants")
PICKLED_PAYLOADS = tuple(f"{folder}/model.pt" for folder in PAYLOADS)  # as torch 2.8 and earlier wrote them
SAMPLE_INPUTS = "data/sample_inputs/model.pt"
PLAIN_MEMBERS = {"archive_format", "archive_version", "byteorder", "version", ".data/version"}
DROPPED_MEMBERS = re.compile(r"\.data/serialization_id|extra/.*|data/sample_inputs/.*")
MAX_GRAPH_BYTES = 64 << 20  # of a JSON member: Python's objects take some thirty times as much
FREE_TENSOR_BYTES = 256 << 20  # a constant that repeats its bytes may become as large as this

NAME = re.compile(r"|<lambda>|[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", re.ASCII)
DUNDER = re.compile(r"(^|\.)__\w*__($|\.)", re.ASCII)
OPERATOR = re.compile(r"torch\.ops\.(aten|prims|torchvision|quantized_decomposed)\.(\w+)\.(\w+)", re.ASCII)
FUNCTIONS = {
    *(f"_operator.{name}" for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pow", "getitem", "and_", "or_", "not_", "eq", "ne",
        "lt", "le", "gt", "ge",
    )),
    *(f"math.{name}" for name in ("ceil", "floor", "trunc", "sqrt")),
    *(f"torch.sym_{name}" for name in ("max", "min", "int", "float", "ite", "not", "sum")),
    *(f"torch.ops.higher_order.{name}" for name in ("wrap_with_set_grad_enabled", "wrap_with_autocast", "cond")),
}  # fmt: skip
FILE_OPERATORS = {"save", "from_file", "load_tensor", "rpc_sync", "rpc_async", "rpc_remote"}

# Expressions of sizes, as sympy prints them: Symbol('s31', positive=True, integer=True), or s31 + 1 in older files.
SYMBOL = re.compile(r"[a-z]{1,4}\d+", re.ASCII)
CONSTANTS = {"true", "false", "oo", "int_oo"}
SYMPY_FUNCTIONS = {
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Eq", "Ne", "Equality", "Unequality",
    "Gt", "Ge", "Lt", "Le", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan", "And", "Or", "Not",
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv",
    "PowByNatural", "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt", "RoundToInt", "ToFloat", "Identity",
}  # fmt: skip
POWERS = {"Pow", "PowByNatural"}
MAX_EXPRESSION, MAX_EXPONENT = 2000, 8
ARITHMETIC = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Load, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv,
    ast.Mod, ast.USub, ast.UAdd, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
TREES = {None, "builtins.tuple", "builtins.list", "builtins.dict"}  # what inputs and outputs may be wrapped in


def is_exported(names: Collection[str]) -> bool:
    """Whether an archive with members of these names, without their folders, is one of torch.export."""
    return "archive_format" in names or "serialized_exported_program.json" in names


def read_exported(path: Path) -> Any:
    """The torch.export.ExportedProgram of a .pt2 file; UnsafeNetworkError if the file could make it run code."""
    with zipfile.ZipFile(path) as archive:
        members = dict(_members(path, archive))
    if GRAPH not in members:
        raise _refused(path, f"there is no {GRAPH} in it", "Save it again with torch 2.9 or newer")
    members[GRAPH] = json.dumps(check_program(path, _parse_json(path, GRAPH, members[GRAPH]))).encode()
    for folder in PAYLOADS:
        check_payloads(path, folder, members)
    members[SAMPLE_INPUTS] = b""  # torch reads this as: there are none
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(f"network/{name}", content)
    copy.seek(0)
    return torch.export.load(copy)


def _refused(path: Path, what: str, advice: str = "") -> UnsafeNetworkError:
    return UnsafeNetworkError(
        f"{path}: {what}, so it was not loaded. {advice or 'Export the module again, from a source you trust'}"
    )


# ------------------------------------------------------------------ members


def _members(path: Path, archive: zipfile.ZipFile) -> Iterator[tuple[str, bytes]]:
    """Name, without the archive's own folder, and content of each member that is kept."""
    file_bytes, seen = path.stat().st_size, set()
    for info in archive.infolist():
        name = info.filename.partition("/")[2]
        if DROPPED_MEMBERS.fullmatch(name):
            continue
        payload = re.fullmatch(
            rf"({'|'.join(PAYLOADS)})/((weight|tensor)_\d+|model_(weights|constants)_config\.json)", name
        )
        if not (payload or name in PLAIN_MEMBERS or name == GRAPH or name in PICKLED_PAYLOADS):
            raise _refused(path, f"its member {name!r:.99} is neither the graph nor a tensor of a torch.export program")
        if name in seen or info.compress_type != zipfile.ZIP_STORED or info.file_size > file_bytes:
            raise _refused(path, f"its member {name!r:.99} is compressed, or is there twice")
        seen.add(name)
        content = archive.read(info)
        yield name, _plain_pickle(path, name, content) if name in PICKLED_PAYLOADS else content


def _plain_pickle(path: Path, name: str, content: bytes) -> bytes:
    """Tensors by name, unpickled by torch's loader of weights, which runs nothing, and pickled again."""
    try:
        tensors = torch.load(io.BytesIO(content), weights_only=True)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise TypeError("it does not hold tensors alone")
    except Exception as error:  # what weights_only refuses has no common type
        raise _refused(path, f"{name} holds more than tensors ({str(error).strip():.99})") from error
    copy = io.BytesIO()
    torch.save(dict(tensors), copy)
    return copy.getvalue()


def _parse_json(path: Path, name: str, content: bytes) -> Any:
    if len(content) > MAX_GRAPH_BYTES:
        raise _refused(path, f"{name} takes {len(content)} bytes; expected at most {MAX_GRAPH_BYTES}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"{name} is not JSON ({error})") from error


def check_payloads(path: Path, folder: str, members: dict[str, bytes]) -> None:
    """Refuse pickled tensors, and tensors that claim many more bytes than the file has for them."""
    name = f"{folder}/model_{folder.rpartition('/')[2]}_config.json"
    if name not in members:
        return
    config = _check(path, _parse_json(path, name, members[name]))
    members[name] = json.dumps(config).encode()
    try:
        for meta in config["config"].values():
            if meta["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", meta["path_name"]):
                raise _refused(path, f"{folder} holds a pickle, which could run any code")
            sizes = [size["as_int"] for size in meta["tensor_meta"]["sizes"]]
            num_bytes = len(members[f"{folder}/{meta['path_name']}"])
            if math.prod(sizes) > num_bytes + (FREE_TENSOR_BYTES // 16 if num_bytes else 0):  # 16: bytes of the widest
                raise _refused(path, f"a tensor of shape {sizes} is to be made of {num_bytes} bytes")
    except (KeyError, TypeError, AttributeError) as error:
        raise _refused(path, f"{name} does not describe tensors ({error!r})") from error


# ------------------------------------------------------------------ the graph


def check_program(path: Path, program: Any) -> Any:
    """The graph without what is not needed (guards, stack traces); refused if any text in it is not known as safe."""
    if not isinstance(program, dict) or not isinstance(program.get("graph_module"), dict):
        raise _refused(path, f"{GRAPH} is no torch.export program")
    if "guards_code" in program:
        program["guards_code"] = []  # code. The shapes of inputs are checked all the same
    for name in ("metadata", "treespec_namedtuple_fields"):
        if name in program["graph_module"]:
            program["graph_module"][name] = {}
    return _check(path, program)


def _check(path: Path, value: Any, key: str = "") -> Any:
    """A copy of a JSON value in which every text has been checked by the rule for its key."""
    if isinstance(value, dict):
        if key == "metadata":
            return {}  # stack traces and the like
        for name in value:
            _check_name(path, name)
        if value.get("as_custom_obj") is not None or value.get("as_operator") is not None or value.get("custom_obj"):
            raise _refused(path, "its graph uses objects that are no tensors")
        return {name: _check(path, item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_check(path, item, key) for item in value]
    if isinstance(value, str):
        RULES.get(key, _check_name)(path, value)
    return value


def _check_name(path: Path, name: str) -> None:
    if not NAME.fullmatch(name) or DUNDER.search(name):
        raise _refused(path, f"its graph has the name {name!r:.99}, which is no plain name")


def _check_operator(path: Path, target: str) -> None:
    known = target in FUNCTIONS
    if not known and (match := OPERATOR.fullmatch(target)) and match[2] not in FILE_OPERATORS:
        packet = getattr(getattr(torch.ops, match[1]), match[2], None)
        known = isinstance(getattr(packet, match[3], None), type(torch.ops.aten.add.Tensor))
    if not known:
        raise _refused(path, f"its graph calls {target!r:.99}, which is not among torch's operators on tensors")


def _check_text(path: Path, text: str) -> None:
    """An argument such as the equation of einsum or the mode of a padding."""
    if not re.fullmatch(r"[\w ,.>+-]{0,200}", text, re.ASCII):
        raise _refused(path, f"its graph has the text {text!r:.99}")


def _check_tree(path: Path, text: str) -> None:
    """How inputs or outputs are wrapped: [1, {"type": ..., "context": ..., "children_spec": [...]}]"""

    def check(tree: Any) -> None:
        context = tree["context"]
        if isinstance(context, str):
            context = json.loads(context)
        plain = context is None or (isinstance(context, list) and all(isinstance(key, (str, int)) for key in context))
        if tree["type"] not in TREES or not plain:
            raise _refused(
                path, f"its inputs or outputs are of type {tree['type']!r:.99}", "Wrap it in a module of tensors"
            )
        for child in tree["children_spec"]:
            check(child)

    try:
        if text:
            check(json.loads(text)[1])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise _refused(path, f"the types of its inputs or outputs cannot be read ({error!r:.99})") from error


def check_expression(path: Path, text: str) -> None:
    """Refuse an expression that is more than arithmetic of sizes: sympy evaluates it as Python."""
    try:
        if len(text) > MAX_EXPRESSION:
            raise ValueError("too long")
        _check_node(ast.parse(text.strip(), mode="eval"))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise _refused(path, f"a size in its graph is {text!r:.99}, which is no arithmetic ({error})") from error


def _check_node(node: ast.AST) -> None:
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.func.id not in SYMPY_FUNCTIONS:
            raise ValueError("a call")
        function = node.func.id
        for keyword in node.keywords:
            if keyword.arg is None or not isinstance(keyword.value, ast.Constant):
                raise ValueError("a keyword")
            _check_node(keyword.value)
        for arg in node.args:
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                pattern = {"Symbol": SYMBOL, "Float": re.compile(r"-?\d+(\.\d*)?(e-?\d{1,3})?")}.get(function)
                if pattern is None or not pattern.fullmatch(arg.value):
                    raise ValueError("a text")
            else:
                _check_node(arg)
        if function in POWERS:
            base, exponent = node.args
            value = exponent.args[0] if isinstance(exponent, ast.Call) and exponent.args else exponent
            value = value.operand if isinstance(value, ast.UnaryOp) else value
            is_small = isinstance(value, ast.Constant) and isinstance(value.value, int) and value.value <= MAX_EXPONENT
            has_symbol = any(isinstance(part, ast.Name) and part.id == "Symbol" for part in ast.walk(base))
            if not is_small or not has_symbol:
                raise ValueError("a power")
        return
    if isinstance(node, ast.Name):
        if not SYMBOL.fullmatch(node.id) and node.id not in CONSTANTS:
            raise ValueError(f"the name {node.id}")
        return
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, (bool, int, float)):
            raise ValueError("a text")
        return
    if not isinstance(node, ARITHMETIC):
        raise ValueError(type(node).__name__)
    for child in ast.iter_child_nodes(node):
        _check_node(child)


RULES: dict[str, Callable[[Path, str], None]] = {
    "expr_str": check_expression,
    "target": _check_operator,
    "as_string": _check_text,
    "as_strings": _check_text,
    "torch_version": lambda path, text: _check_text(path, text.replace("<=", "")),
    "in_spec": _check_tree,
    "out_spec": _check_tree,
}


# ------------------------------------------------------------------ TorchScript


def check_script(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse TorchScript that names an operator which writes or reads files, or calls other machines."""
    word = re.compile(rf"\.[\s\\]*({'|'.join(sorted(FILE_OPERATORS))})\b")
    for info in archive.infolist():
        if not info.filename.lower().endswith(".py"):  # torch finds its code by names in any case
            continue
        if info.file_size > MAX_GRAPH_BYTES:
            raise _refused(path, f"{info.filename!r:.99} takes {info.file_size} bytes")
        source = re.sub(r"#[^\n]*", "", archive.read(info).decode("utf-8", "replace"))
        if found := word.search(source):
            raise _refused(path, f"its code calls {found[1]!r}, which touches files or other machines")
