"""A recording as training data: a Dataset for a DataLoader, and batches on the recording's device.

Recording -> RecordingDataset -> (feature, label) on the CPU, by sample ID
          -> Loader           -> batches (features, labels) on the device, shuffled or in order
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from krnet.errors import InputError


class Replayable(Protocol):
    """What is needed of a recording. krnet.recording.Recording, which imports this module, satisfies it."""

    @property
    def labels(self) -> Tensor | None: ...
    @property
    def device(self) -> torch.device: ...
    def __len__(self) -> int: ...
    def __getitem__(self, which: Any) -> Tensor: ...
    def replay(self, ids: Tensor) -> Tensor: ...
    def to(self, device: str | torch.device) -> Replayable: ...


class RecordingDataset(Dataset[tuple[Tensor, Tensor]]):
    """(feature, label) by sample ID; label is -1 if the recording has no labels."""

    def __init__(self, recording: Replayable):
        self.recording = recording.to("cpu")
        labels = recording.labels
        self.labels = torch.full((len(recording),), -1) if labels is None else labels

    def __len__(self) -> int:
        return len(self.recording)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.recording[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        # A DataLoader calls this for a whole batch, which is then decoded at once.
        return list(zip(self.recording[indices], self.labels[indices], strict=True))


class Loader:
    """Batches of (features, labels) on the recording's device; see `Recording.loader`."""

    def __init__(self, recording: Replayable, batch_size: int, shuffle: bool, seed: int):
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; expected at least 1")
        self.recording, self.batch_size, self.shuffle, self.seed = recording, batch_size, shuffle, seed
        self.epoch = 0

    def __len__(self) -> int:
        return -(-len(self.recording) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        ids = torch.arange(len(self.recording))
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            ids = ids[torch.randperm(len(ids), generator=generator)]
        self.epoch += 1
        parts = ids.split(self.batch_size)
        if self.recording.device.type == "cpu":
            yield from map(self._batch, parts)
            return
        # Decode on a separate CUDA stream, one batch ahead of the consumer.
        device = self.recording.device
        decode_stream = torch.cuda.Stream(device)
        queue: list[tuple[tuple[Tensor, Tensor], torch.cuda.Event]] = []
        for part in [*parts, None]:
            if part is not None:
                with torch.cuda.stream(decode_stream):
                    queue.append((self._batch(part), decode_stream.record_event()))
            if part is None or len(queue) > 1:
                batch, decoded_event = queue.pop(0)
                consumer_stream = torch.cuda.current_stream(device)
                consumer_stream.wait_event(decoded_event)
                for tensor in batch:
                    tensor.record_stream(consumer_stream)
                yield batch

    def _batch(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        labels = self.recording.labels
        batch_labels = torch.full_like(ids, -1) if labels is None else labels[ids]
        return self.recording.replay(ids), batch_labels.to(self.recording.device)
