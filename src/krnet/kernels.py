"""Norm, skip and activation in one pass over memory, and the depthwise convolution before them: for a GPU.

    x (B, C, H, W) -> GroupNorm -> [+ skip] -> Leaky-ReLU                     NormAct, in Triton
    x (B, C, H, W) -> 3x3 depthwise -> GroupNorm -> [+ skip] -> Leaky-ReLU    DepthwiseBlock: two of these, in CUDA C++

Maps lie channels last. One program owns one group of one sample, so both moments of the norm are its own. Depthwise
units need each thread to hold the plane of a channel in its registers (kernels.cu), which Triton has no words for:
as tiles of a Triton program, with neighbours read from the cache, they took six times as long. They are compiled by
NVRTC, which comes with torch, in a second. `layers.py` holds the plain version, which is the oracle of the tests, and
says when this one is used. What it saves: benchmarks/profile.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_TILE = 1 << 15  # values of one group of one sample: what the registers of a program hold
LARGEST_PLANE = 64  # values of one channel: what the registers of a thread hold
LARGEST_GROUP = 512  # channels of a group, each a thread with 128 registers
SHARED_BYTES = 220 << 10  # of a multiprocessor, for all its blocks
SUMS = 11  # gradients of a depthwise unit's parameters, per channel: nine taps, scale, shift


@triton.jit
def _norm_forward(
    x, gamma, beta, skip, y, moments, EPS, SLOPE, C: tl.constexpr, GROUP: tl.constexpr, AREA: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)  # a batch may have more than 2^31 values
    p, c = tl.arange(0, BP), tl.arange(0, BC)
    owned = c < GROUP
    valid = (p < AREA)[:, None] & owned[None, :]
    channel = g * GROUP + c
    at = p[:, None] * C + channel[None, :]
    # FLAT: the output of an FC layer, (C, H, W) in memory, with a scale and a shift for every value.
    flat = channel[None, :] * AREA + p[:, None]
    sample = b * (AREA * C)
    z = tl.load(x + sample + (flat if FLAT else at), mask=valid, other=0.0).to(tl.float32)
    mean = tl.sum(z) / (GROUP * AREA)
    centred = tl.where(valid, z - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred) / (GROUP * AREA) + EPS)
    if FLAT:
        scale, shift = tl.load(gamma + flat, mask=valid, other=0.0), tl.load(beta + flat, mask=valid, other=0.0)
    else:
        scale = tl.load(gamma + channel, mask=owned, other=0.0)[None, :]
        shift = tl.load(beta + channel, mask=owned, other=0.0)[None, :]
    out = centred * rstd * scale.to(tl.float32) + shift.to(tl.float32)
    if SKIP:
        out += tl.load(skip + sample + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + sample + at, tl.where(out >= 0, out, out * SLOPE), mask=valid)
    place = moments + (b * tl.num_programs(1) + g) * 2
    tl.store(place, mean)
    tl.store(place + 1, rstd)


@triton.jit
def _norm_backward(
    x, gamma, y, moments, gradient, dx, dskip, sums, B, SLOPE, C: tl.constexpr, GROUP: tl.constexpr,
    AREA: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, FLAT: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Sums the gradients of scale and shift over the samples that the program visits."""
    first, step, g = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    p, c = tl.arange(0, BP), tl.arange(0, BC)
    owned = c < GROUP
    valid = (p < AREA)[:, None] & owned[None, :]
    channel = g * GROUP + c
    at = p[:, None] * C + channel[None, :]
    flat = channel[None, :] * AREA + p[:, None]
    if FLAT:
        scale = tl.load(gamma + flat, mask=valid, other=0.0).to(tl.float32)
        sum_gamma, sum_beta = tl.zeros((BP, BC), tl.float32), tl.zeros((BP, BC), tl.float32)
    else:
        scale = tl.load(gamma + channel, mask=owned, other=0.0).to(tl.float32)[None, :]
        sum_gamma, sum_beta = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for b in range(first, B, step):
        sample = b * (AREA * C)
        place = moments + (b * tl.num_programs(1) + g) * 2
        mean, rstd = tl.load(place), tl.load(place + 1)
        z = tl.load(x + sample + (flat if FLAT else at), mask=valid, other=0.0).to(tl.float32)
        out = tl.load(y + sample + at, mask=valid, other=0.0)
        d = tl.load(gradient + sample + at, mask=valid, other=0.0).to(tl.float32)
        n = tl.where(valid, (z - mean) * rstd, 0.0)
        d = tl.where(out >= 0, d, d * SLOPE)
        if SKIP:
            tl.store(dskip + sample + at, d, mask=valid)
        if FLAT:
            sum_gamma += d * n
            sum_beta += d
            first_moment, second_moment = tl.sum(d * scale), tl.sum(d * n * scale)
        else:
            by_gamma, by_beta = tl.sum(d * n, 0), tl.sum(d, 0)
            sum_gamma += by_gamma
            sum_beta += by_beta
            first_moment, second_moment = tl.sum(by_beta[None, :] * scale), tl.sum(by_gamma[None, :] * scale)
        d = rstd * (d * scale - first_moment / (GROUP * AREA) - n * (second_moment / (GROUP * AREA)))
        tl.store(dx + sample + (flat if FLAT else at), d, mask=valid)
    if FLAT:
        row = sums + first * (2 * C * AREA)
        tl.store(row + flat, sum_gamma, mask=valid)
        tl.store(row + C * AREA + flat, sum_beta, mask=valid)
    else:
        row = sums + first * (2 * C)
        tl.store(row + channel, sum_gamma, mask=owned)
        tl.store(row + C + channel, sum_beta, mask=owned)


