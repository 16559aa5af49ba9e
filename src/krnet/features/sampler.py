"""The order of samples during training.

    iteration -> BatchOrder.ids -> sample numbers (B,), each from 0 to num_samples - 1

The order depends on seed and iteration alone, so a resumed run sees the same batches as an uninterrupted one. A
batch that reaches the end of an epoch continues with the next, so every batch is full.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


class BatchOrder:
    def __init__(
        self, num_samples: int, batch_size: int, seed: int, *, run: int = 1, device: torch.device | None = None
    ):
        """`run` neighbouring samples stay together in the order: a disk reads them faster than scattered ones."""
        self.num_samples, self.seed, self.run = num_samples, seed, run
        self.batch_size = min(batch_size, num_samples)
        self.device = device or torch.device("cpu")
        self._epoch = lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        if self.run == 1:
            return torch.randperm(self.num_samples, generator=generator).to(self.device)
        runs = torch.randperm(-(-self.num_samples // self.run), generator=generator)
        ids = (runs[:, None] * self.run + torch.arange(self.run)).flatten()
        return ids[ids < self.num_samples].to(self.device)

    def ids(self, iteration: int) -> Tensor:
        start = iteration * self.batch_size
        parts, num_missing = [], self.batch_size
        while num_missing:
            epoch, offset = divmod(start, self.num_samples)
            parts.append(self._epoch(epoch)[offset : offset + num_missing])
            start, num_missing = start + len(parts[-1]), num_missing - len(parts[-1])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
