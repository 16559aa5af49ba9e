"""BatchNorm, the skip if there is one, and ReLU, on bf16 maps on a GPU: two kernels forward, two backward.

    forward    x -> partial moments;        these, x, skip -> y, running statistics
    backward   x, y, dy -> partial sums;    these, x, y, dy -> dx, dskip, dweight, dbias

With fixed statistics (evaluation, or frozen) forward is the second kernel alone. The kernels are in batchnorm.cu, and
are compiled and started as those of kernels.py; `layers.batch_norm_act` says when, and holds the plain version.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from krnet.nn.cuda import kernels

SLAB = 16  # channels of a block: with more, every block of a second kernel would have more to combine
MOST_PARTS = 128  # partial sums of a channel, for the same reason
SUM_THREADS, MAP_THREADS = 256, 512  # of a block in the kernels that sum, and in those that write maps
DEEP = 8  # rounds of a block that sums: from there on more blocks pay


def fits(x: Tensor, norm: nn.BatchNorm2d) -> bool:
    """Whether the kernels serve this norm on maps as x."""
    if kernels.limits(x.device) is None or x.shape[1] % 8 or norm.weight is None or norm.momentum is None:
        return False
    known = norm.running_mean is not None and norm.running_mean.dtype == torch.float32
    rows = x.numel() // x.shape[1]
    return known and norm.weight.dtype == torch.float32 and rows > int(norm.training)


class Tiling:
    """How maps, read as (rows, channels), are shared out among blocks."""

    def __init__(self, x: Tensor):
        self.channels = x.shape[1]
        self.rows = x.numel() // self.channels
        self.slab = min(SLAB, self.channels & -self.channels)
        self.slabs = self.channels // self.slab
        found = kernels.limits(x.device)
        assert found is not None, f"the kernels do not run on {x.device}"
        per_slab = max(1, found.cores // self.slabs)  # blocks, for one on each multiprocessor
        round_rows = SUM_THREADS * 8 // self.slab
        num_rounds = -(-self.rows // round_rows)
        parts = min(max(per_slab, num_rounds // DEEP), MOST_PARTS)
        self.share = -(-num_rounds // parts) * round_rows  # rows of a part; the last may have fewer
        self.parts = -(-self.rows // self.share)
        self.map_blocks = min(per_slab, -(-self.rows * self.slab // (MAP_THREADS * 8)))

    def partials(self, like: Tensor) -> Tensor:
        return torch.empty(self.slabs, self.parts, self.slab, 2, device=like.device)

    def sum(self, name: str, constants: dict[str, int | str], args: list[Tensor]) -> None:
        constants = {"SLAB": self.slab, "THREADS": SUM_THREADS, "MOST_PARTS": MOST_PARTS, **constants}
        numbers = [self.rows, self.channels, self.share]
        kernels.launch(name, constants, (self.slabs, self.parts, 1), SUM_THREADS, 0, [*args, *numbers])

    def map(self, name: str, constants: dict[str, int | str], args: list[Tensor], *numbers: int) -> None:
        constants = {"SLAB": self.slab, "THREADS": MAP_THREADS, "MOST_PARTS": MOST_PARTS, **constants}
        numbers = self.rows, self.channels, *numbers
        kernels.launch(name, constants, (self.slabs, self.map_blocks, 1), MAP_THREADS, 0, [*args, *numbers])


def forward(x: Tensor, norm: nn.BatchNorm2d, skip: Tensor | None, relu: bool) -> tuple[Tensor, Tensor]:
    """y, and mean and 1 / standard deviation (2, C) for backward; moves the running statistics in training."""
    split, y = Tiling(x), kernels.channels_last(x)
    moments = torch.empty(2, split.channels, device=x.device)
    mean, var, num_batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None and var is not None and num_batches is not None, f"{norm} keeps no statistics"
    partials = moments  # not read
    flags: dict[str, int | str] = {"SKIP": int(skip is not None), "RELU": int(relu), "TRAINING": int(norm.training)}
    if norm.training:
        partials = split.partials(x)
        split.sum("batch_moments", {"SKIP": 0, "RELU": 0}, [x, partials])
    flags |= {"EPS": f"{float(norm.eps)!r}f", "MOMENTUM": f"{float(norm.momentum or 0.0)!r}f"}
    args = [x, x if skip is None else skip, norm.weight, norm.bias, partials, mean, var, num_batches, y, moments]
    split.map("batch_norm_forward", flags, args, split.share, split.parts)
    return y, moments


def backward(
    x: Tensor, y: Tensor | None, gradient: Tensor, weight: Tensor, bias: Tensor, moments: Tensor,
    skip: bool, relu: bool, training: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients by x, by weight and bias, and by the skip. y is needed where there are both a skip and a ReLU."""
    split, dx = Tiling(x), kernels.channels_last(x)
    dskip = kernels.channels_last(x) if skip and relu else gradient if skip else None
    partials, sums = split.partials(x), torch.empty_like(moments)
    flags: dict[str, int | str] = {"SKIP": int(skip), "RELU": int(relu)}
    args = [x, x if y is None else y, gradient, weight, bias, moments, partials]
    split.sum("batch_sums", flags, args)
    outputs = [dx, dx if dskip is None else dskip, sums]
    split.map("batch_norm_backward", flags | {"TRAINING": int(training)}, [*args, *outputs], split.parts)
    return dx, sums[0], sums[1], dskip


class BatchNormAct(torch.autograd.Function):
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
        found = backward(x, y, gradient, weight, bias, moments, ctx.skip, ctx.relu, ctx.training)
        return *found, None, None
