"""Folders of images, decoded once.

    train/CLASS/*.jpg, val/CLASS/*.jpg -> read -> class names, (images (N, 3, S, S) uint8, labels (N,)) of each
                                       -> load_folder -> DataSet

Images are ordered class by class; classes and files are sorted by name. Tiny-ImageNet is read as it is published:
train/CLASS/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt. The images are decoded in parallel to square
RGB copies in the user's cache folder. Later runs memory-map these copies, so memory use stays bounded.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap, write_array_header_1_0
from torch import Tensor

from krnet.config import check_int, format_size, readable_name, require
from krnet.data.dataset import DataSet, Split, channel_stats
from krnet.errors import DataError
from krnet.io.atomic import atomic_write

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".webp", ".tif", ".tiff")
MAX_DEFAULT_SIZE_PX = 256  # load_folder crops 224 of 256 pixels, the input size of networks for large images
CHUNK_IMAGES = 256  # images that are decoded before they are written
COPY_VERSION = 1  # raise it when copies are made in another way: all are then made again
PIXEL_BYTES = 7  # of an image while it is converted to RGB: up to four as it was, and three
FREE_IMAGE_BYTES, IMAGE_FACTOR = 128 << 20, 512  # a decoded image takes at most this, or this many times its file
LARGE_BYTES = 16 << 20  # images beyond this size are decoded one at a time
_ONE_LARGE = threading.Lock()

Files = dict[str, list[Path]]  # class name -> its image files


def cache_folder() -> Path:
    pooch = require("pooch", "learn")

    return Path(pooch.os_cache("krnet"))


def read(
    folder: Path,
    size: int | None,
    choose: Callable[[list[str]], Sequence[str]] | None,
    say: Callable[[str], None],
) -> tuple[list[str], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    train = folder / "train"
    test = next((folder / name for name in ("val", "test") if (folder / name).is_dir()), None)
    if not train.is_dir() or test is None:
        raise DataError(f"{folder}: expected the folders train and val (or test) in it, each with a folder per class")
    files = {train: list_classes(train), test: list_annotated(test) or list_classes(test)}
    class_names = sorted(files[train])
    unmatched = sorted(files[train].keys() ^ files[test].keys())
    if unmatched:
        raise DataError(f"{folder}: class {unmatched[0]} is only in {train.name} or {test.name}; expected it in both")
    if choose is not None:
        chosen = list(choose(class_names))
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(class_names):
            raise DataError(f"{folder}: {chosen!r:.200} were chosen; expected some of its {len(class_names)} classes")
        class_names = chosen
    if size is None:
        size = default_size(files[train][class_names[0]][0], say)
    check_int("image_size", size, 1, 4096)
    (train_images, train_labels), (test_images, test_labels) = (
        (
            cached_copies(root, [file for name in class_names for file in found[name]], size, say),
            torch.tensor([label for label, name in enumerate(class_names) for _ in found[name]]),
        )
        for root, found in files.items()
    )
    return class_names, (train_images, train_labels), (test_images, test_labels)


# ------------------------------------------------------------------ files


def list_classes(folder: Path) -> Files:
    found = {}
    for class_folder in folder.iterdir():
        if class_folder.is_dir() and not class_folder.name.startswith("."):
            files = [
                f for f in class_folder.rglob("*") if f.suffix.lower() in IMAGE_SUFFIXES and not f.name.startswith(".")
            ]
            if not files:
                raise DataError(
                    f"{class_folder}: no images in it; expected at least one, as {', '.join(IMAGE_SUFFIXES)}"
                )
            name = readable_name(class_folder.name)
            if name in found:
                raise DataError(f"{folder}: two folders mean the class {name}; rename one")
            found[name] = sorted(files)
    if not found:
        raise DataError(f"{folder}: no folders in it; expected one per class")
    return found


def list_annotated(folder: Path) -> Files:
    """Files of Tiny-ImageNet's val folder by class, or {} for other folders.

    All images are in one folder; val_annotations.txt lists file name, class and box.
    """
    listing, images = folder / "val_annotations.txt", folder / "images"
    found: Files = {}
    if listing.is_file() and images.is_dir():
        for number, line in enumerate(listing.read_text("utf-8", "surrogateescape").splitlines(), 1):
            name, *rest = line.split("\t")
            if not rest or not (images / name).is_file():
                raise DataError(f"{listing}, line {number}: {line!r:.99}; expected a file in images, a tab, its class")
            found.setdefault(readable_name(rest[0]), []).append(images / name)
    return {name: sorted(files) for name, files in found.items()}


# ------------------------------------------------------------------ square copies


def default_size(first: Path, say: Callable[[str], None]) -> int:
    shorter_px = min(open_image(first).size)
    if shorter_px > MAX_DEFAULT_SIZE_PX:
        say(f"{first}: {shorter_px} pixels at the shorter side; copies of {MAX_DEFAULT_SIZE_PX} are kept")
    return min(shorter_px, MAX_DEFAULT_SIZE_PX)


def cached_copies(root: Path, files: list[Path], size: int, say: Callable[[str], None]) -> Tensor:
    """Square copies (N, 3, size, size) of the files, memory-mapped from the cache folder; they are made if missing.

    The name of the cache file contains a hash of names, sizes and times of the files, so changed files get new copies.
    """
    digest = hashlib.sha256(f"{COPY_VERSION}\n".encode())
    for file in files:
        stat = file.stat()
        digest.update(os.fsencode(file.relative_to(root).as_posix()))
        digest.update(f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    name = f"{root.resolve().parent.name}-{root.name}-{size}px-{digest.hexdigest()[:16]}.npy"
    path = cache_folder() / "images" / name
    shape = (len(files), 3, size, size)
    copies = map_copies(path, shape)
    if copies is None:
        say(f"decoding {len(files):,} images of {root} to {size}x{size} pixels, this once; copies go to {path}")
        write_copies(path, files, shape)
        copies = map_copies(path, shape)
    assert copies is not None, f"{path}: just written, and not as it should be"
    return copies


def map_copies(path: Path, shape: tuple[int, ...]) -> Tensor | None:
    try:
        # Copy on write: torch needs writable memory, and the file must not change.
        copies = open_memmap(path, mode="c")
    except (OSError, ValueError):
        return None  # missing or incomplete
    return torch.from_numpy(copies) if copies.shape == shape and copies.dtype == np.uint8 else None


def write_copies(path: Path, files: list[Path], shape: tuple[int, ...]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Threads suffice: PIL releases Python's global lock while it decodes and resizes.
        with atomic_write(path) as out, ThreadPoolExecutor() as pool:
            write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for copy in _map_in_chunks(pool, partial(square_copy, size=shape[-1]), files):
                out.write(copy)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error}); make room there, or set XDG_CACHE_HOME") from error


def _map_in_chunks(pool: ThreadPoolExecutor, function: Callable[[Path], bytes], files: list[Path]) -> Iterator[bytes]:
    for start in range(0, len(files), CHUNK_IMAGES):
        yield from pool.map(function, files[start : start + CHUNK_IMAGES])


def open_image(path: Path) -> Any:
    Image = require("PIL.Image", "images")

    try:
        with Image.open(path) as image:
            num_bytes = _check_pixels(path, *image.size)  # before the pixels are decoded
            with _ONE_LARGE if num_bytes > LARGE_BYTES else nullcontext():
                return image.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # a decoder can raise any exception
        raise DataError(f"{path}: cannot be read as an image ({error}). Replace or remove it") from error


def _check_pixels(path: Path, width: int, height: int) -> int:
    """The bytes of a decoded image; refused if they are out of all proportion to its file."""
    num_bytes, file_bytes = PIXEL_BYTES * width * height, path.stat().st_size
    if num_bytes > (allowed := max(FREE_IMAGE_BYTES, IMAGE_FACTOR * file_bytes)):
        raise DataError(
            f"{path}: {width} x {height} pixels in a file of {file_bytes} bytes would take {format_size(num_bytes)} of "
            f"memory; expected at most {format_size(allowed)}. Remove it, or save it smaller"
        )
    return num_bytes


def square_copy(path: Path, size: int) -> bytes:
    """Resize the shorter side to `size` and cut out the centre square; returns the bytes of (3, size, size)."""
    Image = require("PIL.Image", "images")

    image = open_image(path)
    width, height = image.size
    if min(width, height) != size:
        width, height = width * size // min(width, height), height * size // min(width, height)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1).tobytes()


MAX_PADDED_SIZE_PX = 96  # up to this size networks see whole images, with a padded border; of larger ones a window


def load_folder(
    folder: Path,
    image_size: int | None,
    choose: Callable[[list[str]], Sequence[str]] | None,
    say: Callable[[str], None],
) -> DataSet:
    class_names, train, test = read(folder, image_size, choose, say)
    mean, std = channel_stats(train[0])
    size = train[0].shape[-1]
    # Padding 4 for 32 pixels, as is usual for CIFAR; a window of 224 for 256 pixels, as for ImageNet.
    pad, crop = (size // 8, None) if size <= MAX_PADDED_SIZE_PX else (0, size - size // 16 * 2)
    name = readable_name(folder.resolve().name)
    return DataSet(name, Split(*train), Split(*test), tuple(class_names), mean, std, pad, flip=True, crop=crop)
