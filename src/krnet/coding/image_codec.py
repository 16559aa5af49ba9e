"""Images to bytes and back, by JPEG, WebP or PNG: for recorder images, and for exemplars of iCaRL and LUCIR.

    image (H, W, C) uint8 -> encode_image -> bytes -> decode_image -> (C, H, W) uint8
    bytes of many images  -> EncodedImages: one stream -> images(ids), decoded in parallel -> (B, C, H, W) uint8

Images of one codec begin with the same bytes, in a JPEG hundreds of them (its tables). These are stored once.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from krnet.config import check_choice, check_int, require
from krnet.errors import NotARecordingError

E = TypeVar("E", bound="EncodedImages")


class Stream(Protocol):
    """Bytes that are read in parts: `bytes` themselves, or those of a file."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> bytes: ...


CODECS = ("jpeg", "webp", "webp-lossless", "png")
LOSSLESS = ("webp-lossless", "png")
SUBSAMPLINGS = (420, 444)
WEBP_CHUNKS = {"webp": b"VP8 ", "webp-lossless": b"VP8L"}  # name of the container's chunk with the image
CHANNELS = (1, 3)
LENGTH_TYPES = (torch.uint16, torch.uint32)


@dataclass(frozen=True, kw_only=True)
class ImageEncoding:
    codec: str = "jpeg"
    """jpeg or webp (lossy), webp-lossless or png (lossless; png is the smaller one for tiny images only)."""
    quality: int = 90
    """Quality of jpeg and webp, 1 to 100."""
    subsampling: int = 420
    """Colour resolution of a jpeg: 420 (4:2:0, one colour for 2 x 2 pixels) or 444 (4:4:4, one for each pixel)."""

    def __post_init__(self) -> None:
        check_choice("codec", self.codec, CODECS)
        check_int("quality", self.quality, 1, 100)
        check_choice("subsampling", self.subsampling, SUBSAMPLINGS)

    @property
    def encoding(self) -> tuple[str, int, int]:
        """The settings that, with its pixels, determine the bytes of an image; those the codec ignores are 0."""
        quality = 0 if self.codec in LOSSLESS else self.quality
        return self.codec, quality, self.subsampling if self.codec == "jpeg" else 0


def encode_image(image: np.ndarray, config: ImageEncoding) -> bytes:
    """image (H, W, C) uint8 -> the bytes to store"""
    Image = require("PIL.Image", "images")

    target = io.BytesIO()
    grey = image.shape[2] == 1
    pixels = image[:, :, 0] if grey else image
    Image.fromarray(pixels).save(target, config.codec.split("-")[0], **pillow_options(config, grey))
    content = target.getvalue()
    return pack_webp(content, config.codec) if config.codec in WEBP_CHUNKS else content


def pillow_options(config: ImageEncoding, grey: bool) -> dict[str, Any]:
    """Keyword arguments of Pillow's `save`."""
    if config.codec == "png":
        return {"optimize": True}
    if config.codec == "webp-lossless":
        # Slower methods make small images larger by 1 to 3 %, and large images smaller by less than 1 %.
        return {"lossless": True, "method": 4, "quality": 0}
    if config.codec == "webp":
        return {"quality": config.quality, "method": 6}  # the slowest method makes the smallest files
    colours = {} if grey else {"subsampling": ":".join(str(config.subsampling))}
    return {"quality": config.quality, **colours}


def pack_webp(content: bytes, codec: str = "webp") -> bytes:
    """Remove the container, 20 bytes that follow from the length, and put the bytes that all images share first.

    lossy     RIFF container | frame tag (3) | start code, size (7) | data  ->  start code, size | frame tag | data
    lossless  RIFF container | signature, size (5) | data                   ->  signature, size | data
    """
    assert content[12:16] == WEBP_CHUNKS[codec], f"a chunk {content[12:16]!r} where a {codec} image begins"
    frame = content[20 : 20 + int.from_bytes(content[16:20], "little")]
    return frame if codec == "webp-lossless" else frame[3:10] + frame[:3] + frame[10:]


def unpack_webp(packed: bytes, codec: str = "webp") -> bytes:
    """The inverse of `pack_webp`."""
    frame = packed if codec == "webp-lossless" else packed[7:10] + packed[:7] + packed[10:]
    padded = frame + bytes(len(frame) % 2)
    riff_size, chunk_size = (n.to_bytes(4, "little") for n in (12 + len(padded), len(frame)))
    return b"RIFF%bWEBP%b%b%b" % (riff_size, WEBP_CHUNKS[codec], chunk_size, padded)


