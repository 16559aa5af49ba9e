"""Sources of features that are objects: tensors, arrays, memory maps, datasets of h5py and zarr, lists of samples.

tensor, array     -> from_tensor, from_array -> its memory; a map's rows are read from its file
shape, dtype, [:] -> from_slices             -> one slice for neighbouring samples
len(), [i]        -> from_items              -> one sample at a time
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from krnet.device import dtype_name, share_memory
from krnet.errors import FeatureError
from krnet.features.dtypes import DTYPES
from krnet.features.feature_source import FeatureSource
from krnet.features.file_rows import FileRows, OpenFile, OpenFolder
from krnet.io.overlap import files_of

BLOCK_BYTES = 64 << 20  # read at most this much at a time, since a memory map keeps it resident until it is dropped
FAULT_AROUND_BYTES = 64 << 10  # Linux maps up to this much around every page that is touched


def from_tensor(tensor: torch.Tensor, name: str) -> FeatureSource:
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


def from_array(array: np.ndarray, name: str, dtype: str | None = None) -> FeatureSource:
    """An array or memory map; `dtype` names the type of its values if numpy has no such type (bfloat16)."""
    if isinstance(array, np.ma.MaskedArray):
        raise FeatureError(f"{name}: a masked array; expected plain values. Call .filled(value) first.")
    dtype = dtype or array.dtype.name
    mapped = _memory_map(array)
    shareable = array.dtype.isnative and all(s >= 0 and s % array.itemsize == 0 for s in array.strides)
    if mapped is None and shareable and dtype in DTYPES and dtype != "bfloat16":
        return from_tensor(share_memory(np.asarray(array)), name)

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


def from_slices(array: Any, name: str) -> FeatureSource:
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


def from_items(items: Any, name: str) -> FeatureSource:
    """A torch Dataset, a list, or any object with a length that returns one sample per index."""

    def open_sample(index: int) -> FeatureSource:
        item = items[index]
        item = item[0] if isinstance(item, tuple) and item else item
        if not isinstance(item, (torch.Tensor, np.ndarray, np.generic)):
            raise FeatureError(
                f"{name}: sample {index} is of type {type(item).__name__}; expected a tensor or an array, "
                f"or a tuple that starts with one. Convert it in __getitem__."
            )
        if isinstance(item, torch.Tensor):
            return from_tensor(item[None], type(item).__name__)
        return from_array(np.asarray(item)[None], "ndarray")

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
