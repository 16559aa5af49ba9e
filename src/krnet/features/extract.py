"""Run images through a network and write its feature maps to a file, in bounded memory.

    images, labels -> batches -> trunk -> rows -> NAME.safetensors: `features` (N, *shape), `labels` (N,)
                      image_batches.py  trunk.py     feature_file.py

While a GPU computes a batch, the rows of the one before are copied from it, and a thread writes earlier rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from krnet.config import check_choice
from krnet.device import dtype_name, exact_math
from krnet.errors import DataError, InputError, ResumeError
from krnet.features.feature_file import (
    DTYPES,
    START_ANEW,
    UnfinishedFile,
    check_destination,
    check_same_work,
    partial_path,
    read_work,
    refuse_foreign,
)
from krnet.features.image_batches import ArrayBatches, Batch, LoaderBatches, open_batches
from krnet.features.source import open_features
from krnet.features.trunk import Rows, TrunkRunner, at_work
from krnet.io.atomic import AnyPath
from krnet.io.overlap import PARTIAL_RECORD_ENDING, refuse_overlap
from krnet.io.writable import check_name, check_room, check_writable
from krnet.progress import Progress, Watch, closing_watch

MAX_UNWRITTEN = 2  # batches that wait for the disk
# Largest difference between rows of two calls, relative to the largest value: devices differ by about 1e-6 in float32.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}


@closing_watch
def extract(
    trunk: nn.Module,
    images: Any,
    labels: Any = None,
    *,
    out: AnyPath,
    batch_size: int | None = None,
    dtype: str = "float32",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    device: str | torch.device | None = None,
    resume: bool = False,
    key: str | None = None,
    watch: Watch | None = None,
) -> Path:
    """Compute the features of images with a network, and write them to a file that `krnet.record` takes.

    The images pass through the network batch by batch, and each batch is written as it comes: memory stays bounded
    however many images there are. The file appears under its name when it is complete. If the call is interrupted or
    killed, call it again with resume=True: it goes on where it stopped.

    trunk       the network, or the part of one, that turns images into features: any nn.Module. It runs in evaluation
                mode and without the shortened products of float32 that GPUs offer (tf32); afterwards it is as it was
    images      (N, C, H, W), uint8 or float: array, tensor, memmap, path (.npy .npz .safetensors .h5 .zarr), or part of
                a data set (krnet.data.load(...).train); or a DataLoader, or any iterable of batches: images, or
                (images, labels). Row i of the file belongs to image i, so a DataLoader must not shuffle; only torch's
                own random samplers are recognised and refused. uint8 images may also be (N, H, W, C). The images of a
                data set are taken as they are, whereas `krnet extract --data` crops them and normalises them: for the
                latter, give mean=data.mean, std=data.std
    labels      one integer per image: list, array, or path to .npy; left out if the batches have them
    out         file to write, NAME.safetensors. It holds the arrays `features` (N, ...) and, if there are labels,
                `labels` (N,). Until it is complete, NAME.safetensors.partial lies beside it; then it replaces an
                existing NAME.safetensors
    batch_size  images that pass through the network at once, by default 256; a DataLoader has its own
    dtype       type of the stored values: float32, float16 or bfloat16
    mean, std   per channel or one number; the network gets (image - mean) / std. uint8 images are divided by 255 first
    device      where to compute; by default the GPU that the trunk is on, else the first GPU, else the CPU
    resume      go on where an earlier call with the same arguments stopped; a finished file is checked and returned
    key         name of the array, for a file of images that holds several
    watch       called with a Progress after each batch; `krnet.show_progress` draws a bar

    Returns the path of the file.

    >>> import krnet, torch
    >>> trunk = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, stride=4), torch.nn.ReLU())
    >>> images = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8)
    >>> path = krnet.extract(trunk, images, labels=[0, 1] * 50, out="features.safetensors")
    >>> recording = krnet.record(path, recorder="pca", budget="20kB")  # the labels come from the file
    >>> recording.shape, recording.labels[:4].tolist()
    ((8, 8, 8), [0, 1, 0, 1])
    """
    path = check_name(out)
    check_destination(path)
    if not (resume and path.exists()):
        check_writable(path, longest_ending=PARTIAL_RECORD_ENDING)
    if not isinstance(trunk, nn.Module):
        raise InputError(f"trunk is of type {type(trunk).__name__}; expected a torch.nn.Module that takes images")
    check_choice("dtype", dtype, DTYPES)
    refuse_overlap("extract", [path], [images, labels])
    if not resume:
        refuse_foreign(path)
    source = open_batches(images, labels, batch_size=batch_size, key=key)
    with at_work(trunk, device) as torch_device, exact_math(), torch.no_grad():
        runner = TrunkRunner(trunk, torch_device, dtype, mean, std)
        if resume and path.exists() and not partial_path(path).exists():
            _check_finished(path, source, runner)
        else:
            _write_all(path, source, runner, resume, watch)
    return path


def _write_all(
    path: Path, source: ArrayBatches | LoaderBatches, runner: TrunkRunner, resume: bool, watch: Watch | None
) -> None:
    store = Store(path, UnfinishedFile.reopen(path) if resume else None)
    try:
        first_row = store.resume_at(source)
        unwritten: Rows | None = None  # one batch behind: on a GPU the next one is being computed meanwhile
        for num_batches, (first, images, labels) in enumerate(source.batches(first_row, runner.device), 1):
            if first + len(images) <= first_row:
                store.skip(labels)
                continue
            rows = runner.rows(first, images, labels)
            if unwritten is not None:
                store.add(unwritten)
            unwritten = rows
            if watch is not None:
                share = source.share(rows.stop, num_batches)
                watch(Progress(name="extract", share=share, done=rows.stop, unit="samples", seconds=store.seconds))
        if unwritten is not None:
            store.add(unwritten)
        store.finish(source.name)
    finally:
        store.close()


class Store:
    """The unfinished file, behind a thread that writes to it."""

    def __init__(self, path: Path, file: UnfinishedFile | None):
        self.path, self.file = path, file
        self.started_s = time.perf_counter() if file is None else file.started_s
        self.num_earlier = 0 if file is None else file.num_rows
        """Rows that an earlier call wrote."""
        self.num_rows = 0
        self.num_samples: int | None = None
        """Rows that there will be; None if unknown."""
        self.writer = ThreadPoolExecutor(1)
        self.writing: deque[Future[None]] = deque()

    @property
    def seconds(self) -> float:
        """Time so far, with that of the earlier calls whose rows are kept."""
        return time.perf_counter() - self.started_s if self.file is None else self.file.seconds

    def resume_at(self, source: ArrayBatches | LoaderBatches) -> int:
        """The sample ID to start at: that of the last batch that an earlier call wrote, which is computed again."""
        self.num_samples = source.num_samples
        if self.file is None:
            return 0
        if source.num_samples is not None and source.num_samples < self.num_earlier:
            raise self._shorter(source.num_samples)
        if isinstance(source, ArrayBatches) and source.labels is not None:
            self.file.recall_labels(source.labels[: self.file.last_batch])
        return self.file.last_batch

    def _shorter(self, found: int) -> ResumeError:
        return ResumeError(
            f"{self.path}: an earlier call wrote {self.num_earlier} samples; now there are {found} images. Give the "
            f"images of the first call, or {START_ANEW}"
        )

    def skip(self, labels: Tensor | None) -> None:
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
            _check_same_rows(self.file.partial, self.file.read(rows.first, rows.first + known), rows.values[:known])
            self.file.recall_labels(None if labels is None else labels[:known])
        self.num_rows = rows.stop
        if known < len(rows.values):
            new_labels = None if labels is None else labels[known:]
            self.writing.append(self.writer.submit(self.file.append, rows.values[known:], new_labels))
        while len(self.writing) > MAX_UNWRITTEN:
            self.writing.popleft().result()

    def finish(self, source_name: str) -> None:
        while self.writing:
            self.writing.popleft().result()
        if self.num_rows < self.num_earlier:
            raise self._shorter(self.num_rows)
        if self.file is None:
            raise _no_images(source_name)
        self.file.finish()

    def close(self) -> None:
        """Save the rows that are written, so that a later call can go on."""
        self.writer.shutdown(wait=True)
        if self.file is not None:
            self.file.close()


def _check_same_rows(path: Path, before: Tensor, now: Tensor) -> None:
    difference = (before.float() - now.float()).abs().max().item()
    limit = TOLERANCES[dtype_name(before.dtype)] * max(before.float().abs().max().item(), 1e-30)
    if not difference <= limit:
        raise ResumeError(
            f"{path}: a batch of it, computed again, differs by {difference:.3g}; expected at most {limit:.3g}. Give "
            f"the images of the first call, in their order and without random crops or flips, or "
            f"{START_ANEW}"
        )


def _check_finished(path: Path, source: ArrayBatches | LoaderBatches, runner: TrunkRunner) -> None:
    """Refuse a finished file of other work: compare settings, number of samples, labels, and the first batch."""
    work = read_work(path)
    stored = open_features(path, key="features")
    if source.num_samples is not None and source.num_samples != len(stored):
        raise _other_number(path, len(stored), str(source.num_samples))
    batches = source.batches(0, runner.device)
    first, images, labels = next(batches, (0, None, None))
    if images is None:
        raise _no_images(source.name)
    rows = runner.rows(first, images, labels)
    rows.wait()
    check_same_work(path, work, rows.work)
    ids = torch.arange(min(len(rows.values), len(stored)))
    _check_same_rows(path, stored.read(ids), rows.values[: len(ids)])
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


def _no_images(source_name: str) -> DataError:
    return DataError(f"{source_name}: no images came; expected at least one batch. Was it used up already?")
