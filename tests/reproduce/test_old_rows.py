"""Which rows of the ledger are a run of a recipe: real rows of earlier versions, and rows with one other setting."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import krnet
from krnet.io import ledger
from krnet.reproduce.compare import newest_rows
from krnet.reproduce.recipe import RecipeRun, read_recipe
from krnet.reproduce.works.base import get_work

ROWS = ledger.read(Path(krnet.__file__).parents[2] / "results" / "ledger.jsonl")
# A run of a recipe -> the dates of rows, of other recipes and earlier versions, that have its settings.
OLD = {
    ("cifar100-10", "KRIL", 0): "2026-11-15T18:08",  # recorder krnet then meant the paper's; no heads, no base
    ("cifar100-10", "GFR", 0): "2026-11-15T21:10",
    ("cifar100-10", "LUCIR", 0): "2026-11-15T12:44",  # no exemplar formats
    ("upper-bound", "real features", 0): "2026-11-15T12:48",
    ("single-vs-double", "two recordings, 5 tasks", 0): "2026-11-15T18:22",
    ("bytes", "KRIL, pca, 6.16 MB", 0): "2026-11-16T03:11",  # recipe learn-bytes
    ("accuracy", "KRIL, 6.1 MB", 1): "2026-11-17T00:11",  # head_width was called hidden
    ("accuracy", "ACIL", 2): "2026-11-17T00:13",  # another number of layers, which it did not read
    ("other-splits", "25 tasks of 2", 2): "2026-11-18T11:50",
    ("accuracy", "joint", 0): "2026-11-18T15:59",
}


def run_of(recipe: str, name: str) -> RecipeRun:
    (run,) = (run for run in read_recipe(recipe).runs if run.name == name)
    return run


def matches(row: dict[str, Any], run: RecipeRun, seed: int = 0) -> bool:
    return get_work(run.work).matches(row, run.settings, seed)


def old_row(recipe: str, name: str, seed: int) -> dict[str, Any]:
    """A copy of the row; of its minute there may be others, which are no run of these settings."""
    run, date = run_of(recipe, name), OLD[recipe, name, seed]
    found = [row for row in ROWS if row["date"].startswith(date) and matches(row, run, seed)]
    assert len(found) == 1, f"{len(found)} rows of {date} match"
    return copy.deepcopy(found[0])


@pytest.mark.parametrize(("recipe", "name", "seed"), OLD)
def test_a_real_row_of_an_earlier_version_counts(recipe, name, seed):
    found = old_row(recipe, name, seed)
    assert found["recipe"] != recipe or recipe == "accuracy"
    assert seed in newest_rows(read_recipe(recipe), [found])[name]
    others = [run for run in read_recipe(recipe).runs if run.name != name]
    assert not any(matches(found, run, seed) for run in others)


@pytest.fixture
def row() -> dict[str, Any]:
    """A real row of KRIL in the paper's setting."""
    return old_row("cifar100-10", "KRIL", 0)


CHANGES = {
    "epochs": 159,
    "aux": 1.0,
    "kr2": False,
    "single": True,
    "budget": 6_100_000,
    "fixed_layers": 25,
    "recorder": "raw",
    "tail_lr": 0.1,
    "base_lr": 0.05,
    "gamma": 5e-4,
    "weight_decay": 1e-4,
    "shortcut": "A",
    "base": "strong",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_row_with_one_other_setting_does_not_count(row, name):
    run = run_of("cifar100-10", "KRIL")
    assert matches(row, run)
    row["settings"][name] = CHANGES[name]
    assert not matches(row, run)


def test_a_row_of_other_data_tasks_order_seed_or_outcome_does_not_count(row):
    run = run_of("cifar100-10", "KRIL")
    assert not matches(row, run, seed=1)
    assert not matches({**row, "outcome": "RuntimeError: out of memory"}, run)
    assert not matches({**row, "settings": {**row["settings"], "data": "digits"}}, run)
    for tasks in ([50] + [10] * 5, [100], [50, 50, 1], "50", []):
        assert not matches({**row, "settings": {**row["settings"], "tasks": tasks}}, run)
    for metrics in ({"order_hash": "0" * 12}, {"method": "lucir"}, {"validation": 50}):
        assert not matches({**row, "metrics": {**row["metrics"], **metrics}}, run)


def test_a_row_that_keeps_its_tasks_among_its_metrics_counts(row):
    row["metrics"]["tasks"] = row["settings"].pop("tasks")
    row["metrics"]["data"] = row["settings"].pop("data")
    assert matches(row, run_of("cifar100-10", "KRIL"))


def test_a_base_file_counts_wherever_it_lies_but_not_that_of_another_seed():
    run = run_of("accuracy", "ACIL")
    row = old_row("accuracy", "ACIL", 2)
    assert row["settings"]["base"] == "results/base/cifar100-lucir1993-strong-2.krn" and matches(row, run, 2)
    row["settings"]["base"] = "cifar100-lucir1993-strong-2.krn"
    assert matches(row, run, 2)
    row["settings"]["base"] = "results/base/cifar100-lucir1993-strong-0.krn"
    assert not matches(row, run, 2)


def test_rows_of_any_recipe_are_only_looked_at():
    """Rates, speeds, failures and rows of settings that no longer exist match no run of learning, and none crashes."""
    run = run_of("cifar100-10", "EWC")
    others = {"rate", "speed", "extract", "cifar100-choices", "test-gpu", "appending"}
    assert others <= {row["recipe"] for row in ROWS}
    found = {row["recipe"] for row in ROWS if matches(row, run)}
    assert "learn" in found and not found & others
    for broken in ({}, {"metrics": None, "settings": None}, {"outcome": "ok", "seed": 0, "metrics": {"method": "ewc"}}):
        assert not matches(broken, run)


def test_a_folder_of_images_counts_with_its_size_and_classes():
    run = run_of("imagenet-subset-10", "KRIL")
    row = old_row("cifar100-10", "KRIL", 0)
    row["settings"] |= {"data": "imagenet", "backbone": "resnet18", "base_epochs": 100, "epochs": 100}
    row["settings"] |= {"fixed_layers": 13, "gamma": 5e-4}
    row["metrics"] |= {"image_size": 256, "subset": "lucir1993"}
    assert matches(row, run)
    for other in ({"image_size": 128}, {"subset": "100"}, {"subset": None}):
        assert not matches({**row, "metrics": {**row["metrics"], **other}}, run)