def decode_image(content: bytes, codec: str, shape: Sequence[int]) -> Tensor:
    """An image (C, H, W) uint8; one of another shape than `shape` is refused."""
    Image = require("PIL.Image", "images")

    channels, height, width = shape
    file = unpack_webp(content, codec) if codec in WEBP_CHUNKS else content
    try:
        with Image.open(io.BytesIO(file), formats=[codec.split("-")[0]]) as image:
            if image.size != (width, height):  # checked before the pixels are decoded
                raise ValueError(f"{image.size[0]} x {image.size[1]} pixels; expected {width} x {height}")
            pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # Pillow's decoders raise many kinds of errors
        raise NotARecordingError(
            f"an image of {len(content)} bytes does not decode: {error}. Restore the file from a copy, or record again"
        ) from error
    return torch.from_numpy(pixels.reshape(height, width, channels)).permute(2, 0, 1)


def encode_images(images: Tensor, config: ImageEncoding) -> list[bytes]:
    """images (N, C, H, W) uint8 -> the bytes of each, encoded in parallel"""
    pixels = images.cpu().permute(0, 2, 3, 1).numpy()
    with thread_pool() as pool:
        return list(pool.map(lambda image: encode_image(np.ascontiguousarray(image), config), pixels))


def thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor()  # threads are enough: Pillow releases the interpreter's lock


def common_prefix(contents: Sequence[bytes]) -> bytes:
    """The longest prefix that all contents share."""
    if not contents:
        return b""
    first, last = min(contents), max(contents)  # in the order of bytes, where all others lie between these two
    length = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    return first[:length]


def length_tensor(lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(lengths.astype(np.uint16 if lengths.max(initial=0) < 2**16 else np.uint32))


def as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """Encoded images, one after the other; the prefix that all of them share is stored once."""

    stream: Stream
    ends: np.ndarray
    """(N,) int64: where each image ends in the stream."""
    prefix: bytes
    config: ImageEncoding
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, contents: Sequence[bytes], config: ImageEncoding, shape: tuple[int, int, int]) -> EncodedImages:
        prefix = common_prefix(contents)
        ends = np.cumsum([len(content) - len(prefix) for content in contents], dtype=np.int64)
        return cls(b"".join(content[len(prefix) :] for content in contents), ends, prefix, config, shape)

    @classmethod
    def from_tensors(cls: type[E], tensors: Mapping[str, Tensor], config: Any, shape: tuple[int, int, int]) -> E:
        """The inverse of `tensors`."""
        lengths = tensors["lengths"].cpu()
        stream, prefix = (tensors[name].cpu().numpy().tobytes() for name in ("stream", "start"))
        return cls.from_stream(stream, lengths, prefix, config, shape)

    @classmethod
    def from_stream(
        cls: type[E], stream: Stream, lengths: Tensor, prefix: bytes, config: Any, shape: tuple[int, int, int]
    ) -> E:
        if lengths.dtype not in LENGTH_TYPES:
            raise NotARecordingError(f"tensor 'lengths' is {lengths.dtype}; expected uint16 or uint32. Record again")
        ends = np.cumsum(lengths.numpy().astype(np.int64))
        total = int(ends[-1]) if len(ends) else 0
        if total != len(stream):
            raise NotARecordingError(f"images of {total} bytes in all; the file holds {len(stream)}. Record again")
        return cls(stream, ends, prefix, config, shape)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "lengths": length_tensor(np.diff(self.ends, prepend=0)),
            "stream": as_tensor(self.stream[:]),
            "start": as_tensor(self.prefix),
        }

    def __len__(self) -> int:
        return len(self.ends)

    def content(self, index: int) -> bytes:
        """The bytes of one image, its prefix included."""
        begin = int(self.ends[index - 1]) if index else 0
        return self.prefix + self.stream[begin : int(self.ends[index])]

    def images(self, ids: Tensor) -> Tensor:
        """ids (n,) -> decoded images (n, C, H, W) uint8"""
        decoded = torch.empty(len(ids), *self.shape, dtype=torch.uint8)

        def decode(place: int, index: int) -> None:
            decoded[place] = decode_image(self.content(index), self.config.codec, self.shape)

        if len(ids) == 1:
            decode(0, int(ids[0]))
        elif len(ids):
            with thread_pool() as pool:
                list(pool.map(decode, range(len(ids)), ids.tolist()))
        return decoded
