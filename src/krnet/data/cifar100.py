"""CIFAR-100 as its publisher packs it (Krizhevsky 2009), read without trusting the files.

    data folder/cifar-100-python/{train,test,meta}, fetched if missing
        -> read -> class names, (images (N, 3, 32, 32) uint8, labels (N,)) for training and for testing

The files are pickles, which can run anything when loaded. Here they cannot: the unpickler admits only the names that
such files need, and answers each with a stand-in of its own, so that even numpy is called only with checked values.

"""

from __future__ import annotations

import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.config import require
from krnet.data import folder as folders
from krnet.data.dataset import DataSet, make_split
from krnet.errors import DataError, UnsafePickleError
from krnet.io.atomic import atomic_write

FOLDER, FILES = "cifar-100-python", ("train", "test", "meta")
NUM_CLASSES = 100
URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
MD5 = "eb9058c3a382ffc7106e4002c42a8d85"
RESTORE = f"Take the file from the official archive again: {URL}"

Part = tuple[Tensor, Tensor]  # images, labels


def read(data_folder: Path, download: bool, say: Callable[[str], None]) -> tuple[list[str], Part, Part]:
    folder = data_folder / FOLDER
    if not all((folder / name).is_file() for name in FILES):
        fetch(data_folder, download, say)
    return read_names(folder / "meta"), read_part(folder / "train"), read_part(folder / "test")


def read_names(path: Path) -> list[str]:
    names = _entry(path, _read_pickle(path), "fine_label_names")
    if not isinstance(names, list) or [type(name) in (bytes, str) for name in names] != [True] * NUM_CLASSES:
        raise DataError(f"{path}: fine_label_names are not {NUM_CLASSES} names. {RESTORE}")
    return [_text(name) for name in names]


def read_part(path: Path) -> Part:
    record = _read_pickle(path)
    data, labels = _entry(path, record, "data"), _entry(path, record, "fine_labels")
    rows = data.read() if isinstance(data, PickledArray) else None
    if rows is None or rows.ndim != 2 or rows.shape[1] != 3 * 32 * 32:
        found = "no uint8 array" if rows is None else f"of shape {rows.shape}"
        raise DataError(f"{path}: data is {found}; expected a uint8 array of shape (N, 3072). {RESTORE}")
    if not isinstance(labels, list) or len(labels) != len(rows):
        found = f"{len(labels)} of them" if isinstance(labels, list) else f"a {type(labels).__name__}"
        raise DataError(f"{path}: fine_labels are {found}; expected a list of {len(rows)}, one per image. {RESTORE}")
    for label in labels:
        if type(label) is not int or not 0 <= label < NUM_CLASSES:
            raise DataError(f"{path}: fine label {label!r:.99}; expected whole numbers 0..{NUM_CLASSES - 1}. {RESTORE}")
    # A copy, as what a pickle holds is read-only.
    return torch.tensor(rows).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)


def _entry(path: Path, record: dict[str, Any], key: str) -> Any:
    if key not in record:
        raise DataError(f"{path}: no entry {key!r}; it has {', '.join(map(repr, record)) or 'none'}. {RESTORE}")
    return record[key]


def _text(value: bytes | str) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


# ------------------------------------------------------------------ the archive


def fetch(data_folder: Path, download: bool, say: Callable[[str], None]) -> None:
    """Unpack the official archive: one that lies in the folder already, or downloaded to it."""
    archive = data_folder / f"{FOLDER}.tar.gz"
    missing = (
        f"{data_folder / FOLDER}: expected CIFAR-100's files {', '.join(FILES)} here. Name the folder that holds "
        f"{FOLDER} with --data-dir or KRNET_DATA, or put {URL} into {data_folder}"
    )
    if not download and not archive.is_file():
        raise DataError(f"{missing}; downloading is off")

    def refuse(*_: object) -> None:  # what pooch calls where the archive's MD5 is wrong
        raise DataError(f"{archive}: its MD5 is not {MD5}, and downloading is off. Remove it. {missing}")

    pooch = require("pooch", "learn")

    pooch.get_logger().setLevel("WARNING")  # what it says of the download, `say` is told
    if not archive.is_file():
        say(f"downloading CIFAR-100 (169 MB) from {URL} to {data_folder}")
    try:
        pooch.retrieve(URL, f"md5:{MD5}", archive.name, data_folder, downloader=None if download else refuse)
        unpack(archive, data_folder / FOLDER)
    except DataError:
        raise
    except Exception as error:  # network, disk and archive each have their own kinds
        raise DataError(f"{archive}: cannot be downloaded or unpacked ({error}). {missing}") from error


