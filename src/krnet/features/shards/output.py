"""Write rows of features to a folder of shards: those of the call that no shard holds yet.

    begin(source) -> which rows are missing; add(rows) ...; finish() -> DIR/shard-*.safetensors, DIR/index.json

Going on after a kill, adding samples, and sharing the work are one thing here: a call computes those of its samples
that no shard holds, and cuts them at the same places as every other call. Batches, too, begin at the same samples, so
that the values are the same to the bit.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from krnet.errors import KrnetError, ResumeError, SettingError
from krnet.features.image_batches import ArrayBatches, Batches
from krnet.features.resumed import check_same_rows, no_images
from krnet.features.shards.folder import check_folder, difference, finished, merge
from krnet.features.shards.index import INDEX_NAME
from krnet.features.shards.packer import Packer
from krnet.features.shards.plan import OTHERWISE, Plan, Task, make_task, overlap, share_of
from krnet.features.shards.ranges import Range, cut
from krnet.features.shards.shard import Entry, Origin, open_shard, write_shard
from krnet.features.trunk import Rows, TrunkRunner
from krnet.io.atomic import make_folder
from krnet.io.writable import check_room

COMMON = ("shape", "dtype", "labels")  # fields of the work that an index has under these names; the rest is made_by


class ShardOutput:
    def __init__(self, plan: Plan):
        check_folder(plan.folder)
        self.plan, self.folder = plan, plan.folder
        self.started_s = time.perf_counter()
        self.there = finished(self.folder)
        self.task = Task(0, [], [], 0)
        self.num_samples: int | None = None
        """Images of all parts; None if unknown."""
        self.num_passed = 0
        """Rows that were added or skipped, from the first on."""
        self.is_compared = True
        """Whether rows that are done have been computed again and found alike."""
        self.is_finished = False
        self.packer: Packer | None = None
        self.writer = ThreadPoolExecutor(1)
        self.writing: Future[Entry] | None = None
        self.origin = self.there.origin
        self.batch_size = 1
        """Rows that belong together in a shard, if they fit."""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_s

    def begin(self, source: Batches, runner: TrunkRunner) -> int:
        """Find out what is missing; return the row to start at."""
        self.num_samples = source.num_samples
        self.batch_size = source.batch_size if isinstance(source, ArrayBatches) else 1
        own = None if self.plan.share[1] == 1 else self._share(source, runner)
        self.task = make_task(self.plan, self.there, source.num_samples, own)
        self.is_compared = not self.task.done
        if isinstance(source, ArrayBatches) and not self.is_compared:
            self._check(batch_at(source, runner, max(0, self.task.rows(self.task.done[0])[0])))
            self._check_labels(0, source.labels)
        return 0

    def _share(self, source: Batches, runner: TrunkRunner) -> Range:
        """The rows of this part. Their number in a shard follows from a batch of features."""
        if not isinstance(source, ArrayBatches):
            raise SettingError(
                "share is given, and images come as batches that have to be run through; give them as an array or "
                "a file"
            )
        number, count = self.plan.share
        rows = batch_at(source, runner, source.num_samples * number // count)
        return share_of(self.plan.share, source.num_samples, self._shard_rows(rows, source.batch_size))

    def _shard_rows(self, rows: Rows, batch_size: int) -> int:
        """Rows of a full shard: whole batches where they fit."""
        row_bytes = rows.values[0].nbytes + (0 if rows.labels is None else 8)
        found = max(1, self.plan.shard_bytes // row_bytes)
        return found - found % batch_size if found >= batch_size else found

    def needs(self, first: int, stop: int) -> bool:
        """Whether rows first .. stop - 1 are to be computed."""
        if not self.is_compared and self.task.done_in(first, stop):
            return True
        return any(overlap(part, (first, stop)) for part in self.task.todo)

    def share(self, source: Batches, stop: int, num_batches: int) -> float | None:
        """The part that is done."""
        if self.num_samples is None:
            return source.share(stop, num_batches)
        left = sum(end - max(start, stop) for start, end in self.task.todo if stop < end)
        return 1 - left / max(1, self.task.num_rows)

    def skip(self, first: int, num_samples: int, labels: Tensor | None) -> None:
        """Pass by rows that are there, or that are another call's."""
        self._check_labels(first, labels)
        self.num_passed = first + num_samples

    def add(self, rows: Rows) -> None:
        """Take the rows that are missing. A shard that is full goes to the thread that writes."""
        rows.wait()
        self._check(rows)
        if self.packer is None:
            self.origin = origin_of(rows)
            if isinstance(self.folder, Path):
                self._make_folder(rows)
            step = self._shard_rows(rows, self.batch_size)
            self.packer = Packer(cut(self.task.todo, step), self._write)
        self.packer.add(rows.first, rows.values, rows.labels)
        self.num_passed = rows.stop

    def _make_folder(self, rows: Rows) -> None:
        """Made now, and never removed: a writer without work of its own must not take it from under the others."""
        assert isinstance(self.folder, Path)
        make_folder(self.folder)
        if self.num_samples is not None:
            num_missing = sum(end - start for start, end in self.task.todo)
            check_room(self.folder / INDEX_NAME, num_missing * rows.values[0].nbytes)

    def _check(self, rows: Rows) -> None:
        """Compare with what is there: what made it, and rows that were computed again."""
        if self.origin is not None and origin_of(rows) != self.origin:
            found = difference(self.origin, origin_of(rows))
            raise ResumeError(f"{self.folder}: a new shard {found} Give the same as the first call, or {OTHERWISE}")
        for entry in self.task.done_in(rows.first, rows.stop) if not self.is_compared else []:
            start, stop = self.task.rows(entry)
            low, high = max(start, rows.first), min(stop, rows.stop)
            shard = open_shard(self.folder / entry.name)
            before = shard.rows(torch.arange(low, high) + self.task.first_id)
            check_same_rows(self.folder, before, rows.values[low - rows.first : high - rows.first], otherwise=OTHERWISE)
            self.is_compared = True
        self._check_labels(rows.first, rows.labels)

    def _check_labels(self, first: int, labels: Tensor | None) -> None:
        """Refuse labels of rows first, first + 1, ... that are others than those of the shards that are there."""
        if labels is None or self.origin is None or not self.origin.has_labels:
            return
        for entry in self.task.done_in(first, first + len(labels)):
            start, stop = self.task.rows(entry)
            low, high = max(start, first), min(stop, first + len(labels))
            before = open_shard(self.folder / entry.name).labels()[low - start : high - start]
            if not torch.equal(before, labels[low - first : high - first]):
                raise ResumeError(
                    f"{self.folder}: the labels of samples {low + self.task.first_id}..{high + self.task.first_id - 1} "
                    f"were others. Give the labels and the order of the first call, or {OTHERWISE}"
                )

    def _write(self, row: int, values: Tensor, labels: Tensor | None) -> None:
        """Let the thread write a shard, when it has written the one before."""
        assert self.origin is not None
        if self.writing is not None:
            self.writing.result()
        first_id = self.task.first_id
        run = (first_id, self.num_samples)
        self.writing = self.writer.submit(
            write_shard, self.folder, first_id + row, values, labels, run, self.origin.made_by
        )

    def finish(self, source_name: str, last: Rows | None) -> None:
        """Add the last rows; where the number of samples was unknown, it is known by now."""
        self.num_samples = max(self.num_passed, 0 if last is None else last.stop, self.num_samples or 0)
        if not self.num_samples:
            raise no_images(source_name)
        self.task = self.task.until(self.num_samples)
        if last is not None:
            self.add(last)
        if self.packer is not None:
            self.packer.flush()
        if self.writing is not None:
            self.writing.result()
        held = max((self.task.rows(entry)[1] for entry in self.task.done), default=0)
        if held > self.num_samples:
            raise ResumeError(
                f"{self.folder}: an earlier call wrote {held} samples; now there are {self.num_samples} images. Give "
                f"the images of the first call, or {OTHERWISE}"
            )
        merge(self.folder)
        self.is_finished = True

    def close(self) -> None:
        """Keep the shards that are finished: a later call can go on from them."""
        self.writer.shutdown(wait=True)
        if not self.is_finished:
            with suppress(OSError, KrnetError):  # what went wrong before is what the caller hears of
                merge(self.folder)


def batch_at(source: ArrayBatches, runner: TrunkRunner, row: int) -> Rows:
    """The features of the batch that holds a row."""
    first = row - row % source.batch_size
    _, images, labels = next(source.batches(first, runner.device))
    rows = runner.rows(first, images, labels)
    rows.wait()
    return rows


def origin_of(rows: Rows) -> Origin:
    made_by = {name: value for name, value in rows.work.items() if name not in COMMON}
    return Origin(tuple(rows.work["shape"]), rows.work["dtype"], rows.work["labels"], made_by)
