"""Random crops and flips of a batch of images, on any device.

    seed, iteration -> draw -> draws (B, 3): dy, dx, flip
    images (B, C, H, W) uint8, draws -> crop_flip -> the same shape -> normalise -> float32

The draws are made on the CPU and depend on nothing but seed and iteration, so a run that is resumed, or moved to
another device, sees the same crops. `crop_flip` and `normalise` have fixed shapes and never wait for the device:
both can sit inside a CUDA graph.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def draw(batch_size: int, pad: int, flip: bool, seed: int, iteration: int) -> Tensor:
    """Where each image is cropped and whether it is mirrored: (B, 3) int64, dy and dx in 0..2*pad, flip 0 or 1."""
    # Mixed, not added: seed 1 at iteration 0 must differ from seed 0 at iteration 1.
    mixed = int(np.random.SeedSequence((seed, iteration)).generate_state(1, np.uint64)[0])
    generator = torch.Generator().manual_seed(mixed)
    draws = torch.empty(batch_size, 3, dtype=torch.int64)
    draws[:, :2] = torch.randint(2 * pad + 1, (batch_size, 2), generator=generator)
    draws[:, 2] = torch.randint(1 + flip, (batch_size,), generator=generator)
    return draws


def crop_flip(images: Tensor, draws: Tensor, pad: int) -> Tensor:
    """Each image padded with zeros on all sides, cropped to its own size at (dy, dx), then mirrored if drawn.

    dy = dx = pad and no flip leave it as it is. The result is channels_last in memory, which is how GPUs convolve.
    """
    height, width = images.shape[-2:]
    dy, dx, flip = draws.unbind(1)
    rows = dy[:, None] + torch.arange(height, device=images.device)  # (B, H)
    columns = torch.arange(width, device=images.device).expand(len(images), width)
    columns = dx[:, None] + torch.where(flip[:, None] > 0, width - 1 - columns, columns)  # (B, W)
    padded = F.pad(images, (pad, pad, pad, pad)).permute(0, 2, 3, 1)
    image = torch.arange(len(images), device=images.device)
    return padded[image[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 images as float32: fractions of 255, less the channel's mean, over its standard deviation."""
    return (images.float() / 255 - mean[:, None, None]) / std[:, None, None]
