"""The script that `make lint` gives to mypy --strict, as a user would, calls all that is public."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import krnet

SCRIPT = Path(__file__).parent / "typed" / "user.py"
USED = {
    node.attr if isinstance(node, ast.Attribute) else node.id
    for node in ast.walk(ast.parse(SCRIPT.read_text()))
    if isinstance(node, (ast.Attribute, ast.Name))
}


CLASSES = [krnet.Recording, krnet.Run, krnet.protocol.TaskSplit]


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.__name__)
def test_the_typed_script_uses_every_public_method_and_property(owner):
    public = {name for name in vars(owner) if not name.startswith("_")} - {"order", "order_name", "tasks"}
    assert not public - USED


@pytest.mark.parametrize("module", [krnet, krnet.data], ids=lambda module: module.__name__)
def test_the_typed_script_uses_every_public_name(module):
    assert not set(module.__all__) - USED
