"""Norm, skip and activation in one pass over memory, and the convolution or product before them: for a GPU.

    x (B, C, H, W) -> GroupNorm -> [+ skip] -> Leaky-ReLU                     NormAct
    x (B, C, H, W) -> 3x3 depthwise -> GroupNorm -> [+ skip] -> Leaky-ReLU    DepthwiseBlock: two of these
    x (B, K) -> FC layer -> (B, C, H, W)                                      LinearToMap

Maps lie channels last. The kernels are CUDA C++ (kernels.cu), compiled for each shape by NVRTC, which comes with torch,
in a fraction of a second. Triton, which would be less code, has no words for a thread that holds the plane of a channel
in its registers: depthwise units took six times as long in it, norms twice. `layers.py` holds the plain version, which
is the oracle of the tests, and says when this one is used. What it saves: benchmarks/profile.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

DTYPE = torch.bfloat16  # of maps; parameters and sums are fp32
LARGEST_PLANE = 64  # values of one channel in a unit: what the registers of a thread hold
LARGEST_UNIT = 512  # channels of a group in a unit, each a thread with 128 registers
LARGEST_BLOCK = 1024  # threads: no GPU takes more
MOST_BLOCKS = 16  # on a multiprocessor: all GPUs take so many
LARGE_TILE = 1 << 13  # values of one group of one sample from which on more threads pay
KEPT_PLACES = 16  # gradients of scale and shift that the registers of a thread hold in an ELEMENT norm
SUMS = 11  # gradients of a depthwise unit's parameters, per channel: nine taps, scale, shift
WARPS, WARP = 16, 32  # of a block of column_sums

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Limits:
    """What a device has: multiprocessors, and shared memory of each."""

    cores: int
    shared_bytes: int


@cache
def limits(device: torch.device) -> Limits | None:
    """None where the kernels cannot run."""
    kernel_type = getattr(getattr(torch.cuda, "_utils", None), "_CudaKernel", None)
    compiles = hasattr(torch.cuda, "_compile_kernel") and hasattr(kernel_type, "set_shared_memory_config")
    if device.type != "cuda" or torch.version.cuda is None or not compiles:
        return None
    found = torch.cuda.get_device_properties(device)
    if found.major < 8:  # no cp.async, no bf16
        return None
    return Limits(found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 48 << 10))


@dataclass(frozen=True)
class Layout:
    """How a kernel is laid out for maps of one shape."""

    shape: Shape
    groups: int
    per_core: int
    """Threads of a multiprocessor that its registers are to last for."""
    tiles: int = 1
    """Copies of one sample's group in shared memory."""
    thread_bytes: int = 0
    """Shared memory of each thread besides."""
    lanes: int = 1
    element: bool = False
    parts: int = 1
    depth: int = 1

    @property
    def group(self) -> int:
        return self.shape[0] // self.groups

    @property
    def threads(self) -> int:
        return -(-self.group * self.lanes // WARP) * WARP

    @property
    def tile_bytes(self) -> int:
        return self.tiles * self.depth * DTYPE.itemsize * self.group * self.shape[1] * self.shape[2]

    @property
    def shared_bytes(self) -> int:
        return self.tile_bytes + self.thread_bytes * self.threads + (2 << 10)  # sums, and what the driver takes

    def blocks(self, limits: Limits) -> int:
        """On a multiprocessor at a time: one reads while another computes."""
        return max(1, min(MOST_BLOCKS, self.per_core // self.threads, limits.shared_bytes // self.shared_bytes))

    def grid(self, batch: int, limits: Limits) -> tuple[int, int, int]:
        """As many blocks as the device holds at a time, each with many samples."""
        most = max(1, limits.cores * self.blocks(limits) // (self.groups * self.parts))
        return min(batch, most), self.groups, self.parts

    def fits(self, limits: Limits) -> bool:
        return self.threads <= LARGEST_BLOCK and self.shared_bytes <= limits.shared_bytes

    def constants(self, limits: Limits, skip: bool, eps: float, slope: float) -> dict[str, int | str]:
        channels, height, width = self.shape
        found: dict[str, int | str] = {"C": channels, "GROUP": self.group, "H": height, "W": width}
        found |= {"LANES": self.lanes, "THREADS": self.threads, "BLOCKS": self.blocks(limits), "PARTS": self.parts}
        found |= {"DEPTH": self.depth, "ELEMENT": int(self.element), "SKIP": int(skip), "MORE": int(not skip)}
        return found | {"EPS": f"{float(eps)!r}f", "SLOPE": f"{float(slope)!r}f"}


def unit_layout(shape: Shape, groups: int, tiles: int, thread_bytes: int = 0) -> Layout:
    return Layout(shape, groups, LARGEST_UNIT, tiles, thread_bytes)


def backward_unit_layout(shape: Shape, groups: int) -> Layout:
    """x, y and gradient; each thread has its sums and the signs of its plane."""
    return unit_layout(shape, groups, 3, 4 * (SUMS + -(-shape[1] * shape[2] // 32)))


def norm_layout(shape: Shape, groups: int, element: bool, backward: bool, limits: Limits) -> Layout:
    group, area = shape[0] // groups, shape[1] * shape[2]
    large = group * area > LARGE_TILE
    if not backward:
        lanes = max(1, min(area, (512 if large else 256) // group))
        return Layout(shape, groups, 1536, lanes=lanes, element=element)
    lanes = max(1, min(area, (1024 if large else 256) // group))
    parts = -(-area // (lanes * KEPT_PLACES)) if element else 1
    layout = Layout(shape, groups, 1024, 3, lanes=lanes, element=element, parts=parts, depth=2)
    return layout if layout.fits(limits) else Layout(shape, groups, 1024, 3, 0, lanes, element, parts)


def unit_fits(shape: Shape, groups: int, device: torch.device) -> bool:
    found = limits(device)
    small = shape[1] * shape[2] <= LARGEST_PLANE and shape[0] // groups <= LARGEST_UNIT
    return found is not None and small and backward_unit_layout(shape, groups).fits(found)


def norm_fits(shape: Shape, groups: int, element: bool, device: torch.device) -> bool:
    """Whether NormAct serves: the groups must be of whole channels."""
    found = limits(device)
    if found is None or shape[0] % groups:
        return False
    return all(norm_layout(shape, groups, element, backward, found).fits(found) for backward in (False, True))


@cache
def source() -> str:
    """All kernels; each is compiled only where its name is defined."""
    folder = resources.files("krnet.nn.cuda")
    return "".join(folder.joinpath(name).read_text() for name in ("kernels.cu", "batchnorm.cu"))


@cache
def _compiled(name: str, options: tuple[str, ...], shared_bytes: int, device: torch.device) -> Any:
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # the driver then knows this thread
        # Only the kernel asked for: the others would not compile for every size, and take their time.
        kernel = torch.cuda._compile_kernel(source(), name, nvcc_options=[f"-D{name.upper()}", *options])
        kernel.set_shared_memory_config(shared_bytes)
        return kernel


def launch(
    name: str, constants: dict[str, int | str], grid: tuple[int, int, int], threads: int, shared_bytes: int,
    args: list[Any],
) -> None:  # fmt: skip
    """Run a kernel; compile it first where that has not been done."""
    options = tuple(f"-D{key}={value}" for key, value in constants.items())
    kernel = _compiled(name, options, shared_bytes, args[0].device)
    kernel(grid=grid, block=(threads, 1, 1), args=args, shared_mem=shared_bytes)


def _limits(x: Tensor) -> Limits:
    found = limits(x.device)
    assert found is not None, f"the kernels do not run on {x.device}"
    return found


def map_shape(x: Tensor) -> Shape:
    """(C, H, W) of maps; vectors (B, C) are maps of a single place."""
    return (x.shape[1], x.shape[2], x.shape[3]) if x.ndim == 4 else (x.shape[1], 1, 1)


def channels_last(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def column_sums(parts: Tensor) -> Tensor:
    """Sum over the first dimension. torch's own takes 9 us for the few megabytes that it is."""
    total = torch.empty(parts.shape[1:], device=parts.device)
    grid = (-(-total.numel() // WARP), 1, 1)
    launch("column_sums", {}, grid, WARPS * WARP, 0, [parts, total, len(parts), total.numel()])
    return total


def swap_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, m, k) -> (m, n, k) in another precision, at the speed of memory; torch's own cast reached a third of that."""
    first, second, length = rows.shape
    moved = torch.empty(second, first, length, dtype=dtype, device=rows.device)
    kinds = {"FROM": rows.dtype, "TO": dtype}
    constants: dict[str, int | str] = {k: "float" if v == torch.float32 else "Value" for k, v in kinds.items()}
    threads = min(256, -(-length // (8 * WARP)) * WARP)
    constants |= {"FIRST": first, "SECOND": second, "K": length, "THREADS": threads}
    launch("move_rows", constants, (first * second, 1, 1), threads, 0, [rows, moved])
    return moved


def norm_forward(
    x: Tensor, gamma: Tensor, beta: Tensor, skip: Tensor | None, groups: int, eps: float, slope: float
) -> tuple[Tensor, Tensor]:
    """Norm, skip, activation; and the moments of the norm. A scale for each channel, or (H W, C) one for each value."""
    found, y = _limits(x), channels_last(x)
    moments = torch.empty(len(x), groups, 2, device=x.device)
    layout = norm_layout(map_shape(x), groups, gamma.ndim == 2, False, found)
    constants = layout.constants(found, skip is not None, eps, slope)
    args = [x, gamma, beta, x if skip is None else skip, y, moments]
    launch("norm_forward", constants, (len(x), groups, 1), layout.threads, layout.tile_bytes, args)
    return y, moments


def norm_backward(
    x: Tensor, gamma: Tensor, y: Tensor, moments: Tensor, gradient: Tensor, skip: bool, slope: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients by x, by scale and shift, and by the skip."""
    found, dx, dskip = _limits(x), channels_last(x), channels_last(x) if skip else None
    layout = norm_layout(map_shape(x), moments.shape[1], gamma.ndim == 2, True, found)
    grid = layout.grid(len(x), found)
    sums = torch.empty(grid[0], 2, *gamma.shape, device=x.device)
    constants = layout.constants(found, skip, 0.0, slope)
    args = [x, gamma, y, moments, gradient, dx, dx if dskip is None else dskip, sums, len(x)]
    launch("norm_backward", constants, grid, layout.threads, layout.tile_bytes, args)
    by_gamma, by_beta = column_sums(sums)
    return dx, by_gamma, by_beta, dskip


class NormAct(torch.autograd.Function):
    """GroupNorm, the skip if there is one, Leaky-ReLU."""

    @staticmethod
    def forward(ctx, x, gamma, beta, skip, groups, eps, slope):  # type: ignore[no-untyped-def]
        y, moments = norm_forward(x, gamma, beta, skip, groups, eps, slope)
        ctx.save_for_backward(x, gamma, y, moments)
        ctx.with_skip, ctx.slope = skip is not None, slope
        return y

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, gamma, y, moments = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        found = norm_backward(x, gamma, y, moments, gradient, ctx.with_skip, ctx.slope)
        return *found, None, None, None


class LinearToMap(torch.autograd.Function):
    """An FC layer whose output (B, C H W) is a map: with its rows in another order the map comes channels last."""

    @staticmethod
    def forward(ctx, x, weight, shape):  # type: ignore[no-untyped-def]
        channels, height, width = shape
        # Weights are rounded to bf16 for the product in any case: the new order comes with that.
        rows = swap_rows(weight.view(channels, height * width, -1), x.dtype).flatten(0, 1)  # (H W C, K)
        ctx.save_for_backward(x, rows)
        ctx.channels, ctx.dtype = channels, weight.dtype
        return (x @ rows.t()).view(len(x), height, width, channels).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, rows = ctx.saved_tensors
        gradient = gradient.permute(0, 2, 3, 1).reshape(len(x), -1)  # (B, H W C)
        by_rows = (gradient.t() @ x).view(-1, ctx.channels, x.shape[1])
        return gradient @ rows, swap_rows(by_rows, ctx.dtype).flatten(0, 1), None


def unit_forward(
    x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, skip: Tensor | None, groups: int, eps: float, slope: float
) -> tuple[Tensor, Tensor]:
    """Depthwise convolution, norm, skip, activation; and the moments of the norm."""
    found, y = _limits(x), channels_last(x)
    moments = torch.empty(len(x), groups, 2, device=x.device)
    layout = unit_layout(map_shape(x), groups, 1 if skip is None else 2)
    constants = layout.constants(found, skip is not None, eps, slope)
    args = [x, weight, gamma, beta, x if skip is None else skip, y, moments, len(x)]
    launch("unit_forward", constants, layout.grid(len(x), found), layout.threads, layout.tile_bytes, args)
    return y, moments


def unit_backward(
    x: Tensor, weight: Tensor, gamma: Tensor, y: Tensor, moments: Tensor, gradient: Tensor, more: Tensor | None,
    slope: float,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Gradients by x, with `more` added; by the skip, if there is no `more`; by weight, scale and shift."""
    found, skip, channels = _limits(x), more is None, x.shape[1]
    dx, dskip = channels_last(x), channels_last(x) if skip else None
    layout = backward_unit_layout(map_shape(x), moments.shape[1])
    grid = layout.grid(len(x), found)
    sums = torch.empty(grid[0], SUMS * channels, device=x.device)
    constants = layout.constants(found, skip, 0.0, slope)
    args = [x, weight, gamma, y, moments, gradient, x if more is None else more, dx, dx if dskip is None else dskip]
    launch("unit_backward", constants, grid, layout.threads, layout.tile_bytes, [*args, sums, len(x)])
    by_weight, by_gamma, by_beta = column_sums(sums).split([(SUMS - 2) * channels, channels, channels])
    return dx, dskip, (by_weight.view(weight.shape), by_gamma, by_beta)


class DepthwiseBlock(torch.autograd.Function):
    """A basic block of two depthwise convolutions; the skip's gradient joins in the last kernel."""

    @staticmethod
    def forward(ctx, x, weight1, gamma1, beta1, weight2, gamma2, beta2, groups, eps, slope):  # type: ignore[no-untyped-def]
        middle, moments1 = unit_forward(x, weight1, gamma1, beta1, None, groups, eps, slope)
        y, moments2 = unit_forward(middle, weight2, gamma2, beta2, x, groups, eps, slope)
        ctx.save_for_backward(x, weight1, gamma1, middle, moments1, weight2, gamma2, y, moments2)
        ctx.slope = slope
        return y

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight1, gamma1, middle, moments1, weight2, gamma2, y, moments2 = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        through, skipped, second = unit_backward(middle, weight2, gamma2, y, moments2, gradient, None, ctx.slope)
        dx, _, first = unit_backward(x, weight1, gamma1, middle, moments1, through, skipped, ctx.slope)
        return dx, *first, *second, None, None, None
