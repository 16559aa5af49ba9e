"""The tree is the architecture: what may import what, read off the source, lazy imports included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import krnet

ROOT = Path(krnet.__file__).parent
# A package, or a file of the root, imports only what stands before it.
ORDER = [
    "errors", "config", "ranks", "team", "device", "progress", "io", "coding", "data", "nn", "features", "train",
    "recorders", "recording_file", "fitting", "appending", "recording_data", "loading", "recording", "parts",
    "encoding", "export", "api", "report", "learners", "run_files", "run", "work_files", "task_results",
    "task_loop", "many_runs", "catalog", "bench", "reproduce", "cli",
]  # fmt: skip
# Files of these packages that all plug-ins may use; every other file or folder there is a plug-in.
SHARED = {
    "recorders": {
        "__init__", "additive", "axes", "base", "basis", "byte_blocks", "checks", "coded", "codes", "fit", "grids",
        "growth", "maps", "memory", "network_replayer", "network_sizes", "presets", "ranges",
        "sizes",
    },
    "learners": {
        "__init__", "analytic", "base", "base_task", "compressed_exemplars", "config", "exemplars", "frozen",
        "importance", "rehearsal", "scores", "settings",
    },
}  # fmt: skip
DOORS = {"__init__", "__main__", "protocol"}  # the public names, and python -m krnet: above everything
FILES = sorted(path for path in ROOT.rglob("*.py"))


def module_of(path: Path) -> tuple[str, ...]:
    """("recorders", "pq", "books")"""
    return tuple(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {module_of(path) for path in FILES}
PACKAGES = {module[:-1] for module in MODULES if module[-1] == "__init__"}


def imports(path: Path) -> Iterator[tuple[tuple[str, ...], str | None, int]]:
    """Every krnet module that a file imports, at whatever depth: module, name imported from it, line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            parts = tuple((node.module or "").split("."))
            if parts[0] != "krnet":
                continue
            for alias in node.names:
                whole = (*parts[1:], alias.name)
                is_module = whole in MODULES or whole in PACKAGES
                yield (whole, None, node.lineno) if is_module else (parts[1:], alias.name, node.lineno)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = tuple(alias.name.split("."))
                if parts[0] == "krnet" and len(parts) > 1:
                    yield parts[1:], None, node.lineno


def test_every_file_has_its_place_in_the_order():
    tops = {module[0] for module in MODULES} - DOORS
    assert tops == set(ORDER)


def test_a_package_imports_only_what_stands_before_it():
    for path in FILES:
        top = module_of(path)[0]
        if top in DOORS:
            continue
        for module, name, line in imports(path):
            assert module, f"{path}:{line}: imports {name} from the front door"
            assert module[0] == top or ORDER.index(module[0]) < ORDER.index(top), f"{path}:{line}: {top} -> {module}"


@pytest.mark.parametrize("package", SHARED)
def test_no_plug_in_imports_another_except_from_the_shared_files(package):
    for path in (ROOT / package).rglob("*.py"):
        own = module_of(path)[1]
        for module, _, line in imports(path):
            if module[0] != package or len(module) == 1:
                continue
            if own == "__init__":
                continue  # fills the registry
            allowed = SHARED[package] | ({own} - SHARED[package])
            assert module[1] in allowed, f"{path}:{line}: {own} -> {'.'.join(module)}"


def test_typer_and_rich_are_only_in_the_command_line():
    for path in FILES:
        found = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            )
        }
        assert module_of(path)[0] == "cli" or not found & {"typer", "rich"}


def test_no_private_name_crosses_packages():
    for path in FILES:
        tree = ast.parse(path.read_text())
        bound: dict[str, tuple[str, ...]] = {}  # local name -> krnet module
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "krnet":
                parts = tuple((node.module or "").split("."))[1:]
                for alias in node.names:
                    if (*parts, alias.name) in MODULES:
                        bound[alias.asname or alias.name] = (*parts, alias.name)
                    same = parts[:-1] == module_of(path)[:-1]
                    assert same or not alias.name.startswith("_"), f"{path}:{node.lineno}: {alias.name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
                private = node.attr.startswith("_") and not node.attr.startswith("__")
                assert not private, f"{path}:{node.lineno}: {node.value.id}.{node.attr}"


def test_no_module_has_the_name_of_a_public_function():
    functions = {name for name in krnet.__all__ if callable(getattr(krnet, name))}
    assert not functions & {module[0] for module in MODULES}


def test_registries_are_full_as_soon_as_their_package_is_imported():
    from krnet.learners.base import learner_names
    from krnet.recorders.base import recorder_names

    expected = ["krnet", "paper", "autoencoder", "pca", "transform", "quantized", "pq", "images"]
    expected += ["residual", "local-search", "rotation", "zfp", "fp8", "raw", "zstd"]
    assert sorted(recorder_names()) == sorted(expected)
    trained = ["finetune", "joint", "ewc", "mas", "icarl", "lucir", "gfr", "pass", "kril"]
    assert sorted(learner_names()) == sorted([*trained, "ncm", "fecam", "fetril", "acil", "dsal"])
