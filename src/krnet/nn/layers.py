"""The end of every layer: norm, skip connection, activation. Runs fused CUDA kernels or plain PyTorch.

    norm_act(x, norm)                         after a convolution or an FC layer
    norm_act(x, norm, skip=s)                 the end of a basic block
    fc_to_map(x, linear, norm, (c, h, w))     an FC layer whose output becomes a map
    depthwise_block(x, ...)                   a whole basic block of depthwise convolutions
    batch_norm_act(x, norm, skip, relu)       the same for backbones

Backbones have BatchNorm and ReLU; all other networks have GroupNorm and Leaky-ReLU. The fused kernels (nn/cuda) serve
bf16 maps on a GPU, as `device.fast_math` makes them, up to a certain size. All else takes the plain version, which
defines the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.nn.cuda import batchnorm, kernels

NEGATIVE_SLOPE = 1e-4  # of Leaky-ReLU
_fused: ContextVar[bool] = ContextVar("fused", default=True)


@contextmanager
def plain() -> Iterator[None]:
    """Switch the fused kernels off: benchmarks and tests compare them with the plain version."""
    token = _fused.set(False)
    try:
        yield
    finally:
        _fused.reset(token)


def is_map(x: Tensor) -> bool:
    """Whether x is laid out as the kernels require: bf16, channels last."""
    return x.dtype == kernels.DTYPE and x.is_contiguous(memory_format=torch.channels_last)


def can_fuse(x: Tensor, norm: nn.GroupNorm, shape: tuple[int, int, int], element: bool = False) -> bool:
    """Whether the kernels serve this norm on maps of this shape, on the device of x.

    `element`: the norm has a scale and a shift for each value, not for each channel.
    """
    if not _fused.get() or kernels.limits(x.device) is None or len(x) == 0 or norm.weight is None:
        return False
    return norm.weight.dtype == torch.float32 and kernels.norm_fits(shape, norm.num_groups, element, x.device)


def product_dtype(x: Tensor) -> torch.dtype:
    """The precision in which a layer multiplies x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def norm_act(x: Tensor, norm: nn.GroupNorm, skip: Tensor | None = None) -> Tensor:
    """Leaky-ReLU(norm(x) + skip)."""
    if can_fuse(x, norm, kernels.map_shape(x)):
        maps = x if x.ndim == 4 else x[:, :, None, None]
        if is_map(maps) and (skip is None or is_map(skip)):
            y = kernels.NormAct.apply(maps, norm.weight, norm.bias, skip, norm.num_groups, norm.eps, NEGATIVE_SLOPE)
            return y if x.ndim == 4 else y.flatten(1)
    y = norm(x)
    if torch.is_grad_enabled() or not _fused.get():
        return F.leaky_relu(y if skip is None else y + skip, NEGATIVE_SLOPE)
    # The same in place: on a CPU, half of the time would go to allocating memory for each result.
    return F.leaky_relu_(y if skip is None else y.add_(skip), NEGATIVE_SLOPE)


def fc_to_map(x: Tensor, linear: nn.Linear, norm: nn.GroupNorm, shape: tuple[int, int, int]) -> Tensor:
    """Leaky-ReLU(norm(linear(x))) as maps (B, *shape); the norm has a scale and a shift for each value."""
    if linear.bias is not None or not can_fuse(x, norm, shape, element=True) or product_dtype(x) != kernels.DTYPE:
        return norm_act(linear(x), norm).unflatten(1, shape)
    if linear.weight.dtype == torch.bfloat16 and len(x) < linear.in_features:
        # Replay keeps its weights in bf16. The product has fewer values than they do, so reorder it instead of them.
        maps = linear(x).unflatten(1, shape).contiguous(memory_format=torch.channels_last)
    else:
        maps = kernels.LinearToMap.apply(x.to(kernels.DTYPE), linear.weight, shape)
    scale, shift = (values.view(shape[0], -1).t().contiguous() for values in (norm.weight, norm.bias))  # (H W, C)
    return kernels.NormAct.apply(maps, scale, shift, None, norm.num_groups, norm.eps, NEGATIVE_SLOPE)


def depthwise_block(x: Tensor, conv1: nn.Conv2d, norm1: nn.GroupNorm, conv2: nn.Conv2d, norm2: nn.GroupNorm) -> Tensor:
    """act(norm2(conv2(act(norm1(conv1(x))))) + x), where act is Leaky-ReLU."""
    shape = kernels.map_shape(x)
    if can_fuse(x, norm1, shape) and is_map(x) and kernels.unit_fits(shape, norm1.num_groups, x.device):
        weights = (conv1.weight, norm1.weight, norm1.bias, conv2.weight, norm2.weight, norm2.bias)
        return kernels.DepthwiseBlock.apply(x, *weights, norm1.num_groups, norm1.eps, NEGATIVE_SLOPE)
    return norm_act(conv2(norm_act(conv1(x), norm1)), norm2, skip=x)


def batch_norm_act(x: Tensor, norm: nn.BatchNorm2d, skip: Tensor | None = None, relu: bool = True) -> Tensor:
    """ReLU(norm(x) + skip); skip and ReLU are optional. Hooks of the norm run only in the plain version."""
    if _fused.get() and skip is not None and is_map(x):
        skip = skip.to(x.dtype)  # an fp32 input as the skip would turn all later maps into fp32
    are_maps = is_map(x) and (skip is None or (is_map(skip) and skip.shape == x.shape))
    if _fused.get() and are_maps and batchnorm.fits(x, norm):
        return batchnorm.BatchNormAct.apply(x, norm.weight, norm.bias, skip, norm, relu)
    y = norm(x)
    y = y if skip is None else y + skip
    return F.relu(y) if relu else y
