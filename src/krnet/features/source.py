"""Feature maps in the caller's storage, read by sample ID.

    tensor, array, memmap, .npy .npz .safetensors .h5 .zarr, folder of shards, Dataset, list
        -> open_features -> FeatureSource: read(ids (B,)) -> (B, *shape), stored dtype, CPU

Features are never changed, and only the samples asked for are read: memory stays bounded however large the file is.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from safetensors import SafetensorError, safe_open

from krnet.config import require
from krnet.device import dtype_name, share_memory
from krnet.errors import FeatureError, InputError, LabelError
from krnet.features.dtypes import DTYPES, SAFETENSORS_DTYPES
from krnet.features.file_rows import FileRows, OpenFile, OpenFolder
from krnet.io.overlap import files_of
from krnet.io.places import Place, Url, place

NPY_START = b"\x93NUMPY"  # the first bytes of every .npy file
BLOCK_BYTES = 64 << 20  # read at most this much at a time, since a memory map keeps it resident until it is dropped
FAULT_AROUND_BYTES = 64 << 10  # Linux maps up to this much around every page that is touched

Fill = Callable[[torch.Tensor, torch.Tensor], None]  # fill(out, ids) writes sample ids[i] to out[i]


class FeatureSource:
    """N samples of one shape and dtype. Kinds of storage differ only in `fill`, which reads the rows."""

    def __init__(
        self,
        name: str,
        full_shape: Sequence[int],
        dtype: str,
        fill: Fill,
        resident: torch.Tensor | None = None,
        file: OpenFile | OpenFolder | None = None,
        is_fixed: bool = True,
    ):
        _check_spec(name, full_shape, dtype)
        self.name = name
        self.num_samples = int(full_shape[0])
        self.shape = tuple(int(size) for size in full_shape[1:])
        """Shape of one sample."""
        self.dtype = DTYPES[dtype]
        self.resident = resident
        """All samples (N, *shape) if they are in memory, else None. This is the caller's tensor: never write to it."""
        self.file = file
        """The file that is read; None if there is none, or none that is known."""
        self.is_fixed = is_fixed
        """Reading a sample again gives the same values; a Dataset may draw them at random."""
        self._fill = fill

    @property
    def files(self) -> list[Path]:
        return [] if self.file is None else [self.file.path]

    def __len__(self) -> int:
        return self.num_samples

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of the values in their stored dtype, before any compression of the file."""
        return len(self) * self.sample_bytes

    def read(self, ids: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
        """Samples `ids` (B,), in any order and with repeats, as a new CPU tensor (B, *shape).

        `pinned` memory can be copied to a GPU while other work goes on.
        """
        assert ids.dim() == 1 and ids.dtype == torch.int64 and ids.is_cpu, f"IDs {ids.dtype} {ids.shape}"
        out = torch.empty((len(ids), *self.shape), dtype=self.dtype, pin_memory=pinned)
        if len(ids):
            first, last = (int(edge) for edge in ids.aminmax())
            if first < 0 or last >= len(self):
                raise FeatureError(
                    f"{self.name}: no sample ID {first if first < 0 else last}; "
                    f"this source holds 0..{len(self) - 1}. Were the IDs made for other features?"
                )
            self._fill(out, ids)
        return out

    def part(self, first: int, end: int | None = None) -> FeatureSource:
        """source[first:end]: the samples from ID `first` to before `end`, renumbered from 0."""
        end = len(self) if end is None else end
        return FeatureSource(
            self.name,
            (end - first, *self.shape),
            dtype_name(self.dtype),
            lambda out, ids: self._fill(out, ids + first),
            None if self.resident is None else self.resident[first:end],
            self.file,
            self.is_fixed,
        )


class ExtendedSource(FeatureSource):
    """Replays of a recording, which stand in for features that are no longer at hand, and new features after them."""

    def __init__(self, held: FeatureSource, new: FeatureSource):
        def fill(out: torch.Tensor, ids: torch.Tensor) -> None:
            for rows, source, first in (ids < len(held), held, 0), (ids >= len(held), new, len(held)):
                out[rows] = source.read(ids[rows] - first).to(out.dtype)

        full_shape = (len(held) + len(new), *new.shape)
        super().__init__(new.name, full_shape, "float32", fill, file=new.file, is_fixed=new.is_fixed)
        self.held, self.new = held, new

    def part(self, first: int, end: int | None = None) -> FeatureSource:
        # The new features themselves: in their own dtype, and without a copy where they are in memory.
        whole_new = first == len(self.held) and end in (None, len(self))
        return self.new if whole_new else super().part(first, end)


def _check_spec(name: str, full_shape: Sequence[int], dtype: str) -> None:
    if dtype not in DTYPES:
        raise FeatureError(
            f"{name}: values are of type {dtype}; expected one of {', '.join(DTYPES)}. "
            f"Convert them first, e.g. with .astype(numpy.float32)."
        )
    if len(full_shape) == 0 or 0 in full_shape:
        raise FeatureError(
            f"{name}: shape {tuple(full_shape)} holds no samples; expected (N, *sample shape) "
            f"with every size at least 1. Is this the right array?"
        )


def open_features(features: Any, *, key: str | None = None) -> FeatureSource:
    """Open features of any supported kind. `key` names the array in a file or mapping that holds several."""
    if isinstance(features, (str, os.PathLike, Url)):
        return _open_place(place(features), key)
    name = features.name if isinstance(features, FeatureSource) else type(features).__name__
    if hasattr(features, "keys"):
        return open_features(features[pick_array(features.keys(), key, name)])
    _refuse_key(key, name)
    if isinstance(features, FeatureSource):
        return features
    if isinstance(features, torch.Tensor):
        return _from_tensor(features, name)
    if isinstance(features, np.ndarray):
        return _from_array(features, name)
    if all(hasattr(features, attribute) for attribute in ("shape", "dtype", "__getitem__")):
        return _from_slices(features, name)
    if hasattr(features, "__len__") and hasattr(features, "__getitem__"):
        return _from_items(features, name)
    raise FeatureError(
        f"Features of type {name} cannot be read; expected a tensor, an array, a path ending in "
        f"{', '.join(_OPENERS)}, or something with __len__ and __getitem__. Stack the samples first."
    )


# ------------------------------------------------------------------ kinds of storage


def _from_tensor(tensor: torch.Tensor, name: str) -> FeatureSource:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        raise FeatureError(
            f"{name}: a sparse, nested or meta tensor ({tensor.layout}, {tensor.device}); "
            f"expected a dense one. Call .to_dense() first."
        )
    resident = tensor.detach()

    def fill(out: torch.Tensor, ids: torch.Tensor) -> None:
        if resident.is_cpu:
            torch.index_select(resident, 0, ids, out=out)
        else:
            out.copy_(resident.index_select(0, ids.to(resident.device)))

    return FeatureSource(name, tensor.shape, dtype_name(tensor.dtype), fill, resident)


def _from_array(array: np.ndarray, name: str, dtype: str | None = None) -> FeatureSource:
    """An array or memory map; `dtype` names the type of its values if numpy has no such type (bfloat16)."""
    if isinstance(array, np.ma.MaskedArray):
        raise FeatureError(f"{name}: a masked array; expected plain values. Call .filled(value) first.")
    dtype = dtype or array.dtype.name
    mapped = _memory_map(array)
    shareable = array.dtype.isnative and all(s >= 0 and s % array.itemsize == 0 for s in array.strides)
    if mapped is None and shareable and dtype in DTYPES and dtype != "bfloat16":
        return _from_tensor(share_memory(np.asarray(array)), name)

    rows = None if mapped is None else _file_rows(array, mapped)
    if rows is not None:
        found = rows
        return FeatureSource(
            name, array.shape, dtype, lambda out, ids: found.fill(_numpy_view(out), ids.numpy()), file=found.file
        )
    return _from_strides(array, mapped, name, dtype)


def _from_strides(array: np.ndarray, mapped: np.memmap | None, name: str, dtype: str) -> FeatureSource:
    """An array whose values torch cannot share: of another byte order, or a map with other strides than a file has."""
    values = np.asarray(array) if dtype != "bfloat16" else np.asarray(array).view(np.int16)
    rows_per_step = max(1, BLOCK_BYTES // max(FAULT_AROUND_BYTES, math.prod(array.shape[1:]) * array.itemsize))
    file = None if mapped is None else _file_of(mapped)

    def fill(out: torch.Tensor, ids: torch.Tensor) -> None:
        target, sample_ids = _numpy_view(out), ids.numpy()
        for start in range(0, len(sample_ids), rows_per_step):
            if file is not None:  # to touch a page behind the end of the file would end the process
                file.check_size()
            rows = sample_ids[start : start + rows_per_step]
            is_run = bool((np.diff(rows) == 1).all())
            # A slice is copied straight from the file to the target; indexing by an array makes a copy in between.
            target[start : start + len(rows)] = values[rows[0] : rows[-1] + 1] if is_run else values[rows]
            _drop_pages(mapped)

    return FeatureSource(name, array.shape, dtype, fill, file=file)


def _file_rows(array: np.ndarray, mapped: np.memmap) -> FileRows | None:
    """The rows of a map in its file, to be read without the map; None if that would give other values."""
    file = _file_of(mapped)
    # A copy-on-write map ("c") may hold the caller's changes, which the file lacks.
    if file is None or mapped.mode == "c" or not array.flags.c_contiguous or not array.size:
        return None
    buffer = np.frombuffer(getattr(mapped, "_mmap"), np.uint8)  # noqa: B009  numpy's types do not have it
    own, whole = (np.asarray(part).__array_interface__["data"][0] for part in (array, buffer))
    map_begin = mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY
    rows = FileRows(file, map_begin + own - whole, array.shape, array.dtype)
    if rows.end > file.before.size:
        return None
    # Another file may have taken the place of the one that is mapped: compare a few rows.
    plain = np.asarray(array).view(f"V{array.itemsize}")
    for index in {0, len(array) // 2, len(array) - 1}:
        row = np.empty((1, *array.shape[1:]), f"V{array.itemsize}")
        rows.reader.fill(row.reshape(1, -1).view(np.uint8), np.array([index]))
        if row.tobytes() != plain[index].tobytes():
            return None
    return rows


def _file_of(mapped: np.memmap) -> OpenFile | None:
    try:
        return None if mapped.filename is None else OpenFile(Path(mapped.filename))
    except (OSError, TypeError):  # it was removed: only the map still has it
        return None


def _memory_map(array: Any) -> np.memmap | None:
    """The memory map that `array` is, or is a view of."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and getattr(array, "_mmap", None) is not None:
            return array
        array = array.base
    return None


