"""Fused BatchNorm, skip and ReLU on bf16 maps on a GPU: two kernels forward, two backward.

    forward    x -> partial moments           partial moments, x, skip -> y, running statistics
    backward   x, y, dy -> partial sums       partial sums, x, y, dy -> dx, dskip, dweight, dbias

With fixed statistics (evaluation or frozen) forward is the second kernel alone. The kernels are in batchnorm.cu;
kernels.py compiles and launches them. `layers.batch_norm_act` decides when to use them, and holds the plain version.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from krnet.nn.cuda import kernels

SLAB = 16  # channels per block; with more, each block of a second kernel would have more sums to combine
MOST_PARTS = 128  # largest number of partial sums per channel, for the same reason; a macro of batchnorm.cu
SUM_THREADS = 256  # per block of the kernels that sum (the first of each pair)
MAP_THREADS = 512  # per block of the kernels that write maps (the second of each pair)
MIN_ROUNDS = 8  # more blocks than multiprocessors sum only if each still reads this many rounds of rows


def fits(x: Tensor, norm: nn.BatchNorm2d) -> bool:
    """Whether the kernels serve this norm on maps like x."""
    if kernels.limits(x.device) is None or x.shape[1] % 8 or norm.weight is None or norm.momentum is None:
        return False
    has_statistics = norm.running_mean is not None and norm.running_mean.dtype == torch.float32
    rows = x.numel() // x.shape[1]
    return has_statistics and norm.weight.dtype == torch.float32 and rows > int(norm.training)


class Tiling:
    """How maps, read as (rows, channels), are divided among blocks: by channels into slabs, by rows into parts."""

    def __init__(self, x: Tensor):
        self.channels = x.shape[1]
        self.rows = x.numel() // self.channels
        self.slab = min(SLAB, self.channels & -self.channels)
        self.slabs = self.channels // self.slab
        slab_blocks = max(1, kernels.limits_of(x).num_cores // self.slabs)  # a block for each multiprocessor
        round_rows = SUM_THREADS * 8 // self.slab  # rows that a block reads at a time; a thread reads 8 channels
        num_rounds = -(-self.rows // round_rows)
        parts = min(max(slab_blocks, num_rounds // MIN_ROUNDS), MOST_PARTS)
        self.share = -(-num_rounds // parts) * round_rows  # rows of a part; the last part may have fewer
        self.parts = -(-self.rows // self.share)
        self.map_blocks = min(slab_blocks, -(-self.rows * self.slab // (MAP_THREADS * 8)))

    def empty_partials(self, like: Tensor) -> Tensor:
        return torch.empty(self.slabs, self.parts, self.slab, 2, device=like.device)

    def launch_sum(self, name: str, constants: dict[str, int | str], args: list[Tensor]) -> None:
        constants = {"SLAB": self.slab, "THREADS": SUM_THREADS, "MOST_PARTS": MOST_PARTS, **constants}
        numbers = [self.rows, self.channels, self.share]
        kernels.launch(name, constants, (self.slabs, self.parts, 1), SUM_THREADS, 0, [*args, *numbers])

    def launch_map(self, name: str, constants: dict[str, int | str], args: list[Tensor], *numbers: int) -> None:
        constants = {"SLAB": self.slab, "THREADS": MAP_THREADS, "MOST_PARTS": MOST_PARTS, **constants}
        numbers = self.rows, self.channels, *numbers
        kernels.launch(name, constants, (self.slabs, self.map_blocks, 1), MAP_THREADS, 0, [*args, *numbers])


def forward(x: Tensor, norm: nn.BatchNorm2d, skip: Tensor | None, relu: bool) -> tuple[Tensor, Tensor]:
    """y = ReLU(BatchNorm(x) + skip), and the moments for backward. Updates the running statistics in training."""
    tiling, y = Tiling(x), kernels.empty_maps(x)
    moments = torch.empty(2, tiling.channels, device=x.device)  # mean, 1 / standard deviation
    mean, var, num_batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None and var is not None and num_batches is not None, f"{norm} keeps no statistics"
    partials = moments  # a placeholder that is not read unless training
    flags: dict[str, int | str] = {"SKIP": int(skip is not None), "RELU": int(relu), "TRAINING": int(norm.training)}
    if norm.training:
        partials = tiling.empty_partials(x)
        tiling.launch_sum("batch_moments", {"SKIP": 0, "RELU": 0}, [x, partials])
    flags |= {"EPS": f"{float(norm.eps)!r}f", "MOMENTUM": f"{float(norm.momentum or 0.0)!r}f"}
    args = [x, x if skip is None else skip, norm.weight, norm.bias, partials, mean, var, num_batches, y, moments]
    tiling.launch_map("batch_norm_forward", flags, args, tiling.share, tiling.parts)
    return y, moments


def backward(
    x: Tensor, y: Tensor | None, gradient: Tensor, weight: Tensor, bias: Tensor, moments: Tensor,
    skip: bool, relu: bool, training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of x, weight, bias and the skip. y is read only if there are both a skip and a ReLU."""
    tiling, dx = Tiling(x), kernels.empty_maps(x)
    dskip = kernels.empty_maps(x) if skip and relu else gradient if skip else None
    partials, sums = tiling.empty_partials(x), torch.empty_like(moments)
    flags: dict[str, int | str] = {"SKIP": int(skip), "RELU": int(relu)}
    args = [x, x if y is None else y, gradient, weight, bias, moments, partials]
    tiling.launch_sum("batch_sums", flags, args)
    outputs = [dx, dx if dskip is None else dskip, sums]
    tiling.launch_map("batch_norm_backward", flags | {"TRAINING": int(training)}, [*args, *outputs], tiling.parts)
    return dx, sums[0], sums[1], dskip


class BatchNormAct(torch.autograd.Function):
    """ReLU(BatchNorm(x) + skip); skip and ReLU are optional."""

    @staticmethod
    def forward(ctx, x, weight, bias, skip, norm, relu):  # type: ignore[no-untyped-def]
        y, moments = forward(x, norm, skip, relu)
        ctx.save_for_backward(x, y if relu and skip is not None else None, weight, bias, moments)
        ctx.skip, ctx.relu, ctx.training = skip is not None, relu, norm.training
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, y, weight, bias, moments = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        gradients = backward(x, y, gradient, weight, bias, moments, ctx.skip, ctx.relu, ctx.training)
        return *gradients, None, None
