"""The contents of a recording file: made from a fitted recorder, or compared with what a caller asks for.

Job, Content    -> file_contents  -> tensors and metadata of the file, with the error of its replays
a finished file -> check_finished -> refused unless samples, settings and budget are those of the call
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from krnet.errors import NonFiniteLossError, ResumeError
from krnet.features.metrics import fidelity
from krnet.features.samples import Samples
from krnet.features.stats import normalise
from krnet.io import archive
from krnet.io.ledger import package_version
from krnet.recorders.base import PROBE_SAMPLES, PROBE_VALUES, Content, Job, Recorder
from krnet.recording import Recording

NO_LABELS = torch.zeros(0)


def check_finished(
    path: Path,
    samples: Samples,
    recorder: Recorder,
    settings: Mapping[str, Any],
    digest: str | None,
    budget: int | None,
    max_bytes: int | None,
) -> None:
    """Refuse a finished file of other samples or settings.

    digest     that of the features; None to ignore them
    budget     the budget, given or default, that the file must have been made for; None to ignore it
    max_bytes  the largest size the file may have; None for any. A default budget is an aim, and no limit
    """
    recording = Recording(archive.open_archive(path), torch.device("cpu"))
    info = recording.info()
    found = {"recorder": info["recorder"], "samples": len(recording), "shape": recording.shape}
    expected = {"recorder": recorder.name, "samples": samples.num_samples, "shape": samples.shape}
    for name in sorted(settings.keys() & info["settings"].keys()):
        found[name], expected[name] = info["settings"][name], json.loads(json.dumps(settings[name]))
    if budget is not None and info["fit"].get("budget") is not None:
        found["budget"], expected["budget"] = info["fit"]["budget"], budget
    labels = (NO_LABELS if values is None else values for values in (samples.labels, recording.labels))
    if not torch.equal(*labels):
        found["labels"], expected["labels"] = "others", "as given"
    if digest is not None:
        found["features"], expected["features"] = archive.open_archive(path).metadata["features"], digest
    for name, value in expected.items():
        if found[name] != value:
            raise ResumeError(
                f"{path}: a finished recording, {name} {found[name]}; this one is to have {name} {value}. "
                f"Choose another output, or record without resume to replace it"
            )
    if max_bytes is not None and recording.nbytes > max_bytes:
        raise ResumeError(
            f"{path}: a finished recording of {recording.nbytes} bytes; the budget is {max_bytes}. Choose another "
            f"output, or record without resume to replace it"
        )


def file_contents(job: Job, recorder: Recorder, content: Content) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Replay what a recorder has fitted, measure the error, and return the tensors and the metadata of the file."""
    replayer = recorder.replay(job.samples, content.settings, content, job.device)
    replayer.trunk = job.trunk
    measured = fidelity(replayer.decode, job.source, job.stats, job.watch)
    if not isfinite(measured.mse):
        raise NonFiniteLossError("the fitted recorder decodes to NaN or infinity; nothing was written. Lower lr")
    probe = torch.linspace(0, job.samples.num_samples - 1, PROBE_SAMPLES).round().long().unique()
    metrics = {"mse": measured.mse, "r2": measured.r2, "zero_ratio": job.stats.zero_ratio}
    if job.device.type == "cuda":
        exact, fast = (
            normalise(replayer.decode(probe, fast=f), job.stats.low, job.stats.high, clamp=False) for f in (False, True)
        )
        metrics["fast_extra_mse"] = (exact - fast).square().mean().item()
    sample_metadata, sample_tensors = job.samples.describe()
    tensors = {
        **content.tensors,
        **sample_tensors,
        "probe.ids": probe,
        "probe.values": probe_values(replayer.decode(probe)),
    }
    start = None if job.start is None else job.start.fingerprint
    metadata = {
        "kind": "recording",
        "recorder": recorder.header_name or recorder.name,
        **sample_metadata,
        "features": job.stats.digest,
        "feature_bytes": job.source.nbytes,
        "feature_dtype": str(job.source.dtype).removeprefix("torch."),
        "settings": content.settings,
        "fit": {**asdict(job.fit), "preset": job.preset, "head": job.head is not None, "start": start},
        "metrics": metrics,
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
    return tensors, metadata


def probe_values(decoded: Tensor) -> Tensor:
    """Return up to PROBE_VALUES evenly spaced values of each sample: (P, *shape) -> (P, V)."""
    flat = decoded.reshape(len(decoded), -1)
    return flat[:, torch.linspace(0, flat.shape[1] - 1, PROBE_VALUES).round().long().unique()].contiguous()
