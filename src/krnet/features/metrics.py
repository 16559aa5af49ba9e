"""The error of replays, compared with the recorded features.

    decode(ids), source.read(ids), for all samples -> Fidelity: MSE and R2 of per-channel-normalised values

R2 = 1 - MSE / variance of all normalised values. Moments are what R2 needs to know of samples whose features are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from krnet.features.feature_source import FeatureSource
from krnet.features.stats import FeatureStats, begin_digest, normalise
from krnet.progress import Watch, counting

BATCH_BYTES = 8 << 20  # features per batch; decoding needs several times as much memory


@dataclass(frozen=True)
class Fidelity:
    mse: float
    r2: float
    digest: str
    """That of the features which the replays were compared with; see FeatureStats."""


def r_squared(mse: float, variance: float) -> float:
    """1 - mse / variance. Constant features have no variance: 1 without an error, else 0."""
    if variance == 0:
        return 1.0 if mse == 0 else 0.0
    return 1 - mse / variance


@dataclass(frozen=True)
class Moments:
    """Of the normalised values of some samples: how many, their mean and variance, and the MSE of their replays."""

    count: int
    mean: float
    variance: float
    mse: float

    def __add__(self, other: Moments) -> Moments:
        """Those of both sets of samples together (Chan et al. 1979)."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        share, other_share = self.count / count, other.count / count
        return Moments(
            count,
            share * self.mean + other_share * other.mean,
            share * self.variance + other_share * other.variance + share * other_share * (self.mean - other.mean) ** 2,
            share * self.mse + other_share * other.mse,
        )

    @property
    def r2(self) -> float:
        return r_squared(self.mse, self.variance)


NOTHING = Moments(0, 0.0, 0.0, 0.0)


def fidelity(
    decode: Callable[[Tensor], Tensor], source: FeatureSource, stats: FeatureStats, watch: Watch | None = None
) -> Fidelity:
    """One pass over all samples; `decode` maps IDs (B,) to features (B, *shape) in the original scale."""
    batch_size = max(1, min(4096, BATCH_BYTES // (source.sample_bytes or 1)))
    digest = begin_digest(source)
    square_sum, tell = 0.0, counting(watch, "comparing replays with the features", len(source))
    for ids in torch.arange(len(source)).split(batch_size):
        replayed = decode(ids)
        stored = source.read(ids)
        digest.update(stored.view(torch.uint8).numpy().data)
        real = stored.to(replayed.device)
        # Not clamped: an error outside the range counts too.
        replayed, real = (normalise(x, stats.low, stats.high, clamp=False) for x in (replayed, real))
        square_sum += (replayed - real).double().square().sum().item()
        tell(int(ids[-1]) + 1)
    mse = square_sum / stats.count
    return Fidelity(mse, r_squared(mse, stats.variance), digest.hexdigest())
