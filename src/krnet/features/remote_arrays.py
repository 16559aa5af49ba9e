"""Features behind a URL, read by ranges: a .npy or .safetensors file, or a folder of shards.

    URL, key -> open_remote -> FeatureSource

Nothing is kept on this machine. Each batch is fetched anew; what is fitted for long should be copied to a disk first.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from krnet.errors import FeatureError, RecordingError
from krnet.features.dtypes import DTYPES, SAFETENSORS_DTYPES
from krnet.features.feature_source import FeatureSource
from krnet.features.keys import pick_array, refuse_key
from krnet.features.shards.source import open_shards, shard_names
from krnet.io.header import is_count, parse_json
from krnet.io.places import Url
from krnet.io.remote import RemoteFile
from krnet.io.remote_rows import RemoteTable

FETCH_BYTES = 64 << 10  # of rows that are smaller, some are fetched at once
MAX_NPY_HEADER_BYTES = 64 << 10
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # as the safetensors package has it
SAVE_AGAIN = "Save the features again"


def open_remote(url: Url, key: str | None) -> FeatureSource:
    opener = _OPENERS.get(url.suffix.lower(), _open_folder)
    return opener(url, key)


def remote_names(url: Url) -> list[str]:
    """The arrays that lie there; none if it is a single one."""
    if url.suffix.lower() == ".npy":
        return []
    if url.suffix.lower() == ".safetensors":
        return list(_safetensors_header(url, RemoteFile(url))[0])
    return shard_names(url)


def _open_folder(url: Url, key: str | None) -> FeatureSource:
    if url.suffix.lower() in (".npz", ".h5", ".hdf5", ".zarr"):
        raise FeatureError(
            f"{url}: {url.suffix} is not read by URL; expected .npy, .safetensors or a folder of shards. Download it"
        )
    return open_shards(url, key)


def _open_npy(url: Url, key: str | None) -> FeatureSource:
    refuse_key(key, url)
    file = RemoteFile(url)
    start = io.BytesIO(file.read(0, min(file.size, MAX_NPY_HEADER_BYTES)))
    try:
        version = np.lib.format.read_magic(start)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(start)
    except (ValueError, EOFError) as error:
        raise FeatureError(f"{url}: cannot be read as .npy ({error}). {SAVE_AGAIN}") from error
    if is_fortran and len(shape) > 1:
        raise FeatureError(f"{url}: its values are in the order of Fortran; expected that of C. {SAVE_AGAIN}")
    return _source(url, file, start.tell(), shape, dtype, dtype.name)


def _safetensors_header(url: Url, file: RemoteFile) -> tuple[dict[str, Any], int]:
    """What the header says of each array, and where the data begin."""
    length = int.from_bytes(file.read(0, 8), "little")
    if not 0 < length <= min(MAX_SAFETENSORS_HEADER_BYTES, file.size - 8):
        raise FeatureError(f"{url}: a header of {length} bytes in a file of {file.size}. {SAVE_AGAIN}")
    try:
        header = parse_json(url, "the header", file.read(8, length))
    except RecordingError as error:
        raise FeatureError(f"{url}: its header is no JSON with each key once. {SAVE_AGAIN}") from error
    if not isinstance(header, dict):
        raise FeatureError(f"{url}: its header is a {type(header).__name__}; expected an object. {SAVE_AGAIN}")
    header.pop("__metadata__", None)
    return header, 8 + length


def _open_safetensors(url: Url, key: str | None) -> FeatureSource:
    file = RemoteFile(url)
    header, data_begin = _safetensors_header(url, file)
    name = pick_array(header, key, url)
    match header[name]:
        case {"dtype": str(type_name), "shape": [*shape], "data_offsets": [begin, end]} if (
            all(map(is_count, [*shape, begin, end])) and begin <= end <= file.size - data_begin
        ):
            pass
        case found:
            raise FeatureError(
                f"{url}: array {name!r} is {found!r:.200}; expected a type, shape and place. {SAVE_AGAIN}"
            )
    dtype = SAFETENSORS_DTYPES.get(type_name, type_name)
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise FeatureError(f"{url}: array {name!r} of {dtype} {shape} has {end - begin} bytes. {SAVE_AGAIN}")
    stored = np.dtype({"bfloat16": "int16"}.get(dtype, dtype if dtype in DTYPES else "int8")).newbyteorder("<")
    return _source(url, file, data_begin + begin, tuple(shape), stored, dtype)


def _source(
    url: Url, file: RemoteFile, begin: int, shape: tuple[int, ...], stored: np.dtype, dtype: str
) -> FeatureSource:
    row_bytes = math.prod(shape[1:]) * stored.itemsize
    if shape and begin + shape[0] * row_bytes > file.size:
        raise FeatureError(
            f"{url}: has {file.size} bytes; expected at least {begin + shape[0] * row_bytes} for {shape}. {SAVE_AGAIN}"
        )
    block_bytes = max(1, FETCH_BYTES // max(1, row_bytes)) * max(1, row_bytes)
    table = RemoteTable(file, begin, row_bytes, shape[0] if shape else 0, block_bytes)

    def fill(out: torch.Tensor, ids: torch.Tensor) -> None:
        rows = out.reshape(len(ids), -1).view(torch.uint8).numpy()
        table.fill(rows, ids.numpy())
        if not stored.isnative:
            rows.view(stored.newbyteorder("=")).byteswap(inplace=True)

    return FeatureSource(str(url), shape, dtype, fill)


_OPENERS: dict[str, Callable[[Url, str | None], FeatureSource]] = {
    ".npy": _open_npy,
    ".safetensors": _open_safetensors,
}
