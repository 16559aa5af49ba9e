"""The range of each channel, shared by all recorders whose files hold it: tensors `low` and `high`, (channels,) each.

shape -> stored_range -> how they are declared
file  -> read_range   -> low, high; features are normalised by them, and replays brought back to their scale
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from krnet.errors import NotARecordingError
from krnet.io.archive import TensorStore
from krnet.io.header import RESTORE
from krnet.recorders.base import Stored

NAMES = ("low", "high")


def stored_range(shape: Sequence[int]) -> dict[str, Stored]:
    """Declare both tensors, for samples of this shape."""
    return {name: Stored(tuple(shape[:1]) or (1,), torch.float32) for name in NAMES}


def read_range(store: TensorStore, shape: Sequence[int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Low and high, each (channels,), for samples of this shape."""
    edges = (store.tensor(name, shape=tuple(shape[:1]) or (1,), dtype=torch.float32) for name in NAMES)
    low, high = (edge.to(device=device) for edge in edges)
    return low, high


def refuse_not_finite(decoded: Tensor) -> Tensor:
    """The decoded values; features that are recorded are finite, so others come from a damaged file."""
    if not decoded.isfinite().all():
        raise NotARecordingError(f"values that are not finite, as no recorded ones are. {RESTORE}")
    return decoded
