"""Fused GroupNorm, skip and Leaky-ReLU on a GPU, alone or after a depthwise convolution or an FC layer.

    x (B, C, H, W) -> GroupNorm -> [+ skip] -> Leaky-ReLU                     NormAct
    x (B, C, H, W) -> 3x3 depthwise -> GroupNorm -> [+ skip] -> Leaky-ReLU    a unit; DepthwiseBlock is two of them
    x (B, K) -> FC layer -> (B, C, H, W)                                      LinearToMap

Each takes one pass over memory. Maps are bf16 and channels last. The kernels are CUDA C++ (kernels.cu); NVRTC, which
comes with torch, compiles them for each shape in a fraction of a second. Triton would be less code, but cannot hold
the plane of a channel in the registers of one thread: units took six times as long in it, norms twice. nn/layers.py
holds the plain version, with which the tests compare, and decides when to use the kernels. benchmarks/profile.md
lists the time saved.

GROUP, LANES, PARTS, DEPTH and ELEMENT, here and in the fields of Layout, are explained in kernels.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

DTYPE = torch.bfloat16  # of maps; parameters and sums are fp32
MAX_UNIT_PLANE = 64  # values of a channel (H x W) that a thread of a unit can hold in its registers
MAX_UNIT_THREADS = 512  # a unit has a thread per channel; 128 registers each use up the 65,536 of a multiprocessor
MAX_BLOCK_THREADS = 1024  # CUDA's limit
MAX_BLOCKS_PER_CORE = 16  # blocks on a multiprocessor at a time; every supported GPU allows this many
LARGE_TILE_VALUES = 1 << 13  # above this many values in a group of a sample, more threads per block are faster
MAX_THREAD_PLACES = 16  # places (of H x W) whose scale and shift gradients fit in the registers of a thread
UNIT_PARAMETERS = 11  # parameters of a unit per channel: nine taps, scale, shift
SUM_WARPS = 16  # warps in a block of column_sums; WARPS in kernels.cu
WARP_THREADS = 32

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Limits:
    """What the kernels need to know of a GPU."""

    num_cores: int
    """Multiprocessors."""
    shared_bytes: int
    """Shared memory that a block may use."""


@cache
def limits(device: torch.device) -> Limits | None:
    """Limits of the device; None if the kernels cannot run on it."""
    kernel_type = getattr(getattr(torch.cuda, "_utils", None), "_CudaKernel", None)
    compiles = hasattr(torch.cuda, "_compile_kernel") and hasattr(kernel_type, "set_shared_memory_config")
    if device.type != "cuda" or torch.version.cuda is None or not compiles:
        return None
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:  # no cp.async, no bf16
        return None
    return Limits(properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 48 << 10))


@dataclass(frozen=True)
class Layout:
    """How a kernel divides maps of one shape among blocks and threads. A tile is one group of one sample."""

    shape: Shape
    groups: int
    """Groups of the GroupNorm."""
    core_threads: int
    """Threads that the registers of a multiprocessor must suffice for."""
    tiles: int = 1
    """Tensors (x, y, gradient) of which a tile lies in shared memory."""
    thread_bytes: int = 0
    """Further shared memory of each thread."""
    lanes: int = 1
    """Threads that share a channel."""
    element: bool = False
    """The norm has a scale and a shift for each value, not for each channel."""
    parts: int = 1
    """Blocks that read the same samples, and each write a part of the places."""
    depth: int = 1
    """2 loads the next sample into tiles of its own while the current one is processed."""

    @property
    def group_size(self) -> int:
        """Channels in a group."""
        return self.shape[0] // self.groups

    @property
    def threads(self) -> int:
        return -(-self.group_size * self.lanes // WARP_THREADS) * WARP_THREADS

    @property
    def tile_bytes(self) -> int:
        return self.tiles * self.depth * DTYPE.itemsize * self.group_size * self.shape[1] * self.shape[2]

    @property
    def shared_bytes(self) -> int:
        return self.tile_bytes + self.thread_bytes * self.threads + (2 << 10)  # for sums and the driver

    def blocks(self, limits: Limits) -> int:
        """Blocks on a multiprocessor at a time: one reads while another computes."""
        by_registers, by_memory = self.core_threads // self.threads, limits.shared_bytes // self.shared_bytes
        return max(1, min(MAX_BLOCKS_PER_CORE, by_registers, by_memory))

    def grid(self, batch: int, limits: Limits) -> tuple[int, int, int]:
        """As many blocks as the device runs at a time; each processes one sample after another."""
        max_blocks = max(1, limits.num_cores * self.blocks(limits) // (self.groups * self.parts))
        return min(batch, max_blocks), self.groups, self.parts

    def fits(self, limits: Limits) -> bool:
        return self.threads <= MAX_BLOCK_THREADS and self.shared_bytes <= limits.shared_bytes

    def constants(self, limits: Limits, skip: bool, eps: float, slope: float) -> dict[str, int | str]:
        """Macros that kernels.cu is compiled with."""
        channels, height, width = self.shape
        macros: dict[str, int | str] = {"C": channels, "GROUP": self.group_size, "H": height, "W": width}
        macros |= {"LANES": self.lanes, "THREADS": self.threads, "BLOCKS": self.blocks(limits), "PARTS": self.parts}
        macros |= {"DEPTH": self.depth, "ELEMENT": int(self.element), "SKIP": int(skip), "MORE": int(not skip)}
        return macros | {"EPS": f"{float(eps)!r}f", "SLOPE": f"{float(slope)!r}f"}


def unit_layout(shape: Shape, groups: int, tiles: int, thread_bytes: int = 0) -> Layout:
    return Layout(shape, groups, MAX_UNIT_THREADS, tiles, thread_bytes)


def backward_unit_layout(shape: Shape, groups: int) -> Layout:
    """Tiles of x, y and the gradient; each thread keeps its parameter gradients and the signs of its plane."""
    return unit_layout(shape, groups, 3, 4 * (UNIT_PARAMETERS + -(-shape[1] * shape[2] // 32)))


def norm_layout(shape: Shape, groups: int, element: bool, backward: bool, limits: Limits) -> Layout:
    group_size, area = shape[0] // groups, shape[1] * shape[2]
    large = group_size * area > LARGE_TILE_VALUES
    if not backward:
        lanes = max(1, min(area, (512 if large else 256) // group_size))
        return Layout(shape, groups, 1536, lanes=lanes, element=element)
    lanes = max(1, min(area, (1024 if large else 256) // group_size))
    parts = -(-area // (lanes * MAX_THREAD_PLACES)) if element else 1
    layout = Layout(shape, groups, 1024, 3, lanes=lanes, element=element, parts=parts, depth=2)
    return layout if layout.fits(limits) else Layout(shape, groups, 1024, 3, 0, lanes, element, parts)


def unit_fits(shape: Shape, groups: int, device: torch.device) -> bool:
    """Whether DepthwiseBlock serves maps of this shape; backward needs more memory than forward."""
    gpu = limits(device)
    small = shape[1] * shape[2] <= MAX_UNIT_PLANE and shape[0] // groups <= MAX_UNIT_THREADS
    return gpu is not None and small and backward_unit_layout(shape, groups).fits(gpu)


def norm_fits(shape: Shape, groups: int, element: bool, device: torch.device) -> bool:
    """Whether NormAct serves maps of this shape. Groups must consist of whole channels."""
    gpu = limits(device)
    if gpu is None or shape[0] % groups:
        return False
    return all(norm_layout(shape, groups, element, backward, gpu).fits(gpu) for backward in (False, True))


@cache
def source() -> str:
    """The source of all kernels; #ifdef compiles the one whose name is defined."""
    folder = resources.files("krnet.nn.cuda")
    return "".join(folder.joinpath(name).read_text() for name in ("kernels.cu", "batchnorm.cu"))


