"""The fused kernels by themselves, on a GPU: microseconds by the number of warps, and what memory alone would take.

    python benchmarks/kernels.py [--all]

Prints only; the choice of warps in krnet.kernels and benchmarks/profile.md come from here.
"""

import argparse
import time

import torch

from krnet import kernels, parallel
from krnet.speed import timed

CIFAR, IMAGENET = (1000, 512, 8, 8), (500, 1024, 8, 8)
BYTES_PER_SECOND = 4.2e12


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also the maps of the imagenet preset")
    device = parallel.pick_device("cuda")
    norm_sizes = kernels._norm_sizes
    for shape in [CIFAR, IMAGENET, (500, 256, 16, 16)] if parser.parse_args().all else [CIFAR]:
        channels, area = shape[1], shape[2] * shape[3]
        x = torch.randn(shape, device=device, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        skip, gradient = torch.randn_like(x), torch.randn_like(x)
        weight = torch.randn(channels, 1, 3, 3, device=device)
        cases = {"norm": x, "vector to map": x.flatten(1), "unit": x, "unit, skip": x}
        for name, inputs in cases.items():
            if name.startswith("unit") and area > kernels.LARGEST_PLANE:
                continue
            number = channels * area if inputs.ndim == 2 else channels
            gamma, beta = (torch.full((number,), v, device=device, requires_grad=True) for v in (1.0, 0.0))
            found = []
            with_skip = name == "unit, skip"
            for warps in (0,) if name.startswith("unit") else (4, 8, 16):
                kernels._norm_sizes = lambda s, g, w=warps: norm_sizes(s, g) | {"num_warps": w}
                if warps == 0:

                    def forward():
                        return kernels.unit_forward(x, weight, gamma, beta, skip if with_skip else None, 2, 1e-5, 1e-4)

                    started = time.perf_counter()
                    y, moments = forward()

                    def backward():
                        more = None if with_skip else skip
                        return kernels.unit_backward(x, weight, gamma, y, moments, gradient, more, 1e-5, 1e-4)
                else:
                    leaf = inputs.detach().requires_grad_()

                    def forward():
                        return kernels.NormAct.apply(leaf, gamma, beta, None, 2, shape[1:], 1e-5, 1e-4)

                    started = time.perf_counter()
                    y = forward()

                    def backward():
                        return torch.autograd.grad(y, leaf, gradient, retain_graph=True)

                backward()
                torch.cuda.synchronize()
                compiled_s = time.perf_counter() - started
                times = [1e6 * timed(run, device, 0.05) for run in (forward, backward)]
                found.append(f"{warps or 'all'}: {times[0]:.0f} + {times[1]:.0f} (ready in {compiled_s:.1f} s)")
            moved = x.nbytes / BYTES_PER_SECOND * 1e6
            unit = name.startswith("unit")
            floor = f"{(2 + with_skip) * moved:.0f} + {(4 + unit) * moved:.0f}"
            print(f"{shape} {name}: memory alone {floor} us; by warps {'; '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
