"""Files that an earlier krnet wrote still open, verify, replay and resume.

They lie in tests/golden. Replays may differ from the stored values by 1e-5 of the largest (the manifest's tolerance):
another CPU adds in another order. Renew them with `python tests/golden/make.py`, only if the format moves on purpose.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import krnet
from golden import small

GOLDEN = Path(__file__).parent / "golden"
MANIFEST: dict[str, Any] = json.loads((GOLDEN / "manifest.json").read_text())
every_recording = pytest.mark.parametrize("name", MANIFEST["recordings"])
every_run = pytest.mark.parametrize("name", MANIFEST["runs"])
THEN = {"base": "paper", "head": "trained"}  # defaults of the version that made the runs


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "values.safetensors")


def trunk_of(name: str) -> nn.Module | None:
    return small.make_trunk() if MANIFEST["recordings"][name]["recorder"] == "images" else None


def resumed(name: str, folder: Path) -> dict[str, Any]:
    run = MANIFEST["runs"][name]
    data = small.digits(*run["per_class"])
    settings = THEN | run["settings"]
    return krnet.learn("kril", data, small.tasks(), out=folder, settings=settings, device="cpu", resume=True)


# ------------------------------------------------------------------ recordings


@every_recording
def test_old_recording_replays_the_values_and_labels_that_it_did(name, stored):
    recording = krnet.open(GOLDEN / f"{name}.krn", trunk=trunk_of(name))
    expected = stored[f"{name}.values"]
    error = (recording[MANIFEST["recordings"][name]["ids"]] - expected).abs().max()
    assert error <= MANIFEST["tolerance"] * expected.abs().max()
    labels = stored.get(f"{name}.labels")
    assert recording.labels is None if labels is None else torch.equal(recording.labels, labels)


@every_recording
def test_old_recording_passes_verify_and_has_its_size(name):
    report = krnet.verify(GOLDEN / f"{name}.krn", trunk=trunk_of(name))
    assert report["ok"] and report["probe_error"] is not None
    assert report["bytes"] == (GOLDEN / f"{name}.krn").stat().st_size == MANIFEST["recordings"][name]["bytes"]


def test_every_golden_file_is_in_the_manifest():
    assert {path.stem for path in GOLDEN.glob("*.krn")} == set(MANIFEST["recordings"])
    assert {path.parent.name for path in GOLDEN.glob("*/run.json")} == set(MANIFEST["runs"])


# ------------------------------------------------------------------ runs


@pytest.fixture
def own(name, tmp_path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@every_run
def test_old_finished_run_is_returned_as_it_is(name, own):
    before = contents(own)
    result = resumed(name, own)
    assert result == json.loads((GOLDEN / name / "run.json").read_text())
    assert result["accuracy_matrix"] == MANIFEST["runs"][name]["accuracy_matrix"]
    assert contents(own) == before


@every_run
def test_old_run_killed_before_its_last_line_is_finished_from_its_state(name, own):
    (own / "run.json").unlink()
    found = resumed(name, own)
    assert found["accuracy_matrix"] == MANIFEST["runs"][name]["accuracy_matrix"]
    assert found["validation"] == 0 and found["commits"][0] == "unknown"  # it did not say


@every_run
def test_recordings_of_an_old_run_verify_and_have_their_size(name):
    for file, size in MANIFEST["runs"][name]["recordings"].items():
        assert krnet.verify(GOLDEN / name / file)["bytes"] == size
