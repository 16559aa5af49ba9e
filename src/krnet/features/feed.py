"""Batches for a fit: which samples, and their values on the device.

    iteration -> Feed.batch -> ids (B,), and values (B, *shape) unless all samples are on the device
    these     -> Feed.values -> values (B, *shape); at most a gather, so that a CUDA graph can contain it

The order depends on seed and iteration alone, so a resumed fit sees the same batches as an uninterrupted one.
Features that are in memory, or fit on the GPU, are gathered there. All others are read from their file a few batches
ahead, in runs of neighbouring samples that are long enough for a disk. They are copied to the GPU while it processes
the previous batch.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from krnet.device import free_bytes
from krnet.features.feature_source import FeatureSource
from krnet.features.sampler import BatchOrder
from krnet.team import team

RUN_BYTES = 256 << 10  # a disk reads this much in about the time of a seek
NUM_READERS = max(2, min(6, (os.cpu_count() or 1) // 2))  # threads; each copies about 2 GB/s of a cached file
NUM_AHEAD = 2  # batches read in advance beyond one per reader


class Feed:
    def __init__(self, source: FeatureSource, batch_size: int, seed: int, device: torch.device):
        self.source, self.device, self.seed = source, device, seed
        self.num_samples = len(source)
        self.batch_size = min(batch_size, self.num_samples)
        self.own = team().own()
        """Those of a batch whose values are read here; all, unless several processes share the fit."""
        self.resident = self.find_resident()
        # Neighbouring samples in a batch slow learning down a little, hence at least eight runs per batch.
        disk_run = -(-RUN_BYTES // source.sample_bytes)
        self.run = 1 if self.resident is not None else max(1, min(disk_run, self.batch_size // 8))
        ids_device = device if self.resident is not None else torch.device("cpu")
        self._order = BatchOrder(self.num_samples, self.batch_size, seed, run=self.run, device=ids_device)
        self._pool = ThreadPoolExecutor(NUM_READERS) if self.resident is None else None
        self._copy_stream = torch.cuda.Stream(device) if self._pool and device.type == "cuda" else None
        self._pending: deque[tuple[int, Future[tuple[Tensor, Tensor]]]] = deque()

    def find_resident(self) -> Tensor | None:
        """All samples on the device (N, *shape); None if they need more than half of its free memory."""
        resident = self.source.resident
        if resident is not None and resident.device == self.device:
            return resident
        if self.source.nbytes > free_bytes(self.device) // 2:
            return None
        values = torch.empty((len(self.source), *self.source.shape), dtype=self.source.dtype, device=self.device)
        chunk_size = max(1, (64 << 20) // self.source.sample_bytes)
        for ids in torch.arange(len(self.source)).split(chunk_size):
            values[ids[0] : ids[-1] + 1] = self.source.read(ids).to(self.device)
        return values

    def ids(self, iteration: int) -> Tensor:
        return self._order.ids(iteration)

    def batch(self, iteration: int) -> tuple[Tensor, ...]:
        """The arguments of `values`, on the device."""
        if self.resident is not None:
            return (self.ids(iteration),)
        while self._pending and self._pending[0][0] != iteration:
            self._pending.popleft()
        assert self._pool is not None
        for later in range(iteration + len(self._pending), iteration + NUM_READERS + NUM_AHEAD):
            self._pending.append((later, self._pool.submit(self._read, later)))
        ids, values = self._pending.popleft()[1].result()
        if self._copy_stream is not None:
            current_stream = torch.cuda.current_stream(self.device)
            current_stream.wait_stream(self._copy_stream)
            for tensor in (ids, values):
                tensor.record_stream(current_stream)  # else the copy stream could reuse its memory too early
        return ids, values

    def values(self, ids: Tensor, values: Tensor | None = None) -> Tensor:
        """Values of the own samples (B, *shape) on the device, from what `batch` returned."""
        if values is not None:
            return values
        assert self.resident is not None
        return self.resident.index_select(0, ids[self.own])

    def _read(self, iteration: int) -> tuple[Tensor, Tensor]:
        ids = self.ids(iteration)
        if self._copy_stream is None:
            return ids, self.source.read(ids[self.own])
        values = self.source.read(ids[self.own], pinned=True)
        with torch.cuda.stream(self._copy_stream):
            return ids.pin_memory().to(self.device, non_blocking=True), values.to(self.device, non_blocking=True)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
