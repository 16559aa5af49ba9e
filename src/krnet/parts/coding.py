"""Codes the samples of one part: symbols, and what is measured on them.

    features of an ID range, Coder -> code_part -> the tensors of a part, Measured, digest of the features

Features are read, coded and let go a few at a time. The error is measured on what the symbols are shown as.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from krnet.errors import FeatureError
from krnet.features.feature_source import FeatureSource
from krnet.features.metrics import NOTHING
from krnet.features.stats import begin_digest, normalise, not_finite
from krnet.parts.misfits import NUM_LISTED, Limits, Misfits, moments_of
from krnet.parts.part import Measured
from krnet.parts.symbols import Coder, Packer
from krnet.recording import Recording
from krnet.recording_file import MAX_MSE, PROBE_SAMPLES, channel_range, probe_values

CHUNK_BYTES = 16 << 20  # float32 features coded at once: several copies of them exist

Tell = Callable[[int], None]  # samples of the part that are done


@dataclass(frozen=True)
class CodedPart:
    tensors: dict[str, Tensor]
    measured: Measured
    features: str
    """Digest of the features."""


class PartCoder:
    """Codes part after part with one model."""

    def __init__(self, model: Recording, moves: int | None):
        self.coder, self.moves = Coder(model), moves
        self.limits = Limits.of(model.metadata["metrics"], self.coder.tables)
        self.low, self.high = channel_range(model)
        self.num_values = math.prod(model.shape)

    def code(self, source: FeatureSource, first: int, tell: Tell) -> CodedPart:
        """source: the features of the part alone; first: the ID of the first of them, for messages"""
        packer, digest = Packer(self.coder), begin_digest(source)
        measured = Measured(NOTHING, 0, Misfits())
        probe = torch.linspace(0, len(source) - 1, PROBE_SAMPLES, dtype=torch.float64).round().long().unique()
        probed = []
        with ThreadPoolExecutor(1) as thread:  # packs while the next samples are read and coded
            packed: Future[None] | None = None
            for ids in chunks(source, self.coder.block_size):
                stored = source.read(ids)
                digest.update(stored.view(torch.uint8).numpy().data)
                features = stored.to(self.coder.device).float()
                symbols, shown = self.coder.replayer.code(features, moves=self.moves, stored=True)
                measured += self._measure(source.name, features, shown, symbols, first + int(ids[0]))
                probed.append(probe_values(shown[probe[(probe >= ids[0]) & (probe <= ids[-1])] - ids[0]]).cpu())
                if packed is not None:
                    packed.result()
                packed = thread.submit(packer.add, symbols.cpu())
                tell(int(ids[-1]) + 1)
            assert packed is not None, "a part without samples"
            packed.result()
        tensors = {**packer.tensors(), "probe.ids": probe, "probe.values": torch.cat(probed)}
        return CodedPart(tensors, measured, digest.hexdigest())

    def _measure(self, name: str, features: Tensor, shown: Tensor, symbols: Tensor, first: int) -> Measured:
        # Not clamped: an error outside the range counts too.
        scaled, scaled_back = (
            normalise(x, self.low, self.high, clamp=False).reshape(len(x), self.num_values) for x in (features, shown)
        )
        errors = scaled_back.sub_(scaled).square_().mean(1)  # (n,)
        if not (errors < MAX_MSE).all():
            raise self._too_far(name, features, errors, first)
        variances, means = torch.var_mean(scaled, 1, correction=0)
        moments = moments_of(means, variances, errors, self.num_values)
        tables = self.coder.tables
        bits = None if tables is None else tables.bits(symbols)
        bad = self.limits.exceeded(errors, variances, bits).nonzero()[:, 0]
        ids = tuple(first + row for row in bad[:NUM_LISTED].tolist())
        misfits = Misfits(len(bad), ids, moments_of(means[bad], variances[bad], errors[bad], self.num_values))
        return Measured(moments, features.numel() - int(features.count_nonzero()), misfits)

    def _too_far(self, name: str, features: Tensor, errors: Tensor, first: int) -> FeatureError:
        """The error for features that are not finite, or so large that the error of their replays means nothing."""
        if not features.isfinite().all():
            return not_finite(name, features.cpu(), first)
        row = int((errors < MAX_MSE).logical_not().nonzero()[0])
        return FeatureError(
            f"{name}: sample {first + row} lies far outside the range of the model's samples: its MSE is "
            f"{errors[row]:.3g}, where each channel has the range 1. Leave it out, or fit a model to it"
        )


def chunks(source: FeatureSource, block_size: int) -> Iterator[Tensor]:
    """The IDs of a source, a few at a time: whole blocks of the entropy coder."""
    num_blocks = max(1, CHUNK_BYTES // (4 * max(1, math.prod(source.shape)) * block_size))
    yield from torch.arange(len(source)).split(num_blocks * block_size)


def digest_of(source: FeatureSource, block_size: int) -> str:
    """The digest of features that `PartCoder.code` returns, without coding them."""
    digest = begin_digest(source)
    for ids in chunks(source, block_size):
        digest.update(source.read(ids).view(torch.uint8).numpy().data)
    return digest.hexdigest()
