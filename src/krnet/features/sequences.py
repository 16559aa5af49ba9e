"""Sequences of different length: each is a run of samples, and the next one begins where it ends.

    lengths (3, 5, 2) -> samples 0..2, 3..7, 8..9

    a caller's lengths -> check_lengths -> (S,) int64 -> pack_lengths -> the tensor `sequences` of a file
    the tensor of a file               -> unpack_lengths -> (S,) int64, or the error that says what is wrong
    lengths, replay    -> Sequences: sequences[1] -> (5, *shape)

A sample is one token's hidden state, one frame, one point of time; it keeps its own ID.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from krnet.errors import FeatureError, InputError, LengthsError, NotARecordingError
from krnet.features.ids import resolve_ids
from krnet.features.source import array_names, open_features
from krnet.io.header import RESTORE
from krnet.io.places import Url

LENGTHS = "sequences"  # name of the tensor
LENGTH_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


class Sequences:
    """The sequences of a recording, replayed by their number: 0 is the first. `recording.sequences` returns one."""

    def __init__(self, lengths: Tensor, replay: Callable[[Tensor], Tensor], path: object):
        self.lengths = lengths
        """Number of samples of each sequence, (S,) int64."""
        self.path = path
        self._replay = replay
        self._starts = lengths.cumsum(0) - lengths  # (S,) ID of the first sample of each

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, which: int) -> Tensor: ...
    @overload
    def __getitem__(self, which: slice | list[int] | Tensor | np.ndarray) -> list[Tensor]: ...
    def __getitem__(self, which: Any) -> Any:
        """An integer gives one sequence (length, *shape); a slice, list, mask or tensor gives a list of them."""
        chosen = self._resolve(which)
        values = self._replay(self._ids_of(chosen.reshape(-1)))
        return values if chosen.dim() == 0 else list(values.split(self.lengths[chosen.reshape(-1)].tolist()))

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(len(self)):
            yield self[number]

    def ids(self, which: Any) -> Tensor:
        """IDs of the samples of these sequences, one sequence after the other."""
        return self._ids_of(self._resolve(which).reshape(-1))

    def _resolve(self, which: Any) -> Tensor:
        return resolve_ids(which, len(self), self.path, "sequence")

    def _ids_of(self, chosen: Tensor) -> Tensor:
        lengths = self.lengths[chosen]
        places = lengths.cumsum(0) - lengths  # of the first sample of each, in the result
        return torch.arange(int(lengths.sum())) + torch.repeat_interleave(self._starts[chosen] - places, lengths)


def check_lengths(lengths: Any, num_samples: int) -> Tensor | None:
    """Lengths of any kind (list, array, tensor, path to a file) as a new int64 tensor (S,); None stays None."""
    if lengths is None:
        return None
    expected = f"expected whole numbers from 0 up, one per sequence, that add up to the {num_samples} samples"
    try:
        if isinstance(lengths, (str, os.PathLike, Url)):
            source = open_features(lengths)
            lengths = source.read(torch.arange(len(source)))
        found = np.asarray(lengths.tolist() if isinstance(lengths, Tensor) else lengths)
    except (FeatureError, ValueError) as error:
        raise LengthsError(f"Lengths of sequences cannot be read ({error}); {expected}.") from error
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise LengthsError(f"Lengths of sequences are {found.dtype} of shape {found.shape}; {expected}.")
    wrong = _find_wrong(found, num_samples)
    if wrong is not None:
        raise LengthsError(f"Lengths of sequences: {wrong}; {expected}. Do they belong to these features?")
    return torch.from_numpy(found.astype(np.int64))


def stored_lengths(features: Any, key: str | None, num_samples: int) -> Tensor | None:
    """The array `lengths` that lies beside `features` in the same file or mapping; None if there is none.

    None with a key as well, which asks for one array alone.
    """
    if key is not None or not {"features", "lengths"} <= array_names(features):
        return None
    found = open_features(features, key="lengths")
    try:
        return check_lengths(found.read(torch.arange(len(found))), num_samples)
    except LengthsError as error:
        raise LengthsError(
            f"The array 'lengths' beside the features cannot be the lengths of their sequences: {error} Give "
            f"--lengths, or --key features to leave them out (in Python, lengths= or key='features')."
        ) from error


def joined_lengths(held: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Lengths of the sequences of both."""
    return None if held is None or new is None else torch.cat([held, new])


def pack_lengths(lengths: Tensor | None) -> dict[str, Tensor]:
    """Lengths in the smallest type that holds them, as a tensor to store; nothing if there are no sequences."""
    if lengths is None:
        return {}
    longest = int(lengths.max())
    return {LENGTHS: lengths.to(next(dtype for dtype in LENGTH_DTYPES if longest <= torch.iinfo(dtype).max))}


def unpack_lengths(stored: Tensor | None, num_samples: int, path: object) -> Tensor | None:
    """Lengths (S,) int64 from the tensor of a file, which is not trusted."""
    if stored is None:
        return None
    if stored.dim() != 1 or stored.dtype not in LENGTH_DTYPES:
        raise NotARecordingError(
            f"{path}: lengths of sequences are {stored.dtype} of shape {tuple(stored.shape)}; expected a list of whole "
            f"numbers. {RESTORE}"
        )
    wrong = _find_wrong(stored.numpy(), num_samples)
    if wrong is not None:
        raise NotARecordingError(
            f"{path}: lengths of sequences: {wrong}; expected lengths that add up to the {num_samples} samples. "
            f"{RESTORE}"
        )
    return stored.long()


def refuse_lack(held: Tensor | None, given: Tensor | None, path: object) -> None:
    """Refuse samples without lengths for a recording of sequences, and the other way round."""
    if (held is None) != (given is None):
        raise LengthsError(
            f"{path}: was recorded without lengths of sequences, and lengths are given. Leave them out, or record all "
            f"samples anew with lengths"
            if held is None
            else f"{path}: holds sequences, and no lengths are given for those that are new. Give --lengths "
            f"(in Python, lengths=)"
        )


def no_sequences(path: object) -> InputError:
    return InputError(
        f"{path}: was recorded without lengths, so its samples form no sequences. Replay samples by their IDs, or "
        f"record with --lengths (in Python, lengths=)"
    )


def _find_wrong(lengths: np.ndarray, num_samples: int) -> str | None:
    """What is wrong with lengths (S,), or None."""
    if not len(lengths):
        return "there are none"
    least, most = int(lengths.min()), int(lengths.max())
    if least < 0 or most > num_samples:
        return f"one is {least if least < 0 else most}"
    ends = np.cumsum(lengths, dtype=np.int64)
    # A sum beyond 2^63 passes through negative numbers, since no length is above the number of samples.
    if ends.min() < 0 or ends[-1] != num_samples:
        return f"they add up to {ends[-1]}" if ends.min() >= 0 else "they add up to more than 2^63"
    return None
