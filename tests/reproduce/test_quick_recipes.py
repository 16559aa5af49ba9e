"""Every recipe runs with --quick, from its file to its rows, on few digits; most of them with the slow tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from krnet.io import ledger
from krnet.reproduce.compare import compare
from krnet.reproduce.loop import ledger_of, missing, reproduce
from krnet.reproduce.recipe import read_recipe, recipe_names

pytestmark = pytest.mark.usefixtures("few_digits")


def each_recipe() -> list[Any]:
    """One that does under --quick what another does, such as cifar100-5 and cifar100-10, runs with the slow tests."""
    seen: list[Any] = []
    params = []
    for name in recipe_names():
        runs = read_recipe(name, quick=True).runs
        params.append(pytest.param(name, marks=pytest.mark.slow if runs in seen else ()))
        seen.append(runs)
    return params


@pytest.mark.parametrize("name", each_recipe())
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