def tile(channels: int, area: int, groups: int) -> tuple[int, int]:
    return triton.next_power_of_2(area), triton.next_power_of_2(channels // groups)


def _norm_sizes(shape: tuple[int, int, int], groups: int) -> dict[str, Any]:
    channels, area = shape[0], shape[1] * shape[2]
    BP, BC = tile(channels, area, groups)
    warps = max(1, min(16, BP * BC // 2048))
    return {"C": channels, "GROUP": channels // groups, "AREA": area, "BP": BP, "BC": BC, "num_warps": warps}


@dataclass(frozen=True)
class Layout:
    """How a kernel of kernels.cu is laid out for maps of one shape."""

    shape: tuple[int, int, int]
    groups: int
    lanes: int = 1

    @property
    def group(self) -> int:
        return self.shape[0] // self.groups

    @property
    def threads(self) -> int:
        return -(-self.group * self.lanes // 32) * 32

    @property
    def tile_bytes(self) -> int:
        """Shared memory backward: x, y and gradient of one sample's group."""
        return 3 * 2 * self.group * self.shape[1] * self.shape[2]

    @property
    def blocks(self) -> int:
        """On a multiprocessor at a time: one reads while another computes."""
        by_registers = LARGEST_GROUP // self.threads if self.lanes == 1 else 1024 // self.threads
        return max(1, min(by_registers, SHARED_BYTES // self.shared_bytes))

    @property
    def shared_bytes(self) -> int:
        return self.tile_bytes + 128 + (4 * SUMS * self.threads if self.lanes == 1 else 0)

    def fits(self, device: torch.device) -> bool:
        room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
        return hasattr(torch.cuda, "_compile_kernel") and self.shared_bytes <= room


@cache
def _kernel(name: str, layout: Layout, skip: bool, eps: float, slope: float, device: torch.device) -> Any:
    (channels, height, width), group = layout.shape, layout.group
    constants = {"C": channels, "GROUP": group, "H": height, "W": width, "THREADS": layout.threads}
    constants |= {"LANES": layout.lanes, "BLOCKS": layout.blocks, "SKIP": int(skip), "MORE": int(not skip)}
    options = [f"-D{key}={value}" for key, value in constants.items()] + [f"-DEPS={eps!r}f", f"-DSLOPE={slope!r}f"]
    # Only the kernel asked for: the others would not compile for every size, and take their time.
    options.append(f"-D{name.upper()}")
    source = resources.files("krnet").joinpath("kernels.cu").read_text()
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # the driver then knows this thread
        kernel = torch.cuda._compile_kernel(source, name, nvcc_options=options)
        if name.endswith("backward"):
            kernel.set_shared_memory_config(layout.tile_bytes)
        return kernel


def unit_fits(x: Tensor, norm: torch.nn.GroupNorm) -> bool:
    if not (x.is_cuda and x.dtype == torch.bfloat16 and x.shape[2] * x.shape[3] <= LARGEST_PLANE):
        return False
    layout = Layout(map_shape(x), norm.num_groups)
    return layout.group <= LARGEST_GROUP and layout.fits(x.device)


def _norm_layout(x: Tensor, y: Tensor, groups: int) -> Layout | None:
    """For backward in CUDA C++, which takes half of Triton's time, where it can."""
    group = y.shape[1] // groups
    if x.ndim == 2 or not x.is_cuda or x.dtype != torch.bfloat16 or group > 1024:
        return None
    wanted = 1024 if group * y.shape[2] * y.shape[3] > 1 << 14 else 256
    layout = Layout(map_shape(y), groups, max(2, wanted // group))
    return layout if layout.threads <= 1024 and layout.fits(x.device) else None


def map_shape(x: Tensor) -> tuple[int, int, int]:
    return x.shape[1], x.shape[2], x.shape[3]


class NormAct(torch.autograd.Function):
    """GroupNorm, the skip if there is one, Leaky-ReLU; on maps, or on an FC layer's output, which becomes one."""

    @staticmethod
    def forward(ctx, x, gamma, beta, skip, groups, shape, eps, slope):  # type: ignore[no-untyped-def]
        y = torch.empty((len(x), *shape), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        moments = torch.empty(len(x), groups, 2, device=x.device)
        ctx.flat = x.ndim == 2 and shape[1] * shape[2] > 1
        ctx.with_skip, ctx.slope = skip is not None, slope
        _norm_forward[(len(x), groups)](
            x, gamma, beta, skip if ctx.with_skip else x, y, moments, EPS=eps, SLOPE=slope, FLAT=ctx.flat,
            SKIP=ctx.with_skip, **_norm_sizes(shape, groups),
        )  # fmt: skip
        ctx.save_for_backward(x, gamma, y, moments)
        return y

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, gamma, y, moments = ctx.saved_tensors
        groups = moments.shape[1]
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        dx, dskip = torch.empty_like(x), torch.empty_like(y) if ctx.with_skip else None
        layout = _norm_layout(x, y, groups)
        cores = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
        if layout is not None:
            kernel = _kernel("norm_backward", layout, ctx.with_skip, 0.0, ctx.slope, x.device)
            blocks = min(len(x), max(1, cores * layout.blocks // groups))
            sums = torch.empty(blocks * layout.lanes, 2, len(gamma), device=x.device)
            args = [x, gamma, y, moments, gradient, dx, dx if dskip is None else dskip, sums, len(x)]
            grid, block = (blocks, groups, 1), (layout.threads, 1, 1)
            kernel(grid=grid, block=block, args=args, shared_mem=layout.tile_bytes)
            return dx, *sums.sum(0), dskip, None, None, None, None
        sizes = _norm_sizes(y.shape[1:], groups)
        # Enough programs to cover each other's waiting, few enough that summing up their sums costs nothing.
        programs = min(len(x), max(1, cores * 32 // sizes["num_warps"] // groups // (2 if ctx.flat else 1)))
        sums = torch.empty(programs, 2, len(gamma), device=x.device)
        _norm_backward[(programs, groups)](
            x, gamma, y, moments, gradient, dx, x if dskip is None else dskip, sums, len(x), SLOPE=ctx.slope,
            FLAT=ctx.flat, SKIP=ctx.with_skip, **sizes,
        )  # fmt: skip
        return dx, *sums.sum(0), dskip, None, None, None, None


def unit_forward(
    x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, skip: Tensor | None, groups: int, eps: float, slope: float
) -> tuple[Tensor, Tensor]:
    """Depthwise convolution, norm, skip, activation; and the moments of the norm."""
    y, moments = torch.empty_like(x), torch.empty(len(x), groups, 2, device=x.device)
    layout = Layout(map_shape(x), groups)
    kernel = _kernel("unit_forward", layout, skip is not None, eps, slope, x.device)
    args = [x, weight, gamma, beta, x if skip is None else skip, y, moments]
    kernel(grid=(len(x), groups, 1), block=(layout.threads, 1, 1), args=args)
    return y, moments


def unit_backward(
    x: Tensor, weight: Tensor, gamma: Tensor, y: Tensor, moments: Tensor, gradient: Tensor, more: Tensor | None,
    eps: float, slope: float,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Gradients by x, with `more` added; by the skip, if there is no `more`; by weight, scale and shift."""
    layout, skip = Layout(map_shape(x), moments.shape[1]), more is None
    kernel = _kernel("unit_backward", layout, skip, eps, slope, x.device)
    cores = torch.cuda.get_device_properties(x.device).multi_processor_count
    blocks = min(len(x), max(1, cores * layout.blocks // layout.groups))
    dx, dskip = torch.empty_like(x), torch.empty_like(x) if skip else None
    sums = torch.empty(blocks, SUMS, x.shape[1], device=x.device)
    args = [x, weight, gamma, y, moments, gradient, x if more is None else more, dx, dx if dskip is None else dskip]
    kernel(
        grid=(blocks, layout.groups, 1),
        block=(layout.threads, 1, 1),
        args=[*args, sums, len(x)],
        shared_mem=layout.tile_bytes,
    )
    total = sums.sum(0)
    return dx, dskip, (total[:9].t().reshape(weight.shape), total[9], total[10])


class DepthwiseBlock(torch.autograd.Function):
    """A basic block of two depthwise convolutions; the skip's gradient joins in the last kernel."""

    @staticmethod
    def forward(ctx, x, weight1, gamma1, beta1, weight2, gamma2, beta2, groups, eps, slope):  # type: ignore[no-untyped-def]
        middle, moments1 = unit_forward(x, weight1, gamma1, beta1, None, groups, eps, slope)
        y, moments2 = unit_forward(middle, weight2, gamma2, beta2, x, groups, eps, slope)
        ctx.save_for_backward(x, weight1, gamma1, middle, moments1, weight2, gamma2, y, moments2)
        ctx.constants = eps, slope
        return y

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight1, gamma1, middle, moments1, weight2, gamma2, y, moments2 = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        through, skipped, second = unit_backward(middle, weight2, gamma2, y, moments2, gradient, None, *ctx.constants)
        dx, _, first = unit_backward(x, weight1, gamma1, middle, moments1, through, skipped, *ctx.constants)
        return dx, *first, *second, None, None, None