def _drop_pages(mapped: Any) -> None:
    """Release the pages that were read through a memory map, else the whole file ends up in our memory."""
    # A copy-on-write map ("c") may hold the caller's changes: dropping its pages would lose them.
    if mapped is not None and mapped.mode != "c" and hasattr(mmap, "MADV_DONTNEED"):
        mapped._mmap.madvise(mmap.MADV_DONTNEED)


def _from_slices(array: Any, name: str) -> FeatureSource:
    """An h5py Dataset, a zarr Array, or any object that has a shape and a dtype and can be sliced."""

    def fill(out: torch.Tensor, ids: torch.Tensor) -> None:
        target, sample_ids = _numpy_view(out), ids.numpy()
        order = np.argsort(sample_ids, kind="stable")
        sorted_ids = sample_ids[order]
        # One slice reads neighbours, and all rows of the same stored chunk, since that is decoded as a whole anyway.
        # No slice crosses a multiple of `max_rows`: this bounds the memory if a single chunk spans all samples.
        max_rows = max(1, BLOCK_BYTES // (target.nbytes // len(target)))
        chunk_rows = (getattr(array, "chunks", None) or (1,))[0]
        same_slice = (np.diff(sorted_ids) <= 1) | (np.diff(sorted_ids // chunk_rows) == 0)
        same_slice &= np.diff(sorted_ids // max_rows) == 0
        for rows in np.split(order, np.flatnonzero(~same_slice) + 1):
            start, stop = int(sample_ids[rows[0]]), int(sample_ids[rows[-1]]) + 1
            target[rows] = np.asarray(array[start:stop])[sample_ids[rows] - start]

    dtype = getattr(array.dtype, "name", str(array.dtype))
    return FeatureSource(name, array.shape, dtype, fill, file=_stored_in(array))


def _stored_in(array: Any) -> OpenFile | OpenFolder | None:
    """The file of an HDF5 dataset, or the folder of a zarr array, if it has one."""
    try:
        for path in map(Path, files_of(array)):
            return OpenFolder(path) if path.is_dir() else OpenFile(path)
    except OSError:
        pass
    return None


def _from_items(items: Any, name: str) -> FeatureSource:
    """A torch Dataset, a list, or any object with a length that returns one sample per index."""

    def open_sample(index: int) -> FeatureSource:
        item = items[index]
        item = item[0] if isinstance(item, tuple) and item else item
        if not isinstance(item, (torch.Tensor, np.ndarray, np.generic)):
            raise FeatureError(
                f"{name}: sample {index} is of type {type(item).__name__}; expected a tensor or an array, "
                f"or a tuple that starts with one. Convert it in __getitem__."
            )
        item = item[None] if isinstance(item, torch.Tensor) else np.asarray(item)[None]
        return open_features(item)

    def fill(out: torch.Tensor, ids: torch.Tensor) -> None:
        for row, index in zip(out, ids.tolist(), strict=True):
            found = open_sample(index)
            if found.shape != row.shape or found.dtype != row.dtype:
                raise FeatureError(
                    f"{name}: sample {index} has shape {found.shape} and type {found.dtype}; expected "
                    f"{tuple(row.shape)} and {row.dtype} like sample 0. All samples must be alike. For sequences of "
                    f"different length, join them to one array and give their lengths (--lengths; in Python, lengths=)."
                )
            row.copy_(found.read(torch.tensor([0]))[0])

    if len(items) == 0:
        raise FeatureError(f"{name}: holds no samples; expected at least 1. Is this the right data set?")
    first = open_sample(0)
    return FeatureSource(name, (len(items), *first.shape), dtype_name(first.dtype), fill, is_fixed=False)


def _numpy_view(out: torch.Tensor) -> np.ndarray:
    """`out` as a numpy array that shares its memory; numpy has no bfloat16, whose bits are viewed as int16."""
    return (out.view(torch.int16) if out.dtype == torch.bfloat16 else out).numpy()


# ------------------------------------------------------------------ files


def _open_place(where: Place, key: str | None) -> FeatureSource:
    if isinstance(where, Url):
        from krnet.features.remote_arrays import open_remote  # it makes sources of its own

        return open_remote(where, key)
    return _open_path(where, key)


def _open_path(path: Path, key: str | None) -> FeatureSource:
    opener = _opener(path)
    if opener is None:
        raise FeatureError(
            f"{path}: unknown kind of file {path.suffix!r}; expected one of {', '.join(_OPENERS)}, or a folder of "
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
    return _open_folder if path.is_dir() and kind != ".zarr" else _OPENERS.get(kind)


def _open_folder(path: Path, key: str | None) -> FeatureSource:
    from krnet.features.shards.source import open_shards  # it makes sources of its own

    return open_shards(path, key)


def _open_npy(path: Path, key: str | None) -> FeatureSource:
    _refuse_key(key, path)
    return _from_array(open_memmap(path, mode="r"), str(path))


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
        return _from_array(open_memmap(unpacked.name, mode="r"), str(path))


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
    _check_spec(str(path), shape, dtype)
    stored = np.dtype("int16" if dtype == "bfloat16" else dtype).newbyteorder("<")
    offset = 8 + header_bytes + entry["data_offsets"][0]
    return _from_array(np.memmap(path, stored, "r", offset, shape), str(path), dtype)


def _h5_names(path: Path) -> list[str]:
    h5py = require("h5py", "stores")
    names: list[str] = []
    with h5py.File(path, "r") as file:
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return names


def _open_h5(path: Path, key: str | None) -> FeatureSource:
    name = pick_array(_h5_names(path), key, path)
    file = require("h5py", "stores").File(path, "r")  # stays open as long as its dataset is in use
    return _from_slices(file[name], str(path))


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
        _refuse_key(key, path)
        return _from_slices(opened, str(path))
    return _from_slices(opened[pick_array(_zarr_names(path), key, path)], str(path))


_OPENERS: dict[str, Callable[[Path, str | None], FeatureSource]] = {
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


def _names(path: Place) -> list[str]:
    if isinstance(path, Url):
        from krnet.features.remote_arrays import remote_names  # it makes sources of its own

        return remote_names(path)
    list_names = _NAMES.get(path.suffix.lower())
    if list_names is None and path.is_dir():
        from krnet.features.shards.source import shard_names  # it makes sources of its own

        list_names = shard_names
    return [] if list_names is None else list_names(path)


def pick_array(names: Iterable[str], key: str | None, where: object) -> str:
    """Name of the array to read: `key` if given, else the only one, else "features"."""
    names = sorted(names)  # zarr lists them in no fixed order; messages should not change
    if key is None and len(names) == 1:
        return names[0]
    chosen = "features" if key is None else key
    if chosen not in names:
        raise FeatureError(
            f"{where}: no array called {chosen!r}; it holds {', '.join(map(repr, names)) or 'none at all'}. "
            f"Name one of them with --key (in Python, key=)."
        )
    return chosen


def _refuse_key(key: str | None, where: object) -> None:
    if key is not None:
        raise FeatureError(
            f"{where}: the key {key!r} was given for a single array; expected none. Leave out --key (in Python, key=)."
        )


def check_labels(labels: Any, num_samples: int) -> torch.Tensor | None:
    """Labels of any kind (list, array, tensor, path to .npy) as a new int64 tensor (N,); None stays None."""
    if labels is None:
        return None
    expected = f"expected {num_samples} integers, one per sample"
    try:
        if isinstance(labels, (str, os.PathLike)):
            labels = _load_labels(Path(labels), expected)
        # tolist(), since numpy refuses some tensors (bfloat16, CUDA, requires_grad).
        found = np.asarray(labels.tolist() if isinstance(labels, torch.Tensor) else labels)
    except LabelError:
        raise
    except (OSError, EOFError, ValueError) as error:
        raise LabelError(f"Labels cannot be read ({error}); {expected}, in a .npy file or a flat list.") from error
    if found.shape != (num_samples,):
        raise LabelError(f"Labels have shape {found.shape}; {expected}. Do they belong to these features?")
    if found.dtype.kind not in "iu":
        raise LabelError(f"Labels are of type {found.dtype}; {expected}. Convert them with .astype(int).")
    if found.max() > np.iinfo(np.int64).max:
        raise LabelError(f"Label {found.max()} is beyond int64; {expected}. Renumber the classes.")
    return torch.from_numpy(found.astype(np.int64))


def _load_labels(path: Path, expected: str) -> np.ndarray:
    """Read a .npy file, whatever its name is."""
    with path.open("rb") as file:
        if file.read(len(NPY_START)) != NPY_START:
            raise LabelError(
                f"{path}: is no .npy file; {expected}, as numpy.save writes them. Labels that lie in the file of the "
                f"features, as an array 'labels' beside 'features', are found there: leave out --labels (in Python, "
                f"labels=)."
            )
    return np.asarray(np.load(path, allow_pickle=False))


def array_names(features: Any) -> set[str]:
    """Names of the arrays in a file or mapping that may hold several."""
    if isinstance(features, (str, os.PathLike, Url)):
        return set(_names(place(features)))
    return set(features.keys()) if hasattr(features, "keys") else set()


def has_labels(features: Any) -> bool:
    """Whether a file or mapping holds the arrays `features` and `labels`."""
    return {"features", "labels"} <= array_names(features)


def stored_labels(features: Any, key: str | None, num_samples: int) -> torch.Tensor | None:
    """The array `labels` that lies beside `features` in the same file or mapping, as `krnet.extract` writes it.

    None if there is none; and with a key, which asks for one array alone.
    """
    if key is not None or not has_labels(features):
        return None
    try:
        found = open_features(features, key="labels")
        return check_labels(found.read(torch.arange(len(found))), num_samples)
    except InputError as error:
        raise LabelError(
            f"The array 'labels' beside the features cannot be their labels: {error} Give --labels, or --key features "
            f"to leave them out (in Python, labels= or key='features')."
        ) from error
