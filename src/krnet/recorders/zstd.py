"""Store the features exactly, compressed by Zstandard: recorder raw in fewer bytes.

    values (n, *shape) -> their first bytes, then their second bytes, ... -> zstd -> the file

The bytes of floats of one significance are alike, so they are put side by side first, as Blosc and HDF5 do (shuffle).
Zeros, as a ReLU leaves them, take next to nothing. float32 has no error; float16 rounds to 11 significant bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.config import check_choice, check_int, from_dict
from krnet.errors import NotARecordingError, SettingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.io.header import RESTORE
from krnet.recorders.base import Content, Job, Recorder, Stored, register
from krnet.recorders.byte_blocks import (
    MAX_BLOCK,
    BlockReplayer,
    compress,
    estimated_bytes,
    stored_stream,
)
from krnet.recorders.checks import reading_settings
from krnet.recorders.ranges import read_range, refuse_not_finite, stored_range
from krnet.recorders.sizes import overhead_bytes

DTYPES = {"float32": torch.float32, "float16": torch.float16}
COPIES = 6  # of a block while it is decoded: its bytes, in order, and as float32


@dataclass(frozen=True, kw_only=True)
class ZstdConfig:
    dtype: str | None = None
    """float32 or float16; by default that of the features, and float32 if they have another one."""
    level: int = 9
    """Effort of the compression, 1 to 22."""
    block_size: int = 64
    """Samples compressed together; reading one decompresses its whole block."""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)
        check_int("level", self.level, 1, 22)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)


class ZstdCodec:
    def __init__(self, config: ZstdConfig, shape: tuple[int, ...]):
        self.dtype, self.level, self.shape = DTYPES[config.dtype or "float32"], config.level, shape

    def encode(self, features: Tensor) -> bytes:
        import zstandard

        values = features.to(self.dtype).cpu().contiguous().view(-1).view(torch.uint8).numpy()
        shuffled = np.ascontiguousarray(values.reshape(-1, self.dtype.itemsize).T)
        return zstandard.ZstdCompressor(level=self.level).compress(shuffled.tobytes())

    def decode(self, content: bytes, num_samples: int) -> Tensor:
        import zstandard

        num_bytes = num_samples * math.prod(self.shape) * self.dtype.itemsize
        try:
            # A frame names its own size, and memory of that size is taken: it must be the right one.
            named = zstandard.get_frame_parameters(content).content_size
            if named != num_bytes:
                raise NotARecordingError(f"a block of {named} bytes; expected {num_bytes}. {RESTORE}")
            found = zstandard.ZstdDecompressor().decompress(content)
        except zstandard.ZstdError as error:
            raise NotARecordingError(f"a block that zstd cannot read ({error}). {RESTORE}") from error
        values = np.ascontiguousarray(np.frombuffer(found, np.uint8).reshape(self.dtype.itemsize, -1).T)
        decoded = torch.from_numpy(values).view(self.dtype).float().reshape(num_samples, *self.shape)
        return refuse_not_finite(decoded)


@register
class ZstdRecorder(Recorder):
    name = "zstd"
    config_class = ZstdConfig
    package, extra = "zstandard", "rivals"
    fast_is_exact = True

    def fit(self, job: Job) -> Content:
        config, started = self._complete(job), time.perf_counter()
        dtype = DTYPES[config.dtype or "float32"]
        if (largest := _largest(job)) > torch.finfo(dtype).max:
            raise SettingError(
                f"dtype is {config.dtype}, which ends at {torch.finfo(dtype).max:g}; the values go up to {largest:g}. "
                f"Take dtype float32"
            )
        streams = compress(job, ZstdCodec(config, job.source.shape), config.block_size)
        tensors = {"low": job.stats.low, "high": job.stats.high, **streams}
        return Content(tensors=tensors, settings=asdict(config), seconds=time.perf_counter() - started)

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The default dtype where that is likely to fit the budget; else float16, if all values are in its range."""
        given, config = dict(job.settings), self._complete(job)
        codec = ZstdCodec(config, job.source.shape)
        size = estimated_bytes(job, codec, config.block_size) + overhead_bytes(job, 4, asdict(config))
        size += 8 * len(job.stats.low)
        if "dtype" not in given and size > budget and _largest(job) <= torch.finfo(torch.float16).max:
            return {**given, "dtype": "float16"}
        return {**given, "dtype": config.dtype}

    def _complete(self, job: Job) -> ZstdConfig:
        default = "float16" if job.source.dtype == torch.float16 else "float32"
        return from_dict(ZstdConfig, {"dtype": default} | {k: v for k, v in job.settings.items() if v is not None})

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        return {**stored_range(shape), **stored_stream(num_samples, from_dict(ZstdConfig, settings).block_size)}

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        return COPIES * from_dict(ZstdConfig, settings).block_size * math.prod(shape)

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> BlockReplayer:
        with reading_settings(self.name):
            config = from_dict(ZstdConfig, settings)
        read_range(store, samples.shape)  # not needed, but of this shape: it tells channels from rows
        codec = ZstdCodec(config, samples.shape)
        return BlockReplayer(store, codec, samples.num_samples, config.block_size, device)


def _largest(job: Job) -> float:
    """The largest size of a value."""
    return max(-job.stats.low.min().item(), job.stats.high.max().item())
