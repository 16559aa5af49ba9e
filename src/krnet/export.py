"""Write replays to a .npy file, in chunks, so that the file may be larger than the memory.

Selection (config.py) -> choose_ids -> ids (B,) -> write_replays -> X.npy
"""

from __future__ import annotations

import math
import zipfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from krnet.config import Selection
from krnet.errors import InputError, UnknownSampleError
from krnet.features.sequences import Sequences
from krnet.io.atomic import AnyPath, atomic_write
from krnet.io.overlap import refuse_overlap
from krnet.io.writable import check_room, check_writable
from krnet.progress import Watch, counting
from krnet.recording import Recording

CHUNK_BYTES = 64 << 20  # replays written at once


def choose_ids(held: Recording | Sequences, selection: Selection) -> Tensor:
    """Return the selected IDs (B,) of samples, or of sequences, in order. A slice may reach beyond the last one."""
    num_samples = len(held)
    if isinstance(selection, Path):
        parts = [_read_ids(selection, num_samples)]
    else:
        # A single ID is a range of one until it is checked: it may be too large for an array of integers.
        ranges = [range(num_samples)[part] if isinstance(part, slice) else range(part, part + 1) for part in selection]
        for number in (r[0] for r in ranges if len(r) == 1):
            _check_range(held, number, number)
        parts = [np.arange(r.start, r.stop, r.step) for r in ranges]
    ids = np.concatenate(parts)
    if not len(ids):
        raise UnknownSampleError(f"{held.path}: no {_noun(held)} selected; this file holds 0..{num_samples - 1}")
    _check_range(held, int(ids.min()), int(ids.max()))
    ids = ids.astype(np.int64)
    return torch.from_numpy(np.where(ids < 0, ids + num_samples, ids))


def _noun(held: Recording | Sequences) -> str:
    return "sequence" if isinstance(held, Sequences) else "sample"


def _check_range(held: Recording | Sequences, low: int, high: int) -> None:
    num_samples = len(held)
    if low < -num_samples or high >= num_samples:
        bad = high if high >= num_samples else low
        raise UnknownSampleError(f"{held.path}: no {_noun(held)} ID {bad}; this file holds 0..{num_samples - 1}")


def _read_ids(path: Path, num_samples: int) -> np.ndarray:
    """Read a flat array of IDs, or a mask with one boolean per sample."""
    expected = f"expected a .npy file with a flat array of integers, or a mask of {num_samples} booleans"
    try:
        found = np.load(path, allow_pickle=False)
    except (EOFError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: sample IDs cannot be read ({error}); {expected}") from error
    if not isinstance(found, np.ndarray):
        raise InputError(f"{path}: holds several arrays; {expected}")
    if found.dtype == bool and found.shape == (num_samples,):
        return np.flatnonzero(found)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InputError(f"{path}: holds {found.dtype} of shape {found.shape}; {expected}")
    return found


def write_replays(
    recording: Recording,
    ids: Tensor,
    path: AnyPath,
    *,
    labels_path: AnyPath | None = None,
    lengths: Tensor | None = None,
    lengths_path: AnyPath | None = None,
    watch: Watch | None = None,
) -> int:
    """Write the replays, float32 (B, *shape), and their labels, int64 (B,); return the bytes of the replays' file.

    lengths  those of the sequences that are written, (S,) int64, for a file of their own

    Each file appears complete or not at all. `watch` is told after each chunk.
    """
    labels = recording.labels
    if labels_path is not None and labels is None:
        raise InputError(f"{recording.path}: was recorded without labels; leave out the file for labels")
    refuse_overlap("replay", [path, labels_path, lengths_path], [recording])
    for output in [name for name in (path, labels_path, lengths_path) if name is not None]:
        if Path(output).parent.is_dir() and not Path(output).is_dir():  # else atomic_write says what is wrong
            check_writable(output)
    if Path(path).parent.is_dir():
        check_room(path, 4 * len(ids) * math.prod(recording.shape))
    step = max(1, CHUNK_BYTES // (4 * max(1, math.prod(recording.shape))))
    with ExitStack() as files:
        file = files.enter_context(atomic_write(path))
        if labels_path is not None and labels is not None:
            np.save(files.enter_context(atomic_write(labels_path)), labels[ids].numpy())
        if lengths_path is not None and lengths is not None:
            np.save(files.enter_context(atomic_write(lengths_path)), lengths.numpy())
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(ids), *recording.shape)}
        np.lib.format.write_array_header_1_0(file, header)
        tell = counting(watch, "replay", len(ids))
        for start in range(0, len(ids), step):
            file.write(recording.replay(ids[start : start + step]).cpu().numpy().data)
            tell(min(start + step, len(ids)))
        return file.tell()
