"""The features themselves, as they are: what every other way to store them is measured against.

    values (N, *shape) -> the file -> values[ids]

No fit and no error in float32; float16 halves the bytes and rounds to 11 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from krnet.config import check_choice
from krnet.errors import InputError, NotARecordingError
from krnet.recorders.base import Content, Job, Recorder, Replayer, TensorStore, register
from krnet.samples import Samples

DTYPES = {"float32": torch.float32, "float16": torch.float16}


class RawReplayer(Replayer):
    def __init__(self, values: Tensor, device: torch.device):
        self.values, self.device = values, device

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        return self.values[ids].to(self.device).float()


@register
class RawRecorder(Recorder):
    name = "raw"
    setting_names = frozenset({"dtype"})

    def fit(self, job: Job) -> Content:
        name = job.settings.get("dtype", "float32")
        check_choice("dtype", name, DTYPES)
        values = torch.empty((len(job.source), *job.source.shape), dtype=DTYPES[name])
        step = max(1, (64 << 20) // job.source.sample_bytes)
        for ids in torch.arange(len(job.source)).split(step):
            values[ids[0] : ids[-1] + 1] = job.source.read(ids)
        if not values.isfinite().all():
            raise InputError(f"dtype is {name!r}; the largest values do not fit in it. Take dtype float32")
        return Content(tensors={"values": values}, settings={"dtype": name})

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> RawReplayer:
        name = settings.get("dtype")
        if name not in DTYPES:
            raise NotARecordingError(f"values of type {name!r}; expected one of {', '.join(DTYPES)}. Record again")
        return RawReplayer(
            store.tensor("values", shape=(samples.num_samples, *samples.shape), dtype=DTYPES[name]), device
        )
