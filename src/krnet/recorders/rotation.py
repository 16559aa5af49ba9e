"""Rotate each sample at random, then round all its values to the levels that suit a normal distribution.

    x in [0, 1] -> minus the mean map -> R x -> scale s (of the sample) -> nearest of the levels to R x / s -> ANS
    ids -> levels -> s * R^T levels + mean map -> x

Zandieh et al., "TurboQuant: online vector quantization with near-optimal distortion rate" (2025), and Gao and Long,
"RaBitQ" (2024). After a random rotation every value of a sample is about normal, with the sample's own variance: one
set of levels (Lloyd 1982, Max 1960) serves all samples of all data, and no codebook is fitted or stored. The rotation
comes from a seed and takes no bytes. Deviations:

- The rotation is a product of random signs and Hadamard transforms, for any number of values without padding; theirs
  are dense or padded to a power of two.
- The mean map is subtracted (RaBitQ subtracts centroids, TurboQuant nothing).
- Scales are rounded to powers of 2^(1/8).
- The number of levels need not be a power of two, and codes are entropy-coded, which takes fewer bytes than packing
  them: 1.91 bits for 4 levels, 3.77 for 16.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.coding.matrix import CODED_TENSORS, MAX_BLOCK
from krnet.coding.search import largest_fitting
from krnet.config import check_int, from_dict
from krnet.device import exact_math
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.recorders.base import Content, Job, Recorder, Stored, register
from krnet.recorders.basis import Basis, CodedReplayer, matrix_of, planned_bytes, stored_matrix
from krnet.recorders.checks import reading_settings
from krnet.recorders.codes import CODES, check_codes, code_reader, encode_codes, measure_codes
from krnet.recorders.maps import mean_map, once_for_features
from krnet.recorders.memory import block_numbers
from krnet.recorders.ranges import read_range, stored_range
from krnet.recorders.sizes import planned_overhead

MAX_LEVELS = 256
SCALE_STEPS = 8  # scales for each factor of two
LEAST_EXPONENT, MOST_EXPONENT = -24 * SCALE_STEPS, SCALE_STEPS  # of a scale: values lie in [0, 1]
LEVEL_ROUNDS = 500
ROUNDS = 3  # of signs and Hadamard transforms
SEARCH_ROWS = 1024  # samples from which a search estimates sizes
COPIES = 128  # float32 numbers for each value of PROBE_SAMPLES samples while they are rotated, and of the rotation
PART_BYTES = 2 << 20  # of the samples that are rotated at once


@dataclass(frozen=True, kw_only=True)
class RotationConfig:
    levels: int = 16
    """Levels of the quantiser, 2 to 256: 1 to 8 bits a value before entropy coding."""
    rotation: int = 0
    """Seed of the random rotation."""
    block_size: int = 64
    """Samples whose codes are entropy-coded together; reading one decodes its whole block."""

    def __post_init__(self) -> None:
        check_int("levels", self.levels, 2, MAX_LEVELS)
        check_int("rotation", self.rotation, 0, 2**63 - 1)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)


# ------------------------------------------------------------------ levels


@cache
def normal_levels(num_levels: int) -> Tensor:
    """(num_levels,) the levels with the least mean squared error for a standard normal variable, in rising order.

    Each level is to be the mean of its cell. The iteration of Lloyd begins at the quantiles of a normal variable of
    variance 3, which are the best ones for many levels (Panter and Dite 1951).
    """
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    levels = math.sqrt(3) * normal.icdf((torch.arange(num_levels, dtype=torch.float64) + 0.5) / num_levels)
    end = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(LEVEL_ROUNDS):
        edges = torch.cat([-end, (levels[1:] + levels[:-1]) / 2, end])
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        # The mean of a normal variable in a cell: minus the rise of the density, divided by that of the distribution.
        means = -density.diff() / normal.cdf(edges).diff()
        levels = (means - means.flip(0)) / 2  # symmetric: differences of the upper tail's probabilities are inexact
        levels = torch.cat([levels[: num_levels // 2], -levels[: -(-num_levels // 2)].flip(0)])
    return levels.float()


# ------------------------------------------------------------------ the rotation


def hadamard(size: int) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / math.sqrt(2)
    return matrix


class Turn:
    """A random rotation of vectors of any length.

    Each round shuffles the values, gives them random signs, cuts them into parts whose lengths are the powers of two in
    the binary form of the length, and applies a Hadamard transform to each part: 120 = 64 + 32 + 16 + 8.
    """

    def __init__(self, size: int, seed: int, device: torch.device):
        self.device = device
        # Raw numbers of a bit generator are the same with every version of numpy, which its distributions need not be.
        draw = np.random.PCG64(seed).random_raw
        orders = [np.argsort(draw(size), kind="stable") for _ in range(ROUNDS)]
        self.orders = [torch.from_numpy(order).to(device) for order in orders]
        self.inverse_orders = [torch.from_numpy(np.argsort(order)).to(device) for order in orders]
        self.signs = [torch.from_numpy((draw(size) >> 63).astype(np.float32) * 2 - 1).to(device) for _ in range(ROUNDS)]
        self.lengths = [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]

    def forward(self, x: Tensor) -> Tensor:
        """x (n, size) -> R x"""
        for order, signs in zip(self.orders, self.signs):
            x = self._transform(x[:, order] * signs)
        return x

    def inverse(self, y: Tensor) -> Tensor:
        for order, signs in zip(self.inverse_orders[::-1], self.signs[::-1]):
            y = (self._transform(y) * signs)[:, order]
        return y

    def _transform(self, x: Tensor) -> Tensor:
        """A Hadamard transform of each part; it is its own inverse."""
        parts = []
        for part in x.split(self.lengths, dim=1):
            # H of a * b values is H of a along rows and H of b along columns.
            bits = part.shape[1].bit_length() - 1
            left, right = (hadamard(1 << size).to(self.device) for size in (bits // 2, bits - bits // 2))
            parts.append((left @ part.reshape(len(part), len(left), len(right)) @ right).flatten(1))
        return torch.cat(parts, dim=1)


# ------------------------------------------------------------------ the recorder


class Rotated(Basis):
    """A sample's codes: the index of a level for each value, then its scale as a power of 2^(1 / SCALE_STEPS)."""

    def __init__(self, mean: Tensor, config: RotationConfig):
        """mean (values,) float16"""
        self.mean = mean
        self.num_columns = len(mean) + 1
        self.turn = Turn(len(mean), config.rotation, mean.device)
        self.levels = normal_levels(config.levels).to(mean.device)
        self.edges = (self.levels[1:] + self.levels[:-1]) / 2

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(max(1, PART_BYTES // (4 * len(self.mean))))  # the rotation takes several times their memory
        return torch.cat([self._codes(part) for part in parts])

    def _codes(self, x: Tensor) -> Tensor:
        y = self.turn.forward(x.flatten(1) - self.mean.float())
        exponent = (SCALE_STEPS * y.square().mean(1, keepdim=True).sqrt().log2()).round()
        exponent = exponent.clamp(LEAST_EXPONENT, MOST_EXPONENT)
        codes = torch.bucketize(y / self._scale(exponent), self.edges, out_int32=True)
        return torch.cat([codes.float(), exponent], dim=1)

    def inverse(self, numbers: Tensor) -> Tensor:
        codes = check_codes(numbers[:, :-1], 0, len(self.levels) - 1)
        exponent = check_codes(numbers[:, -1:], LEAST_EXPONENT, MOST_EXPONENT)
        y = self.levels[codes] * self._scale(exponent)
        return self.turn.inverse(y) + self.mean.float()

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean}

    def _scale(self, exponent: Tensor) -> Tensor:
        return torch.exp2(exponent / SCALE_STEPS)


@register
class RotationRecorder(Recorder):
    name = "rotation"
    config_class = RotationConfig
    fast_is_exact = True
    projects = True

    def fit(self, job: Job) -> Content:
        config, started = from_dict(RotationConfig, job.settings), time.perf_counter()
        with exact_math(), torch.inference_mode():
            basis = self._basis(job, config)
            codes = encode_codes(matrix_of(job, basis), config.block_size)
        tensors = {"low": job.stats.low, "high": job.stats.high, **basis.tensors(), **codes}
        return Content(tensors=tensors, settings=asdict(config), seconds=time.perf_counter() - started)

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The most levels whose file fits: sizes are estimated from SEARCH_ROWS samples, the result is verified."""
        given = dict(job.settings)
        if "levels" in given:
            return given
        config, levels, aim_bytes = from_dict(RotationConfig, given), 2, float(budget)
        estimate = cache(lambda levels: self._estimate_bytes(job, replace(config, levels=levels)))
        for _ in range(4):
            limit = aim_bytes
            levels = largest_fitting(lambda n, limit=limit: estimate(n) <= limit, 2, MAX_LEVELS)  # type: ignore[misc]
            size_bytes = planned_bytes(job, self.fit(replace(job, settings={**given, "levels": levels})), CODES)
            if size_bytes <= budget or levels == 2:
                break
            aim_bytes *= 0.999 * budget / size_bytes
        return {**given, "levels": levels}

    def _estimate_bytes(self, job: Job, config: RotationConfig) -> float:
        with exact_math(), torch.inference_mode():
            codes = matrix_of(job, self._basis(job, config))
            stats = measure_codes(codes, config.block_size, max_rows=SEARCH_ROWS)
        own_bytes = job.stats.low.nbytes + job.stats.high.nbytes + 2 * (codes.num_columns - 1)
        return stats.size_bytes + own_bytes + planned_overhead(job, len(CODED_TENSORS) + 3, asdict(config))

    def _basis(self, job: Job, config: RotationConfig) -> Rotated:
        mean = once_for_features(job, self.name, None, lambda: mean_map(job).flatten().half())
        return Rotated(mean, config)

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        config, num_values = from_dict(RotationConfig, settings), math.prod(shape)
        codes = stored_matrix(CODES, num_samples, num_values + 1, config.block_size)
        return {**stored_range(shape), "mean": Stored((num_values,), torch.float16), **codes}

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        config, num_values = from_dict(RotationConfig, settings), math.prod(shape)
        return block_numbers(config.block_size, num_values + 1) + COPIES * num_values

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> CodedReplayer:
        with reading_settings(self.name):
            config = from_dict(RotationConfig, settings)
        num_values, (low, high) = math.prod(samples.shape), read_range(store, samples.shape, device)
        mean = store.tensor("mean", shape=(num_values,), dtype=torch.float16).to(device)
        reader = code_reader(store, samples.num_samples, num_values + 1, config.block_size, device)
        return CodedReplayer(reader, Rotated(mean, config), samples, low, high)
