"""Batches of a recording for training, pass after pass; a pass can be taken up in the middle.

Recording -> Order (order.py): which IDs come when
          -> decoded here, ahead of time on a GPU (ahead.py), or by other processes (workers.py)
          -> batches (features, labels) on the recording's device
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor

from krnet.config import check_int
from krnet.errors import ResumeError, SettingError
from krnet.loading.ahead import ahead
from krnet.loading.order import Order, even_ranges
from krnet.loading.workers import decoded_by_workers
from krnet.recording_data import Replayable

RESIDENT_BYTES = 1 << 30  # of a file: its samples are shuffled together
RANGES_PER_BUFFER = 16

Batch = tuple[Tensor, Tensor]


class Loader:
    """Batches of (features, labels) on the recording's device; see `Recording.loader`."""

    def __init__(
        self,
        recording: Replayable,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        *,
        drop_last: bool = False,
        buffer: int | None = None,
        prefetch: int = 1,
        num_workers: int = 0,
        share: tuple[int, int] = (0, 1),
    ):
        for name, value, least in (
            ("batch_size", batch_size, 1), ("prefetch", prefetch, 0), ("num_workers", num_workers, 0),
            ("buffer", 1 if buffer is None else buffer, 1), ("share", share[1], 1), ("share", share[0], 0),
        ):  # fmt: skip
            check_int(name, value, least)
        if share[0] >= share[1]:
            raise SettingError(f"share is {share}; expected (k, n) with k from 0 to n - 1")
        self.recording, self.prefetch, self.num_workers, self.share = recording, prefetch, num_workers, share
        num_samples = len(recording)
        if buffer is None:
            share_at_hand = RESIDENT_BYTES / max(1, recording.nbytes)
            buffer = num_samples if share_at_hand >= 1 else max(batch_size, int(share_at_hand * num_samples))
        ranges = even_ranges(num_samples, max(1, buffer // RANGES_PER_BUFFER))
        self.order = Order(ranges, batch_size, shuffle=shuffle, seed=seed, buffer=buffer, drop_last=drop_last)
        self.epoch = 0
        """The pass that goes on, or comes next."""
        self.batch = 0
        """Batches of it that have been handed out."""
        self._is_new = True
        self._labels: Tensor | None = None

    def __len__(self) -> int:
        return self.order.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Begin with this pass, counted from 0, at the next iteration.

        Without it, each iteration is the next pass.
        """
        check_int("epoch", epoch, 0)
        self.epoch, self.batch, self._is_new = epoch, 0, True

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is: how many batches have been handed out, and what the order follows from."""
        return {"epoch": self.epoch, "batch": self.batch, **self._settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on, at the next iteration, behind the batch that was the last one when the state was taken."""
        for name, value in self._settings.items():
            if state.get(name) != value:
                raise ResumeError(
                    f"the state is that of a loader with {name} {state.get(name)!r:.99}; this one has {value}. Make it "
                    f"with the same settings, for the same recording"
                )
        for name, most in (("epoch", inf), ("batch", len(self))):
            check_int(name, state.get(name), 0, most)
        self.epoch, self.batch, self._is_new = state["epoch"], state["batch"], True

    @property
    def _settings(self) -> dict[str, Any]:
        """What the order follows from."""
        order = self.order
        return {
            "recording": self.recording.fingerprint, "num_samples": order.num_samples, "batch_size": order.batch_size,
            "num_batches": order.num_batches, "shuffle": order.shuffle, "seed": order.seed, "buffer": order.buffer,
        }  # fmt: skip

    def __iter__(self) -> Iterator[Batch]:
        if not self._is_new:  # the pass before was left in the middle
            self.epoch, self.batch = self.epoch + 1, 0
        self._is_new = False
        epoch = self.epoch
        for batch in self._decoded(epoch, self.batch):
            self.batch += 1
            yield batch
        self.epoch, self.batch, self._is_new = epoch + 1, 0, True

    def _decoded(self, epoch: int, first: int) -> Iterator[Batch]:
        device, (number, count) = self.recording.device, self.share
        batches = (self.order.batch(epoch, place)[number::count] for place in range(first, len(self)))
        if self.num_workers:
            on_gpu = device.type == "cuda"
            for batch in decoded_by_workers(
                self.recording, self.labels, batches, self.num_workers, self.prefetch, pin=on_gpu
            ):
                yield batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)
        elif device.type == "cuda" and self.prefetch:
            yield from ahead(self._decode, batches, self.prefetch, device)
        else:
            yield from map(self._decode, batches)

    def _decode(self, ids: Tensor) -> Batch:
        return self.recording.replay(ids), self.labels[ids].to(self.recording.device)

    @property
    def labels(self) -> Tensor:
        """(N,) by sample ID; -1 where there are none. Read once: some recordings read them from many files."""
        if self._labels is None:
            found = self.recording.labels
            self._labels = torch.full((len(self.recording),), -1) if found is None else found
        return self._labels
