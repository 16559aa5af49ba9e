"""The solved head is ridge regression on random features; the readout is means and deviations of every layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import nn

from krnet.errors import SettingError
from krnet.nn import backbones
from krnet.nn.readout import Readout
from krnet.nn.solved_head import RecursiveHead, SolvedHead, solve_positive


@pytest.fixture
def readings():
    torch.manual_seed(0)
    labels = torch.arange(4).repeat(60)
    return 3 * torch.randn(4, 10)[labels] + torch.randn(240, 10) + 5, labels


def test_rows_are_those_of_ridge_regression_on_one_hot_labels(readings):
    values, labels = readings
    head = SolvedHead(10, 32, 4, seed=0, ridge=1e-2)
    head.solve(values, labels)
    features = head.random_features(values).double().numpy()
    expected = Ridge(alpha=1e-2 * 240, fit_intercept=False).fit(features, np.eye(4)[labels.numpy()]).coef_.T
    np.testing.assert_allclose(head.rows.numpy(), expected, atol=1e-5)
    assert (head(values).argmax(1) == labels).double().mean() > 0.9


def test_the_scale_is_that_of_the_first_solution_and_rows_grow(readings):
    values, labels = readings
    old = labels < 2
    head = SolvedHead(10, 64, 2, seed=0, ridge=1e-3)
    head.solve(values[old], labels[old])
    torch.testing.assert_close(head.mean, values[old].mean(0))
    torch.testing.assert_close(head.std, values[old].std(0, correction=0))
    mean = head.mean.clone()
    head.grow(2)
    assert head(values).shape == (240, 4)
    head.solve(values, labels)
    assert torch.equal(head.mean, mean) and (head(values).argmax(1) == labels).double().mean() > 0.9


def test_random_features_come_from_the_seed_and_take_no_bytes():
    one, same, other = (SolvedHead(10, 32, 4, seed=s, ridge=1e-3) for s in (1, 1, 2))
    assert torch.equal(one.projection, same.projection) and not torch.equal(one.projection, other.projection)
    assert set(one.state_dict()) == {"mean", "std", "rows"}


def test_a_reading_that_never_changes_does_no_harm(readings):
    values, labels = readings
    values[:, 3] = 7.0
    head = SolvedHead(10, 32, 4, seed=0, ridge=1e-3)
    head.solve(values, labels)
    assert head(values).isfinite().all()


@pytest.mark.parametrize("standardise", [False, True])
def test_learning_in_parts_is_ridge_regression_on_all_samples(readings, standardise):
    values, labels = readings
    answers, features = torch.eye(4)[labels], None
    head = RecursiveHead(10, 32, 2, seed=0, standardise=standardise)
    gram = head.new_gram(0.1)
    for first in (0, 2):
        part = (labels >= first) & (labels < first + 2)
        head.grow(first)
        head.learn(gram, values[part], answers[part, : first + 2])
    features = head.random_features(values).double().numpy()
    expected = Ridge(alpha=0.1, fit_intercept=False).fit(features, np.eye(4)[labels.numpy()]).coef_.T
    np.testing.assert_allclose(head.rows.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(gram.numpy(), features.T @ features + 0.1 * np.eye(32), rtol=1e-9)


def test_plain_random_features_are_those_of_a_new_linear_layer_without_bias():
    head = RecursiveHead(400, 500, 2, seed=0, activation=torch.tanh, standardise=False)
    layer = nn.Linear(400, 500)
    assert head.projection.std().item() == pytest.approx(layer.weight.std().item(), rel=0.01)
    values = torch.randn(3, 400)
    torch.testing.assert_close(head.random_features(values), torch.tanh(values @ head.projection))


def test_dependent_features_without_a_ridge_are_refused():
    with pytest.raises(SettingError, match="larger ridge"):
        solve_positive(torch.ones(3, 3, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64))


def test_the_readout_has_mean_and_deviation_of_the_map_and_of_every_block():
    torch.manual_seed(0)
    backbone = backbones.build("resnet8").eval()
    _, tail = backbones.cut(backbone, 3)  # leaves blocks of 32 and 64 channels
    maps = torch.rand(5, 16, 8, 8)
    found = Readout(tail)(maps)
    second = tail[0](maps)
    layers = [maps, second, tail[1](second)]
    expected = [part for m in layers for part in (m.mean((2, 3)), m.flatten(2).std(2, correction=0))]
    torch.testing.assert_close(found, torch.cat(expected, 1))
    assert found.shape == (5, 2 * (16 + 32 + 64))
    torch.testing.assert_close(found[:, -128:-64], tail(maps))  # what the trained head reads is a part of it


def test_a_tail_that_is_one_module_is_read_at_its_ends():
    class Tail(nn.Module):
        def forward(self, maps):
            return maps.flatten(1)[:, :3]

    assert Readout(Tail())(torch.rand(5, 4, 2, 2)).shape == (5, 2 * 4 + 3)
