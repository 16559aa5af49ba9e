"""Add samples to a recording whose features are no longer at hand.

    recording's replays, then new features -> Recorder.fit -> old samples bit for bit, and the new ones -> the file
    what the file says of its samples + what is measured on the new ones -> R2 of all samples

Recorders grow as with `krnet.record(start=...)`, see recorders/growth.py: replays stand in for the old features. R2
refers to the range that each channel has in the recording, as the R2 that the file states for its old samples does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from krnet.config import from_dict, parse_size
from krnet.device import dtype_name
from krnet.errors import FeatureError, InputError, LabelError, SettingError
from krnet.features.feature_source import ExtendedSource, FeatureSource
from krnet.features.labels import check_labels
from krnet.features.metrics import Moments, fidelity
from krnet.features.samples import Samples
from krnet.features.sequences import joined_lengths, refuse_lack
from krnet.features.stats import chain_digests, scan
from krnet.io import archive
from krnet.progress import Watch
from krnet.recorders.base import FIT_NAMES, Earlier, Job, Recorder, get_recorder, recorder_names
from krnet.recorders.checks import check_inputs, check_names
from krnet.recorders.sizes import overhead_bytes
from krnet.recording_file import (
    Decode,
    FileContents,
    channel_range,
    check_same_features,
    check_size,
    file_contents,
    fit,
    read_parts,
    replays_of,
)
from krnet.train.config import FitConfig

SURE_R2 = 1 - 1e-9  # up to this R2, the old features' variance is mse / (1 - r2); above it, their replays' is used
SMALL_EXCESS = 0.01  # share of the file's size
HEADER_MARGIN_BYTES = 64  # by how much the headers of two files may differ that hold the same samples


@dataclass(frozen=True)
class Addition:
    """What is added to a recording, and how it is fitted."""

    features: FeatureSource
    labels: Any = None
    lengths: Tensor | None = None
    """Of sequences, checked."""
    budget: int | str | None = None
    head: nn.Module | None = None
    watch: Watch | None = None
    settings: Mapping[str, Any] | None = None
    """Settings of the fit, and of the recorder where new samples may differ from old ones."""


def grown_contents(
    start: Earlier, metadata: Mapping[str, Any], added: Addition, device: torch.device, path: Path
) -> FileContents:
    """Tensors and metadata of the file that holds the samples of `start`, which has this metadata, and those added."""
    recorder = get_recorder(start.recorder)
    job = _job(recorder, start, metadata, added, device)
    describe = partial(_describe_features, metadata=metadata)
    # A budget that was given with room is still the plan.
    planned = {name: metadata["fit"][name] for name in ("budget", "room") if "room" in metadata["fit"]}

    def make(budget: int | None) -> FileContents:
        chosen = {} if budget is None else recorder.for_budget(job, budget)
        fitted = replace(job, settings={**chosen, **job.settings})
        tensors, made = file_contents(fitted, recorder, fit(recorder, fitted), describe)
        made["fit"] |= planned
        return tensors, made

    if added.budget is not None:
        limit = parse_size(added.budget)
        found = make(limit)
        check_size(path, found[1], archive.file_bytes(*found), limit, recorder)
        return found
    found, limit = make(None), default_budget(start, metadata, job.samples)
    size_bytes = archive.file_bytes(*found)
    if size_bytes <= limit:
        return found
    # A recorder compares an upper bound of the file's size with its budget; this file shows how far off that is.
    own = [tensor for name, tensor in found[0].items() if name != "labels" and not name.startswith("probe.")]
    bound_bytes = overhead_bytes(job, len(own), found[1]["settings"]) + sum(tensor.nbytes for tensor in own)
    smaller = make(max(1, limit + bound_bytes - size_bytes - HEADER_MARGIN_BYTES))
    # A few small samples may not fit however coarse they are: that would spoil them and save next to nothing.
    spoilt = archive.file_bytes(*smaller) > limit and size_bytes <= (1 + SMALL_EXCESS) * limit
    return found if spoilt else smaller


def default_budget(start: Earlier, metadata: Mapping[str, Any], samples: Samples) -> int:
    """Largest size of the grown file: as many bytes a sample as `start` has, or as its budget planned with `room`.

    Labels are counted apart: those of old samples take more bytes once the samples are no longer sorted by class.
    """
    num_held, num_all = len(start), samples.num_samples
    room, budget = (metadata["fit"].get(name) for name in ("room", "budget"))
    held_bytes: int = start.info()["bytes"]
    if room is not None and budget is not None:
        if num_all >= room:
            return int(budget * num_all / room)
        return held_bytes + int((budget - held_bytes) * (num_all - num_held) / (room - num_held))
    held = Samples(num_held, start.shape, start.labels, start.lengths)
    label_bytes, held_label_bytes = (
        len(str(described["classes"])) + sum(tensor.nbytes for tensor in tensors.values())
        for described, tensors in (samples.describe(), held.describe())
    )
    return int((held_bytes - held_label_bytes) * num_all / num_held) + label_bytes


def _job(recorder: Recorder, start: Earlier, metadata: Mapping[str, Any], added: Addition, device: torch.device) -> Job:
    """The job of all samples; its features begin with the replays of `start`."""
    new, settings = added.features, dict(added.settings or {})
    _check(recorder, start, metadata, added)
    new_labels = check_labels(added.labels, len(new))
    labels = None if start.labels is None or new_labels is None else torch.cat([start.labels, new_labels])
    replays = replays_of(start.replay, f"replays of {start.path}", len(start), start.shape)
    low, high = channel_range(start)
    # Coded without training, unless the caller gives a length or a head; other settings are those of the recording.
    kept = {name: value for name, value in metadata["fit"].items() if name in FIT_NAMES}
    given = {name: value for name, value in settings.items() if name in FIT_NAMES}
    has_length = bool(given.keys() & {"iterations", "time_budget"})
    if has_length:
        kept |= {"iterations": None, "time_budget": None}
    return Job(
        source=ExtendedSource(replays, new),
        samples=Samples(len(start) + len(new), start.shape, labels, joined_lengths(start.lengths, added.lengths)),
        stats=replace(scan(new, watch=added.watch), low=low, high=high),
        fit=from_dict(FitConfig, {**kept, **given, "stop_at_r2": None, "device": str(device)}),
        device=device,
        settings={name: value for name, value in settings.items() if name not in FIT_NAMES},
        head=added.head,
        start=start,
        frozen=added.head is None and not has_length,
        watch=added.watch,
    )


def _check(recorder: Recorder, start: Earlier, metadata: Mapping[str, Any], added: Addition) -> None:
    """Refuse a recorder that cannot grow, and features unlike those of the recording."""
    path, new, names = start.path, added.features, list(added.settings or {})
    if not recorder.grows:
        growing = [name for name in recorder_names() if get_recorder(name).grows]
        raise InputError(
            f"{path}: written by recorder {recorder.name}, which cannot take up more samples; those that can are "
            f"{', '.join(growing)}. Record all samples anew with krnet.record"
        )
    for name, advice in {
        "device": "open the recording on another device, as with recording.to('cuda')",
        "target_r2": "give a budget, or record with --start (in Python, start=), which takes all features",
        "stop_at_r2": "give --iterations or --time-budget (in Python, iterations or time_budget)",
    }.items():
        if name in names:
            raise SettingError(f"{name} is given, which append does not take; {advice}")
    check_inputs(recorder, {"head": added.head})
    check_names(recorder, names)
    if new.shape != start.shape:
        raise FeatureError(f"{new.name}: samples of {new.shape}; {path} holds samples of {start.shape}. Give such ones")
    dtype = dtype_name(new.dtype)
    if metadata.get("feature_dtype", dtype) != dtype:
        raise FeatureError(
            f"{new.name}: values of type {dtype}; {path} was recorded from {metadata['feature_dtype']}. Convert them "
            f"to {metadata['feature_dtype']}"
        )
    refuse_lack(start.lengths, added.lengths, path)
    if (start.labels is None) != (added.labels is None):
        raise LabelError(
            f"{path}: has no labels, and labels are given. Leave them out, or record all samples anew with labels"
            if start.labels is None
            else f"{path}: has labels, and none are given for the new samples. Give one for each"
        )


def _describe_features(job: Job, decode: Decode, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the grown file says of its features: that of the recording, which has this metadata, with the new ones."""
    source, start = job.source, job.start
    assert isinstance(source, ExtendedSource) and start is not None, "nothing to append to"
    stated, parts, num_held = metadata["metrics"], read_parts(metadata, start.path), len(source.held)

    def decode_new(ids: Tensor) -> Tensor:
        return decode(ids + num_held)

    measured = fidelity(decode_new, source.new, job.stats, job.watch)
    check_same_features(source.new, job.stats, measured)
    # Means are those of replays, for old and new samples alike: what a recorder shifts, it shifts in both.
    new_replays = replays_of(decode_new, source.new.name, len(source.new), source.shape)
    replays = [replace(scan(part), low=job.stats.low, high=job.stats.high) for part in (source.held, new_replays)]
    means = [float(stats.normalised_mean.mean()) for stats in replays]
    held_variance = stated["mse"] / (1 - stated["r2"]) if stated["r2"] <= SURE_R2 else replays[0].variance
    held = Moments(replays[0].count, means[0], held_variance, stated["mse"])
    new = Moments(job.stats.count, means[1], job.stats.variance, measured.mse)
    both = held + new
    zero_ratio = (held.count * stated["zero_ratio"] + new.count * job.stats.zero_ratio) / both.count
    metrics = {"mse": both.mse, "r2": both.r2, "zero_ratio": zero_ratio}
    # A recording that was grown with all features at hand states its error in their range, which it does not hold.
    if stated.get("estimated") or (len(parts) == 1 and metadata["fit"].get("start") is not None):
        metrics["estimated"] = True
    return {
        "features": chain_digests(metadata["features"], job.stats.digest),
        "feature_bytes": metadata["feature_bytes"] + source.new.nbytes,
        "feature_dtype": dtype_name(source.new.dtype),
        "metrics": metrics,
        "parts": [*parts, len(source.new)],
    }
