"""The contents of a recording file: made from a fitted recorder, or compared with what a caller asks for.

Job, Content    -> file_contents  -> tensors and metadata of the file, with the error of its replays
a finished file -> check_finished -> refused unless samples, settings and budget are those of the call
OUT, or nothing -> destination    -> the path to write to
an opened file  -> check_fields   -> refused unless its metadata are those of a recording
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from krnet.device import dtype_name
from krnet.errors import (
    BudgetError,
    ChangedFeaturesError,
    FeatureError,
    MissingTensorError,
    NonFiniteLossError,
    NotARecordingError,
    ProbeError,
    RecordingError,
    ResumeError,
)
from krnet.features.feature_source import FeatureSource
from krnet.features.metrics import Fidelity, fidelity
from krnet.features.samples import Samples
from krnet.features.stats import FeatureStats, changed, check_unchanged, metric_range, normalise, scan
from krnet.io import archive
from krnet.io.atomic import AnyPath, check_place
from krnet.io.header import RESTORE
from krnet.io.ledger import package_version
from krnet.io.stored_rows import MadeRows
from krnet.io.temporary import TemporaryFolder
from krnet.io.writable import check_name
from krnet.recorders.base import PROBE_SAMPLES, PROBE_VALUES, Content, Earlier, Job, Recorder

REPLACE = "leave out --resume (in Python, resume=True) to replace it"
NONE_GIVEN = torch.zeros(0)
PROBE_TOLERANCE = 1e-4  # relative to the largest value; devices and thread counts differ by about 1e-6
MAX_MSE = 2.0**62  # a header holds no larger number (recording.py)
NUMBER = (int, float)
# Metadata that `info` and `verify` need, with their types; Samples and the recorder check what they need themselves.
FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "settings": dict, "fit": dict, "features": str, "feature_bytes": int, "iterations": int, "stopped_by": str,
    "metrics.mse": NUMBER, "metrics.r2": NUMBER, "metrics.zero_ratio": NUMBER, "times.fit_seconds": NUMBER,
    "versions": dict,
}  # fmt: skip
FIELD_MINIMA = {"feature_bytes": 1, "iterations": 0}

Decode = Callable[[Tensor], Tensor]  # IDs (B,) -> features (B, *shape)
FileContents = tuple[dict[str, Tensor | MadeRows], dict[str, Any]]  # tensors, metadata


def destination(out: AnyPath | None) -> tuple[object, Path]:
    """Return (None, path), refused now if it cannot be written; without `out`, a temporary path and its keeper.

    The temporary folder is removed when its keeper is garbage-collected.
    """
    if out is not None:
        path = check_name(out)
        check_place(path)
        return None, path
    keeper = TemporaryFolder()
    return keeper, keeper.path / "recording.krn"


def check_finished(
    recording: Earlier,
    samples: Samples,
    recorder: Recorder,
    settings: Mapping[str, Any],
    digest: str | None,
    budget: int | None,
    max_bytes: int | None,
    target_r2: float | None,
) -> None:
    """Refuse a finished file of other samples or settings.

    digest     that of the features; None to ignore them
    budget     the budget, given or default, that the file must have been made for; None to ignore it
    max_bytes  the largest size the file may have; None for any. A default budget is an aim, and no limit
    target_r2  the R2 whose smallest file was searched for; None if it was not
    """
    path, info = recording.path, recording.info()
    found = {"recorder": info["recorder"], "samples": len(recording), "shape": recording.shape}
    expected = {"recorder": recorder.name, "samples": samples.num_samples, "shape": samples.shape}
    for name in sorted(settings.keys() & info["settings"].keys()):
        found[name], expected[name] = info["settings"][name], json.loads(json.dumps(settings[name]))
    if "target_r2" in info["fit"] and "stop_at_r2" in info["fit"]:  # in older files target_r2 may mean stop_at_r2
        found["target_r2"], expected["target_r2"] = info["fit"]["target_r2"], target_r2
    if budget is not None and info["fit"].get("budget") is not None:
        found["budget"], expected["budget"] = info["fit"]["budget"], budget
    pairs = {"labels": (samples.labels, recording.labels), "lengths": (samples.lengths, recording.lengths)}
    for name, pair in pairs.items():
        if not torch.equal(*(NONE_GIVEN if values is None else values for values in pair)):
            found[name], expected[name] = "others", "as given"
    if digest is not None:
        found["features"], expected["features"] = archive.open_archive(path).metadata["features"], digest
    for name, value in expected.items():
        if found[name] != value:
            if name == "budget" and max_bytes is None:
                raise ResumeError(
                    f"{path}: a finished recording, made for a budget of {found[name]} bytes. No budget is given now, "
                    f"and the default for these features is {value}. Give --budget {found[name]} (in Python, budget=), "
                    f"choose another output, or {REPLACE}"
                )
            raise ResumeError(
                f"{path}: a finished recording, {name} {found[name]}; this one is to have {name} {value}. "
                f"Choose another output, or {REPLACE}"
            )
    if max_bytes is not None and info["bytes"] > max_bytes:
        raise ResumeError(
            f"{path}: a finished recording of {info['bytes']} bytes; the budget is {max_bytes}. Choose another "
            f"output, or {REPLACE}"
        )


def check_size(path: Path, metadata: Mapping[str, Any], found: int, budget: int, recorder: Recorder) -> None:
    """Refuse a file that is larger than its budget."""
    if found > budget:
        settings = recorder.settings_text(metadata["settings"])
        grown = metadata["fit"]["start"] is not None
        error = BudgetError(
            f"{path}: takes {found} bytes with recorder {recorder.name} ({settings}), the smallest it found for "
            f"these features and settings; the budget is {budget}. Nothing was written. Raise the budget to {found} "
            + (
                "bytes, or record all samples anew; a file that is to grow keeps to a budget if the first recording is "
                "made with room (--room) for as many samples as it will hold"
                if grown
                else "bytes, leave out settings of your own, or take another recorder"
            )
        )
        error.needed = found
        raise error


def fit(recorder: Recorder, job: Job) -> Content:
    """Fit; features that were changed meanwhile are refused as such, before odd values lead to other errors."""
    try:
        content = recorder.fit(job)
    except ChangedFeaturesError:
        raise
    except Exception:
        check_unchanged(job.source, job.stats.digest)
        raise
    check_unchanged(job.source, job.stats.digest)
    return content


def check_same_features(source: FeatureSource, stats: FeatureStats, measured: Fidelity) -> None:
    """Refuse features that are others after the fit than before: neither digest nor R2 would be true of them."""
    check_unchanged(source, stats.digest)
    if source.is_fixed and measured.digest != stats.digest:
        raise changed(source, "other values were read after the fit than before")


def describe_features(job: Job, decode: Decode) -> dict[str, Any]:
    """What the metadata say of the features, with the error of their replays."""
    measured = fidelity(decode, job.source, job.stats, job.watch)
    check_same_features(job.source, job.stats, measured)
    return {
        "features": job.stats.digest,
        "feature_bytes": job.source.nbytes,
        "feature_dtype": dtype_name(job.source.dtype),
        "metrics": {"mse": measured.mse, "r2": measured.r2, "zero_ratio": job.stats.zero_ratio},
    }


def check_fields(opened: archive.Archive) -> None:
    """Refuse metadata that lacks a field or has a value that no recording has."""
    for field, kind in FIELD_TYPES.items():
        value: Any = opened.metadata
        for name in field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        is_valid = isinstance(value, kind) and not isinstance(value, bool)
        if is_valid and isinstance(value, NUMBER):
            is_valid = abs(value) < 2**63  # JSON may hold integers that are too large for a float
        if is_valid and field in FIELD_MINIMA:
            is_valid = FIELD_MINIMA[field] <= value < 2**63
        if not is_valid:
            raise NotARecordingError(
                f"{opened.path}: metadata {field!r} is {value!r:.99}; expected another value. {RESTORE}"
            )


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Errors begin with the path of the file: what decodes its tensors, such as a recorder, does not know it."""
    try:
        yield
    except RecordingError as error:
        if str(error).startswith(str(path)):
            raise
        raise type(error)(f"{path}: {error}") from error


