"""A fit of krnet that has no time to learn is still as good as the best recorder that does not train."""

import gc

import pytest
import torch

import krnet
from krnet.errors import BudgetError
from krnet.recorders.maps import LEARNED_CACHE
from maps import relu_maps

RIVALS = ("pca", "transform", "quantized")


def smooth(num_samples, shape, noise):
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(num_samples, shape[0], 3, 3, generator=generator)
    maps = torch.nn.functional.interpolate(coarse, shape[1:], mode="bilinear")
    return maps + noise * torch.randn(maps.shape, generator=generator)


def vectors(num_samples, size, rank):
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(num_samples, rank, generator=generator) @ torch.randn(rank, size, generator=generator)
    return mixed + 0.3 * torch.randn(mixed.shape, generator=generator)


def sparse(num_samples, shape):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(num_samples, *shape, generator=generator)
    return (values - 1).relu() * values


def text(num_samples, num_tokens, width):
    """Sequences (n, tokens, width): a token is like the one before it, and its numbers are mixed from a few."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(num_samples, num_tokens, 5, generator=generator).cumsum(1) / num_tokens**0.5
    return steps @ torch.randn(5, width, generator=generator) + 0.05 * torch.randn(
        num_samples, num_tokens, width, generator=generator
    )


def alike(num_samples, shape):
    """Values of two kinds, without any direction in which they vary more than in others."""
    return (torch.randn(num_samples, *shape, generator=torch.Generator().manual_seed(0)) > 1).float()


FEATURES = {  # the best of the rivals, and features that suit it
    "transform": lambda: smooth(400, (6, 12, 12), 0.2),
    "pca": lambda: vectors(1500, 48, 6),
    "quantized": lambda: sparse(24, (72, 11, 11)),  # more values than axes of whole maps are found for
}


def r2_of(features, budget, recorder):
    try:
        return krnet.record(features, recorder=recorder, budget=budget).r2
    except BudgetError:
        return -1.0


@pytest.mark.parametrize(("rival", "bits"), [("transform", 1.0), ("pca", 1.0), ("pca", 3.0), ("quantized", 1.0)])
def test_a_fit_without_time_to_learn_is_as_good_as_the_best_that_does_not_train(rival, bits):
    features = FEATURES[rival]()
    budget = int(8000 + features.numel() * bits / 8)
    found = krnet.record(features, budget=budget, iterations=1, device="cpu")
    r2 = {name: r2_of(features, budget, name) for name in RIVALS}
    assert max(r2, key=r2.get) == rival or bits > 1  # with many bits they are nearly alike
    assert found.r2 >= max(r2.values()) - 0.001 and found.nbytes <= budget


@pytest.mark.parametrize("channels_first", [False, True])
def test_sequences_may_have_their_tokens_on_either_axis(channels_first):
    features = text(300, 24, 32)
    features = features.transpose(1, 2).contiguous() if channels_first else features
    budget = 8000 + features.numel() // 16
    found = krnet.record(features, budget=budget, iterations=1, device="cpu")
    assert found.r2 >= max(r2_of(features, budget, name) for name in RIVALS) and found.r2 > 0.93


def test_many_coarse_numbers_are_tried_where_no_direction_varies_more_than_others():
    features = alike(500, (16, 6, 6))
    found = krnet.record(features, budget=24_000, iterations=1, device="cpu")
    assert found.r2 >= r2_of(features, 24_000, "transform") - 0.002


def test_few_samples_of_many_values_are_as_good_as_those_of_pca():
    features = vectors(60, 20_000, 5)
    found = krnet.record(features, budget=306_000, iterations=1, device="cpu")
    assert found.r2 >= r2_of(features, 306_000, "pca") - 0.001


def test_what_was_trained_is_kept_where_it_is_better():
    found = krnet.record(relu_maps(600, (8, 6, 6))[0], budget=16_000, iterations=100, device="cpu")
    assert found.info()["iterations"] == 100


@pytest.mark.parametrize("given", [{"c1": 8}, {"dead_zone": 0.8}, {"block": (6, 2, 2)}])
def test_a_setting_that_is_given_stays_even_if_a_start_without_it_were_better(given):
    features = smooth(100, (6, 6, 6), 0.2)
    found, free = (
        krnet.record(features, budget=12_000, iterations=1, device="cpu", **options) for options in (given, {})
    )
    assert (found.info()["iterations"], free.info()["iterations"]) == (1, 0) and free.r2 > found.r2


def test_a_budget_for_more_samples_leaves_room_for_them():
    features = sparse(120, (20, 8, 8))
    found = krnet.record(features, budget=100_000, room=240, iterations=1, device="cpu")
    assert 40_000 < found.nbytes < 60_000


def test_nothing_is_kept_of_features_that_are_gone():
    krnet.record(smooth(60, (8, 8, 8), 0.1), budget=12_000, iterations=1, device="cpu")
    gc.collect()
    assert not LEARNED_CACHE
