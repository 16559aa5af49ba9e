"""Statistics of all features, computed in one pass, and the normalisation by their range.

FeatureSource -> scan -> FeatureStats (low, high, mean, std per channel; zero_ratio; digest)
FeatureSource, sizes of its parts -> digest_of_parts -> digest, as a recording that was appended to has it
values --normalise--> [0, 1] per channel --denormalise--> values
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from krnet.errors import ChangedFeaturesError, FeatureError
from krnet.features.feature_source import FeatureSource
from krnet.features.file_rows import CHANGED
from krnet.progress import Watch, counting


@dataclass(frozen=True, eq=False)
class FeatureStats:
    """Statistics of all features; tensors have one value per channel, (C,).

    Axis 0 of a sample is the channel; a scalar sample is one channel. All values are converted to float32 first, as
    recorders do.
    """

    low: torch.Tensor  # float32, like high
    high: torch.Tensor
    mean: torch.Tensor  # float64, like std
    std: torch.Tensor  # population standard deviation; exactly 0 for a constant channel
    zero_ratio: float  # share of all values that are exactly zero
    count: int  # number of all values: samples times values per sample
    digest: str  # hash of shape, dtype and bytes; independent of the kind of storage

    @property
    def _scale(self) -> torch.Tensor:
        span = self.high.double() - self.low.double()
        return torch.where(span > 0, 1 / span, 0.0)

    @property
    def normalised_mean(self) -> torch.Tensor:
        """Mean of (x - low) / (high - low); 0 for a constant channel."""
        return (self.mean - self.low) * self._scale

    @property
    def normalised_std(self) -> torch.Tensor:
        """Standard deviation of (x - low) / (high - low); 0 for a constant channel."""
        return self.std * self._scale

    @property
    def variance(self) -> float:
        """Variance of all normalised values: the mean variance within channels plus the variance of their means."""
        within = self.normalised_std.square().mean()
        return float(within + self.normalised_mean.var(correction=0))


def scan(source: FeatureSource, *, chunk_bytes: int = 64 << 20, watch: Watch | None = None) -> FeatureStats:
    """Read every sample once, in chunks; `chunk_bytes` bounds the float64 copy of a chunk."""
    num_channels = source.shape[0] if source.shape else 1
    sample_size = math.prod(source.shape)
    channel_size = sample_size // num_channels
    rows_per_chunk = max(1, chunk_bytes // (8 * sample_size))
    digest = begin_digest(source)
    low = torch.full((num_channels,), math.inf)
    high = -low
    mean = torch.zeros(num_channels, dtype=torch.float64)
    square_sum = torch.zeros_like(mean)
    num_zeros, tell = 0, counting(watch, "reading the features", len(source))

    for start in range(0, len(source), rows_per_chunk):
        stop = min(start + rows_per_chunk, len(source))
        stored = source.read(torch.arange(start, stop))
        digest.update(stored.view(torch.uint8).numpy().data)
        values = stored.float().reshape(stop - start, num_channels, channel_size)
        chunk_low, chunk_high = values.amin((0, 2)), values.amax((0, 2))
        # NaN and infinity survive in amin and amax, so checking these saves a pass over the values.
        if not (chunk_low.isfinite() & chunk_high.isfinite()).all():
            raise not_finite(source.name, stored, start)
        low, high = low.minimum(chunk_low), high.maximum(chunk_high)
        num_zeros += values.numel() - int(values.count_nonzero())

        # Chan et al. (1979): merge the squared deviations from each chunk's mean. Plain sums of squares would lose a
        # small variance around a large mean.
        values64 = values.double()
        chunk_mean = values64.mean((0, 2))
        chunk_square_sum = values64.sub_(chunk_mean[:, None]).square_().sum((0, 2))
        num_old, num_new = start * channel_size, (stop - start) * channel_size
        shift = chunk_mean - mean
        mean += shift * (num_new / (num_old + num_new))
        square_sum += chunk_square_sum + shift.square() * (num_old * num_new / (num_old + num_new))
        tell(stop)

    if not (high - low).isfinite().all():
        raise FeatureError(
            f"{source.name}: values run from {low.min():g} to {high.max():g} within a channel; expected a "
            f"range that float32 can hold (3.4e38). Scale the features down."
        )
    count = len(source) * sample_size
    std = (square_sum / (len(source) * channel_size)).sqrt().masked_fill(low == high, 0.0)
    return FeatureStats(low, high, mean, std, num_zeros / count, count, digest.hexdigest())


def check_unchanged(source: FeatureSource, digest: str) -> None:
    """Refuse features whose file has changed since it was opened; `digest` is that of the features at that time.

    A file with a new time of change alone is read again, whole: someone may have touched it, or written the same.
    """
    if source.file is None:
        return
    before, now = source.file.before, source.file.state()
    difference = before.difference(now)
    if difference is None and now.time_ns != before.time_ns:
        if scan(source).digest == digest:
            source.file.before = now
        else:
            difference = "its content is another"
    if difference is not None:
        raise changed(source, difference)


def changed(source: FeatureSource, difference: str) -> ChangedFeaturesError:
    return ChangedFeaturesError(
        f"{source.name}: was changed while it was in use: {difference}; nothing was written. {CHANGED}"
    )


def begin_digest(source: FeatureSource) -> hashlib.blake2b:
    """The digest of features before their first byte."""
    return hashlib.blake2b(f"{(len(source), *source.shape)} {source.dtype}".encode(), digest_size=16)


def chain_digests(first: str, second: str) -> str:
    """The digest of features that came in two parts, from the digests of the parts."""
    return hashlib.blake2b(f"{first} {second}".encode(), digest_size=16).hexdigest()


def digest_of_parts(source: FeatureSource, sizes: Sequence[int]) -> str:
    """The digest of features that came in parts of these numbers of samples, one after the other."""
    ends = itertools.accumulate(sizes)
    return reduce(chain_digests, (scan(source.part(end - size, end)).digest for size, end in zip(sizes, ends)))


def metric_range(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The range by which errors of appended samples are normalised: that of the recording.

    Samples may be appended that vary where all before were constant. Such a channel counts as one of average range.
    """
    span = high - low
    typical = span[span > 0].mean() if (span > 0).any() else torch.ones(())
    return low, torch.where(span > 0, high, low + typical)


