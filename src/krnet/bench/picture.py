"""A PNG of rows of images under each other, a column for each sample.

    {"image": (n, C, H, W), "from replayed features": ..., ...}, values 0 to 1 -> FILE

The names of the rows are in the file, as text of the PNG under "rows".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from krnet.config import require
from krnet.io.atomic import AnyPath, atomic_write, make_folder
from krnet.io.overlap import refuse_overlap

FILE = "inversion.png"
LEAST_SIDE = 64  # smaller images are enlarged by a whole number
GAP = 4  # white pixels between images


def check_picture(path: Path, inputs: Sequence[AnyPath]) -> None:
    """Notice before long work what would prevent the picture; makes its folder."""
    require("PIL.Image", "images")
    refuse_overlap("verify", [path], inputs)
    make_folder(path.parent)


def draw_rows(path: Path, rows: Mapping[str, Tensor]) -> Path:
    """Write the rows, from top to bottom, and return the path. The folder is made if it is missing."""
    pillow, png = require("PIL.Image", "images"), require("PIL.PngImagePlugin", "images")
    sheet = torch.cat([_strip(images) for images in rows.values()], 1)  # (3, height, width)
    pixels = (sheet.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    text = png.PngInfo()
    text.add_text("rows", "; ".join(rows))
    make_folder(path.parent)
    with atomic_write(path) as file:
        pillow.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG", pnginfo=text)
    return path


def _strip(images: Tensor) -> Tensor:
    """One row (3, H, W): images side by side, in colour, without transparency."""
    images = images.detach().float().cpu()
    images = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    times = -(-LEAST_SIDE // min(images.shape[2:]))
    images = images.repeat_interleave(times, 2).repeat_interleave(times, 3)
    return F.pad(images, (0, GAP, 0, GAP), value=1.0).permute(1, 2, 0, 3).flatten(2)
