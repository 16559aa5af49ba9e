"""Find samples that a model does not fit, such as those of another trunk: they have a large error or take many bytes.

    the model's R2 and tables           -> Limits
    error, variance, bits of each sample -> Limits.exceeded -> which of them do not fit
                                         -> Misfits: how many, the first of them, and how well they are shown

How a model shows samples that it was not fitted to depends on how many it was fitted to. Measured on CIFAR maps at 0.25
and at 1 bit a value, in terms of the mean of 2,500 samples that were fitted: unseen maps have at most 3.1 times the
error, 3.4 times the ratio of error to what is shown, and twice the bits. Maps with their channels in another order have
8 to 20 times that ratio (pca), or up to four times the bits (transform).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from krnet.coding.open_tables import OpenTables
from krnet.features.metrics import NOTHING, Moments

# A sample does not fit if one of these exceeds that of the model's own samples, on average, by the factor.
MAX_ERROR_FACTOR = 4.0
MAX_BITS_FACTOR = 3.0
MAX_RATIO_FACTOR = 4.0  # of error / (variance - error): 6 dB,
MIN_ERROR_FACTOR = 1.5  # where the error exceeds theirs, too: maps that are nearly constant have little variance
LEAST_ERROR = 1e-4  # mean squared error where each channel has the range 1: 1 % of it, which nobody calls a misfit
NUM_LISTED = 10  # IDs that are kept
TINY = 1e-12


@dataclass(frozen=True)
class Limits:
    error: float
    """MSE of the samples that the model was fitted to; each channel has the range 1."""
    ratio: float
    """error / (variance - error) of these samples."""
    bits: float | None
    """Bits that they take each; None if symbols are not entropy-coded."""

    @classmethod
    def of(cls, metrics: Mapping[str, Any], tables: OpenTables | None) -> Limits:
        """metrics: those of the model's metadata"""
        ratio = (1 - metrics["r2"]) / max(metrics["r2"], TINY)
        return cls(max(metrics["mse"], LEAST_ERROR), ratio, None if tables is None else tables.mean_bits)

    def exceeded(self, errors: Tensor, variances: Tensor, bits: Tensor | None) -> Tensor:
        """Of each sample its MSE, its variance and its bits (n,) -> whether it does not fit (n,)."""
        ratios = errors / (variances - errors).clamp(min=TINY)
        found = errors > MAX_ERROR_FACTOR * self.error
        found |= (errors > MIN_ERROR_FACTOR * self.error) & (ratios > MAX_RATIO_FACTOR * self.ratio)
        if bits is not None and self.bits is not None:
            found |= bits > MAX_BITS_FACTOR * self.bits
        return found


@dataclass(frozen=True)
class Misfits:
    """Some samples that do not fit."""

    num_samples: int = 0
    first_ids: tuple[int, ...] = ()
    moments: Moments = NOTHING

    def __add__(self, other: Misfits) -> Misfits:
        return Misfits(
            self.num_samples + other.num_samples,
            (*self.first_ids, *other.first_ids)[:NUM_LISTED],
            self.moments + other.moments,
        )

    def describe(self) -> dict[str, Any]:
        """Plain values, for people."""
        return {
            "num_samples": self.num_samples,
            "first_ids": list(self.first_ids),
            "r2": self.moments.r2 if self.num_samples else None,
        }


def moments_of(means: Tensor, variances: Tensor, errors: Tensor, num_values: int) -> Moments:
    """Of some samples together, from the mean, the variance and the MSE (n,) of each; all have `num_values` values."""
    if not len(means):
        return NOTHING
    means, variances, errors = (each.double() for each in (means, variances, errors))
    variance = variances.mean() + means.var(correction=0)
    return Moments(num_values * len(means), float(means.mean()), float(variance), float(errors.mean()))
