"""Compress features as zfp does, which scientists use for arrays of floats.

    x in [0, 1] -> x / step -> an array of 1 to 4 dimensions -> zfp with a tolerance of 1 -> the file
    ids -> zfp -> times step, clamped to the channel's range -> x

Lindstrom, "Fixed-rate compressed floating-point arrays" (2014). zfp cuts an array into blocks of 4 values along each
dimension, decorrelates them, and codes their bits from the highest down to the tolerance. What we add: each channel is
brought to the range [0, 1] first, and the tolerance may be any number (zfp rounds its own down to a power of two).

zfp trusts what it reads: it looks for the end of a block beyond the end of its bytes. So these are followed by as many
zeros as an array of this size can need.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from krnet.coding.search import find_least
from krnet.config import check_int, check_range, from_dict
from krnet.errors import NotARecordingError
from krnet.features.samples import Samples
from krnet.features.stats import denormalise, normalise
from krnet.io.archive import TensorStore
from krnet.io.header import RESTORE
from krnet.recorders.base import Content, Job, Recorder, Stored, register
from krnet.recorders.byte_blocks import MAX_BLOCK, BlockReplayer, compress, estimated_bytes, stored_stream
from krnet.recorders.checks import reading_settings
from krnet.recorders.ranges import read_range, refuse_not_finite, stored_range
from krnet.recorders.sizes import overhead_bytes

MAX_DIMS = 4  # of an array of zfp
SIDE = 4  # values of a block of zfp along each dimension
VALUE_BITS, BLOCK_BITS = 33, 64  # that zfp can read at most: of a float, and beside them of a block
LEAST_STEP, MOST_STEP = 1e-7, 1e3
COPIES = 7  # of a block while it is decoded: its bytes, padded, as an array, and in the original scale


@dataclass(frozen=True, kw_only=True)
class ZfpConfig:
    step: float = 0.1
    """Tolerance of zfp, where the range of each channel is 1. Most errors are far smaller."""
    dims: int | None = None
    """Dimensions of the arrays that zfp sees, counted from the last of the features, 1 to 4; all before them become
    one. By default those that take the fewest bytes."""
    block_size: int = 64
    """Samples compressed together; reading one decompresses its whole block."""

    def __post_init__(self) -> None:
        check_range("step", self.step, LEAST_STEP, MOST_STEP)
        if self.dims is not None:
            check_int("dims", self.dims, 1, MAX_DIMS)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)


class ZfpCodec:
    def __init__(self, config: ZfpConfig, shape: tuple[int, ...], low: Tensor, high: Tensor):
        """low, high (channels,): the range of each channel"""
        self.step, self.dims, self.shape, self.low, self.high = config.step, config.dims or 1, shape, low, high

    def array_shape(self, num_samples: int) -> tuple[int, ...]:
        """All dimensions but the last `dims - 1` become one."""
        whole = (num_samples, *self.shape)
        first = max(1, len(whole) - self.dims + 1)
        return math.prod(whole[:first]), *whole[first:]

    def encode(self, features: Tensor) -> bytes:
        import zfpy

        x = normalise(features.cpu().reshape(len(features), *(self.shape or (1,))), self.low, self.high) / self.step
        array = x.reshape(self.array_shape(len(features))).contiguous().numpy()
        found: bytes = zfpy.compress_numpy(array, tolerance=1.0, write_header=False)
        return found

    def decode(self, content: bytes, num_samples: int) -> Tensor:
        import zfpy

        shape = self.array_shape(num_samples)
        most_bytes = math.prod(-(-size // SIDE) for size in shape) * (VALUE_BITS * SIDE ** len(shape) + BLOCK_BITS) // 8
        if len(content) > most_bytes:
            raise NotARecordingError(f"a block of {len(content)} bytes; expected at most {most_bytes}. {RESTORE}")
        padded = content + bytes(most_bytes + 16 - len(content))
        try:
            array = zfpy._decompress(padded, zfpy.type_float, shape, tolerance=1.0)
        except ValueError as error:
            raise NotARecordingError(f"a block that zfp cannot read ({error}). {RESTORE}") from error
        x = torch.from_numpy(array).mul_(self.step).reshape(num_samples, *(self.shape or (1,)))
        return denormalise(refuse_not_finite(x).clamp_(0, 1), self.low, self.high).reshape(num_samples, *self.shape)


@register
class ZfpRecorder(Recorder):
    name = "zfp"
    config_class = ZfpConfig
    package, extra = "zfpy", "rivals"
    fast_is_exact = True

    def fit(self, job: Job) -> Content:
        config, started = self._complete(job, from_dict(ZfpConfig, job.settings)), time.perf_counter()
        streams = compress(job, self._codec(job, config), config.block_size)
        tensors = {"low": job.stats.low, "high": job.stats.high, **streams}
        return Content(tensors=tensors, settings=asdict(config), seconds=time.perf_counter() - started)

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The smallest step whose file fits; sizes are estimated from a few samples, the result is verified."""
        given = dict(job.settings)
        if "step" in given:
            return given
        start = from_dict(ZfpConfig, given)

        def size_bytes(step: float) -> float:
            config = self._complete(job, replace(start, step=min(max(step, LEAST_STEP), MOST_STEP)))
            own_bytes = 8 * len(job.stats.low) + overhead_bytes(job, 4, asdict(config))
            return own_bytes + estimated_bytes(job, self._codec(job, config), config.block_size)

        def step_for(aim: float) -> float:
            found = find_least(
                lambda step: -math.log(size_bytes(step)), -math.log(aim), start=start.step, low=LEAST_STEP,
                high=MOST_STEP, slack=0.002, tries=24,
            )  # fmt: skip
            return min(max(float(f"{found or MOST_STEP:.5g}"), LEAST_STEP), MOST_STEP)

        step, aim = step_for(budget), float(budget)
        for _ in range(3):
            real = self._file_bytes(job, replace(start, step=step))
            if real <= budget or step >= MOST_STEP:
                break
            aim *= 0.998 * budget / real
            step = step_for(aim)
        config = self._complete(job, replace(start, step=step))
        return {**given, "step": config.step, "dims": config.dims}

    def _file_bytes(self, job: Job, config: ZfpConfig) -> float:
        content = self.fit(replace(job, settings=asdict(config)))
        num_bytes = sum(tensor.nbytes for tensor in content.tensors.values())
        return num_bytes * job.num_planned / len(job.source) + overhead_bytes(job, 4, content.settings)

    def _complete(self, job: Job, config: ZfpConfig) -> ZfpConfig:
        """With the dimensions that take the fewest bytes of a few samples, if none are given."""
        if config.dims is not None:
            return config
        most = min(MAX_DIMS, 1 + len(job.source.shape))
        choices = [replace(config, dims=dims) for dims in range(1, most + 1)]
        return min(choices, key=lambda one: estimated_bytes(job, self._codec(job, one), one.block_size))

    def _codec(self, job: Job, config: ZfpConfig) -> ZfpCodec:
        return ZfpCodec(config, job.source.shape, job.stats.low.cpu(), job.stats.high.cpu())

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        return {**stored_range(shape), **stored_stream(num_samples, from_dict(ZfpConfig, settings).block_size)}

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        config = from_dict(ZfpConfig, settings)
        # A block of zfp reaches beyond the array where that is not a multiple of 4 wide.
        whole = ZfpCodec(config, tuple(shape), torch.zeros(1), torch.ones(1)).array_shape(config.block_size)
        return COPIES * math.prod(SIDE * -(-size // SIDE) for size in whole)

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> BlockReplayer:
        with reading_settings(self.name):
            config = from_dict(ZfpConfig, settings)
        codec = ZfpCodec(config, samples.shape, *read_range(store, samples.shape))
        return BlockReplayer(store, codec, samples.num_samples, config.block_size, device)
