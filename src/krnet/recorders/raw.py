"""Store the features as they are: the reference for every other recorder.

    values (N, *shape) -> the file -> values[ids]

Nothing is fitted. float32 has no error; float16 halves the bytes and rounds to 11 significant bits. By default float16
features are stored as float16, and all others as float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krnet.config import check_choice, from_dict
from krnet.device import dtype_name
from krnet.errors import FeatureError, NotARecordingError, SettingError
from krnet.features.samples import Samples
from krnet.recorders.base import (
    Content,
    Job,
    Recorder,
    Replayer,
    Stored,
    TensorStore,
    file_bytes,
    register,
    tensor_bytes,
)

DTYPES = {"float32": torch.float32, "float16": torch.float16}
CHUNK_BYTES = 64 << 20  # bytes of features read at once


class RawReplayer(Replayer):
    def __init__(self, values: Tensor, device: torch.device):
        self.values, self.device = values, device

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        return self.values[ids].to(self.device).float()

    def project(self, features: Tensor) -> Tensor:
        projected = features.to(self.values.dtype).float()
        if not projected.isfinite().all():
            raise FeatureError(
                f"values up to {features.abs().max():g}; the recording holds {dtype_name(self.values.dtype)}, which "
                f"ends at {torch.finfo(self.values.dtype).max:g}. Record with dtype float32"
            )
        return projected


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
        values = torch.empty((len(job.source), *job.source.shape), dtype=DTYPES[name])
        num_samples = max(1, CHUNK_BYTES // job.source.sample_bytes)
        for ids in torch.arange(len(job.source)).split(num_samples):
            values[ids[0] : ids[-1] + 1] = job.source.read(ids)
        if not values.isfinite().all():
            low, high = job.stats.low.min().item(), job.stats.high.max().item()
            limit = torch.finfo(DTYPES[name]).max
            raise SettingError(
                f"dtype is {name}, which ends at {limit:g}; the values run from {low:g} to {high:g}. Take dtype float32"
            )
        return Content(tensors={"values": values}, settings={"dtype": name})

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The default dtype where that fits the budget; else float16, if all values are in its range."""
        default: dict[str, Any] = {"dtype": default_dtype(job)}
        size = file_bytes(job, self.stored(job.source.shape, len(job.source), default), default)
        largest = max(-job.stats.low.min().item(), job.stats.high.max().item())
        half = size > budget and largest <= torch.finfo(torch.float16).max
        return {**({"dtype": "float16"} if half else default), **job.settings}

    def least_bytes(self, num_samples: int, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        smallest = from_dict(RawConfig, settings).dtype or "float16"
        return tensor_bytes(self.stored(shape, num_samples, {"dtype": smallest}))

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        return {"values": Stored((num_samples, *shape), DTYPES[settings["dtype"] or "float32"])}

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> RawReplayer:
        name = settings.get("dtype")
        if not isinstance(name, str) or name not in DTYPES:
            raise NotARecordingError(f"values of type {name!r}; expected one of {', '.join(DTYPES)}. Record again")
        return RawReplayer(
            store.tensor("values", shape=(samples.num_samples, *samples.shape), dtype=DTYPES[name]), device
        )
