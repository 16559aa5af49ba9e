"""Write rows of features to one file, in a thread of its own; and check a file that is finished.

begin(source) -> the row to start at; add(rows) ...; finish() -> NAME.safetensors
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from krnet.errors import ResumeError
from krnet.features.feature_file import UnfinishedFile, read_work
from krnet.features.image_batches import ArrayBatches, Batch, Batches
from krnet.features.resumed import START_ANEW, check_same_rows, check_same_work, no_images
from krnet.features.source import open_features
from krnet.features.trunk import Rows, TrunkRunner
from krnet.io.writable import check_room

MAX_UNWRITTEN = 2  # batches that wait for the disk


class FileOutput:
    """The unfinished file, behind a thread that writes to it."""

    def __init__(self, path: Path, resume: bool):
        file = UnfinishedFile.reopen(path) if resume else None
        self.path, self.file = path, file
        self.started_s = time.perf_counter() if file is None else file.started_s
        self.num_earlier = 0 if file is None else file.num_rows
        """Rows that an earlier call wrote."""
        self.first_row = 0 if file is None else file.last_batch
        """The first row of the last batch that an earlier call wrote: it is computed again, and compared."""
        self.num_rows = 0
        self.num_samples: int | None = None
        """Rows that there will be; None if unknown."""
        self.writer = ThreadPoolExecutor(1)
        self.writing: deque[Future[None]] = deque()

    @property
    def seconds(self) -> float:
        """Time so far, with that of the earlier calls whose rows are kept."""
        return time.perf_counter() - self.started_s if self.file is None else self.file.seconds

    def begin(self, source: Batches, runner: TrunkRunner) -> int:
        """The sample ID to start at."""
        self.num_samples = source.num_samples
        if self.file is None:
            return self.first_row
        if source.num_samples is not None and source.num_samples < self.num_earlier:
            raise self._shorter(source.num_samples)
        if isinstance(source, ArrayBatches) and source.labels is not None:
            self.file.recall_labels(source.labels[: self.first_row])
        return self.first_row

    def _shorter(self, found: int) -> ResumeError:
        return ResumeError(
            f"{self.path}: an earlier call wrote {self.num_earlier} samples; now there are {found} images. Give the "
            f"images of the first call, or {START_ANEW}"
        )

    def needs(self, first: int, stop: int) -> bool:
        """Whether the samples first .. stop - 1 are to be computed."""
        return stop > self.first_row

    def share(self, source: Batches, stop: int, num_batches: int) -> float | None:
        """The part that is done."""
        return source.share(stop, num_batches)

    def skip(self, first: int, num_samples: int, labels: Tensor | None) -> None:
        """Pass by a batch that an earlier call wrote."""
        assert self.file is not None
        self.file.recall_labels(labels)

    def add(self, rows: Rows) -> None:
        """Hand rows to the thread that writes; those that an earlier call wrote are compared with it instead."""
        rows.wait()
        if self.file is None:
            if self.num_samples is not None:
                check_room(self.path, self.num_samples * rows.values[0].nbytes)
            self.file = UnfinishedFile.create(self.path, rows.work, self.started_s)
        check_same_work(self.file.partial, self.file.work, rows.work)
        known = max(0, min(self.num_earlier, rows.stop) - rows.first)
        labels = rows.labels
        if known:
            check_same_rows(self.file.partial, self.file.read(rows.first, rows.first + known), rows.values[:known])
            self.file.recall_labels(None if labels is None else labels[:known])
        self.num_rows = rows.stop
        if known < len(rows.values):
            new_labels = None if labels is None else labels[known:]
            self.writing.append(self.writer.submit(self.file.append, rows.values[known:], new_labels))
        while len(self.writing) > MAX_UNWRITTEN:
            self.writing.popleft().result()

    def finish(self, source_name: str, last: Rows | None) -> None:
        """Add the last rows, and give the file its name."""
        if last is not None:
            self.add(last)
        while self.writing:
            self.writing.popleft().result()
        if self.num_rows < self.num_earlier:
            raise self._shorter(self.num_rows)
        if self.file is None:
            raise no_images(source_name)
        self.file.finish()

    def close(self) -> None:
        """Save the rows that are written, so that a later call can go on."""
        self.writer.shutdown(wait=True)
        if self.file is not None:
            self.file.close()


def check_finished(path: Path, source: Batches, runner: TrunkRunner) -> None:
    """Refuse a finished file of other work: compare settings, number of samples, labels, and the first batch."""
    work = read_work(path)
    stored = open_features(path, key="features")
    if source.num_samples is not None and source.num_samples != len(stored):
        raise _other_number(path, len(stored), str(source.num_samples))
    batches = source.batches(0, runner.device)
    first, images, labels = next(batches, (0, None, None))
    if images is None:
        raise no_images(source.name)
    rows = runner.rows(first, images, labels)
    rows.wait()
    check_same_work(path, work, rows.work)
    ids = torch.arange(min(len(rows.values), len(stored)))
    check_same_rows(path, stored.read(ids), rows.values[: len(ids)])
    all_labels = source.labels if isinstance(source, ArrayBatches) else labels
    if source.num_samples is None:
        all_labels = _run_through(path, len(stored), batches, len(images), labels)
    if all_labels is not None:
        stored_labels = open_features(path, key="labels").read(torch.arange(len(stored)))
        if not torch.equal(stored_labels[: len(all_labels)], all_labels):
            raise ResumeError(f"{path}: finished already, with other labels. Give the same labels, or {START_ANEW}")


def _run_through(
    path: Path, num_stored: int, batches: Iterator[Batch], num_images: int, labels: Tensor | None
) -> Tensor | None:
    """Count the images of the batches that are left, beside num_images before; return the labels of all."""
    parts = [labels]
    while num_images <= num_stored:
        _, images, labels = next(batches, (0, None, None))
        if images is None:
            break
        num_images += len(images)
        parts.append(labels)
    if num_images != num_stored:
        raise _other_number(path, num_stored, f"{'at least ' if num_images > num_stored else ''}{num_images}")
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


def _other_number(path: Path, num_stored: int, found: str) -> ResumeError:
    return ResumeError(
        f"{path}: finished already, with {num_stored} samples; there are {found} images. Give the same images, or "
        f"{START_ANEW}"
    )
