"""Renew the golden files: a tiny recording of every recorder, two finished runs of kril, and what they give back.

    python tests/golden/make.py

    NAME.krn            a recording by one recorder, in one form
    values.safetensors  NAME.values: its replays of a few samples; NAME.labels: its labels
    trunk.safetensors   weights of the trunk that recorder images needs
    RUN/                a finished run of kril on digits: run.json, settings.json, state.krn and its recordings
    manifest.json       of each recording: bytes, replayed samples, and the recorder's name that krnet now has for it;
                        of each run: settings, accuracy matrix, and the bytes of its recordings

tests/test_golden.py reads them with the code of its day: replays must come within 1e-5 of the largest stored value.
They were written by commit 6d9920f, and show that files of that day still open. Renew them only where the format moves
on purpose, and keep the old ones then: users have such files.
"""

from __future__ import annotations

import os

# Before torch is imported, as in conftest.py: one thread, and no instructions that some virtual machines lack.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import krnet
from golden import small

FOLDER = Path(__file__).parent
NUM_SAMPLES = 40
NUM_EARLIER = 24  # of the recording that a grown one starts from
REPLAYED = [0, 23, 24, 39]
NETWORK = {"d0": 8, "c0": 4, "c1": 4, "iterations": 300}
COMPACT = {"step": 0.25, "components": 6, "c1": 8, "blocks": 1, "iterations": 30}
NO_AXES = {"components": 0, "step": 0.1, "c1": 8, "blocks": 1, "iterations": 30}
# Recorder, as krnet.record is told, and settings; all are of small.maps.
OF_MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "raw-float32": ("raw", {}),
    "raw-float16": ("raw", {"dtype": "float16"}),
    "quantized": ("quantized", {"step": 0.1}),
    "transform": ("transform", {"step": 0.15}),
    "pca": ("pca", {"step": 0.15}),
    "pq": ("pq", {"parts": 2, "bits": 4}),
    "pq-price": ("pq", {"parts": 4, "bits": 4, "rate_weight": 0.002, "rotations": 0}),
    "autoencoder-floats": ("autoencoder", {**NETWORK, "code_width": 8}),
    "autoencoder-bits": ("autoencoder", {**NETWORK, "code_width": 8, "code_bits": 4, "weight_bits": 4}),
    "compact-axes": ("compact", COMPACT),
    "compact-no-axes": ("compact", NO_AXES),
    "compact-budget": ("compact", {"budget": 8000, "iterations": 30}),
    "paper-floats": ("paper", {**NETWORK, "group_size": 16}),
    "paper-bits": ("paper", {**NETWORK, "group_size": 16, "bits": 4, "code": 4}),
}
RUNS: dict[str, dict[str, Any]] = {
    "kril-paper": {"recorder_settings": "d0=8,c0=4,c1=4,group_size=16"},
    "kril-compact": {"budget": 30_000},
}
RUN_SETTINGS = {
    "backbone": "resnet8", "fixed_layers": 5, "base_epochs": 12, "epochs": 12, "batch_size": 16, "base_lr": 0.05,
    "lr": 0.02, "recorder_iterations": 60,
}  # fmt: skip
PER_CLASS, TEST_PER_CLASS = 10, 5


def write_trunk() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {"0.weight": (8, 3, 3, 3), "0.bias": (8,)}
    save_file({name: 0.3 * torch.randn(size, generator=generator) for name, size in weights.items()}, small.TRUNK)


def options_of(recorder: str) -> dict[str, Any]:
    return small.recorder_options(recorder) if recorder in ("compact", "paper") else {"recorder": recorder}


def record_all() -> dict[str, str]:
    """Write every NAME.krn; the recorder of each, by its name in krnet."""
    made: dict[str, str] = {}

    def record(name: str, recorder: str, features: Tensor, labels: Tensor | None, **settings: Any) -> None:
        out = FOLDER / f"{name}.krn"
        krnet.record(features, labels, out=out, device="cpu", **options_of(recorder), **settings)
        made[name] = "krnet" if recorder == "compact" else recorder

    features, labels = small.maps(NUM_SAMPLES)
    for name, (recorder, settings) in OF_MAPS.items():
        record(name, recorder, features, labels, **settings)
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in (("compact-grown", COMPACT), ("compact-no-axes-grown", NO_AXES)):
            start = Path(folder) / f"{name}.krn"
            options = options_of("compact")
            krnet.record(features[:NUM_EARLIER], labels[:NUM_EARLIER], out=start, device="cpu", **options, **settings)
            record(name, "compact", features, labels, start=start, iterations=10)
    record("compact-mixed-labels", "compact", *small.mixed(NUM_SAMPLES), **COMPACT)
    record("paper-mixed-labels", "paper", *small.mixed(NUM_SAMPLES), **NETWORK, group_size=8)
    record("quantized-no-labels", "quantized", small.mixed(NUM_SAMPLES)[0], None, step=0.1)
    record("compact-vectors", "compact", *small.vectors(NUM_SAMPLES), **COMPACT)
    record("paper-vectors", "paper", *small.vectors(NUM_SAMPLES), **NETWORK, group_size=16)
    images, trunk = small.pictures(NUM_SAMPLES), small.make_trunk()
    given = {**small.IMAGES, "images": images, "trunk": trunk}
    given.pop("recorder")
    for name, codec in (("images-jpeg", {"codec": "jpeg", "subsampling": 444}), ("images-png", {"codec": "png"})):
        record(name, "images", small.picture_features(images, trunk), labels, **given, **codec)
    return made


def describe(name: str, recorder: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the manifest says of a recording, and the values that it replays."""
    path = FOLDER / f"{name}.krn"
    trunk: nn.Module | None = small.make_trunk() if recorder == "images" else None
    recording = krnet.open(path, trunk=trunk)
    tensors = {f"{name}.values": recording[REPLAYED]}
    if recording.labels is not None:
        tensors[f"{name}.labels"] = recording.labels
    return {"recorder": recorder, "bytes": path.stat().st_size, "ids": REPLAYED}, tensors


def learn_all() -> dict[str, Any]:
    """Every RUN, and what the manifest says of it."""
    found: dict[str, Any] = {}
    for name, own in RUNS.items():
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        settings = {**RUN_SETTINGS, **own}
        data = small.digits(PER_CLASS, TEST_PER_CLASS)
        run = krnet.learn("kril", data, small.tasks(), out=folder, settings=settings, device="cpu")
        found[name] = {
            "settings": settings,
            "per_class": [PER_CLASS, TEST_PER_CLASS],
            "recorder": "paper" if "budget" not in own else "krnet",
            "accuracy_matrix": run["accuracy_matrix"],
            "recordings": {path.name: path.stat().st_size for path in sorted(folder.glob("*.krn"))
                           if path.name != "state.krn"},
        }  # fmt: skip
    return found


def main() -> None:
    for old in FOLDER.glob("*.krn"):
        old.unlink()
    write_trunk()
    recordings: dict[str, Any] = {}
    values: dict[str, Tensor] = {}
    for name, recorder in record_all().items():
        recordings[name], tensors = describe(name, recorder)
        values |= tensors
    save_file(values, FOLDER / "values.safetensors")
    manifest = {
        "tolerance": 1e-5,
        "renew": "python tests/golden/make.py",
        "recordings": recordings,
        "runs": learn_all(),
    }
    (FOLDER / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".pyc")
    print(f"{len(recordings)} recordings and {len(manifest['runs'])} runs, {size} bytes in all, with {krnet.__file__}")


if __name__ == "__main__":
    main()
