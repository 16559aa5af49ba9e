"""The images of recorder images: settings, the images to record, and those that a recording holds.

    images (N, C, H, W) or (N, H, W, C) uint8 -> ImageSource.encode -> bytes of each      (krnet/coding/image_codec.py)
    bytes of each -> SpooledImages -> tensors of the file; the file -> RecordedImages -> images(ids): decoded, uint8

The trunk, which makes features of the images, is in recorder.py.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from krnet.coding.image_codec import (
    CHANNELS,
    EncodedImages,
    ImageEncoding,
    as_tensor,
    common_prefix,
    encode_images,
    length_tensor,
)
from krnet.config import check_choice, check_int, check_range, from_dict
from krnet.errors import InputError, NotARecordingError, SettingError
from krnet.features.feature_source import FeatureSource
from krnet.features.source import open_features
from krnet.io.archive import RowStore
from krnet.io.stored_rows import MadeRows, Rows

MAX_SIDE = 4096  # pixels; bounds the memory that a few bytes of a file can ask for
TRUNK_SETTINGS = ("trunk", "trunk_results")  # of the file: the trunk's fingerprint, and what it makes of a few images
CHUNK_BYTES = 16 << 20  # bytes of images, as float32, that are handled at once; a trunk takes several times as much


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(ImageEncoding):
    mean: tuple[float, ...] = (0.0,)
    """Mean of each channel, in fractions of 255, subtracted before the trunk; one number serves all channels."""
    std: tuple[float, ...] = (1.0,)
    """Standard deviation of each channel, in fractions of 255; images are divided by it before the trunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, lowest in (("mean", -1e6), ("std", 1e-6)):
            values = getattr(self, name)
            values = tuple(values) if isinstance(values, (tuple, list)) else (values,)
            for value in values:
                check_range(name, value, lowest, 1e6)
            object.__setattr__(self, name, values)

    def check_channels(self, channels: int) -> None:
        for name in ("mean", "std"):
            if len(values := getattr(self, name)) not in (1, channels):
                raise SettingError(f"{name} is {values}; the images have {channels} channels")

    def standardise(self, images: Tensor) -> Tensor:
        """uint8 images (n, C, H, W) -> float32 inputs of the trunk, of the same shape."""
        mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in (self.mean, self.std))
        return images.float().div_(255).sub_(mean).div_(std)


def open_images(images: Any) -> FeatureSource:
    """The images as a source; refused unless they are uint8 with 1 or 3 channels."""
    found = open_features(images)
    if found.dtype != torch.uint8 or len(found.shape) != 3:
        raise InputError(
            f"images of type {found.dtype} and shape {(len(found), *found.shape)}; expected uint8 (N, C, H, W) or "
            f"(N, H, W, C)"
        )
    channels, *sides = image_shape(found)
    if channels not in CHANNELS or max(sides) > MAX_SIDE:
        raise InputError(
            f"images of shape {found.shape}; expected {' or '.join(map(str, CHANNELS))} channels, first or last, and "
            f"at most {MAX_SIDE} pixels a side"
        )
    return found


def image_shape(images: FeatureSource) -> tuple[int, int, int]:
    """Channels, height and width. The first axis is the channels if it has 1 or 3 entries, else the last axis is."""
    first, second, third = images.shape
    return (first, second, third) if first in CHANNELS else (third, first, second)


def read_images(images: FeatureSource, ids: Tensor) -> Tensor:
    """ids (n,) -> (n, C, H, W) uint8"""
    found = images.read(ids)
    return found if images.shape[0] in CHANNELS else found.permute(0, 3, 1, 2)


