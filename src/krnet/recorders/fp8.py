"""Store each value as an 8-bit float, in units of its channel's largest: one byte a value.

    x -> x / (largest |x| of the channel / largest float of the format) -> e4m3 or e5m2 -> a byte
    ids -> bytes -> times the channel's unit, clamped to the channel's range -> x

The formats are those of Micikevicius et al., "FP8 formats for deep learning" (2022), with a scale per channel. What we
add: replays are clamped to the channel's range, which can only lower the error. Nothing is fitted, and features and
replays pass through the memory in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from krnet.config import check_choice, from_dict
from krnet.features.samples import Samples
from krnet.io.stored_rows import MadeRows, Rows
from krnet.recorders.base import Coded, Content, Job, Recorder, Replayer, RowStore, Stored, register
from krnet.recorders.checks import reading_settings
from krnet.recorders.ranges import read_range, refuse_not_finite, stored_range

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class FP8Config:
    format: str = "e4m3"
    """e4m3 (3 bits of mantissa, the smaller error) or e5m2 (2 bits, and a wider range of exponents)."""

    def __post_init__(self) -> None:
        check_choice("format", self.format, FORMATS)


@dataclass(frozen=True, eq=False)
class Floats:
    """The conversion to bytes and back."""

    dtype: torch.dtype
    low: Tensor  # (channels, 1), like high
    high: Tensor
    shape: tuple[int, ...]

    @property
    def unit(self) -> Tensor:
        """(channels, 1): what 1 stands for; 1 where a channel is all zeros."""
        unit = torch.maximum(self.low.abs(), self.high.abs()) / torch.finfo(self.dtype).max
        return torch.where(unit > 0, unit, 1.0)

    def encode(self, x: Tensor) -> Tensor:
        """x (n, *shape) -> bytes (n, *shape)"""
        limit = torch.finfo(self.dtype).max  # a quotient may be rounded to above it, which would be NaN
        scaled = (x.float().reshape(len(x), len(self.low), -1) / self.unit).clamp(-limit, limit)
        return scaled.to(self.dtype).view(torch.uint8).reshape(len(x), *self.shape)

    def decode(self, stored: Tensor) -> Tensor:
        x = stored.view(self.dtype).float().reshape(len(stored), len(self.low), -1) * self.unit
        return x.maximum(self.low).minimum(self.high).reshape(len(stored), *self.shape)


class FP8Replayer(Replayer):
    def __init__(self, values: Rows, floats: Floats, device: torch.device):
        self.values, self.floats, self.device = values, floats, device

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        return self.show(self.values.take(ids).to(self.device))

    def code(self, features: Tensor, *, moves: int | None = None, stored: bool = False) -> Coded:
        symbols = self.floats.encode(features)
        return Coded(symbols, self.show(symbols))

    def show(self, symbols: Tensor) -> Tensor:
        return refuse_not_finite(self.floats.decode(symbols))


@register
class FP8Recorder(Recorder):
    name = "fp8"
    config_class = FP8Config
    fast_is_exact = True
    projects = True

    def fit(self, job: Job) -> Content:
        config, source, stats = from_dict(FP8Config, job.settings), job.source, job.stats
        floats = Floats(FORMATS[config.format], stats.low[:, None], stats.high[:, None], source.shape)

        def read(start: int, stop: int) -> Tensor:
            return floats.encode(source.read(torch.arange(start, stop)))

        values = MadeRows((len(source), *source.shape), torch.uint8, read)
        return Content({"low": stats.low, "high": stats.high}, asdict(config), made={"values": values})

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        return {**stored_range(shape), "values": Stored((num_samples, *shape), torch.uint8)}

    def least_bytes(self, num_samples: int, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        return super().least_bytes(num_samples, shape, {"format": "e4m3"})  # both formats take as many

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: RowStore, device: torch.device
    ) -> FP8Replayer:
        with reading_settings(self.name):
            config = from_dict(FP8Config, settings)
        low, high = (edge[:, None] for edge in read_range(store, samples.shape, device))
        values = store.rows("values", shape=(samples.num_samples, *samples.shape), dtype=torch.uint8)
        return FP8Replayer(values, Floats(FORMATS[config.format], low, high, samples.shape), device)
