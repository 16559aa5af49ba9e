"""Feature maps in the caller's storage, read by sample ID.

    FeatureSource.read(ids (B,)) -> (B, *shape), stored dtype, CPU

Features are never changed, and only the samples asked for are read: memory stays bounded however large the file is.
source.py makes a FeatureSource of whatever a caller gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from krnet.device import dtype_name
from krnet.errors import FeatureError
from krnet.features.dtypes import DTYPES
from krnet.features.file_rows import OpenFile, OpenFolder

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
        check_spec(name, full_shape, dtype)
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

    def check_shape(self, shape: tuple[int, ...], holder: object) -> None:
        """Refuse samples of another shape than those that `holder` has."""
        if self.shape != shape:
            raise FeatureError(
                f"{self.name}: samples of {self.shape}; {holder} holds samples of {shape}. Give such ones"
            )

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


def check_spec(name: str, full_shape: Sequence[int], dtype: str) -> None:
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
