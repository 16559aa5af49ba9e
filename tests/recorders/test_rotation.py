"""Recorder rotation: its levels are those of Lloyd and Max, and its rotation is one and helps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import krnet
from krnet.recorders.rotation import Turn, normal_levels
from maps import relu_maps

# Mean squared error of the best quantiser of a standard normal variable (Max 1960), and its outermost level.
MAX_1960 = {2: (0.3634, 0.7980), 3: (0.1902, 1.224), 4: (0.1175, 1.510), 8: (0.03454, 2.152), 16: (0.009497, 2.733)}


@pytest.mark.parametrize("num_levels", MAX_1960)
def test_levels_are_those_of_lloyd_and_max(num_levels):
    levels, x = normal_levels(num_levels), torch.randn(400_000)
    found = levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]
    error, outermost = MAX_1960[num_levels]
    assert (found - x).square().mean().item() == pytest.approx(error, rel=0.02)
    assert levels[-1].item() == pytest.approx(outermost, abs=2e-3) and torch.equal(levels, -levels.flip(0))


@pytest.mark.parametrize("size", [1, 2, 7, 64, 120, 1000])
def test_the_rotation_keeps_lengths_and_angles_and_its_inverse_undoes_it(size):
    turn, x = Turn(size, 5, torch.device("cpu")), torch.randn(30, size)
    y = turn.forward(x)
    torch.testing.assert_close(y @ y.T, x @ x.T, atol=1e-4 * size, rtol=1e-4)
    torch.testing.assert_close(turn.inverse(y), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [64, 120, 257])
def test_a_single_value_is_spread_over_all_and_another_seed_spreads_it_otherwise(size):
    x = torch.zeros(1, size)
    x[0, size // 3] = size**0.5
    y = Turn(size, 0, torch.device("cpu")).forward(x)
    assert y.abs().max() < 5 and (y.abs() > 0.05).float().mean() > 0.8
    assert (Turn(size, 1, torch.device("cpu")).forward(x) - y).abs().max() > 0.5


def test_few_large_values_cost_more_without_the_rotation(monkeypatch):
    features = torch.randn(300, 64) * (torch.rand(300, 64) < 0.1)
    turned = krnet.record(features, recorder="rotation", levels=4).r2
    for name in ("forward", "inverse"):
        monkeypatch.setattr(Turn, name, lambda self, x: x)
    assert krnet.record(features, recorder="rotation", levels=4).r2 < turned - 0.1


def test_every_sample_has_a_scale_of_its_own():
    features = relu_maps(200, (6, 4, 4))[0] * torch.logspace(-2, 0, 200)[:, None, None, None]
    recording = krnet.record(features, recorder="rotation", levels=64)
    error, power = ((x.flatten(1)[:50]).square().mean() for x in (recording[:] - features, features - features.mean(0)))
    assert error < 0.01 * power  # of the faintest quarter


def test_more_levels_and_more_bytes_lower_the_error():
    features = torch.randn(500, 32)
    made = [krnet.record(features, recorder="rotation", levels=n) for n in (2, 3, 8, 100)]
    for one, other in pairwise(made):
        assert one.r2 < other.r2 and one.nbytes < other.nbytes


def test_a_budget_is_used_up_to_a_level():
    features = torch.randn(4000, 32)
    found = krnet.record(features, recorder="rotation", budget="60kB")
    more = krnet.record(features, recorder="rotation", levels=found.settings["levels"] + 1)
    assert found.nbytes <= 60_000 < more.nbytes + 1500  # the size of a header is estimated to 1.4 kB
