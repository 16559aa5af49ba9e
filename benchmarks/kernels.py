"""Time each fused kernel on a GPU, forward and backward, beside the time that its memory traffic alone would take.

    python benchmarks/kernels.py [--preset cifar100]

A CUDA graph runs each kernel many times, so that launches cost nothing. All runs use the same tensors, so small ones
stay in the cache. Prints microseconds and writes nothing; benchmarks/profile.md holds the findings.
"""

import argparse
import time

import torch

from krnet.bench.speed import seconds_per_call
from krnet.device import pick_device
from krnet.nn.cuda import kernels

BYTES_PER_SECOND = 4.3e12  # memory bandwidth of an H200
BATCH, GROUPS, EPS, SLOPE, REPEATS = 1000, 2, 1e-5, 1e-4, 20
# fc: inputs of the last FC layer, and its outputs as a map; vectors: lengths of the other normed vectors;
# unit: map of a depthwise unit; maps: map after a full convolution.
PRESETS = {
    "cifar100": {"fc": (1024, (512, 8, 8)), "vectors": (512, 1024), "unit": (512, 8, 8), "maps": (64, 8, 8)},
    "imagenet": {"fc": (1536, (1024, 8, 8)), "vectors": (512, 1536), "unit": (1024, 8, 8), "maps": (256, 16, 16)},
}


def microseconds(run, device):
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    return 1e6 * seconds_per_call(graph.replay, device, 0.1) / REPEATS


def show(name, device, forward, backward, min_bytes):
    """Print the times of a kernel; `min_bytes`: bytes that forward and backward must move."""
    started = time.perf_counter()
    outputs = forward()
    backward(*outputs)
    torch.cuda.synchronize(device)
    ready_s = time.perf_counter() - started
    times_us = [microseconds(run, device) for run in (forward, lambda: backward(*outputs))]
    memory_us = [1e6 * size / BYTES_PER_SECOND for size in min_bytes]
    text = " + ".join(f"{time_us:.1f} (memory alone {least:.1f})" for time_us, least in zip(times_us, memory_us))
    print(f"{name}: {text} us, compiled in {ready_s:.2f} s", flush=True)


def tensors(shape, device, number):
    values = [torch.randn(BATCH, *shape, device=device, dtype=torch.bfloat16) for _ in range(number)]
    return [value.contiguous(memory_format=torch.channels_last) for value in values]


def show_norm(shape, device, with_skip=False, element=False):
    x, skip, gradient = tensors(shape, device, 3)
    scales = (shape[1] * shape[2], shape[0]) if element else (shape[0],)
    gamma, beta = torch.ones(scales, device=device), torch.zeros(scales, device=device)
    show(
        f"norm {shape}{', skip' * with_skip}{', a scale for each value' * element}",
        device,
        lambda: kernels.norm_forward(x, gamma, beta, skip if with_skip else None, GROUPS, EPS, SLOPE),
        lambda y, moments: kernels.norm_backward(x, gamma, y, moments, gradient, with_skip, SLOPE),
        [(2 + with_skip) * x.nbytes, (4 + with_skip) * x.nbytes],
    )


def show_unit(shape, device, with_skip):
    x, skip, gradient = tensors(shape, device, 3)
    weight = torch.randn(shape[0], 1, 3, 3, device=device)
    gamma, beta = torch.ones(shape[0], device=device), torch.zeros(shape[0], device=device)
    more = None if with_skip else skip
    show(
        f"unit {shape}{', skip' * with_skip}",
        device,
        lambda: kernels.unit_forward(x, weight, gamma, beta, skip if with_skip else None, GROUPS, EPS, SLOPE),
        lambda y, moments: kernels.unit_backward(x, weight, gamma, y, moments, gradient, more, SLOPE),
        [(2 + with_skip) * x.nbytes, 5 * x.nbytes],
    )


def show_rows(inputs, shape, device):
    """Time two things: an FC weight to bf16 in the order of a map, with its gradient back; and sums over rows."""
    area = shape[1] * shape[2]
    weight = torch.randn(shape[0], area, inputs, device=device)
    show(
        f"rows of an FC layer, {inputs} to {shape}",
        device,
        lambda: (kernels.swap_rows(weight, torch.bfloat16),),
        lambda rows: kernels.swap_rows(rows, torch.float32),
        [1.5 * weight.nbytes] * 2,
    )
    for parts in (
        torch.randn(132, kernels.UNIT_PARAMETERS * shape[0], device=device),
        torch.randn(66, 2, area * shape[0]),
    ):
        parts = parts.to(device)
        ours_us, torch_us = (
            microseconds(run, device) for run in (lambda: kernels.column_sums(parts), lambda: parts.sum(0))
        )
        least = 1e6 * parts.nbytes / BYTES_PER_SECOND
        print(
            f"sums of {tuple(parts.shape)}: {ours_us:.1f} us, torch {torch_us:.1f} (memory alone {least:.1f})",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cifar100", choices=PRESETS, help="sizes of the network (%(default)s)")
    sizes = PRESETS[parser.parse_args().preset]
    device = pick_device("cuda")
    with torch.cuda.device(device):
        show_rows(*sizes["fc"], device)
        for length in sizes["vectors"]:
            show_norm((length, 1, 1), device)
        show_norm(sizes["fc"][1], device, element=True)
        for with_skip in (False, True):
            show_unit(sizes["unit"], device, with_skip)
        for with_skip in (False, True):
            show_norm(sizes["maps"], device, with_skip)


if __name__ == "__main__":
    main()