def not_finite(name: str, stored: torch.Tensor, start: int) -> FeatureError:
    """The error for the first NaN or infinity in a chunk that starts at sample `start`."""
    index = int(stored.float().isfinite().logical_not().flatten().nonzero()[0])
    sample = start + index // (stored.numel() // len(stored))
    value = float(stored.flatten()[index])
    found = f"{value:g}, beyond float32" if math.isfinite(value) else str(value)  # nan, inf, -inf
    return FeatureError(
        f"{name}: sample {sample} holds {found}; expected finite values within float32 (3.4e38). "
        f"Repair or leave out that sample."
    )


def normalise(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, *, clamp: bool = True) -> torch.Tensor:
    """(x - low) / (high - low) of a batch (B, *shape), as float32 in [0, 1]; a constant channel becomes 0."""
    low, span = _low_and_span(x, low, high)
    scaled = ((x.float() - low) / span).masked_fill(span == 0, 0.0)
    return scaled.clamp(0.0, 1.0) if clamp else scaled


def denormalise(y: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """y (high - low) + low, as float32; a constant channel becomes exactly `low`."""
    low, span = _low_and_span(y, low, high)
    return y.float() * span + low


def _low_and_span(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """low and high - low on the device of batch x, shaped (C, 1, ...) to broadcast along its channels."""
    shape = (-1, *[1] * (x.dim() - 2))  # a batch of scalars (B,) has one channel, of shape (1,)
    low, high = (edge.to(x.device).reshape(shape) for edge in (low, high))
    return low, high - low
