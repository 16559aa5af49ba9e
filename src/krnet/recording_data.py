"""A recording as training data: a Dataset for a DataLoader. Batches on its device are in krnet.loading.

Recording -> RecordingDataset -> (feature, label) on the CPU, by sample ID
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Replayable(Protocol):
    """What is needed of a recording. krnet.recording.Recording, which imports this module, satisfies it."""

    @property
    def labels(self) -> Tensor | None: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
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