def chunk_samples(shape: Iterable[int]) -> int:
    """Images of shape (C, H, W) to handle at once."""
    return max(1, min(1024, CHUNK_BYTES // (4 * math.prod(shape))))


def read_shape(settings: Mapping[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width of the images, from the settings of a file."""
    shape = settings.get("image_shape")
    if not isinstance(shape, (list, tuple)) or len(shape) != 3:
        raise SettingError(f"image_shape is {shape!r:.99}; expected three sizes")
    channels, height, width = shape
    check_choice("channels", channels, CHANNELS)
    for side in (height, width):
        check_int("image_shape", side, 1, MAX_SIDE)
    return channels, height, width


@dataclass(frozen=True, eq=False)
class RecordedImages(EncodedImages):
    """The images of a recording."""

    config: ImagesConfig

    @classmethod
    def read(cls, settings: Mapping[str, Any], store: RowStore, num_samples: int) -> RecordedImages:
        own = {name: value for name, value in settings.items() if name not in ("image_shape", *TRUNK_SETTINGS)}
        try:
            config = from_dict(ImagesConfig, own)
            shape = read_shape(settings)
            config.check_channels(shape[0])
        except (InputError, TypeError, OverflowError) as error:
            raise NotARecordingError(f"settings of recorder images refused: {error}. Record again") from error
        lengths = store.tensor("lengths", shape=(num_samples,))
        prefix = store.tensor("start", dtype=torch.uint8).numpy().tobytes()
        stream = StoredStream(store.rows("stream", dtype=torch.uint8))
        return cls.from_stream(stream, lengths, prefix, config, shape)


@dataclass(frozen=True, eq=False)
class StoredStream:
    """The bytes of a tensor, read from its file when they are needed."""

    rows: Rows

    def __len__(self) -> int:
        return math.prod(self.rows.shape)

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        return bytes(self.rows.read(start, max(start, stop)).numpy())


class SpooledImages:
    """Encoded images on their way to a recording: in a temporary file without a name, so that memory stays bounded."""

    def __init__(self, folder: Path | None):
        self.file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed with this object
        self.ends: list[int] = []
        self.prefix: bytes | None = None

    def add(self, contents: Iterable[bytes]) -> SpooledImages:
        for content in contents:
            self.file.write(content)
            self.ends.append((self.ends[-1] if self.ends else 0) + len(content))
            self.prefix = content if self.prefix is None else common_prefix([self.prefix, content])
        self.file.flush()
        return self

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, MadeRows]]:
        """The tensors of the file, as EncodedImages.tensors has them; the stream is made from the temporary file."""
        prefix = self.prefix or b""
        ends = np.array(self.ends, np.int64)
        lengths = np.diff(ends, prepend=0) - len(prefix)
        own_ends = np.cumsum(lengths)  # in the stream, which has the prefix of none

        def read(start: int, stop: int) -> Tensor:
            """Bytes start:stop of the stream."""
            parts, index = [], int(np.searchsorted(own_ends, start, side="right"))
            while start < stop:
                end = min(stop, int(own_ends[index]))
                position = int(ends[index]) - (int(own_ends[index]) - start)
                parts.append(os.pread(self.file.fileno(), end - start, position))
                start, index = end, index + 1
            return as_tensor(b"".join(parts))

        stream = MadeRows((int(lengths.sum()),), torch.uint8, read)
        return {"lengths": length_tensor(lengths), "start": as_tensor(prefix)}, {"stream": stream}


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Images to be recorded: first those of an earlier recording, if there is one, then those that are given."""

    given: FeatureSource
    earlier: RecordedImages | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return image_shape(self.given)

    def __len__(self) -> int:
        return self.num_earlier + len(self.given)

    @property
    def num_earlier(self) -> int:
        return 0 if self.earlier is None else len(self.earlier)

    def read(self, ids: Tensor) -> Tensor:
        """ids (n,) in rising order -> (n, C, H, W) uint8"""
        found = [read_images(self.given, ids[ids >= self.num_earlier] - self.num_earlier)]
        if self.earlier is not None:
            found.insert(0, self.earlier.images(ids[ids < self.num_earlier]))
        return torch.cat(found)

    def encode(self, ids: Tensor, config: ImagesConfig) -> Iterator[bytes]:
        """ids in rising order -> the bytes of each image. Earlier images with the same encoding keep their bytes."""
        if self.earlier is not None and self.earlier.config.encoding == config.encoding:
            for index in ids[ids < self.num_earlier].tolist():
                yield self.earlier.content(index)
            ids = ids[ids >= self.num_earlier]
        for chunk in ids.split(chunk_samples(self.shape)):
            yield from encode_images(self.read(chunk), config)