def unpack(archive: Path, target: Path) -> None:
    """Only members of the three names are read, and we say where they go: no path or link is followed."""
    wanted = {f"{FOLDER}/{name}": target / name for name in FILES}
    target.mkdir(exist_ok=True)
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() and member.name in wanted else None
            if content is not None:
                with atomic_write(wanted.pop(member.name)) as file:
                    shutil.copyfileobj(content, file, 1 << 20)
    if wanted:
        raise DataError(f"{archive}: no file {next(iter(wanted))} in it. Remove the archive; it will be fetched again")


# ------------------------------------------------------------------ pickles


class PickledArray:
    """What a pickled array is read into."""

    fields: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.fields = state[1:]  # without the version: shape, type, whether Fortran's order, bytes

    def read(self) -> np.ndarray | None:
        """The array, read-only; None unless it is uint8 and has as many bytes as its shape says."""
        try:
            shape, dtype, fortran, content = self.fields
            if dtype.name not in ("u1", b"u1"):
                return None
            return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
        except (AttributeError, TypeError, ValueError):
            return None


class PickledType:
    def __init__(self, name: Any):
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like mean nothing for uint8."""


def _make_type(name: Any, *_: Any) -> PickledType:
    return PickledType(name)


def _reconstruct(*_: Any) -> PickledArray:
    return PickledArray()


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> PickledArray:
    array = PickledArray()
    array.fields = (shape, dtype, order == "F", content)
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
    return str.encode(text, "latin1")


_ADMITTED: dict[str, Any] = {
    "numpy.ndarray": "ndarray",
    "numpy.dtype": _make_type,
    # Up to pickle protocol 4 and from protocol 5 on, each by numpy 1 and by numpy 2.
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "_codecs.encode": _encode,  # how Python 3 writes bytes that Python 2 can read
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _ADMITTED:
            raise UnsafePickleError(f"asks for {module}.{name}")
        return _ADMITTED[f"{module}.{name}"]


def _read_pickle(path: Path) -> dict[str, Any]:
    """A dict of plain values and PickledArrays; anything else in the file stops it."""
    try:
        with path.open("rb") as file:
            record = _ArraysOnly(file, encoding="bytes").load()
    except UnsafePickleError as error:
        raise UnsafePickleError(
            f"{path}: {error}; expected nothing but arrays and plain values, so it was not loaded. Delete it. {RESTORE}"
        ) from None
    except Exception as error:  # a damaged pickle raises anything at all
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{path}: cannot be read ({reason:.200}). {RESTORE}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}: holds a {type(record).__name__}; expected a dict. {RESTORE}")
    return {_text(key): value for key, value in record.items() if isinstance(key, (bytes, str))}


CIFAR_MEAN, CIFAR_STD = (0.5071, 0.4866, 0.4409), (0.2009, 0.1984, 0.2023)  # LUCIR's; others use others


def load_cifar100(data_folder: Path | None, download: bool, say: Callable[[str], None]) -> DataSet:
    """From cifar-100-python in the data folder, or in the user's cache folder."""
    data_folder = data_folder or folders.cache_folder()
    class_names, train, test = read(data_folder, download, say)
    folder = data_folder / FOLDER
    return DataSet(
        "cifar100",
        make_split(*train, class_names, folder / "train"),
        make_split(*test, class_names, folder / "test"),
        tuple(class_names),
        CIFAR_MEAN,
        CIFAR_STD,
        pad=4,
        flip=True,
    )
