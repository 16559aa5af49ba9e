"""Store the features as they are: the reference for every other recorder.

    values (N, *shape) -> the file -> values[ids]

Nothing is fitted. float32 has no error; float16 halves the bytes and rounds to 11 significant bits. By default float16
features are stored as float16, and all others as float32. Features and replays pass through the memory in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krnet.config import check_choice, from_dict
from krnet.device import dtype_name
from krnet.errors import FeatureError, NotARecordingError, SettingError
from krnet.features.samples import Samples
from krnet.io.stored_rows import MadeRows, Rows, block_header_bytes
from krnet.recorders.base import Coded, Content, Job, Recorder, Replayer, RowStore, Stored, register, tensor_bytes
from krnet.recorders.sizes import file_bytes

DTYPES = {"float32": torch.float32, "float16": torch.float16}


class RawReplayer(Replayer):
    def __init__(self, values: Rows, device: torch.device):
        self.values, self.device = values, device

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        return self.values.take(ids).to(self.device).float()

    def code(self, features: Tensor, *, moves: int | None = None, stored: bool = False) -> Coded:
        values = features.to(self.values.dtype)
        if not values.isfinite().all():
            raise FeatureError(
                f"values up to {features.abs().max():g}; the recording holds {dtype_name(self.values.dtype)}, which "
                f"ends at {torch.finfo(self.values.dtype).max:g}. Record with dtype float32"
            )
        return Coded(values, self.show(values))

    def show(self, symbols: Tensor) -> Tensor:
        return symbols.float()


@dataclass(frozen=True, kw_only=True)
class RawConfig:
    dtype: str | None = None
    """float32 or float16; by default that of the features, and float32 if they have another one."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)


def default_dtype(job: Job) -> str:
    """float16 for float16 features, which loses nothing; float32 for all others."""
    return "float16" if job.source.dtype == torch.float16 else "float32"


@register
class RawRecorder(Recorder):
    name = "raw"
    config_class = RawConfig
    fast_is_exact = True
    projects = True

    def fit(self, job: Job) -> Content:
        name = from_dict(RawConfig, job.settings).dtype or default_dtype(job)
        dtype, source = DTYPES[name], job.source
        if not torch.stack([job.stats.low.min(), job.stats.high.max()]).to(dtype).isfinite().all():
            low, high = job.stats.low.min().item(), job.stats.high.max().item()
            limit = torch.finfo(DTYPES[name]).max
            raise SettingError(
                f"dtype is {name}, which ends at {limit:g}; the values run from {low:g} to {high:g}. Take dtype float32"
            )

        def read(start: int, stop: int) -> Tensor:
            return source.read(torch.arange(start, stop)).to(dtype)

        values = MadeRows((len(source), *source.shape), dtype, read)
        return Content(tensors={}, settings={"dtype": name}, made={"values": values})

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The default dtype where that fits the budget; else float16, if all values are in its range."""
        default: dict[str, Any] = {"dtype": default_dtype(job)}
        size = file_bytes(job, self.stored(job.source.shape, len(job.source), default), default)
        size += block_header_bytes(len(job.source), math.prod(job.source.shape) * DTYPES[default["dtype"]].itemsize)
        largest = max(-job.stats.low.min().item(), job.stats.high.max().item())
        half = size > budget and largest <= torch.finfo(torch.float16).max
        return {**({"dtype": "float16"} if half else default), **job.settings}

    def least_bytes(self, num_samples: int, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        smallest = from_dict(RawConfig, settings).dtype or "float16"
        return tensor_bytes(self.stored(shape, num_samples, {"dtype": smallest}))

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        return {"values": Stored((num_samples, *shape), DTYPES[settings["dtype"] or "float32"])}

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: RowStore, device: torch.device
    ) -> RawReplayer:
        name = settings.get("dtype")
        if not isinstance(name, str) or name not in DTYPES:
            raise NotARecordingError(f"values of type {name!r}; expected one of {', '.join(DTYPES)}. Record again")
        return RawReplayer(
            store.rows("values", shape=(samples.num_samples, *samples.shape), dtype=DTYPES[name]), device
        )
