"""TrivialAugment of a batch of images, on any device: one random operation of random strength for each image.

    seed, iteration -> draw -> draws (B, 3): operation, strength, sign
    images (B, C, H, W) uint8, draws -> apply -> (B, C, H, W) uint8

Müller and Hutter, "TrivialAugment: Tuning-free Yet State-of-the-Art Data Augmentation" (2021), in its wide form: 14
operations, 31 strengths, pixels from outside the image are 0, no interpolation.

Every operation is computed for every image, and each image takes the one that was drawn. So shapes are fixed and a CUDA
graph can contain it; beside a training step it costs little.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from krnet.data.augment import generator_for

MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
BLENDS = ("brightness", "colour", "contrast", "sharpness")
CURVES = ("posterize", "solarize", "autocontrast", "equalize")
OPERATIONS = ("identity", *MOVES, *BLENDS, *CURVES)

NUM_STRENGTHS = 31
MAX_SHEAR = 0.99
MAX_TRANSLATION = 32.0  # pixels
MAX_ANGLE = math.radians(135)
MAX_BLEND = 0.99
LEAST_BITS = 2  # of a posterized pixel
GREY_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green and blue
SMOOTHING = ((1, 1, 1), (1, 5, 1), (1, 1, 1))  # the blurred image that `sharpness` blends with; divided by its sum


def draw(batch_size: int, seed: int, iteration: int) -> Tensor:
    """Draw each image's operation, strength (0 to 30) and sign (0 or 1): (B, 3) int64."""
    generator = generator_for(seed, iteration)
    limits = (len(OPERATIONS), NUM_STRENGTHS, 2)
    return torch.stack([torch.randint(limit, (batch_size,), generator=generator) for limit in limits], dim=1)


def apply(images: Tensor, draws: Tensor) -> Tensor:
    """Change each image by its operation."""
    operation, strength, sign = draws.unbind(1)
    share = strength.float() / (NUM_STRENGTHS - 1)  # 0 to 1
    signed = torch.where(sign > 0, -share, share)
    pixels = move(images, operation, signed).float()
    changed = {**blends(pixels, 1 + MAX_BLEND * signed), **curves(pixels, strength)}
    for name, values in changed.items():
        chosen = (operation == OPERATIONS.index(name))[:, None, None, None]
        pixels = torch.where(chosen, values, pixels)
    return pixels.round().clamp(0, 255).to(torch.uint8)


def move(images: Tensor, operation: Tensor, signed: Tensor) -> Tensor:
    """Shear, shift or turn images (B, C, H, W); other operations leave them unchanged. signed (B,): -1 to 1."""
    count, _, height, width = images.shape

    def where(name: str, value: Tensor) -> Tensor:
        return torch.where(operation == OPERATIONS.index(name), value, torch.zeros_like(signed))

    angle = where("rotate", MAX_ANGLE * signed)
    shear_x, shear_y = where("shear_x", MAX_SHEAR * signed), where("shear_y", MAX_SHEAR * signed)
    shift_x, shift_y = where("translate_x", MAX_TRANSLATION * signed), where("translate_y", MAX_TRANSLATION * signed)
    # Coordinates from the centre. A pixel (x, y) of the result comes from (x', y') of the image.
    y = torch.arange(height, device=images.device).float()[None, :, None] - (height - 1) / 2
    x = torch.arange(width, device=images.device).float()[None, None, :] - (width - 1) / 2
    cos, sin, shear_x, shear_y, shift_x, shift_y = (
        value[:, None, None] for value in (angle.cos(), angle.sin(), shear_x, shear_y, shift_x, shift_y)
    )
    column = (cos * x + (shear_x - sin) * y - shift_x + (width - 1) / 2).round().long()  # (B, H, W)
    row = ((shear_y + sin) * x + cos * y - shift_y + (height - 1) / 2).round().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    index = source.view(count, 1, -1).expand(-1, images.shape[1], -1)
    moved = images.flatten(2).gather(2, index).view(images.shape)
    return moved * inside[:, None]


@lru_cache
def _weights(channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weights (C,) of a grey image, and the kernel (C, 1, 3, 3) that smooths. Kept: a CUDA graph cannot make them."""
    grey = torch.tensor(GREY_WEIGHTS if channels == 3 else [1 / channels] * channels, device=device)
    kernel = torch.tensor(SMOOTHING, device=device, dtype=torch.float32)
    return grey, (kernel / kernel.sum()).expand(channels, 1, 3, 3).contiguous()


def blends(pixels: Tensor, factor: Tensor) -> dict[str, Tensor]:
    """By operation: factor * pixels + (1 - factor) * a plainer image. factor (B,): 1 changes nothing."""
    channels = pixels.shape[1]
    weights, kernel = _weights(channels, pixels.device)
    grey = (pixels * weights[:, None, None]).sum(1, keepdim=True).round()  # (B, 1, H, W)
    smooth = pixels.clone()  # its border stays sharp
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(pixels, kernel, groups=channels)
    plainer = {
        "brightness": torch.zeros_like(grey),
        "colour": grey,
        "contrast": grey.mean((1, 2, 3), keepdim=True).round(),
        "sharpness": smooth,
    }
    factor = factor[:, None, None, None]
    return {name: (factor * pixels + (1 - factor) * other).clamp(0, 255) for name, other in plainer.items()}


def curves(pixels: Tensor, strength: Tensor) -> dict[str, Tensor]:
    """By operation: each pixel by itself, through a curve that depends on its image. strength (B,): 0 to 30."""
    strength = strength[:, None, None, None]
    lost_bits = (strength * (8 - LEAST_BITS) / (NUM_STRENGTHS - 1)).round()
    unit = torch.exp2(lost_bits)
    threshold = 255 - strength * (255 / (NUM_STRENGTHS - 1))
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    stretched = (pixels - low) * (255 / (high - low).clamp(min=1))
    return {
        "posterize": (pixels / unit).floor() * unit,
        "solarize": torch.where(pixels >= threshold, 255 - pixels, pixels),
        "autocontrast": torch.where(high > low, stretched, pixels),
        "equalize": equalize(pixels),
    }


def equalize(pixels: Tensor) -> Tensor:
    """Give each channel a histogram as even as possible: a value becomes the share of pixels below it, times 255."""
    values = pixels.flatten(2).long()  # (B, C, H W)
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.long, device=pixels.device)
    counts.scatter_add_(2, values, torch.ones_like(values))
    brightest = counts.gather(2, values.amax(2, keepdim=True))  # the pixels that will be 255
    step = (values.shape[2] - brightest) // 255  # (B, C, 1): pixels for each of the 255 other values
    below = counts.cumsum(2) - counts
    curve = ((below + step // 2) // step.clamp(min=1)).clamp(0, 255)
    return torch.where(step > 0, curve.gather(2, values), values).view(pixels.shape).to(pixels.dtype)
