"""Images that a caller gives, as the pixels that networks were trained on.

images as an array, a tensor, lists, or part of a data set -> as_pixels -> uint8 (N, C, H, W)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.data.dataset import Split
from krnet.device import share_memory
from krnet.errors import DataError


def as_pixels(images: Any, shape: tuple[int, int, int]) -> Tensor:
    """Images as (N, C, H, W) uint8, without a copy if they have that form."""
    images = images.images if isinstance(images, Split) else images
    found = images if isinstance(images, Tensor) else _as_tensor(images)
    channels, height, width = shape
    if found.dtype != torch.uint8:
        raise _wrong_type(found.dtype)
    if found.shape[1:] == shape:
        return found
    if found.shape[1:] == (height, width, channels):
        return found.permute(0, 3, 1, 2)
    if found.shape[1:] == (height, width) and channels == 1:
        return found[:, None]
    grey = f", or (N, {height}, {width}) as they are grey" if channels == 1 else ""
    one = ". Give a single image as images[None]" if found.dim() < 4 else ""
    raise DataError(
        f"images have shape {tuple(found.shape)}; expected (N, {channels}, {height}, {width}), the size of the images "
        f"that were learned, or (N, {height}, {width}, {channels}){grey}{one}"
    )


def _as_tensor(images: Any) -> Tensor:
    """An array of uint8, or lists of numbers, as a tensor; an array is not copied."""
    try:
        array = np.ascontiguousarray(images)
    except ValueError as error:
        raise DataError(
            f"images are no array ({error}); expected images of one size, as an array or a tensor"
        ) from error
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"images are of type {type(images).__name__}; expected an array or a tensor of uint8, or part of a data "
            f"set, such as data.test"
        )
    if array.dtype != np.uint8:
        raise _wrong_type(array.dtype)
    return share_memory(array)


def _wrong_type(dtype: object) -> DataError:
    return DataError(f"images are {dtype}; expected uint8 from 0 to 255. Floats that are normalised go to run.model")
