"""Each value by itself: rounded to multiples of a step, and entropy-coded.

    x in [0, 1] per channel -> symbol floor(|x - zero| / step + 1 - dead_zone) -> ANS -> centroid of the symbol

`zero` is where the feature value 0 falls in its channel's range, so that the wide bin holds what a ReLU cut off.
Each (channel, position) has the entropy table that suits it of at most 256: positions of a channel differ more from
each other than from the same position elsewhere, and one table a channel takes more bytes.
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
    # Half of the values of a ReLU are 0 and cheap: a wider bin for them saves bytes at the same R2.
    dead_zone: float = 0.75


class Values(Basis):
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
    variants = ({"centroid": 0.5},)  # less R2, and far more that a classifier gets right
    headroom = 1  # new values never leave the channels' range

    def basis(self, job: Job, config: QuantizedConfig, learned: Any) -> tuple[Values, QuantizedConfig]:
        low, high = (edge.to(job.device) for edge in (job.stats.low, job.stats.high))
        return Values(job.source.shape or (1,), low, high), config

    def restore(
        self, samples: Samples, config: QuantizedConfig, store: TensorStore, low: Tensor, high: Tensor
    ) -> Values:
        return Values(samples.shape or (1,), low, high)
