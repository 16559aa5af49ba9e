"""The functions of the public API: record, open, verify.

features, labels -> record -> OUT.krn -> open -> Recording
                                      -> verify -> report, or the error that says what is wrong
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from krnet.config import check_choice, check_int, check_range, from_dict, parse_size
from krnet.device import pick_device
from krnet.errors import FeatureError, FidelityError, InputError
from krnet.features.feature_source import FeatureSource
from krnet.features.labels import check_labels, stored_labels
from krnet.features.metrics import fidelity
from krnet.features.samples import Samples
from krnet.features.sequences import check_lengths, stored_lengths
from krnet.features.source import open_features
from krnet.features.stats import check_unchanged, digest_of_parts, scan
from krnet.fitting import contents_within, smallest_reaching
from krnet.io import archive
from krnet.io.atomic import AnyPath
from krnet.io.overlap import CHECKPOINT_ENDING, refuse_overlap
from krnet.io.writable import check_writable
from krnet.parts.folder import is_folder_of_parts
from krnet.parts.recording import PartsRecording
from krnet.progress import Watch, closing_watch
from krnet.recorders.base import FIT_NAMES, FLOAT_BYTES, Job, Recorder, default_recorder, get_recorder
from krnet.recorders.checks import check_inputs, check_names, check_package
from krnet.recording import PRECISIONS, Recording
from krnet.recording_file import (
    channel_range,
    check_finished,
    destination,
    read_parts,
)
from krnet.team import refuse_in_team, team
from krnet.train.config import FitConfig
from krnet.train.loop import refuse_foreign, remove_checkpoint


@closing_watch
def record(
    features: Any,
    labels: Any = None,
    *,
    lengths: Any = None,
    recorder: str | None = None,
    preset: str | None = None,
    iterations: int | None = None,
    stop_at_r2: float | None = None,
    target_r2: float | None = None,
    time_budget: float | None = None,
    budget: int | str | None = None,
    room: int | None = None,
    resume: bool = False,
    out: AnyPath | None = None,
    seed: int = 0,
    device: str | None = None,
    head: nn.Module | None = None,
    start: AnyPath | Recording | None = None,
    images: Any = None,
    trunk: nn.Module | None = None,
    key: str | None = None,
    watch: Watch | None = None,
    over_budget: bool = False,
    **settings: Any,
) -> Recording:
    """Record features so that any sample can be replayed by its ID.

    features   tensor, array, memmap, path (.npy .npz .safetensors .h5 .zarr, or a folder of shards), URL (.npy
               .safetensors, or a folder of shards), or anything with len() and [i]
    labels     one integer per sample; the file keeps them. By default the array `labels` of a file that holds it beside
               `features`, as `krnet.extract` writes it
    lengths    lengths of sequences, if the samples are those of sequences that `torch.cat` has joined:
               recording.sequences[i] replays one. By default the array `lengths` of the file of features, if it has one
    recorder   how to store the features. Default: krnet; with a preset: paper; with a start: the one that wrote it
    preset     size of a network of the paper: cifar100, imagenet, ...
    budget     size of the file in bytes, at most, as 12_000_000 or "12MB" (MB = 10^6); the recording is the best that
               fits. Without budget and target_r2, krnet takes one bit per value, a 32nd of float32, and 6 kB
    room       number of samples that the file will hold after it has grown (see start); the budget, given or
               default, is for all of them
    target_r2  R2 to reach with the smallest file, instead of a budget. A few whole fits search for it, each with
               `iterations` or `time_budget`; a recorder whose size the settings fix is fitted once
    stop_at_r2 end a network's fit as soon as the R2 over all features reaches this. It saves time, not bytes
    out        file to write, which replaces an existing one when it is complete; by default a temporary file that
               lives as long as the Recording
    resume     continue from a checkpoint beside `out`; a finished file is opened and returned. A search for target_r2
               keeps no checkpoint and starts again
    head       a frozen module; the fit also minimises the error of its output (L_kr2, weight `gamma`)
    start      an earlier recording, whose samples come first in `features`. Recorders that grow (krnet, pca, quantized,
               transform, pq) leave its samples unchanged; paper starts from its network; images encodes its images
               again only if the budget requires it
    images, trunk  for recorder images: the images that the features were made of, and the module that made them
    key        name of the array, for a file that holds several
    watch      called with a Progress every few steps; `krnet.show_progress` draws a bar
    over_budget  if no file meets the budget, write the smallest one instead of raising an error

    Other settings are those of the recorder and, if it trains a network, those of FitConfig (batch_size, schedule,
    lr, ...); `krnet record --recorder NAME --list-settings` prints them.

    >>> recording = krnet.record(torch.rand(40, 4, 3, 3), recorder="pca", budget="10kB", out="features.krn")
    >>> recording[5].shape
    torch.Size([4, 3, 3])
    """
    earlier = _open_start(start)
    chosen = get_recorder(recorder or default_recorder(preset, earlier))
    check_package(chosen)
    stops = {"iterations": iterations, "stop_at_r2": stop_at_r2, "time_budget": time_budget}
    fit_settings = {name: value for name, value in settings.items() if name in FIT_NAMES}
    fit_settings |= {name: value for name, value in stops.items() if value is not None}
    check_names(chosen, [*settings, *fit_settings])
    check_inputs(chosen, {"preset": preset, "head": head, "start": earlier, "images": images, "trunk": trunk})
    preset_fit = chosen.preset_fit(preset) if fit_settings.get("schedule") == "paper" else {}
    budget_bytes = None if budget is None else parse_size(budget)
    max_bytes = None if over_budget else budget_bytes
    recorder_settings = {name: value for name, value in settings.items() if name not in FIT_NAMES}
    fit = from_dict(FitConfig, {**preset_fit, "seed": seed, "device": device, **fit_settings})
    if target_r2 is not None:
        _check_target(target_r2, fit, budget_bytes)
    if room is not None:
        check_int("room", room, 1)
    _check_team(chosen, {"start": start, "target_r2": target_r2}, out)
    keeper, path = destination(out)
    refuse_overlap("record", [path], [features, labels, lengths, images, earlier])
    if chosen.trains and out is not None and not resume:
        refuse_foreign(_checkpoint_path(path))
    source, samples = _open_samples(features, labels, lengths, key)
    target_bytes = budget_bytes
    if target_bytes is None and earlier is None and target_r2 is None:  # what grows keeps its step, and needs none
        num_planned = max(len(source), room or 0)
        target_bytes = chosen.default_budget(num_planned * prod(source.shape), recorder_settings)
    if room is not None:
        _check_room(room, len(source), chosen, target_bytes)
    torch_device = pick_device(fit.device)
    if resume and path.exists():
        # Only features from a file must be equal to the bit: those in memory may come from a GPU, which may have
        # rounded them differently in an earlier run.
        digest = scan(source, watch=watch).digest if isinstance(features, str | os.PathLike) else None
        compared = None if over_budget else target_bytes
        check_finished(open(path), samples, chosen, recorder_settings, digest, compared, max_bytes, target_r2)
        return open(path, torch_device, trunk=trunk)
    if out is not None:
        _check_space(path, chosen, source, recorder_settings, target_bytes)
    stats = scan(source, watch=watch)
    check_unchanged(source, stats.digest)
    job = Job(
        source=source,
        samples=samples,
        stats=stats,
        fit=fit,
        device=torch_device,
        settings=recorder_settings,
        preset=preset,
        head=head,
        start=earlier,
        images=images,
        trunk=trunk,
        room=room,
        checkpoint=None if out is None else _checkpoint_path(path),
        resume=resume,
        watch=watch,
    )
    contents = (
        contents_within(job, chosen, path, target_bytes, max_bytes)
        if target_r2 is None
        else smallest_reaching(job, chosen, target_r2)
    )
    if contents is None:  # the first process of the team writes
        team().wait()
        return open(path, torch_device)
    tensors, metadata = contents
    metadata["fit"]["target_r2"] = target_r2
    archive.write(path, tensors, metadata)
    remove_checkpoint(_checkpoint_path(path))
    team().wait()
    return Recording(archive.open_archive(path), job.device, keep=keeper, trunk=trunk)


def _open_start(start: AnyPath | Recording | None) -> Recording | None:
    found = open(start) if isinstance(start, str | os.PathLike) else start
    if isinstance(found, PartsRecording):
        raise InputError(
            f"{found.path}: is a folder of parts; expected a single recording to start from. Give that of a fit, as "
            f"{found.model.path} is"
        )
    return found


def _open_samples(features: Any, labels: Any, lengths: Any, key: str | None) -> tuple[FeatureSource, Samples]:
    """The features, and their labels and lengths: those that are given, else those that lie beside the features."""
    source = open_features(features, key=key)
    if labels is None:
        labels = stored_labels(features, key, len(source))
    if lengths is None:
        lengths = stored_lengths(features, key, len(source))
    sequence_lengths = check_lengths(lengths, len(source))
    return source, Samples(len(source), source.shape, check_labels(labels, len(source)), sequence_lengths)


def _check_target(target_r2: float, fit: FitConfig, budget: int | None) -> None:
    """Refuse what keeps a search for the smallest file from its target."""
    check_range("target_r2", target_r2, -inf, 1)
    if fit.stop_at_r2 is not None and fit.stop_at_r2 < target_r2:
        raise InputError(
            f"target_r2 is {target_r2} and stop_at_r2 is {fit.stop_at_r2}: every fit would end below the target. "
            f"Raise --stop-at-r2 (in Python, stop_at_r2), or leave it out"
        )
    if budget is not None:
        raise InputError(
            "--budget and --target-r2 (in Python, budget and target_r2) are both given; record takes one of them: "
            "the best file of a size, or the smallest that is good enough. Leave one out"
        )


def _check_space(
    path: Path, recorder: Recorder, source: FeatureSource, settings: Mapping[str, Any], budget: int | None
) -> None:
    """Refuse a file that cannot be written, or that the disk has no room for, before the fit."""
    planned_bytes = recorder.least_bytes(len(source), source.shape, settings)
    if budget is not None:  # a larger budget than the features take is not used up
        planned_bytes = max(planned_bytes, min(budget, FLOAT_BYTES * len(source) * prod(source.shape)))
    check_writable(path, num_bytes=planned_bytes, longest_ending=CHECKPOINT_ENDING if recorder.trains else "")


def _check_team(recorder: Recorder, given: Mapping[str, Any], out: AnyPath | None) -> None:
    """Refuse what several processes do not do together: they share the batches of one fit."""
    if not recorder.trains:
        refuse_in_team(f"recorder {recorder.name}, which has no batches to share, is fitted")
    for name, value in given.items():
        if value is not None:
            refuse_in_team(f"{name} is given, and a fit with it is made")
    if out is None:
        refuse_in_team("no file to write is given, and a recording is made")


def _check_room(room: int, num_samples: int, recorder: Recorder, budget: int | None) -> None:
    """Refuse room for fewer samples than there are, or where nothing is planned: without a budget, or growth."""
    if room < num_samples:
        raise InputError(
            f"room is {room}, fewer than the {num_samples} samples there are; expected as many as the file is to hold "
            f"when it has grown. Raise it, or leave it out"
        )
    if budget is None or not recorder.grows:
        raise InputError(
            f"room is {room}, which says what a budget is for where a recording is to grow; "
            + (f"recorder {recorder.name} does not" if not recorder.grows else "there is no budget")
            + ". Leave it out"
        )


def open(
    path: AnyPath,
    device: str | torch.device | None = "cpu",
    precision: str = "exact",
    *,
    trunk: nn.Module | None = None,
    max_bytes: int | str | None = None,
) -> Recording:
    """Open a recording: a file, a URL whose content is read by ranges, or a folder that `krnet.encode` wrote.

    device     where to replay; None takes the GPU if there is one
    precision  exact (full fp32) or fast (bf16 on a GPU)
    trunk      for a recording of images (recorder images): the module that makes features of them
    max_bytes  largest memory that the file may take, such as "2GB"; by default 512 MB, or 512 times its size if that
               is more: far above what a file that krnet wrote needs

    >>> len(krnet.open("features.krn"))
    40
    """
    check_choice("precision", precision, PRECISIONS)
    limit = None if max_bytes is None else parse_size(max_bytes, "max_bytes")
    if is_folder_of_parts(path) and trunk is None:
        return PartsRecording(path, pick_device(device), precision, limit)
    return Recording(archive.open_archive(path, limit), pick_device(device), precision, trunk=trunk)


@closing_watch
def verify(
    path: AnyPath,
    against: Any = None,
    *,
    device: str | None = "cpu",
    key: str | None = None,
    trunk: nn.Module | None = None,
    max_bytes: int | str | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Check the structure of a file, every checksum and the stored probe; with `against`, its error as well.

    against    the features that were recorded, followed by those that were appended; replays are compared with them
    key        name of the array, for a file of features that holds several
    max_bytes  as for krnet.open
    watch      called with a Progress every few samples; `krnet.show_progress` draws a bar

    The probe of a recording of images needs its trunk; without one, `probe_error` is None.

    >>> krnet.verify("features.krn")["ok"]
    True
    """
    recording = open(path, device, trunk=trunk, max_bytes=max_bytes)
    report: dict[str, Any] = {
        "path": str(path), "ok": True, "bytes": recording.nbytes, **recording.check(), "mse": None, "r2": None,
        "same_features": None,
    }  # fmt: skip
    if against is None:
        return report
    stated = recording.metadata
    source, parts = open_features(against, key=key), read_parts(stated, recording.path)
    if (len(source), source.shape) != (len(recording), recording.shape):
        raise FeatureError(
            f"{source.name}: {len(source)} samples of {source.shape}; {path} holds {len(recording)} of "
            f"{recording.shape}" + (". Give the features it was recorded from" if len(parts) == 1 else _grown(parts))
        )
    metrics = stated["metrics"]
    stats = scan(source, watch=watch)
    digest = stats.digest
    if len(parts) > 1:  # errors are normalised by the range of the first samples, as when the others were appended
        low, high = channel_range(recording)
        stats, digest = replace(stats, low=low, high=high), digest_of_parts(source, parts)
    measured = fidelity(recording.replay, source, stats, watch)
    same = digest == stated["features"]
    stored = metrics["mse"]
    if same and not metrics.get("estimated") and abs(measured.mse - stored) > 0.01 * stored + 1e-9:
        raise FidelityError(
            f"{path}: MSE {measured.mse:.3g} on the features it was recorded from; expected {stored:.3g}, as it "
            f"was when recorded. Record again"
        )
    return {**report, "mse": measured.mse, "r2": measured.r2, "same_features": same}


def _grown(parts: Sequence[int]) -> str:
    """Say which features a recording that has grown is compared with."""
    return (
        f": it began with {parts[0]}, and {' and '.join(map(str, parts[1:]))} were appended. Give the features of all "
        f"of them as one array, in this order, as numpy.concatenate makes it"
    )


def _checkpoint_path(path: Path) -> Path:
    return path.with_name(path.name + CHECKPOINT_ENDING)
