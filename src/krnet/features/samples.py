"""Number, shape, labels and sequences of the samples in a recording, and how its file stores them.

Samples --describe--> metadata (num_samples, shape, classes), and the tensors `labels` and `sequences`
        <--recall----

`classes` lists [label, number of samples]. The tensor is left out if the samples are sorted by class.
`sequences` holds the lengths of sequences, where samples form such.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krnet.errors import NotARecordingError, OversizedRecordingError
from krnet.features.sequences import LENGTHS, pack_lengths, unpack_lengths
from krnet.io.header import MAX_DIMS
from krnet.io.memory import MemoryLimit

LABELS = "labels"  # name of the tensor
LABEL_DTYPES = (torch.uint8, torch.int16, torch.int32)
# Every recorder needs at least an eighth of a bit for a sample; a header that claims more samples is wrong.
SAMPLES_PER_BYTE = 64
LABEL_BYTES = 32  # of memory for each label while they are read: int64, and as class numbers, and copies of both


@dataclass(frozen=True)
class Samples:
    num_samples: int
    shape: tuple[int, ...]
    """Shape of one sample."""
    labels: Tensor | None
    """Label of each sample ID, (N,) int64."""
    lengths: Tensor | None = None
    """Lengths of the sequences that the samples form, (S,) int64."""

    def class_counts(self) -> list[int]:
        """Samples per class, classes in order of first appearance; unlabelled samples form one class."""
        return [self.num_samples] if self.labels is None else class_index(self.labels)[1].tolist()

    def describe(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metadata and tensors to store in the file."""
        metadata: dict[str, Any] = {
            "num_samples": self.num_samples,
            "shape": list(self.shape),
            "classes": None,
        }
        sequences = pack_lengths(self.lengths)
        if self.labels is None:
            return metadata, sequences
        index, counts = class_index(self.labels)
        names = torch.empty_like(counts).scatter_(0, index, self.labels)
        metadata["classes"] = [list(pair) for pair in zip(names.tolist(), counts.tolist(), strict=True)]
        # The class table alone describes samples that are sorted by class.
        if torch.equal(index, torch.repeat_interleave(torch.arange(len(counts)), counts)):
            return metadata, sequences
        smallest = next(dtype for dtype in LABEL_DTYPES if len(counts) <= torch.iinfo(dtype).max + 1)
        return metadata, {LABELS: index.to(smallest), **sequences}

    @classmethod
    def recall(
        cls,
        metadata: dict[str, Any],
        file_bytes: int,
        read: Callable[[str], Tensor | None],
        path: object,
        limit: MemoryLimit | None = None,
    ) -> Samples:
        """Rebuild from the file. `read(name)` returns a tensor, or None if the file has none of this name."""
        num_samples, shape, classes = (metadata.get(name) for name in ("num_samples", "shape", "classes"))
        shape = shape if isinstance(shape, list) and len(shape) < MAX_DIMS else None
        if num_samples is None or shape is None or not all(map(_is_count, [num_samples, *shape])):
            raise NotARecordingError(
                f"{path}: num_samples {num_samples!r:.99} and shape {shape!r:.99}; expected positive numbers. "
                f"Is this a checkpoint? Only a finished recording can be opened"
            )
        if num_samples > file_bytes * SAMPLES_PER_BYTE:
            raise OversizedRecordingError(
                f"{path}: claims {num_samples} samples in {file_bytes} bytes; expected at most "
                f"{SAMPLES_PER_BYTE} a byte. Restore the file from a copy, or record again"
            )
        lengths = unpack_lengths(read(LENGTHS), num_samples, path)
        if classes is None:
            return cls(num_samples, tuple(shape), None, lengths)
        if limit is not None:
            limit.check(LABEL_BYTES * num_samples, f"the labels of {num_samples} samples")
        try:
            names, counts = [label for label, _ in classes], [count for _, count in classes]
            if any(type(name) is not int for name in names) or len(set(names)) != len(names):
                raise ValueError("its labels are not different whole numbers")
            if not all(map(_is_count, counts)) or sum(counts) != num_samples:
                raise ValueError("its counts do not add up to the number of samples")
            index = read(LABELS)
            if index is None:
                index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
            elif index.shape != (num_samples,) or index.dtype not in LABEL_DTYPES:
                raise ValueError(f"the labels are {index.dtype} {tuple(index.shape)}")
            index = index.long()
            # bincount allocates as many counters as the largest index: check that first.
            if int(index.max()) >= len(counts) or torch.bincount(index, minlength=len(counts)).tolist() != counts:
                raise ValueError("the labels are not those it counts")
            labels = torch.tensor(names)[index]
        except (TypeError, ValueError, RuntimeError) as error:
            raise NotARecordingError(
                f"{path}: the class table is wrong: {error}. Restore the file from a copy, or record again"
            ) from error
        return cls(num_samples, tuple(shape), labels, lengths)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**48


def class_index(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels (N,) -> (class number of each sample, samples per class), classes in order of first appearance."""
    _, inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    first = torch.full((len(counts),), len(labels)).scatter_reduce(0, inverse, torch.arange(len(labels)), "amin")
    order = torch.argsort(first)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    return rank[inverse], counts[order]
