"""Feature maps made up for tests: structured like real ones, so that a short fit has something to learn.

relu_maps(300)    smooth, of low rank, alike within a class, about half zeros; labels in turn
signed_maps(300)  smooth, of both signs, each sample with an amplitude of its own
"""

import torch
import torch.nn.functional as F
from torch import Tensor

RANK = 8  # smooth patterns that all channels of a map are mixed from


def relu_maps(
    num_samples: int, shape: tuple[int, int, int] = (16, 8, 8), *, num_classes: int = 5, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Maps (N, *shape) as a ReLU leaves them, and labels (N,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_samples) % num_classes
    centres = torch.randn(num_classes, RANK, 4, 4, generator=generator)
    coarse = centres[labels] + 0.5 * torch.randn(num_samples, RANK, 4, 4, generator=generator)
    mixing = torch.randn(shape[0], RANK, 3, 3, generator=generator)
    return F.conv2d(_smooth(coarse, shape), mixing, padding=1).relu(), labels


def signed_maps(num_samples: int, shape: tuple[int, int, int] = (8, 8, 8), *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Maps (N, *shape) around zero, and their amplitudes (N,) from 0.05 to 1."""
    generator = torch.Generator().manual_seed(seed)
    amplitude = torch.logspace(-1.3, 0, num_samples)[torch.randperm(num_samples, generator=generator)]
    coarse = torch.randn(num_samples, RANK, 3, 3, generator=generator)
    mixing = torch.randn(shape[0], RANK, 1, 1, generator=generator)
    maps = F.conv2d(_smooth(coarse, shape), mixing)
    maps = maps / maps.std((1, 2, 3), keepdim=True)
    return maps * amplitude[:, None, None, None], amplitude


def _smooth(coarse: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return F.interpolate(coarse, size=shape[1:], mode="bilinear", align_corners=True)
