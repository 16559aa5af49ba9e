"""Run images through a network and write its feature maps to a file, or to a folder of shards, in bounded memory.

    images, labels -> batches -> trunk -> rows -> NAME.safetensors: `features` (N, *shape), `labels` (N,)
                      image_batches.py  trunk.py     file_output.py
                                            rows -> DIR/: shards of them, and index.json
                                                    shards/output.py

While a GPU computes a batch, the rows of the one before are copied from it, and a thread writes earlier rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from krnet.config import check_choice, parse_size
from krnet.device import exact_math
from krnet.errors import InputError, SettingError
from krnet.features.feature_file import DTYPES, check_destination, partial_path, refuse_foreign
from krnet.features.file_output import FileOutput, check_finished
from krnet.features.image_batches import Batches, open_batches
from krnet.features.shards.output import ShardOutput
from krnet.features.shards.plan import Plan
from krnet.features.trunk import Rows, TrunkRunner, at_work
from krnet.io.atomic import AnyPath
from krnet.io.overlap import PARTIAL_RECORD_ENDING, refuse_overlap
from krnet.io.places import is_url, place
from krnet.io.writable import check_name, check_writable
from krnet.progress import Progress, Watch, closing_watch

SHARD_SIZE = "256MB"  # what object stores read and write well; labels and headers fit beside it


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
    shard_size: int | str = SHARD_SIZE,
    first_id: int | str = 0,
    share: tuple[int, int] = (0, 1),
    watch: Watch | None = None,
) -> Path:
    """Compute the features of images with a network, and write them to a file, or to a folder of shards.

    `krnet.record` takes both. The images pass through the network batch by batch, and each batch is written as it
    comes: memory stays bounded however many images there are. The file appears under its name when it is complete. If
    the call is interrupted or killed, call it again with resume=True: it goes on where it stopped.

    A folder holds many files of bounded size, and is for features that are too many for one file, or for one machine:
    samples can be added later, and several processes can write at once, each its share.

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
                existing NAME.safetensors. Or a folder of shards, "DIR/" or a URL: files
                shard-FIRST-LAST.safetensors, and index.json
    batch_size  images that pass through the network at once, by default 256; a DataLoader has its own
    dtype       type of the stored values: float32, float16 or bfloat16
    mean, std   per channel or one number; the network gets (image - mean) / std. uint8 images are divided by 255 first
    device      where to compute; by default the GPU that the trunk is on, else the first GPU, else the CPU
    resume      go on where an earlier call with the same arguments stopped; a finished file is checked and returned
    key         name of the array, for a file of images that holds several
    shard_size  size of a shard, at most, as 256_000_000 or "256MB"; a kill loses at most what was computed for one. Two
                shards are in memory at a time
    first_id    sample ID of the first image in a folder of shards: with "end", the first that is not there yet
    share       (k, n): write part k of n, counted from 0, of all shards. Give n processes the same call, each with its
                own k; no process waits for another. Values and shards are the same for any n. A process that finishes
                merges the index; the folder can be read when all parts are there
    watch       called with a Progress after each batch; `krnet.show_progress` draws a bar

    Returns the path of the file or folder; a URL as such, which krnet.record takes.

    >>> import krnet, torch
    >>> trunk = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, stride=4), torch.nn.ReLU())
    >>> images = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8)
    >>> path = krnet.extract(trunk, images, labels=[0, 1] * 50, out="features.safetensors")
    >>> recording = krnet.record(path, recorder="pca", budget="20kB")  # the labels come from the file
    >>> recording.shape, recording.labels[:4].tolist()
    ((8, 8, 8), [0, 1, 0, 1])
    >>> folder = krnet.extract(trunk, images, out="shards/", shard_size="100kB")
    >>> more = krnet.extract(trunk, images[:20], out="shards/", first_id="end")
    >>> len(krnet.record("shards/", recorder="raw"))
    120
    """
    plan = _plan(out, shard_size, first_id, share, resume)
    path = cast(Path, place(out)) if is_url(out) else check_name(out)
    if plan is None:
        check_destination(path)
    if plan is None and not (resume and path.exists()):
        check_writable(path, longest_ending=PARTIAL_RECORD_ENDING)
    if not isinstance(trunk, nn.Module):
        raise InputError(f"trunk is of type {type(trunk).__name__}; expected a torch.nn.Module that takes images")
    check_choice("dtype", dtype, DTYPES)
    if not is_url(out):
        refuse_overlap("extract" if plan is None else "extract shards", [path], [images, labels])
    if plan is None and not resume:
        refuse_foreign(path)
    source = open_batches(images, labels, batch_size=batch_size, key=key)
    with at_work(trunk, device) as torch_device, exact_math(), torch.no_grad():
        runner = TrunkRunner(trunk, torch_device, dtype, mean, std)
        if plan is not None:
            _write_all(ShardOutput(plan), source, runner, watch)
        elif resume and path.exists() and not partial_path(path).exists():
            check_finished(path, source, runner)
        else:
            _write_all(FileOutput(path, resume), source, runner, watch)
    return path


def _plan(
    out: AnyPath, shard_size: int | str, first_id: int | str, share: tuple[int, int], resume: bool
) -> Plan | None:
    """What to write to a folder of shards; None if `out` is to be one file."""
    if is_folder(out):
        return Plan(place(out), parse_size(shard_size, "shard_size"), first_id, share, resume)
    given = {"shard_size": shard_size != SHARD_SIZE, "first_id": first_id != 0, "share": tuple(share) != (0, 1)}
    for name in (name for name, is_given in given.items() if is_given):
        raise SettingError(
            f"{name} is given, which is for a folder of shards, and the output is the file {os.fspath(out)}. Leave it "
            f"out, or give a folder: {os.path.splitext(os.fspath(out))[0]}/"
        )
    return None


def is_folder(out: AnyPath) -> bool:
    """Whether the name of an output is that of a folder of shards: it ends in a slash, has no ending, or is one."""
    text = os.fspath(out)
    if is_url(text):
        if place(text).suffix.lower() == ".safetensors":
            raise InputError(
                f"{place(text)}: is the URL of a file; expected that of a folder of shards: s3://bucket/dir/"
            )
        return True
    suffix = Path(text).suffix.lower()
    return text.endswith(os.sep) or not suffix or (suffix != ".safetensors" and Path(text).is_dir())


class Output(Protocol):
    """Where the rows go: a file (file_output.py), or a folder of shards (shards/output.py)."""

    @property
    def seconds(self) -> float: ...
    def begin(self, source: Batches, runner: TrunkRunner) -> int: ...
    def needs(self, first: int, stop: int) -> bool: ...
    def share(self, source: Batches, stop: int, num_batches: int) -> float | None: ...
    def skip(self, first: int, num_samples: int, labels: Tensor | None) -> None: ...
    def add(self, rows: Rows) -> None: ...
    def finish(self, source_name: str, last: Rows | None) -> None: ...
    def close(self) -> None: ...


def _write_all(output: Output, source: Batches, runner: TrunkRunner, watch: Watch | None) -> None:
    try:
        first_row = output.begin(source, runner)
        unwritten: Rows | None = None  # one batch behind: on a GPU the next one is being computed meanwhile
        for num_batches, batch in enumerate(source.batches(first_row, runner.device, output.needs), 1):
            first, images, labels = batch
            if not output.needs(first, first + len(images)):
                output.skip(first, len(images), labels)
                continue
            rows = runner.rows(first, images, labels)
            if unwritten is not None:
                output.add(unwritten)
            unwritten = rows
            if watch is not None:
                share = output.share(source, rows.stop, num_batches)
                watch(Progress(name="extract", share=share, done=rows.stop, unit="samples", seconds=output.seconds))
        output.finish(source.name, unwritten)
    finally:
        output.close()
