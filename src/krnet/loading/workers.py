"""Batches that other processes decode on the CPU, in the order that they are asked for.

IDs of each batch -> n processes, each with a replayer of its own -> batches (features, labels), pinned for a GPU
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from krnet.recording_data import Replayable

Batch = tuple[Tensor, Tensor]


class Batches(Dataset[Any]):
    """A data set whose item is a whole batch."""

    def __init__(self, recording: Replayable, labels: Tensor):
        self.recording, self.labels = recording.to("cpu"), labels

    def __getitems__(self, ids: list[int]) -> Batch:
        return self.recording[ids], self.labels[ids]


def decoded_by_workers(
    recording: Replayable, labels: Tensor, batches: Iterable[Tensor], num_workers: int, prefetch: int, pin: bool
) -> Iterator[Batch]:
    """torch's DataLoader gives the batches in their order, whichever process is first."""
    loader = DataLoader(
        Batches(recording, labels),
        batch_sampler=cast(Any, (ids.tolist() for ids in batches)),
        num_workers=num_workers,
        prefetch_factor=max(1, prefetch),
        collate_fn=_as_it_is,
        pin_memory=pin,
    )
    yield from loader


def _as_it_is(batch: Any) -> Any:
    return batch
