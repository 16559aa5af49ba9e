"""Which samples a recording holds: their number, shape and labels, and how a file says so.

Samples --describe--> metadata (num_samples, shape, classes) + tensor `labels` where runs do not say it
        <--recall----


Batched ID embedding: turn a sample ID into a vector, with two stored vectors per group of samples.

    sample ID -> (group m, slot n) -> static vector v_s[m]            -> FC module --+
                                      dynamic vector v_d[m], shifted n -> FC module --+-> embedding (B, 2H)

Zhang et al., "KRNet: Towards Efficient Knowledge Replay", section "Batched ID Embedding".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krnet.errors import NotARecordingError, OversizedRecordingError
from krnet.io.header import MAX_DIMS

LABELS = "labels"
LABEL_DTYPES = (torch.uint8, torch.int16, torch.int32)
# No recorder needs less than an eighth of a bit for a sample; a header that claims more samples is lying.
SAMPLES_PER_BYTE = 64


@dataclass(frozen=True)
class Samples:
    num_samples: int
    shape: tuple[int, ...]
    """Shape of one sample."""
    labels: Tensor | None
    """(N,) int64, by sample ID."""

    def class_counts(self) -> list[int]:
        """Samples per class, classes in order of first appearance; without labels all are one class."""
        return [self.num_samples] if self.labels is None else class_index(self.labels)[1].tolist()

    def describe(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        metadata: dict[str, Any] = {
            "num_samples": self.num_samples,
            "shape": list(self.shape),
            "classes": None,
        }
        if self.labels is None:
            return metadata, {}
        index, counts = class_index(self.labels)
        names = torch.empty_like(counts).scatter_(0, index, self.labels)
        metadata["classes"] = [list(pair) for pair in zip(names.tolist(), counts.tolist(), strict=True)]
        # Samples that come class by class need no more than the class table.
        if torch.equal(index, torch.repeat_interleave(torch.arange(len(counts)), counts)):
            return metadata, {}
        fits = next(t for t in LABEL_DTYPES if len(counts) <= torch.iinfo(t).max + 1)
        return metadata, {LABELS: index.to(fits)}

    @classmethod
    def recall(
        cls, metadata: dict[str, Any], file_bytes: int, read: Callable[[], Tensor | None], path: object
    ) -> Samples:
        """`read()` gives the tensor `labels`, or None where the file has none."""
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
        if classes is None:
            return cls(num_samples, tuple(shape), None)
        try:
            names, counts = [label for label, _ in classes], [count for _, count in classes]
            if any(type(name) is not int for name in names) or len(set(names)) != len(names):
                raise ValueError("its labels are not different whole numbers")
            if not all(map(_is_count, counts)) or sum(counts) != num_samples:
                raise ValueError("its counts do not add up to the number of samples")
            index = read()
            if index is None:
                index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
            elif index.shape != (num_samples,) or index.dtype not in LABEL_DTYPES:
                raise ValueError(f"the labels are {index.dtype} {tuple(index.shape)}")
            index = index.long()
            # bincount makes room up to the largest number that it meets.
            if int(index.max()) >= len(counts) or torch.bincount(index, minlength=len(counts)).tolist() != counts:
                raise ValueError("the labels are not those it counts")
            labels = torch.tensor(names)[index]
        except (TypeError, ValueError, RuntimeError) as error:
            raise NotARecordingError(
                f"{path}: the class table is wrong: {error}. Restore the file from a copy, or record again"
            ) from error
        return cls(num_samples, tuple(shape), labels)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**48


def class_index(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels (N,) -> (class number of each sample, samples per class), classes in order of first appearance."""
    _, inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    first = torch.full((len(counts),), len(labels)).scatter_reduce(0, inverse, torch.arange(len(labels)), "amin")
    order = torch.argsort(first)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return place[inverse], counts[order]