@cache
def _compiled(name: str, options: tuple[str, ...], shared_bytes: int, device: torch.device) -> Any:
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # makes the CUDA context current in this thread
        # Compile this kernel alone: the others take time, and some do not compile for this size.
        kernel = torch.cuda._compile_kernel(source(), name, nvcc_options=[f"-D{name.upper()}", *options])
        kernel.set_shared_memory_config(shared_bytes)
        return kernel


def launch(
    name: str, constants: dict[str, int | str], grid: tuple[int, int, int], threads: int, shared_bytes: int,
    args: list[Any],
) -> None:  # fmt: skip
    """Run a kernel, and compile it before its first run."""
    options = tuple(f"-D{key}={value}" for key, value in constants.items())
    kernel = _compiled(name, options, shared_bytes, args[0].device)
    kernel(grid=grid, block=(threads, 1, 1), args=args, shared_mem=shared_bytes)


def limits_of(x: Tensor) -> Limits:
    gpu = limits(x.device)
    assert gpu is not None, f"the kernels do not run on {x.device}"
    return gpu


def map_shape(x: Tensor) -> Shape:
    """(C, H, W) of maps; vectors (B, C) count as maps of one place."""
    return (x.shape[1], x.shape[2], x.shape[3]) if x.ndim == 4 else (x.shape[1], 1, 1)


