"""Works `speed` and `zeros`: rows of what was measured, and when an older row will do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from krnet.bench import speed
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.reproduce.works.base import get_work

SPEED, ZEROS = get_work("speed"), get_work("zeros")
LEDGER = Path(__file__).parents[2] / "results" / "ledger.jsonl"
QUICK = {"features": "digits", "batch_size": 32, "step_time_s": 0.01}


def test_a_row_has_the_time_of_every_step_its_floor_and_the_speed_of_replay(place, monkeypatch):
    monkeypatch.setattr(speed, "REPLAY_BATCHES", (1, 8))
    monkeypatch.setattr(speed, "measure_peaks", lambda *given: {"flops_per_second": 1e12, "bytes_per_second": 1e10})
    row = SPEED.perform("test", QUICK, 0, place)
    steps = row["metrics"]["steps"]
    assert steps.keys() == {"adam", "muon", "muon 4 bits"}
    for step in steps.values():
        assert step["batch_size"] == 32
        floor_s = step["flops"] / 1e12 + step["bytes"] / 1e10
        assert step["floor_milliseconds"] == pytest.approx(1e3 * floor_s)
        assert step["times_floor"] == pytest.approx(step["milliseconds"] / step["floor_milliseconds"])
    assert row["metrics"]["replay"].keys() == {"1", "8"}
    assert all(rate > 0 for ways in row["metrics"]["replay"].values() for rate in ways.values())
    assert SPEED.matches(row, QUICK, 0) and not SPEED.matches(row, QUICK, 1)
    assert not SPEED.matches(row, QUICK | {"batch_size": 64}, 0)
    assert not SPEED.matches(row, QUICK | {"features": "random"}, 0)


def test_an_older_row_counts_if_it_timed_every_step():
    rows = [row for row in ledger.read(LEDGER) if row["recipe"] == "speed"]
    found = {row["commit"] for row in rows if SPEED.matches(row, {"preset": "cifar100"}, 0)}
    assert {"e6cb46a", "5b62d8f"} <= found  # with steps of 4 bits
    assert "f5cd068" not in found  # without
    on_maps = {"preset": "cifar100", "features": "cifar100-base"}
    assert "9f17127" in {row["commit"] for row in rows if SPEED.matches(row, on_maps, 0)}
    assert not any(SPEED.matches(row, on_maps | {"targets": [0.9]}, 0) for row in rows)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"preset": "cifar"}, "preset is 'cifar'"),
        ({"targets": [0.9]}, "targets are given, and features are random"),
        ({"features": "digits", "num_samples": 5}, "num_samples is given, and digits has its own"),
        ({"batch": 5}, "unknown setting 'batch'; did you mean 'batch_size'"),
        ({"features": "digits", "targets": [95.6]}, "expected 0 to 1"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(SettingError, match=message):
        SPEED.check(settings)


def test_zeros_are_counted(place, digits):
    row = ZEROS.perform("test", {"features": "digits"}, 0, place)
    maps = digits.source().read(torch.arange(200))
    assert row["metrics"]["zero_ratio"] == (maps == 0).double().mean().item()
    assert ZEROS.value(row) == 100 * row["metrics"]["zero_ratio"]
    assert ZEROS.matches(row, {"features": "digits"}, 0)
    assert not ZEROS.matches(row, {"features": "cifar100-base"}, 0)
    with pytest.raises(SettingError, match="unknown setting 'feature'; did you mean 'features'"):
        ZEROS.check({"feature": "digits"})
