"""Random crops and flips of a batch of images, on any device.

    seed, iteration -> draw -> draws (B, 3): dy, dx, flip
    images (B, C, H, W) uint8, draws -> crop_flip -> (B, C, H, W) or a smaller window -> standardise -> float32
    images (B, C, H, W) uint8        -> centre    -> the window in the centre, for evaluation

The draws are made on the CPU and depend only on seed and iteration, so a run that is resumed or moved to another device
sees the same crops. `crop_flip` and `standardise` have fixed shapes and do not synchronise with the device, so both can
be part of a CUDA graph.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def generator_for(seed: int, iteration: int) -> torch.Generator:
    """Random numbers that depend on seed and iteration alone."""
    # Not seed + iteration: seed 1 at iteration 0 must differ from seed 0 at iteration 1.
    mixed_seed = int(np.random.SeedSequence((seed, iteration)).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(mixed_seed)


def draw(batch_size: int, shift: int, flip: bool, seed: int, iteration: int) -> Tensor:
    """Draw the crop and the flip of each image: (B, 3) int64 with dy and dx in 0..2*shift, flip 0 or 1."""
    generator = generator_for(seed, iteration)
    draws = torch.empty(batch_size, 3, dtype=torch.int64)
    draws[:, :2] = torch.randint(2 * shift + 1, (batch_size, 2), generator=generator)
    draws[:, 2] = torch.randint(1 + flip, (batch_size,), generator=generator)
    return draws


def crop_flip(images: Tensor, draws: Tensor, pad: int, crop: int | None = None) -> Tensor:
    """Pad each image with zeros on all sides, crop it at (dy, dx), then mirror it if flip is 1.

    crop: side of the window in pixels. None: the window is as large as the image; dy = dx = pad without a flip then
    leaves the image unchanged. The result is channels_last in memory, the fastest layout for convolutions on GPUs.
    """
    height, width = images.shape[-2:] if crop is None else (crop, crop)
    dy, dx, flip = draws.unbind(1)
    rows = dy[:, None] + torch.arange(height, device=images.device)  # (B, H)
    columns = torch.arange(width, device=images.device).expand(len(images), width)
    columns = dx[:, None] + torch.where(flip[:, None] > 0, width - 1 - columns, columns)  # (B, W)
    padded = F.pad(images, (pad, pad, pad, pad)).permute(0, 2, 3, 1)  # (B, H + 2 pad, W + 2 pad, C)
    image = torch.arange(len(images), device=images.device)
    return padded[image[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def centre(images: Tensor, crop: int | None) -> Tensor:
    """The window in the centre, as a view; the whole images if crop is None."""
    if crop is None:
        return images
    top, left = ((side - crop) // 2 for side in images.shape[-2:])
    return images[..., top : top + crop, left : left + crop]


def standardise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(images / 255 - mean) / std as float32, with mean and std (C,) of each channel."""
    return (images.float() / 255 - mean[:, None, None]) / std[:, None, None]
