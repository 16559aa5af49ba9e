"""Which samples, or which sequences, an index names.

5, 2:9, [5, 3], -1, a mask -> resolve_ids -> IDs (B,), or the error that names the one that is not there
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.errors import UnknownSampleError


def resolve_ids(which: Any, count: int, path: object, noun: str = "sample") -> Tensor:
    """Turn any index into IDs 0 .. count-1, in its own shape; negative IDs count from the end.

    path, noun  the file, and what it holds `count` of, for messages
    """
    if isinstance(which, slice):
        try:
            chosen = range(count)[which]
        except (TypeError, ValueError) as error:  # a step of 0, or limits that are no whole numbers
            raise UnknownSampleError(f"{path}: {which} is not a range of {noun}s ({error})") from error
        return torch.arange(chosen.start, chosen.stop, chosen.step) if chosen else torch.empty(0, dtype=torch.long)
    try:
        # torch refuses arrays with negative strides; numpy copies them.
        ids = torch.as_tensor(np.ascontiguousarray(which) if isinstance(which, np.ndarray) else which).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnknownSampleError(f"{path}: {which!r:.99} is not an index of {noun}s") from error
    if ids.numel() == 0:
        ids = ids.long()
    if ids.dtype == torch.bool:
        if ids.shape != (count,):
            raise UnknownSampleError(f"{path}: a mask of shape {tuple(ids.shape)}; expected ({count},)")
        return ids.nonzero().squeeze(1)
    if ids.is_floating_point() or ids.is_complex():
        raise UnknownSampleError(f"{path}: {noun} IDs are {ids.dtype}; expected whole numbers")
    if ids.dtype == torch.uint64 and bool((ids.view(torch.int64) < 0).any()):  # as int64 they would be negative
        raise UnknownSampleError(f"{path}: {noun} IDs of 2^63 and more; this file holds 0..{count - 1}")
    ids = ids.long()
    bad = ids[(ids < -count) | (ids >= count)]
    if len(bad.reshape(-1)):
        raise UnknownSampleError(f"{path}: no {noun} ID {int(bad.reshape(-1)[0])}; this file holds 0..{count - 1}")
    return torch.where(ids < 0, ids + count, ids)
