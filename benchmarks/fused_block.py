"""Candidate for the fast step: depthwise 3x3, GroupNorm, (+ skip,) Leaky-ReLU in one Triton kernel each way.

    python benchmarks/fused_block.py                      on a GPU: error against the plain layers, and times
    TRITON_INTERPRET=1 python benchmarks/fused_block.py   anywhere triton is installed: the error only

Why: four basic blocks on (1000, 512, 8, 8) maps are eight such units, and a unit must move its input and its output:
2 x 65 MB in bf16, 30 us at 4.3 TB/s, forward; about 65 us backward (input, output, their gradients). Predicted for all
eight: 0.8 ms a step. Not part of the package until measured to pay.

One program owns a sample's group of channels (256 x 64 values), so both moments of the norm are its own. Backward it
recomputes the convolution instead of keeping it, and adds up the weights' gradients over the samples it visits.
"""

import os
import time

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

SLOPE, EPS = 1e-4, 1e-5
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _convolve(x, base, weight, channel, owned, valid, row, col, H: tl.constexpr, W: tl.constexpr, FLIP: tl.constexpr):
    """Sum over the nine taps; FLIP gives the transposed convolution that gradients need."""
    total = tl.zeros(base.shape, tl.float32)
    for dy in tl.static_range(-1, 2):
        for dx in tl.static_range(-1, 2):
            inside = (row + dy >= 0) & (row + dy < H) & (col + dx >= 0) & (col + dx < W)
            value = tl.load(x + base + dy * W + dx, mask=valid & inside[None, :], other=0.0).to(tl.float32)
            tap = 4 - (dy * 3 + dx) if FLIP else 4 + (dy * 3 + dx)
            total += value * tl.load(weight + channel * 9 + tap, mask=owned, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def _forward(
    x, weight, gamma, beta, skip, y, moments, C, H: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr,
    BC: tl.constexpr, BP: tl.constexpr, HAS_SKIP: tl.constexpr, SLOPE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    b, g = tl.program_id(0), tl.program_id(1)
    c, p = tl.arange(0, BC), tl.arange(0, BP)
    channel, owned = (g * GROUP + c).to(tl.int64), c < GROUP  # a batch has more than 2^31 values
    valid = owned[:, None] & (p < H * W)[None, :]
    base = (b * C + channel)[:, None] * (H * W) + p[None, :]
    z = _convolve(x, base, weight, channel, owned, valid, p // W, p % W, H, W, False)
    mean = tl.sum(z) / (GROUP * H * W)
    centred = tl.where(valid, z - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred) / (GROUP * H * W) + EPS)
    scale = tl.load(gamma + channel, mask=owned, other=0.0).to(tl.float32)[:, None]
    out = centred * rstd * scale + tl.load(beta + channel, mask=owned, other=0.0).to(tl.float32)[:, None]
    if HAS_SKIP:
        out += tl.load(skip + base, mask=valid, other=0.0).to(tl.float32)
    out = tl.where(out >= 0, out, out * SLOPE)
    tl.store(y + base, out, mask=valid)
    at = moments + (b * tl.num_programs(1) + g) * 2
    tl.store(at, mean)
    tl.store(at + 1, rstd)


@triton.jit
def _backward(
    x, weight, gamma, y, moments, dy_, dx_, dskip, scratch, dweight, dgamma, dbeta, B, C, H: tl.constexpr,
    W: tl.constexpr, GROUP: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, HAS_SKIP: tl.constexpr,
    SLOPE: tl.constexpr,
):  # fmt: skip
    first, step, g = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    c, p = tl.arange(0, BC), tl.arange(0, BP)
    row, col = p // W, p % W
    channel, owned = (g * GROUP + c).to(tl.int64), c < GROUP
    valid = owned[:, None] & (p < H * W)[None, :]
    scale = tl.load(gamma + channel, mask=owned, other=0.0).to(tl.float32)[:, None]
    sum_gamma, sum_beta = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    taps = tl.arange(0, 16)
    sum_weight = tl.zeros((BC, 16), tl.float32)
    for b in range(first, B, step):
        base = (b * C + channel)[:, None] * (H * W) + p[None, :]
        at = moments + (b * tl.num_programs(1) + g) * 2
        mean, rstd = tl.load(at), tl.load(at + 1)
        z = _convolve(x, base, weight, channel, owned, valid, row, col, H, W, False)
        n = tl.where(valid, (z - mean) * rstd, 0.0)
        out = tl.load(y + base, mask=valid, other=0.0).to(tl.float32)
        d = tl.load(dy_ + base, mask=valid, other=0.0).to(tl.float32)
        d = tl.where(out >= 0, d, d * SLOPE)
        if HAS_SKIP:
            tl.store(dskip + base, d, mask=valid)
        sum_gamma += tl.sum(d * n, 1)
        sum_beta += tl.sum(d, 1)
        d = d * scale
        count = GROUP * H * W
        d = tl.where(valid, rstd * (d - tl.sum(d) / count - n * (tl.sum(d * n) / count)), 0.0)
        for dy in tl.static_range(-1, 2):
            for dx in tl.static_range(-1, 2):
                inside = (row + dy >= 0) & (row + dy < H) & (col + dx >= 0) & (col + dx < W)
                value = tl.load(x + base + dy * W + dx, mask=valid & inside[None, :], other=0.0).to(tl.float32)
                tap = 4 + (dy * 3 + dx)
                sum_weight += tl.where(taps[None, :] == tap, tl.sum(d * value, 1)[:, None], 0.0)
        # Neighbours belong to other threads: through memory (it stays in the cache), and wait for all to have written.
        tl.store(scratch + base, d, mask=valid)
        tl.debug_barrier()
        into = _convolve(scratch, base, weight, channel, owned, valid, row, col, H, W, True)
        tl.store(dx_ + base, into, mask=valid)
    tl.store(dgamma + first * C + channel, sum_gamma, mask=owned)
    tl.store(dbeta + first * C + channel, sum_beta, mask=owned)
    where = (first * C + channel)[:, None] * 9 + taps[None, :]
    tl.store(dweight + where, sum_weight, mask=owned[:, None] & (taps < 9)[None, :])


class Unit(torch.autograd.Function):
    """x (B, C, H, W), contiguous -> leaky_relu(group_norm(depthwise(x)) + skip)."""

    @staticmethod
    def forward(ctx, x, weight, gamma, beta, skip, groups):
        B, C, H, W = x.shape
        y = torch.empty_like(x)
        moments = torch.empty(B, groups, 2, device=x.device)
        sizes = dict(
            H=H, W=W, GROUP=C // groups, BC=triton.next_power_of_2(C // groups), BP=triton.next_power_of_2(H * W)
        )
        ctx.sizes = dict(sizes, HAS_SKIP=skip is not None, SLOPE=SLOPE, num_warps=16)
        _forward[(B, groups)](x, weight, gamma, beta, x if skip is None else skip, y, moments, C, EPS=EPS, **ctx.sizes)
        ctx.save_for_backward(x, weight, gamma, y, moments)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, gamma, y, moments = ctx.saved_tensors
        B, C, groups = x.shape[0], x.shape[1], moments.shape[1]
        programs = min(B, 3 if INTERPRETED else 2 * torch.cuda.get_device_properties(x.device).multi_processor_count)
        partial = [torch.empty(programs, C, *rest, device=x.device) for rest in ((9,), (), ())]
        dx, scratch = torch.empty_like(x), torch.empty_like(x)
        dskip = torch.empty_like(x) if ctx.sizes["HAS_SKIP"] else dx
        _backward[(programs, groups)](
            x, weight, gamma, y, moments, dy.contiguous(), dx, dskip, scratch, *partial, B, C, **ctx.sizes
        )
        dweight, dgamma, dbeta = (part.sum(0) for part in partial)
        return dx, dweight.view_as(weight), dgamma, dbeta, dskip if ctx.sizes["HAS_SKIP"] else None, None


def plain(x, weight, gamma, beta, skip, groups):
    z = F.group_norm(F.conv2d(x, weight, padding=1, groups=x.shape[1]), groups, gamma, beta, EPS)
    return F.leaky_relu(z if skip is None else z + skip, SLOPE)


def check(shape, dtype, device, with_skip):
    """Largest relative error of output and gradients against the plain layers in float64."""
    C = shape[1]
    torch.manual_seed(0)
    x, skip, dy = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    weight = torch.randn(C, 1, 3, 3, device=device) / 3
    gamma, beta = 1 + 0.1 * torch.randn(C, device=device), 0.1 * torch.randn(C, device=device)
    results = []
    for function, cast in ((Unit.apply, lambda t: t), (plain, lambda t: t.double())):
        leaves = [cast(t).detach().requires_grad_() for t in (x, weight, gamma, beta, skip)]
        y = function(*leaves[:4], leaves[4] if with_skip else None, 2)
        y.backward(cast(dy).to(y.dtype))
        results.append([y, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True))


def timed(function, repeats=30):
    for _ in range(5):
        function()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats * 1e6


def main():
    device = torch.device("cpu" if INTERPRETED else "cuda")
    for shape in [(4, 8, 8, 8), (3, 6, 7, 7), (2, 10, 5, 3)] + (
        [] if INTERPRETED else [(64, 512, 8, 8), (16, 1024, 7, 7)]
    ):
        for with_skip in (False, True):
            print(f"{shape} skip {with_skip}: float32 {check(shape, torch.float32, device, with_skip):.1e}", end="")
            print("" if INTERPRETED else f", bfloat16 {check(shape, torch.bfloat16, device, with_skip):.1e}")
    if INTERPRETED:
        return
    for shape in [(1000, 512, 8, 8), (1000, 1024, 7, 7)]:
        x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(shape[1], 1, 3, 3, device=device, requires_grad=True)
        gamma, beta = (torch.ones(shape[1], device=device, requires_grad=True) for _ in range(2))
        dy = torch.randn_like(x)
        low = [t.bfloat16() for t in (weight, gamma, beta)]
        compiled = torch.compile(plain)
        for name, run in {
            "fused": lambda: Unit.apply(x, weight, gamma, beta, x, 2),
            "compiled": lambda: compiled(x, *low, x, 2),
            "eager": lambda: plain(x, *low, x, 2),
        }.items():
            forward = timed(run)
            both = timed(lambda: torch.autograd.grad(run(), x, dy))
            print(f"{shape} {name}: forward {forward:.0f} us, forward and backward {both:.0f} us")


if __name__ == "__main__":
    main()
