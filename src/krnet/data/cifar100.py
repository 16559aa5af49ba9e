"""CIFAR-100 in its publisher's files (Krizhevsky 2009), read without trusting the files.

    data folder/cifar-100-python/{train,test,meta}, downloaded if missing
        -> read -> class names, (images (N, 3, 32, 32) uint8, labels (N,)) for training and for testing
        -> load_cifar100 -> DataSet

The files are pickles, which can run any code when they are loaded. The unpickler here allows only the names that these
files need, and replaces each by a class or function of this module. numpy is called only with checked values.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import shutil
import tarfile
import textwrap
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
MAX_FILE_BYTES = 1 << 30

Part = tuple[Tensor, Tensor]  # images, labels


def read(data_folder: Path, download: bool, say: Callable[[str], None]) -> tuple[list[str], Part, Part]:
    folder = data_folder / FOLDER
    if not all((folder / name).is_file() for name in FILES):
        fetch(data_folder, download, say)
    return read_names(folder / "meta"), read_part(folder / "train"), read_part(folder / "test")


def read_names(path: Path) -> list[str]:
    names = _get_entry(path, _read_pickle(path), "fine_label_names")
    if not isinstance(names, list) or [type(name) in (bytes, str) for name in names] != [True] * NUM_CLASSES:
        raise DataError(f"{path}: fine_label_names are not {NUM_CLASSES} names. {RESTORE}")
    return [_to_str(name) for name in names]


def read_part(path: Path) -> Part:
    record = _read_pickle(path)
    data, labels = _get_entry(path, record, "data"), _get_entry(path, record, "fine_labels")
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
    # torch.tensor copies: the array of a pickle is read-only.
    return torch.tensor(rows).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)


def _get_entry(path: Path, record: dict[str, Any], key: str) -> Any:
    if key not in record:
        raise DataError(f"{path}: no entry {key!r}; it has {', '.join(map(repr, record)) or 'none'}. {RESTORE}")
    return record[key]


def _to_str(value: bytes | str) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


# ------------------------------------------------------------------ archive


def fetch(data_folder: Path, download: bool, say: Callable[[str], None]) -> None:
    """Unpack the official archive in the data folder; download it first if it is missing."""
    archive = data_folder / f"{FOLDER}.tar.gz"
    remedies = (
        f"Either put the archive into {data_folder} (it is unpacked there):\n  {URL}\n"
        f"Or name the folder that holds {FOLDER}, with its files {', '.join(FILES)}:\n"
        f"  --data-dir, KRNET_DATA, or data_dir= in Python"
    )
    if not download and not archive.is_file():
        raise DataError(f"CIFAR-100 is not in {data_folder / FOLDER}, and downloading is off.\n{remedies}")

    def refuse(*_: object) -> None:  # pooch calls it as the downloader if the archive's MD5 is wrong
        raise DataError(f"{archive}: its MD5 is not {MD5}, and downloading is off. Remove it.\n{remedies}")

    pooch = require("pooch", "learn")

    pooch.get_logger().setLevel("WARNING")  # `say` reports the download instead
    if not archive.is_file():
        say(f"downloading CIFAR-100 (169 MB) from {URL} to {data_folder}")
    try:
        pooch.retrieve(URL, f"md5:{MD5}", archive.name, data_folder, downloader=None if download else refuse)
        unpack(archive, data_folder / FOLDER)
    except DataError:
        raise
    except Exception as error:  # network, disk and tar errors have no common type
        reason = textwrap.fill(
            f"{type(error).__name__}: {error}", 100, max_lines=3, initial_indent="  ", subsequent_indent="  "
        )
        raise DataError(f"CIFAR-100 cannot be downloaded or unpacked: {archive}\n{reason}\n{remedies}") from error


def unpack(archive: Path, target: Path) -> None:
    """Extract the three files to `target`. Paths and links of the archive are never followed."""
    missing = {f"{FOLDER}/{name}": target / name for name in FILES}
    target.mkdir(exist_ok=True)
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() and member.name in missing else None
            if content is not None:
                with atomic_write(missing.pop(member.name)) as file:
                    shutil.copyfileobj(content, file, 1 << 20)
    if missing:
        raise DataError(f"{archive}: no file {next(iter(missing))} in it. Remove the archive; it will be fetched again")


# ------------------------------------------------------------------ pickles


class PickledArray:
    """Stand-in for a pickled numpy array."""

    fields: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.fields = state[1:]  # state: version, shape, dtype, whether in Fortran order, bytes

    def read(self) -> np.ndarray | None:
        """The array, read-only; None if it is not uint8 or its bytes do not fit its shape."""
        try:
            shape, dtype, fortran, content = self.fields
            if dtype.name not in ("u1", b"u1"):
                return None
            return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")
        except (AttributeError, TypeError, ValueError):
            return None


class PickledType:
    """Stand-in for a pickled numpy dtype."""

    def __init__(self, name: Any):
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Ignored: byte order and alignment do not matter for uint8."""


