"""Which rows of the ledger the picture of bench rate is drawn from, and what it says of krnet's bytes."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plot_rate

BUDGET = 6_500_000


def row(r2, recorder="krnet", given=None, iterations=None, num_bytes=BUDGET, **changes):
    settings = {"recorder": recorder, "given": given or {}, "budget": BUDGET, "iterations": iterations}
    settings |= ({"network": "compact"} if recorder == "krnet" else {}) | changes
    metrics = {"r2": r2, "bytes": num_bytes}
    return {"recipe": "rate", "outcome": "ok", "settings": settings, "metrics": metrics}


def drawn(rows):
    return {(name, given): point["r2"] for (name, given, _), point in plot_rate.longest_fits(rows).items()}


def test_the_newest_of_the_longest_fits_is_drawn():
    assert drawn([row(0.1), row(0.2), row(0.9, iterations=100)]) == {("krnet", "{}"): 0.2}


def test_experiments_and_small_sets_are_left_out_and_variants_are_not():
    rows = [row(0.1, given={"blocks": 4}), row(0.2, num_samples=300), row(0.3, "pca", {"centroid": -0.5})]
    assert drawn(rows) == {("pca", '{"centroid": -0.5}'): 0.3}


def test_a_width_that_was_given_is_no_experiment_where_a_budget_chooses_it():
    assert plot_rate.chosen_width(BUDGET) == 128
    assert drawn([row(0.1), row(0.2, given={"c1": 128}), row(0.3, given={"c1": 64})]) == {("krnet", "{}"): 0.2}


def test_bytes_are_read_off_between_points_of_krnet():
    points = ((0.9, 1e6), (0.99, 4e6))
    ours = [{"recorder": "krnet", "given": {}, "r2": r2, "bytes": size} for r2, size in points]
    rival = {"r2": 1 - 0.1**1.5, "bytes": 4e6}
    assert plot_rate.share_of_krnet(rival, ours) == pytest.approx(0.5)
    assert math.isnan(plot_rate.share_of_krnet({"r2": 0.5, "bytes": 4e6}, ours))
