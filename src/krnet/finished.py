"""Whether a recording that is there already is the one that was asked for: then there is nothing to resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from krnet.errors import ResumeError
from krnet.features.samples import Samples
from krnet.io import archive
from krnet.recorders.base import Recorder
from krnet.recording import Recording

MODULES = {"images", "trunk"}  # settings that are no plain values; a recording has checks of its own for them
NO_LABELS = torch.zeros(0)


def check_finished(
    path: Path,
    samples: Samples,
    recorder: Recorder,
    settings: Mapping[str, Any],
    digest: str | None,
    budget: int | None,
) -> None:
    """Refuse a file of other samples or settings. digest: of the features, where these are what they were."""
    recording = Recording(archive.open_archive(path), torch.device("cpu"))
    info = recording.info()
    found = {"recorder": info["recorder"], "samples": len(recording), "shape": recording.shape}
    expected = {"recorder": recorder.name, "samples": samples.num_samples, "shape": samples.shape}
    for name in sorted((settings.keys() - MODULES) & info["settings"].keys()):
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
    if budget is not None and recording.nbytes > budget:
        raise ResumeError(
            f"{path}: a finished recording of {recording.nbytes} bytes; the budget is {budget}. Choose another output, "
            f"or record without resume to replace it"
        )
