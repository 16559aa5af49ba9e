"""Which samples come when, and their values on the device.

    iteration -> Feed.batch  -> ids (B,), and values (B, *shape) where they are not on the device anyhow
              -> Feed.values -> values (B, *shape); no more than a gather, so that it may be part of a graph

The order is a function of seed and iteration alone, so a resumed fit sees what an uninterrupted one would.
Features that lie in memory, or fit on the GPU, are gathered there; others are read from where they lie, a few
batches ahead, in runs of neighbours long enough for a disk, and cross to the GPU while it works on the batch before.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from krnet.device import free_bytes
from krnet.features.sampler import BatchOrder
from krnet.features.source import FeatureSource

RUN_BYTES = 256 << 10  # a disk reads this much in about the time it takes to seek
READERS = max(2, min(6, (os.cpu_count() or 1) // 2))  # one copies about 2 GB/s from memory the disk is cached in


class Feed:
    def __init__(self, source: FeatureSource, batch_size: int, seed: int, device: torch.device):
        self.source, self.device, self.seed = source, device, seed
        self.num_samples = len(source)
        self.batch_size = min(batch_size, self.num_samples)
        self.resident = self.find_resident()
        # Neighbours in a batch are a little worse to learn from, hence eight runs a batch at the least.
        run = -(-RUN_BYTES // source.sample_bytes)
        self.run = 1 if self.resident is not None else max(1, min(run, self.batch_size // 8))
        place = device if self.resident is not None else torch.device("cpu")
        self._order = BatchOrder(self.num_samples, self.batch_size, seed, run=self.run, device=place)
        self._pool = ThreadPoolExecutor(READERS) if self.resident is None else None
        self._side = torch.cuda.Stream(device) if self._pool and device.type == "cuda" else None
        self._waiting: deque[tuple[int, Future[tuple[Tensor, Tensor]]]] = deque()

    def find_resident(self) -> Tensor | None:
        """All samples on the device, where they are there or fit there."""
        kept = self.source.resident
        if kept is not None and kept.device == self.device:
            return kept
        if self.source.nbytes > free_bytes(self.device) // 2:
            return None
        values = torch.empty((len(self.source), *self.source.shape), dtype=self.source.dtype, device=self.device)
        step = max(1, (64 << 20) // self.source.sample_bytes)
        for ids in torch.arange(len(self.source)).split(step):
            values[ids[0] : ids[-1] + 1] = self.source.read(ids).to(self.device)
        return values

    def ids(self, iteration: int) -> Tensor:
        return self._order.ids(iteration)

    def batch(self, iteration: int) -> tuple[Tensor, ...]:
        """What `values` needs, on the device."""
        if self.resident is not None:
            return (self.ids(iteration),)
        while self._waiting and self._waiting[0][0] != iteration:
            self._waiting.popleft()
        assert self._pool is not None
        for ahead in range(iteration + len(self._waiting), iteration + READERS + 2):
            self._waiting.append((ahead, self._pool.submit(self._read, ahead)))
        ids, values = self._waiting.popleft()[1].result()
        if self._side is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self._side)
            for tensor in (ids, values):
                tensor.record_stream(now)  # made on the other stream: its memory is not free before this one is done
        return ids, values

    def values(self, ids: Tensor, values: Tensor | None = None) -> Tensor:
        if values is not None:
            return values
        assert self.resident is not None
        return self.resident.index_select(0, ids)

    def _read(self, iteration: int) -> tuple[Tensor, Tensor]:
        ids = self.ids(iteration)
        if self._side is None:
            return ids, self.source.read(ids)
        values = self.source.read(ids, pinned=True)
        with torch.cuda.stream(self._side):
            return ids.pin_memory().to(self.device, non_blocking=True), values.to(self.device, non_blocking=True)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
