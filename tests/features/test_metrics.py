"""MSE and R2 are those of a plain numpy computation."""

import numpy as np
import pytest
import torch

from krnet.features import metrics
from krnet.features.metrics import fidelity, r_squared
from krnet.features.source import open_features
from krnet.features.stats import denormalise, normalise, scan


def plain(values: np.ndarray, replayed: np.ndarray) -> tuple[float, float]:
    """Per-channel-normalised MSE, and R2 = 1 - MSE / variance of all normalised values."""
    channels = values.shape[1] if values.ndim > 1 else 1
    true, found = (a.astype(np.float64).reshape(len(values), channels, -1) for a in (values, replayed))
    low, high = (edge(true, axis=(0, 2), keepdims=True) for edge in (np.min, np.max))
    span = np.where(high > low, high - low, np.inf)  # a constant channel counts as 0 on both sides
    normalised = (true - low) / span
    mse = np.mean(((found - low) / span - normalised) ** 2)
    return mse, 1 - mse / np.var(normalised)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch_bytes", [1, 32 << 20])
def test_fidelity_is_the_plain_computation(shape, dtype, batch_bytes, monkeypatch):
    monkeypatch.setattr(metrics, "BATCH_BYTES", batch_bytes)
    scale = torch.logspace(-2, 2, shape[0]).view(-1, *[1] * (len(shape) - 1)) if shape else torch.tensor(3.0)
    values = (torch.randn(50, *shape) * scale).to(dtype)
    replayed = values.float() + 0.3 * scale * torch.randn(values.shape)
    source = open_features(values)
    found = fidelity(lambda ids: replayed[ids], source, scan(source))
    mse, r2 = plain(values.float().numpy(), replayed.numpy())
    assert (found.mse, found.r2) == (pytest.approx(mse, rel=1e-5), pytest.approx(r2, rel=1e-5))


def test_a_perfect_replay_has_r2_one_and_the_mean_of_everything_has_none():
    values = torch.rand(40, 3, 4)
    source = open_features(values)
    stats = scan(source)
    perfect = fidelity(lambda ids: values[ids], source, stats)
    assert (perfect.mse, perfect.r2) == (0, 1)
    mean = (stats.normalised_mean.mean() * (stats.high - stats.low) + stats.low).view(3, 1).expand(3, 4)
    assert fidelity(lambda ids: mean.expand(len(ids), 3, 4), source, stats).r2 == pytest.approx(0, abs=1e-6)


def test_errors_outside_the_range_of_the_features_count_in_full():
    values = torch.tensor([[0.0], [1.0]])
    source = open_features(values)
    assert fidelity(lambda ids: values[ids] - 10, source, scan(source)).mse == pytest.approx(100)


def test_constant_features_are_explained_whatever_is_replayed():
    values = torch.full((7, 2, 3), 0.1)
    source = open_features(values)
    found = fidelity(lambda ids: torch.randn(len(ids), 2, 3), source, scan(source))
    assert (found.mse, found.r2) == (0, 1)


def test_r2_without_variance_is_one_without_error_and_zero_with():
    assert (r_squared(0, 0), r_squared(0.1, 0), r_squared(0.1, 0.2)) == (1, 0, 0.5)


@pytest.mark.parametrize("span", [1e-5, 1e-3, 1.0, 1e4])
def test_a_channel_of_any_range_is_normalised_to_0_and_1(span):
    """Small ranges, too: only a constant channel becomes 0."""
    values = torch.stack([torch.linspace(0, span, 11), torch.full((11,), 7.0)], 1)[:, :, None, None]  # (N, 2, 1, 1)
    low, high = torch.tensor([0.0, 7.0]), torch.tensor([span, 7.0])
    found = normalise(values, low, high)
    assert torch.allclose(found[:, 0, 0, 0], torch.linspace(0, 1, 11), atol=1e-6)
    assert not found[:, 1].any()
    assert torch.allclose(denormalise(found, low, high), values, rtol=1e-6, atol=1e-6 * span)
