"""Folders of images, decoded once.

    train/CLASS/*.jpg, val/CLASS/*.jpg -> read -> class names, (images (N, 3, S, S) uint8, labels (N,)) of each

Images come class by class, classes and files sorted by name. Tiny-ImageNet is understood as it is published:
train/CLASS/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt. All are decoded in parallel to square RGB
copies, which the user's cache folder keeps and later runs map from there: memory stays bounded.

"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap, write_array_header_1_0
from torch import Tensor

from krnet.config import check_int, require
from krnet.data.dataset import DataSet, Split, channel_stats
from krnet.errors import DataError
from krnet.io.atomic import atomic_write

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".webp", ".tif", ".tiff")
MAX_DEFAULT_SIZE = 256  # from which data.py has 224 cropped, as networks for large images expect
CHUNK = 256  # images that are decoded before they are written
COPY_VERSION = 1  # of how copies are made: another number, and all are made again

Files = dict[str, list[Path]]  # by class


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
    differing = sorted(files[train].keys() ^ files[test].keys())
    if differing:
        raise DataError(f"{folder}: class {differing[0]} is only in {train.name} or {test.name}; expected it in both")
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


# ------------------------------------------------------------------ which files


def list_classes(folder: Path) -> Files:
    found = {}
    for class_folder in folder.iterdir():
        if class_folder.is_dir() and not class_folder.name.startswith("."):
            files = [f for f in class_folder.rglob("*") if f.suffix.lower() in SUFFIXES and not f.name.startswith(".")]
            if not files:
                raise DataError(f"{class_folder}: no images in it; expected at least one, as {', '.join(SUFFIXES)}")
            found[class_folder.name] = sorted(files)
    if not found:
        raise DataError(f"{folder}: no folders in it; expected one per class")
    return found


def list_annotated(folder: Path) -> Files:
    """Tiny-ImageNet's val: images in one heap, and a list of file name, class and box. Empty where there is none."""
    listing, images = folder / "val_annotations.txt", folder / "images"
    found: Files = {}
    if listing.is_file() and images.is_dir():
        for number, line in enumerate(listing.read_text().splitlines(), 1):
            name, *rest = line.split("\t")
            if not rest or not (images / name).is_file():
                raise DataError(f"{listing}, line {number}: {line!r:.99}; expected a file in images, a tab, its class")
            found.setdefault(rest[0], []).append(images / name)
    return {name: sorted(files) for name, files in found.items()}


# ------------------------------------------------------------------ their copies


def default_size(first: Path, say: Callable[[str], None]) -> int:
    shorter = min(open_image(first).size)
    if shorter > MAX_DEFAULT_SIZE:
        say(f"{first}: {shorter} pixels at the shorter side; copies of {MAX_DEFAULT_SIZE} are kept")
    return min(shorter, MAX_DEFAULT_SIZE)


def cached_copies(root: Path, files: list[Path], size: int, say: Callable[[str], None]) -> Tensor:
    """(N, 3, size, size), mapped from the cache folder; made first where these very files have no copies yet."""
    digest = hashlib.sha256(f"{COPY_VERSION}\n".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.relative_to(root).as_posix()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
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
        # Copy on write: torch wants memory it may write to, and the file must stay as it is.
        copies = open_memmap(path, mode="c")
    except (OSError, ValueError):
        return None  # not there, or not whole
    return torch.from_numpy(copies) if copies.shape == shape and copies.dtype == np.uint8 else None


def write_copies(path: Path, files: list[Path], shape: tuple[int, ...]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Threads will do: PIL decodes and resizes outside Python's lock.
        with atomic_write(path) as out, ThreadPoolExecutor() as pool:
            write_array_header_1_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for copy in _in_chunks(pool, partial(square_copy, size=shape[-1]), files):
                out.write(copy)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error}); make room there, or set XDG_CACHE_HOME") from error


def _in_chunks(pool: ThreadPoolExecutor, function: Callable[[Path], bytes], files: list[Path]) -> Iterator[bytes]:
    for start in range(0, len(files), CHUNK):
        yield from pool.map(function, files[start : start + CHUNK])


def open_image(path: Path) -> Any:
    Image = require("PIL.Image", "images")

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # decoders raise what they like
        raise DataError(f"{path}: cannot be read as an image ({error}). Replace or remove it") from error


def square_copy(path: Path, size: int) -> bytes:
    """Shorter side resized to `size`, the middle of the longer one kept; (3, size, size) as bytes."""
    Image = require("PIL.Image", "images")

    image = open_image(path)
    width, height = image.size
    if min(width, height) != size:
        width, height = width * size // min(width, height), height * size // min(width, height)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size))).transpose(2, 0, 1).tobytes()


SMALL_SIZE = 96  # images of a folder up to here are padded and seen whole; of larger ones networks see a window


def load_folder(
    folder: Path,
    image_size: int | None,
    choose: Callable[[list[str]], Sequence[str]] | None,
    say: Callable[[str], None],
) -> DataSet:
    class_names, train, test = read(folder, image_size, choose, say)
    mean, std = channel_stats(train[0])
    size = train[0].shape[-1]
    # 4 around 32 pixels, as CIFAR's; 224 of 256, as ImageNet's.
    pad, crop = (size // 8, None) if size <= SMALL_SIZE else (0, size - size // 16 * 2)
    name = folder.resolve().name
    return DataSet(name, Split(*train), Split(*test), tuple(class_names), mean, std, pad, flip=True, crop=crop)
