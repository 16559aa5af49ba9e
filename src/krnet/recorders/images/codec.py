"""Images to bytes and back: what recorder images keeps, without the trunk that makes features of it.

    images (N, C, H, W) or (N, H, W, C) uint8 -> Originals.encode -> JPEG, WebP or PNG -> Encoded: one after the other
    ids -> Encoded.images -> decoded in parallel -> (B, C, H, W) uint8

Small images begin with the same hundreds of bytes (the tables of a JPEG); these are kept once.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.config import check_choice, check_int, check_range, from_dict, require
from krnet.errors import InputError, NotARecordingError, SettingError
from krnet.features.source import FeatureSource, open_features
from krnet.io.archive import TensorStore

CODECS = ("jpeg", "webp", "webp-lossless", "png")
LOSSLESS = ("webp-lossless", "png")
SUBSAMPLINGS = (420, 444)
WEBP_CHUNKS = {"webp": b"VP8 ", "webp-lossless": b"VP8L"}
CHANNELS = (1, 3)
MAX_SIDE = 4096  # pixels: bounds what a few bytes may be decoded to
CHUNK_BYTES = 64 << 20  # of float images in hand


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    codec: str = "jpeg"
    """jpeg, webp (both lossy), webp-lossless or png (both lossless; png is the smaller of tiny images only)."""
    quality: int = 90
    """Of jpeg and webp, 1 to 100."""
    subsampling: int = 420
    """Of the colours in a jpeg: 420 (4:2:0, one for 2 x 2 pixels) or 444 (4:4:4, one for each)."""
    mean: tuple[float, ...] = (0.0,)
    """Of each channel, in fractions of 255: subtracted before the trunk; one number serves all channels."""
    std: tuple[float, ...] = (1.0,)
    """Of each channel, in fractions of 255: divided by before the trunk."""

    def __post_init__(self) -> None:
        check_choice("codec", self.codec, CODECS)
        check_int("quality", self.quality, 1, 100)
        check_choice("subsampling", self.subsampling, SUBSAMPLINGS)
        for name, lowest in (("mean", -1e6), ("std", 1e-6)):
            values = getattr(self, name)
            values = tuple(values) if isinstance(values, (tuple, list)) else (values,)
            for value in values:
                check_range(name, value, lowest)
            object.__setattr__(self, name, values)

    @property
    def encoding(self) -> tuple[str, int, int]:
        """What the bytes of an image follow from, beside its pixels."""
        quality = 0 if self.codec in LOSSLESS else self.quality
        return self.codec, quality, self.subsampling if self.codec == "jpeg" else 0

    def check_channels(self, channels: int) -> None:
        for name in ("mean", "std"):
            if len(values := getattr(self, name)) not in (1, channels):
                raise SettingError(f"{name} is {values}; the images have {channels} channels")

    def standardise(self, images: Tensor) -> Tensor:
        """uint8 images (n, C, H, W) as the trunk takes them."""
        mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in (self.mean, self.std))
        return (images.float() / 255 - mean) / std


def encode_image(image: np.ndarray, config: ImagesConfig) -> bytes:
    """image (H, W, C) uint8"""
    Image = require("PIL.Image", "images")

    target = io.BytesIO()
    grey = image.shape[2] == 1
    Image.fromarray(image[:, :, 0] if grey else image).save(target, config.codec.split("-")[0], **options(config, grey))
    content = target.getvalue()
    return pack_webp(content, config.codec) if config.codec in WEBP_CHUNKS else content


def options(config: ImagesConfig, grey: bool) -> dict[str, Any]:
    """Pillow's."""
    if config.codec == "png":
        return {"optimize": True}
    if config.codec == "webp-lossless":
        # Slower ones are larger by 1 to 3 % where images are small, smaller by less than 1 % where they are not.
        return {"lossless": True, "method": 4, "quality": 0}
    if config.codec == "webp":
        return {"quality": config.quality, "method": 6}  # the slowest, and the smallest
    colours = {} if grey else {"subsampling": ":".join(str(config.subsampling))}
    return {"quality": config.quality, **colours}


def pack_webp(content: bytes, codec: str = "webp") -> bytes:
    """Without the container, 20 bytes that follow from the length; what is the same in all images comes first.

    RIFF container | frame tag (3) | start code and size (7) | data  ->  start code and size | frame tag | data
    RIFF container | signature and size (5) | data                   ->  the same, if lossless, without the container
    """
    assert content[12:16] == WEBP_CHUNKS[codec], f"a chunk {content[12:16]!r} where a {codec} image begins"
    frame = content[20 : 20 + int.from_bytes(content[16:20], "little")]
    return frame if codec == "webp-lossless" else frame[3:10] + frame[:3] + frame[10:]


def unpack_webp(packed: bytes, codec: str = "webp") -> bytes:
    frame = packed if codec == "webp-lossless" else packed[7:10] + packed[:7] + packed[10:]
    padded = frame + bytes(len(frame) % 2)
    whole, own = (n.to_bytes(4, "little") for n in (12 + len(padded), len(frame)))
    return b"RIFF%bWEBP%b%b%b" % (whole, WEBP_CHUNKS[codec], own, padded)


def decode_image(content: bytes, codec: str, shape: Sequence[int]) -> Tensor:
    """(C, H, W) uint8 of just that shape, or refused."""
    Image = require("PIL.Image", "images")

    channels, height, width = shape
    file = unpack_webp(content, codec) if codec in WEBP_CHUNKS else content
    try:
        with Image.open(io.BytesIO(file), formats=[codec.split("-")[0]]) as image:
            if image.size != (width, height):  # before so many pixels are made
                raise ValueError(f"{image.size[0]} x {image.size[1]} pixels; expected {width} x {height}")
            pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # Pillow's decoders raise nearly everything
        raise NotARecordingError(
            f"an image of {len(content)} bytes does not decode: {error}. Restore the file from a copy, or record again"
        ) from error
    return torch.from_numpy(pixels.reshape(height, width, channels)).permute(2, 0, 1)


def workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor()  # Pillow works without the interpreter's lock


def common_start(contents: Sequence[bytes]) -> bytes:
    """What all of them begin with."""
    first, last = min(contents), max(contents)  # by bytes: all others lie between them
    same = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[:same]


def open_images(images: Any) -> FeatureSource:
    if images is None:
        raise InputError(
            "recorder images needs the images: give images=, or --images on the command line, uint8 (N, C, H, W) or "
            "(N, H, W, C)"
        )
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
    """Channels, height and width; channels come first where that can be."""
    first, second, third = images.shape
    return (first, second, third) if first in CHANNELS else (third, first, second)


def read_images(images: FeatureSource, ids: Tensor) -> Tensor:
    """(n, C, H, W) uint8"""
    found = images.read(ids)
    return found if images.shape[0] in CHANNELS else found.permute(0, 3, 1, 2)


def chunk_size(shape: Iterable[int]) -> int:
    return max(1, min(1024, CHUNK_BYTES // (4 * math.prod(shape))))


def as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


@dataclass(frozen=True, eq=False)
class Encoded:
    """Encoded images, one after the other, without what all of them begin with."""

    stream: bytes
    ends: np.ndarray
    start: bytes
    config: ImagesConfig
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, contents: Sequence[bytes], config: ImagesConfig, shape: tuple[int, int, int]) -> Encoded:
        start = common_start(contents)
        ends = np.cumsum([len(content) - len(start) for content in contents], dtype=np.int64)
        return cls(b"".join(content[len(start) :] for content in contents), ends, start, config, shape)

    @classmethod
    def read(cls, settings: Mapping[str, Any], store: TensorStore, num_samples: int) -> Encoded:
        own = {name: value for name, value in settings.items() if name not in ("image_shape", "trunk")}
        shape = settings.get("image_shape")
        try:
            config = from_dict(ImagesConfig, own)
            if not isinstance(shape, (list, tuple)) or len(shape) != 3:
                raise SettingError(f"image_shape is {shape!r:.99}; expected three sizes")
            channels, height, width = shape
            check_choice("channels", channels, CHANNELS)
            for side in (height, width):
                check_int("image_shape", side, 1, MAX_SIDE)
            config.check_channels(channels)
        except InputError as error:
            raise NotARecordingError(f"settings of recorder images refused: {error}. Record again") from error
        lengths = store.tensor("lengths", shape=(num_samples,))
        if lengths.dtype not in (torch.uint16, torch.uint32):
            raise NotARecordingError(f"tensor 'lengths' is {lengths.dtype}; expected uint16 or uint32. Record again")
        stream, start = (store.tensor(name, dtype=torch.uint8).numpy().tobytes() for name in ("stream", "start"))
        ends = np.cumsum(lengths.numpy().astype(np.int64))
        if int(ends[-1]) != len(stream):
            raise NotARecordingError(
                f"images of {int(ends[-1])} bytes in all; the file holds {len(stream)}. Record again"
            )
        return cls(stream, ends, start, config, (channels, height, width))

    def tensors(self) -> dict[str, Tensor]:
        lengths = np.diff(self.ends, prepend=0)
        lengths = lengths.astype(np.uint16 if lengths.max() < 2**16 else np.uint32)
        return {
            "lengths": torch.from_numpy(lengths), "stream": as_tensor(self.stream), "start": as_tensor(self.start)
        }  # fmt: skip

    def __len__(self) -> int:
        return len(self.ends)

    def content(self, index: int) -> bytes:
        begin = int(self.ends[index - 1]) if index else 0
        return self.start + self.stream[begin : int(self.ends[index])]

    def images(self, ids: Tensor) -> Tensor:
        """(n, C, H, W) uint8"""
        if not len(ids):
            return torch.empty(0, *self.shape, dtype=torch.uint8)

        def one(index: int) -> Tensor:
            return decode_image(self.content(index), self.config.codec, self.shape)

        if len(ids) == 1:
            return one(int(ids[0]))[None]
        with workers() as pool:
            return torch.stack(list(pool.map(one, ids.tolist())))


@dataclass(frozen=True, eq=False)
class Originals:
    """Images to be kept: first those of an earlier recording, if there is one, then those that are given."""

    given: FeatureSource
    earlier: Encoded | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return image_shape(self.given)

    def __len__(self) -> int:
        return self.num_earlier + len(self.given)

    @property
    def num_earlier(self) -> int:
        return 0 if self.earlier is None else len(self.earlier)

    def read(self, ids: Tensor) -> Tensor:
        """ids, in rising order -> (n, C, H, W) uint8"""
        found = [read_images(self.given, ids[ids >= self.num_earlier] - self.num_earlier)]
        if self.earlier is not None:
            found.insert(0, self.earlier.images(ids[ids < self.num_earlier]))
        return torch.cat(found)

    def encode(self, ids: Tensor, config: ImagesConfig) -> list[bytes]:
        """ids in rising order. What is kept in the same quality already is kept as it is, not encoded once more."""
        found = list[bytes]()
        if self.earlier is not None and self.earlier.config.encoding == config.encoding:
            found += [self.earlier.content(index) for index in ids[ids < self.num_earlier].tolist()]
            ids = ids[ids >= self.num_earlier]
        with workers() as pool:
            for some in ids.split(chunk_size(self.shape)):
                pixels = self.read(some).permute(0, 2, 3, 1).numpy()
                found += pool.map(lambda image: encode_image(np.ascontiguousarray(image), config), pixels)
        return found
