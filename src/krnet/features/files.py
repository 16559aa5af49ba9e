"""Sources of features in files, by the ending of the name; a folder without one is a folder of shards.

path, key -> open_path -> FeatureSource
path      -> names_in  -> the arrays that it holds
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from safetensors import SafetensorError, safe_open

from krnet.config import require
from krnet.errors import FeatureError, InputError
from krnet.features.arrays import from_array, from_slices
from krnet.features.dtypes import SAFETENSORS_DTYPES
from krnet.features.feature_source import FeatureSource, check_spec
from krnet.features.keys import pick_array, refuse_key
from krnet.features.shards.source import open_shards, shard_names


def open_path(path: Path, key: str | None) -> FeatureSource:
    opener = _opener(path)
    if opener is None:
        raise FeatureError(
            f"{path}: unknown kind of file {path.suffix!r}; expected one of {', '.join(OPENERS)}, or a folder of "
            f"shards. Save the features as one of these."
        )
    if not path.exists():
        raise FeatureError(f"{path}: no such file; expected a file of features. Check the path.")
    try:
        return opener(path, key)
    except InputError:
        raise
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, SafetensorError) as error:
        raise FeatureError(
            f"{path}: cannot be read as {path.suffix} ({error}); expected a whole file with arrays of plain "
            f"numbers, no pickled objects. Save the features again."
        ) from error


def _opener(path: Path) -> Callable[[Path, str | None], FeatureSource] | None:
    kind = path.suffix.lower()
    return open_shards if path.is_dir() and kind != ".zarr" else OPENERS.get(kind)


def names_in(path: Path) -> list[str]:
    """Names of the arrays in a file or folder; none if it is a single array."""
    list_names = _NAMES.get(path.suffix.lower()) or (shard_names if path.is_dir() else None)
    return [] if list_names is None else list_names(path)


def _open_npy(path: Path, key: str | None) -> FeatureSource:
    refuse_key(key, path)
    return from_array(open_memmap(path, mode="r"), str(path))


def _npz_names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def _open_npz(path: Path, key: str | None) -> FeatureSource:
    """Unpack the array to a temporary file, since a compressed one cannot be mapped. The file is deleted at once; its
    memory map stays readable."""
    name = pick_array(_npz_names(path), key, path)
    with zipfile.ZipFile(path) as archive, tempfile.NamedTemporaryFile(suffix=".npy") as unpacked:
        with archive.open(f"{name}.npy") as member:
            shutil.copyfileobj(member, unpacked, 1 << 20)
        unpacked.flush()
        return from_array(open_memmap(unpacked.name, mode="r"), str(path))


def _safetensors_names(path: Path) -> list[str]:
    with safe_open(path, framework="numpy") as checked:
        return list(checked.keys())


def _open_safetensors(path: Path, key: str | None) -> FeatureSource:
    """safe_open checks the file. We map the rows ourselves: the map of safe_open never releases its pages."""
    name = pick_array(_safetensors_names(path), key, path)
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(header_bytes))[name]
    shape, dtype = tuple(entry["shape"]), SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"])
    check_spec(str(path), shape, dtype)
    stored = np.dtype("int16" if dtype == "bfloat16" else dtype).newbyteorder("<")
    offset = 8 + header_bytes + entry["data_offsets"][0]
    return from_array(np.memmap(path, stored, "r", offset, shape), str(path), dtype)


def _h5_names(path: Path) -> list[str]:
    h5py = require("h5py", "stores")
    names: list[str] = []
    with h5py.File(path, "r") as file:
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return names


def _open_h5(path: Path, key: str | None) -> FeatureSource:
    name = pick_array(_h5_names(path), key, path)
    file = require("h5py", "stores").File(path, "r")  # stays open as long as its dataset is in use
    return from_slices(file[name], str(path))


def _zarr_names(path: Path) -> list[str]:
    """None of them if the file is a single array."""
    zarr = require("zarr", "stores")
    opened = zarr.open(path, mode="r")
    members = () if isinstance(opened, zarr.Array) else opened.members(max_depth=None)
    return [name for name, item in members if isinstance(item, zarr.Array)]


def _open_zarr(path: Path, key: str | None) -> FeatureSource:
    zarr = require("zarr", "stores")
    opened = zarr.open(path, mode="r")
    if isinstance(opened, zarr.Array):
        refuse_key(key, path)
        return from_slices(opened, str(path))
    return from_slices(opened[pick_array(_zarr_names(path), key, path)], str(path))


OPENERS: dict[str, Callable[[Path, str | None], FeatureSource]] = {
    ".npy": _open_npy,
    ".npz": _open_npz,
    ".safetensors": _open_safetensors,
    ".h5": _open_h5,
    ".hdf5": _open_h5,
    ".zarr": _open_zarr,
}


# Names of the arrays in a file that may hold several.
_NAMES: dict[str, Callable[[Path], list[str]]] = {
    ".npz": _npz_names,
    ".safetensors": _safetensors_names,
    ".h5": _h5_names,
    ".hdf5": _h5_names,
    ".zarr": _zarr_names,
}
