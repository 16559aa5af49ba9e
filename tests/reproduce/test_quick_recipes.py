"""Every recipe runs with --quick, from its file to its rows, on few digits; most of them with the slow tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from krnet.io import ledger
from krnet.reproduce.compare import compare
from krnet.reproduce.loop import ledger_of, missing, reproduce
from krnet.reproduce.recipe import read_recipe, recipe_names

pytestmark = pytest.mark.usefixtures("few_digits")


# At least one of every kind of work.
SHORT = {"storage-table", "aux-loss", "reconstruction", "tsne", "inversion", "zoo-cpu"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in recipe_names()]
)
def test_recipe_runs_quick_and_leaves_a_row_for_each_run(name: str, tmp_path: Path) -> None:
    recipe = read_recipe(name, quick=True)
    results = ledger.read()
    assert reproduce(name, quick=True, seeds=[0], out=tmp_path, device="cpu") == []
    with ledger_of(tmp_path, quick=True):
        rows = ledger.read()
        assert missing(recipe, rows, [0]) == []
        assert reproduce(name, quick=True, seeds=[0], out=tmp_path, device="cpu") == []
        assert ledger.read() == rows, "a finished run was done again"
    assert rows and {row["recipe"] for row in rows} == {name}
    assert all(row["outcome"] == "ok" for row in rows)
    assert {one.series for one in compare(recipe, rows, [])} == {run.name for run in recipe.runs}
    assert ledger.read() == results, "a quick run stands among the results"
