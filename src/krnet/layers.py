"""What every layer ends in: GroupNorm, the skip, Leaky-ReLU; in fused kernels where they pay, plainly elsewhere.

    norm_act(x, norm)                    x after a convolution or an FC layer
    norm_act(x, norm, skip=s)            the end of a basic block
    norm_act(x, norm, shape=(c, h, w))   an FC layer's output becomes a map
    depthwise_block(x, ...)              a whole basic block of depthwise convolutions

The fused kernels serve bf16 on a GPU, that is `parallel.fast`; everything else, and all that is larger than they can
hold, takes the plain way, which is the definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NEGATIVE_SLOPE = 1e-4
_fused: ContextVar[bool] = ContextVar("fused", default=True)


@contextmanager
def plain() -> Iterator[None]:
    """Without fused kernels: what they are measured and tested against."""
    token = _fused.set(False)
    try:
        yield
    finally:
        _fused.reset(token)


@cache
def kernels() -> ModuleType | None:
    """The kernels, where Triton is installed (it comes with torch for CUDA)."""
    try:
        from krnet import kernels as module
    except ImportError:
        return None
    return module


def fused_for(x: Tensor, norm: nn.GroupNorm, area: int) -> ModuleType | None:
    """The kernels, if they serve this input."""
    if not (x.is_cuda and x.dtype == torch.bfloat16 and _fused.get()):
        return None
    found = kernels()
    if found is None:
        return None
    rows, columns = found.tile(norm.num_channels // (area if x.ndim == 2 else 1), area, norm.num_groups)
    return found if rows * columns <= found.LARGEST_TILE else None


def norm_act(
    x: Tensor, norm: nn.GroupNorm, skip: Tensor | None = None, shape: tuple[int, int, int] | None = None
) -> Tensor:
    """Leaky-ReLU(norm(x) + skip); `shape` turns the vectors of an FC layer into maps."""
    geometry = shape or ((x.shape[1], x.shape[2], x.shape[3]) if x.ndim == 4 else (x.shape[1], 1, 1))
    found = fused_for(x, norm, geometry[1] * geometry[2])
    if found is not None and (x.ndim == 2 or x.is_contiguous(memory_format=torch.channels_last)):
        y = found.NormAct.apply(x, norm.weight, norm.bias, skip, norm.num_groups, geometry, norm.eps, NEGATIVE_SLOPE)
        return y if x.ndim == 4 or shape else y.flatten(1)
    y = norm(x)
    y = F.leaky_relu(y if skip is None else y + skip, NEGATIVE_SLOPE)
    return y.unflatten(1, shape) if shape else y


def depthwise_block(x: Tensor, conv1: nn.Conv2d, norm1: nn.GroupNorm, conv2: nn.Conv2d, norm2: nn.GroupNorm) -> Tensor:
    """conv, norm, act, conv, norm, plus x, act."""
    found = fused_for(x, norm1, x.shape[2] * x.shape[3])
    if found is not None and found.unit_fits(x, norm1) and x.is_contiguous(memory_format=torch.channels_last):
        weights = (conv1.weight, norm1.weight, norm1.bias, conv2.weight, norm2.weight, norm2.bias)
        return found.DepthwiseBlock.apply(x, *weights, norm1.num_groups, norm1.eps, NEGATIVE_SLOPE)
    return norm_act(conv2(norm_act(conv1(x), norm1)), norm2, skip=x)
