"""Quantise every value on its own, and entropy-code the symbols.

    x in [0, 1] per channel -> d = x - zero -> symbol sign(d) * floor(|d| / step + 1 - dead_zone) -> ANS
    ids -> symbols -> centroids of their bins + zero -> x

`zero` is the place of the feature value 0 in its channel's range: the dead zone is around it, where a ReLU puts many
values. Each (channel, position) uses the best of at most 256 entropy tables. One table per channel takes more bytes:
positions of a channel differ more from each other than from the same position in other channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krnet.coding.matrix import CodedConfig
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.recorders.base import Job, register
from krnet.recorders.basis import Basis
from krnet.recorders.coded import CodedRecorder


@dataclass(frozen=True, kw_only=True)
class QuantizedConfig(CodedConfig):
    # Half of the values after a ReLU are 0: a wider dead zone saves bytes at the same R2.
    dead_zone: float = 0.75


class Values(Basis):
    """The values themselves, relative to the feature value 0."""

    def __init__(self, shape: tuple[int, ...], low: Tensor, high: Tensor):
        span = high - low
        self.num_columns = math.prod(shape)
        self.zero = torch.where(span > 0, -low / span, 0.0).clamp(0, 1)[:, None]  # (C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x.reshape(len(x), len(self.zero), -1) - self.zero).flatten(1)

    def inverse(self, numbers: Tensor) -> Tensor:
        return numbers.view(len(numbers), len(self.zero), -1) + self.zero

    def tensors(self) -> dict[str, Tensor]:
        return {}


@register
class QuantizedRecorder(CodedRecorder):
    name = "quantized"
    config_class = QuantizedConfig
    variants = ({"centroid": 0.5},)  # a lower R2, but a classifier is right far more often
    headroom = 1  # new values stay in the channels' range, so they need no spare symbols

    def basis(self, job: Job, config: QuantizedConfig, learned: Any) -> tuple[Values, QuantizedConfig]:
        low, high = (edge.to(job.device) for edge in (job.stats.low, job.stats.high))
        return Values(job.source.shape or (1,), low, high), config

    def restore(
        self, samples: Samples, config: QuantizedConfig, store: TensorStore, low: Tensor, high: Tensor
    ) -> Values:
        return Values(samples.shape or (1,), low, high)