def empty_maps(x: Tensor) -> Tensor:
    """New maps of the shape of x, channels last, with undefined values."""
    return torch.empty_like(x, memory_format=torch.channels_last)


def column_sums(parts: Tensor) -> Tensor:
    """Sum over the first dimension. torch.sum is slower: 9 us for the few megabytes of a step."""
    total = torch.empty(parts.shape[1:], device=parts.device)
    grid = (-(-total.numel() // WARP_THREADS), 1, 1)
    launch("column_sums", {}, grid, SUM_WARPS * WARP_THREADS, 0, [parts, total, len(parts), total.numel()])
    return total


def swap_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, m, k) -> (m, n, k) in another precision, at the speed of memory. torch's cast reaches a third of it."""
    first, second, length = rows.shape
    swapped = torch.empty(second, first, length, dtype=dtype, device=rows.device)
    dtypes = {"FROM": rows.dtype, "TO": dtype}
    constants: dict[str, int | str] = {k: "float" if v == torch.float32 else "Value" for k, v in dtypes.items()}
    threads = min(256, -(-length // (8 * WARP_THREADS)) * WARP_THREADS)
    constants |= {"FIRST": first, "SECOND": second, "K": length, "THREADS": threads}
    launch("move_rows", constants, (first * second, 1, 1), threads, 0, [rows, swapped])
    return swapped


def norm_forward(
    x: Tensor, gamma: Tensor, beta: Tensor, skip: Tensor | None, groups: int, eps: float, slope: float
) -> tuple[Tensor, Tensor]:
    """y = Leaky-ReLU(GroupNorm(x) + skip), and the moments of the norm, for backward.

    gamma and beta are (C,), or (H W, C) if each value has its own.
    """
    gpu, y = limits_of(x), empty_maps(x)
    moments = torch.empty(len(x), groups, 2, device=x.device)  # mean, 1 / standard deviation
    layout = norm_layout(map_shape(x), groups, gamma.ndim == 2, False, gpu)
    constants = layout.constants(gpu, skip is not None, eps, slope)
    args = [x, gamma, beta, x if skip is None else skip, y, moments]
    launch("norm_forward", constants, (len(x), groups, 1), layout.threads, layout.tile_bytes, args)
    return y, moments


def norm_backward(
    x: Tensor, gamma: Tensor, y: Tensor, moments: Tensor, gradient: Tensor, skip: bool, slope: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, gamma, beta and the skip."""
    gpu, dx, dskip = limits_of(x), empty_maps(x), empty_maps(x) if skip else None
    layout = norm_layout(map_shape(x), moments.shape[1], gamma.ndim == 2, True, gpu)
    grid = layout.grid(len(x), gpu)
    sums = torch.empty(grid[0], 2, *gamma.shape, device=x.device)  # of each block, for gamma and beta
    constants = layout.constants(gpu, skip, 0.0, slope)
    args = [x, gamma, y, moments, gradient, dx, dx if dskip is None else dskip, sums, len(x)]
    launch("norm_backward", constants, grid, layout.threads, layout.tile_bytes, args)
    dgamma, dbeta = column_sums(sums)
    return dx, dgamma, dbeta, dskip


class NormAct(torch.autograd.Function):
    """Leaky-ReLU(GroupNorm(x) + skip); the skip may be None."""

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
        gradients = norm_backward(x, gamma, y, moments, gradient, ctx.with_skip, ctx.slope)
        return *gradients, None, None, None


class LinearToMap(torch.autograd.Function):
    """An FC layer whose output (B, C H W) is a map. Reordering the rows of its weight makes the map channels last."""

    @staticmethod
    def forward(ctx, x, weight, shape):  # type: ignore[no-untyped-def]
        channels, height, width = shape
        # The product needs the weights in bf16 anyway: the same pass reorders them.
        rows = swap_rows(weight.view(channels, height * width, -1), x.dtype).flatten(0, 1)  # (H W C, K)
        ctx.save_for_backward(x, rows)
        ctx.channels, ctx.dtype = channels, weight.dtype
        return (x @ rows.t()).view(len(x), height, width, channels).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, rows = ctx.saved_tensors
        gradient = gradient.permute(0, 2, 3, 1).reshape(len(x), -1)  # (B, H W C)
        drows = (gradient.t() @ x).view(-1, ctx.channels, x.shape[1])  # (H W, C, K)
        return gradient @ rows, swap_rows(drows, ctx.dtype).flatten(0, 1), None


def unit_forward(
    x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, skip: Tensor | None, groups: int, eps: float, slope: float
) -> tuple[Tensor, Tensor]:
    """y = Leaky-ReLU(GroupNorm(depthwise convolution of x) + skip), and the moments of the norm, for backward."""
    gpu, y = limits_of(x), empty_maps(x)
    moments = torch.empty(len(x), groups, 2, device=x.device)  # mean, 1 / standard deviation
    layout = unit_layout(map_shape(x), groups, 1 if skip is None else 2)
    constants = layout.constants(gpu, skip is not None, eps, slope)
    args = [x, weight, gamma, beta, x if skip is None else skip, y, moments, len(x)]
    launch("unit_forward", constants, layout.grid(len(x), gpu), layout.threads, layout.tile_bytes, args)
    return y, moments


def unit_backward(
    x: Tensor, weight: Tensor, gamma: Tensor, y: Tensor, moments: Tensor, gradient: Tensor, more: Tensor | None,
    slope: float,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Gradients of x, of the skip, and of (weight, gamma, beta).

    A block's first unit has no skip: it is given `more`, the gradient of the block's skip, which is added to dx.
    Its second unit has a skip and no `more`.
    """
    gpu, skip, channels = limits_of(x), more is None, x.shape[1]
    dx, dskip = empty_maps(x), empty_maps(x) if skip else None
    layout = backward_unit_layout(map_shape(x), moments.shape[1])
    grid = layout.grid(len(x), gpu)
    sums = torch.empty(grid[0], UNIT_PARAMETERS * channels, device=x.device)  # of each block
    constants = layout.constants(gpu, skip, 0.0, slope)
    args = [x, weight, gamma, y, moments, gradient, x if more is None else more, dx, dx if dskip is None else dskip]
    launch("unit_backward", constants, grid, layout.threads, layout.tile_bytes, [*args, sums, len(x)])
    dweight, dgamma, dbeta = column_sums(sums).split([(UNIT_PARAMETERS - 2) * channels, channels, channels])
    return dx, dskip, (dweight.view(weight.shape), dgamma, dbeta)


class DepthwiseBlock(torch.autograd.Function):
    """A basic block of two depthwise units; the last kernel of backward adds the gradient of the skip."""

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
        dmiddle, dskip, dunit2 = unit_backward(middle, weight2, gamma2, y, moments2, gradient, None, ctx.slope)
        dx, _, dunit1 = unit_backward(x, weight1, gamma1, middle, moments1, dmiddle, dskip, ctx.slope)
        return dx, *dunit1, *dunit2, None, None, None
