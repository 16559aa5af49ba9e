"""How far replays are from the features they stand for.

    decode(ids) against source.read(ids), all samples -> Fidelity: MSE and R2 of per-channel-normalised values

R2 = 1 - MSE / variance of all normalised values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from krnet.features.source import FeatureSource
from krnet.features.stats import FeatureStats, normalise

BATCH_BYTES = 8 << 20  # of features; decoding them takes several times as much


@dataclass(frozen=True)
class Fidelity:
    mse: float
    r2: float


def r_squared(mse: float, variance: float) -> float:
    """Constant features have nothing to explain: all of it is explained if there is no error."""
    if variance == 0:
        return 1.0 if mse == 0 else 0.0
    return 1 - mse / variance


def fidelity(decode: Callable[[Tensor], Tensor], source: FeatureSource, stats: FeatureStats) -> Fidelity:
    """One pass over all samples; `decode` maps IDs (B,) to features (B, *shape) in the original scale."""
    step = max(1, min(4096, BATCH_BYTES // (source.sample_bytes or 1)))
    total = 0.0
    for ids in torch.arange(len(source)).split(step):
        replayed = decode(ids)
        real = source.read(ids).to(replayed.device)
        # Not clamped: an error outside the range is an error.
        difference = normalise(replayed, stats.low, stats.high, clamp=False) - normalise(real, stats.low, stats.high)
        total += difference.double().square().sum().item()
    mse = total / stats.count
    return Fidelity(mse, r_squared(mse, stats.variance))
