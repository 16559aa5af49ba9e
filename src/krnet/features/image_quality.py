"""How much two sets of images differ: SSIM and PSNR, each a number per image.

    images, others (N, C, H, W), values 0 to 1 -> ssim, psnr -> (N,) float32

SSIM: Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to structural similarity",
IEEE Transactions on Image Processing, 2004. As there, a Gaussian window of 11x11 with sigma 1.5, K1 = 0.01, K2 = 0.03,
and only windows that lie inside the image. Ours beyond it: channels are averaged, and images smaller than the window
get the largest odd window that fits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from krnet.device import exact_math

WINDOW, SIGMA = 11, 1.5
C1, C2 = 0.01**2, 0.03**2
LEAST_MSE = (1 / 255) ** 2 / 12  # of rounding to 8 bits: an error below it is none, and PSNR ends at 58.9 dB


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB: -10 log10(mean squared error)."""
    mse = (images.float() - others.float()).square().flatten(1).mean(1)
    return -10 * mse.clamp(min=LEAST_MSE).log10()


def ssim(images: Tensor, others: Tensor) -> Tensor:
    """Structural similarity of each image: 1 for equal images, about 0 for unrelated ones. It has gradients.

    Variances are differences of two numbers that are almost equal: they need products in full float32.
    """
    with exact_math(), torch.autocast(images.device.type, enabled=False):
        x, y = images.float(), others.float()
        down, across = (_window_sums(size, x.device) for size in x.shape[-2:])

        def mean(values: Tensor) -> Tensor:
            """Weighted mean of each window (N, C, H - 10, W - 10)."""
            return down @ values @ across.T

        mean_x, mean_y = mean(x), mean(y)
        var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
        covariance = mean(x * y) - mean_x * mean_y
        likeness = (2 * mean_x * mean_y + C1) * (2 * covariance + C2)
        return (likeness / ((mean_x**2 + mean_y**2 + C1) * (var_x + var_y + C2))).flatten(1).mean(1)


@lru_cache(maxsize=16)  # a CUDA graph cannot copy it to the device: it is there when the graph is captured
def _window_sums(size: int, device: torch.device) -> Tensor:
    """A matrix (size - window + 1, size) whose rows are the Gaussian weights of the windows along one axis."""
    window = min(WINDOW, size - 1 + size % 2)
    offsets = torch.arange(window, dtype=torch.float64) - window // 2
    weights = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    rows = torch.zeros(size - window + 1, size, dtype=torch.float64)
    for first, row in enumerate(rows):
        row[first : first + window] = weights / weights.sum()
    return rows.float().to(device)