def read_parts(metadata: Mapping[str, Any], path: Path) -> list[int]:
    """Numbers of samples that a recording began with and that were appended to it, call by call."""
    parts, num_samples = metadata.get("parts"), metadata["num_samples"]
    if parts is None:
        return [num_samples]
    valid = isinstance(parts, list) and all(type(size) is int and size > 0 for size in parts)
    if not valid or sum(parts) != num_samples:
        raise NotARecordingError(f"{path}: parts {parts!r:.99}; expected those of {num_samples} samples. {RESTORE}")
    return list(parts)


def file_contents(
    job: Job,
    recorder: Recorder,
    content: Content,
    describe: Callable[[Job, Decode], dict[str, Any]] = describe_features,
) -> FileContents:
    """Replay what a recorder has fitted, measure the error, and return the tensors and the metadata of the file."""
    replayer = recorder.replay(job.samples, content.settings, content, job.device)
    replayer.trunk = job.trunk
    described = describe(job, replayer.decode)
    metrics = described["metrics"]
    if not isfinite(metrics["mse"]):
        raise NonFiniteLossError("the fitted recorder decodes to NaN or infinity; nothing was written. Lower lr")
    if metrics["mse"] >= MAX_MSE:
        raise FeatureError(
            f"{job.source.name}: replays have an MSE of {metrics['mse']:.3g}, where the range of each channel is 1; "
            f"nothing was written. Leave out samples with values far outside the range of the others, or record anew"
        )
    probe = torch.linspace(0, job.samples.num_samples - 1, PROBE_SAMPLES).round().long().unique()
    if job.device.type == "cuda":
        exact, fast = (
            normalise(replayer.decode(probe, fast=f), job.stats.low, job.stats.high, clamp=False) for f in (False, True)
        )
        metrics["fast_extra_mse"] = (exact - fast).square().mean().item()
    sample_metadata, sample_tensors = job.samples.describe()
    tensors: dict[str, Tensor | MadeRows] = {
        **content.tensors,
        **content.made,
        **sample_tensors,
        "probe.ids": probe,
        "probe.values": probe_values(replayer.decode(probe)),
    }
    fit = {**asdict(job.fit), "preset": job.preset, "head": job.head is not None}
    fit["start"] = None if job.start is None else job.start.fingerprint
    if job.room is not None:
        fit["room"] = job.room
    metadata = {
        "kind": "recording",
        "recorder": recorder.header_name or recorder.name,
        **sample_metadata,
        **described,
        "settings": content.settings,
        "fit": fit,
        "iterations": content.iterations,
        "stopped_by": content.stopped_by,
        "times": {
            "fit_seconds": content.seconds,
            # Padded to 24 digits: equal runs, which differ in their seconds, give files of equal size.
            "pad": " " * max(0, 24 - len(repr(float(content.seconds)))),
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "versions": {"krnet": package_version(), "torch": torch.__version__},
    }
    if content.share_left is not None:
        metadata["twice_as_long"] = {"seconds": 2 * content.seconds, "r2": 1 - content.share_left * (1 - metrics["r2"])}
    return tensors, metadata


def probe_values(decoded: Tensor) -> Tensor:
    """Return up to PROBE_VALUES evenly spaced values of each sample: (P, *shape) -> (P, V)."""
    flat = decoded.reshape(len(decoded), math.prod(decoded.shape[1:]))
    return flat[:, torch.linspace(0, flat.shape[1] - 1, PROBE_VALUES).round().long().unique()].contiguous()


def replays_of(decode: Decode, name: str, num_samples: int, shape: tuple[int, ...]) -> FeatureSource:
    """Replays as a source of features."""

    def fill(out: Tensor, ids: Tensor) -> None:
        out.copy_(decode(ids))

    return FeatureSource(name, (num_samples, *shape), "float32", fill)


def channel_range(recording: Earlier) -> tuple[Tensor, Tensor]:
    """Low and high of each channel, by which errors of samples are normalised that were not recorded at first."""
    try:
        return metric_range(recording.tensor("low"), recording.tensor("high"))
    except MissingTensorError:  # raw values need no range: it is that of the replays
        found = scan(replays_of(recording.replay, str(recording.path), len(recording), recording.shape))
        return metric_range(found.low, found.high)


def check_probe(kept: archive.Archive, replay: Decode) -> float:
    """The largest difference of the decoded probe from the stored one; refused above PROBE_TOLERANCE."""
    ids = kept.tensor("probe.ids", dtype=torch.int64)
    if ids.dim() != 1 or not len(ids):
        raise ProbeError(f"{kept.path}: probe samples of shape {tuple(ids.shape)}; expected a few. Record again")
    found = probe_values(replay(ids)).cpu()  # (P, V)
    expected = kept.tensor("probe.values", shape=found.shape, dtype=torch.float32)
    difference = (found - expected).abs().max().item()
    limit = PROBE_TOLERANCE * max(expected.abs().max().item(), torch.finfo(torch.float32).tiny)
    if not difference <= limit:
        raise ProbeError(
            f"{kept.path}: decoded probe samples differ by {difference:.3g} from those decoded when it was written; "
            f"expected at most {limit:.3g}. Try another device or torch version, and record again if that fails too"
        )
    return difference