def _make_type(name: Any, *_: Any) -> PickledType:
    return PickledType(name)


def _reconstruct(*_: Any) -> PickledArray:
    return PickledArray()


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> PickledArray:
    array = PickledArray()
    array.fields = (shape, dtype, order == "F", content)
    return array


_ALLOWED_NAMES: dict[str, Any] = {
    "numpy.ndarray": "ndarray",
    "numpy.dtype": _make_type,
    # Pickle protocols up to 4 use _reconstruct, later ones _frombuffer; numpy 1 has numpy.core, numpy 2 numpy._core.
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy._core.numeric._frombuffer": _from_buffer,
}


class _ArrayUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.num_encodable = len(content)

    def encode(self, text: Any, encoding: Any) -> bytes:
        """Python 3 writes bytes for Python 2 as a text and this call; one text may be encoded often."""
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}")
        self.num_encodable -= len(text)
        if self.num_encodable < 0:
            raise pickle.UnpicklingError("more bytes than the file has")
        return str.encode(text, "latin1")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return self.encode
        if f"{module}.{name}" not in _ALLOWED_NAMES:
            raise UnsafePickleError(f"asks for {module}.{name}")
        return _ALLOWED_NAMES[f"{module}.{name}"]


def _check_sizes(content: bytes) -> None:
    """Refuse a pickle that asks for more memory than it has bytes: the unpickler allocates before it reads."""
    for code, value, _ in pickletools.genops(content):  # which refuses texts that are longer than what follows
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= (value or 0) <= len(content):
            raise ValueError(f"object number {value} of {len(content)} bytes")


def _read_pickle(path: Path) -> dict[str, Any]:
    """Load a dict of plain values and PickledArrays; anything else in the file raises an error."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes; the largest of the archive has 155 MB")
        content = path.read_bytes()
        _check_sizes(content)
        record = _ArrayUnpickler(content).load()
    except UnsafePickleError as error:
        raise UnsafePickleError(
            f"{path}: {error}; expected nothing but arrays and plain values, so it was not loaded. Delete it. {RESTORE}"
        ) from None
    except Exception as error:  # a damaged pickle can raise any exception
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{path}: cannot be read ({reason:.200}). {RESTORE}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}: holds a {type(record).__name__}; expected a dict. {RESTORE}")
    return {_to_str(key): value for key, value in record.items() if isinstance(key, (bytes, str))}


CIFAR_MEAN, CIFAR_STD = (
    (0.5071, 0.4866, 0.4409),
    (0.2009, 0.1984, 0.2023),
)  # the values of LUCIR; other papers use other values


def load_cifar100(data_folder: Path | None, download: bool, say: Callable[[str], None]) -> DataSet:
    """Read cifar-100-python in the data folder, or in the user's cache folder if none is given."""
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
