"""The notebook runs in a fresh kernel, and its stored outputs are what it prints now.

python tools/run_notebook.py      stores them again
"""

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "examples" / "quickstart.ipynb"
STORED: Any = nbformat.read(PATH, as_version=4)
CODE = [cell for cell in STORED.cells if cell.cell_type == "code"]
MAX_KB = 300
TOLERANCE = 0.1  # relative, of numbers with a decimal point: a fit ends a little differently on another machine
DECIMAL = re.compile(r"\d[\d,]*\.\d+")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|home|root|usr|var|opt|mnt|work|Users|private)\b|\b[A-Z]:\\")
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def run_notebook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_notebook", ROOT / "tools" / "run_notebook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell.outputs if output["output_type"] == "stream")


def shown(cell: Any) -> list[Any]:
    """What a cell shows beside its text: the kinds of each output."""
    return [sorted(output["data"]) for output in cell.outputs if output["output_type"] != "stream"]


def differences(stored: Any, made: Any) -> list[str]:
    """Cells whose outputs differ: in text, in decimals by more than the tolerance, or in the kind of what is shown.

    The text of a cell with the tag `varies` is not compared.
    """
    found = []
    for before, now in zip(stored.cells, made.cells, strict=True):
        if before.cell_type != "code":
            continue
        if shown(before) != shown(now):
            found.append(f"{before.id}: shows {shown(now)}; stored are {shown(before)}")
        texts = printed(before), printed(now)
        if "varies" in before.metadata.get("tags", ()):
            same = bool(texts[0]) == bool(texts[1])
        else:
            numbers = [[float(number.replace(",", "")) for number in DECIMAL.findall(text)] for text in texts]
            same = DECIMAL.sub("#", texts[0]).split() == DECIMAL.sub("#", texts[1]).split()
            same = same and numbers[1] == pytest.approx(numbers[0], rel=TOLERANCE)
        if not same:
            found.append(f"{before.id}: prints {texts[1]!r}; stored is {texts[0]!r}")
    return found


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_has_stored(run_notebook):
    made = run_notebook.run_notebook(STORED)
    assert not differences(STORED, made), "look at the change, then run: python tools/run_notebook.py"


def test_another_output_is_noticed():
    for cell_id, old, new in (("append", "1797", "1796"), ("record", "R2 0.9", "R2 0.7"), ("load", "True", "False")):
        made = copy.deepcopy(STORED)
        output = next(cell for cell in made.cells if cell.id == cell_id).outputs[-1]
        output["text"] = output["text"].replace(old, new)
        (difference,) = differences(STORED, made)
        assert difference.startswith(cell_id)
    made = copy.deepcopy(STORED)
    next(cell for cell in made.cells if cell.id == "plot").outputs.clear()
    assert len(differences(STORED, made)) == 1


def test_every_cell_that_prints_or_draws_has_its_outputs_stored_and_short():
    assert [cell.execution_count for cell in CODE] == list(range(1, len(CODE) + 1))
    for cell in CODE:
        shows = re.search(r"\bprint\(|plt\.show|\.plot\(|show_progress", cell.source)
        assert bool(cell.outputs) == bool(shows), cell.id
        assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in cell.outputs)
        texts = [output.get("text") or output["data"]["text/plain"] for output in cell.outputs]
        assert sum(len(text.splitlines()) for text in texts) <= 10, cell.id
        assert not any("\x1b" in text or "Output()" in text for text in texts), cell.id


def test_the_notebook_is_small_and_names_no_path_of_a_machine():
    assert PATH.stat().st_size < 1e3 * MAX_KB
    bare = copy.deepcopy(STORED)
    for cell in bare.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("image/png", None)  # any letters may occur in it
    text = nbformat.writes(bare)
    assert not MACHINE_PATH.findall(text)
    assert MACHINE_PATH.search('"/tmp/tmpx1/kril"')
    assert set(bare.metadata) == {"kernelspec", "language_info"} and set(bare.metadata.language_info) == {"name"}


def test_links_of_the_notebook_exist():
    links = [link for cell in STORED.cells if cell.cell_type == "markdown" for link in LINK.findall(cell.source)]
    assert links
    assert not [link for link in links if not (PATH.parent / link).exists()]
