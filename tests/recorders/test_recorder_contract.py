"""The contract of a recorder: every registered one, in every form its file may have, keeps the same promises.

A recorder joins by a line in KINDS. What is special to one is tested in the file of its own.
"""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import krnet
from forge import rewrite_metadata
from krnet import api
from krnet.cli import app as cli
from krnet.errors import (
    BudgetError,
    ChecksumError,
    InputError,
    MissingTensorError,
    NotARecordingError,
    OversizedRecordingError,
    RecordingError,
    SettingError,
    TensorShapeError,
)
from krnet.io import archive
from krnet.recorders.base import Recorder, get_recorder, recorder_names
from maps import relu_maps, signed_maps
from packages import if_usable

NUM, SHAPE = 90, (6, 5, 4)
SHAPES = [(), (7,), (9, 4), (3, 1, 6), (2, 3, 4, 5)]


@dataclass(frozen=True)
class Kind:
    """A recorder and settings under which it is quick."""

    recorder: str
    settings: dict[str, Any] = field(default_factory=dict)
    r2: float = 0.05
    """What its replays reach at least."""
    fine: dict[str, Any] = field(default_factory=dict)
    """Settings for features of any shape."""
    fine_r2: float = -math.inf
    budget: int = 9_000
    """A size that the recorder can have and can use."""


SIZES = {"d0": 16, "c0": 8, "c1": 8}
FIT = {"iterations": 25, **SIZES}
BRIEF = {"iterations": 2}
COMPACT = {"iterations": 10}
KINDS = {
    "raw": Kind("raw", r2=1.0, fine_r2=1.0, budget=30_000),
    "raw half": Kind("raw", {"dtype": "float16"}, r2=0.9999, fine={"dtype": "float16"}, fine_r2=0.9999),
    "quantized": Kind("quantized", {"step": 0.1}, r2=0.9, fine={"step": 0.01}, fine_r2=0.999),
    "transform": Kind("transform", {"step": 0.1}, r2=0.9, fine={"step": 0.01}, fine_r2=0.999),
    "pca": Kind("pca", {"step": 0.1}, r2=0.9, fine={"step": 0.01}, fine_r2=0.999),
    "pq": Kind("pq", {"parts": 3, "bits": 5, "rounds": 6}, r2=0.8, fine_r2=0.99),
    "pq priced": Kind(
        "pq", {"parts": 2, "bits": 6, "rate_weight": 0.002, "rounds": 3}, r2=0.5, fine={"rate_weight": 1e-5},
        fine_r2=0.99,
    ),
    "autoencoder": Kind("autoencoder", {"code_width": 16, **FIT}, fine=BRIEF, budget=40_000),
    "autoencoder coded": Kind(
        "autoencoder", {"code_width": 16, "code_bits": 3, "weight_bits": 16, "block_size": 8, **FIT},
        fine={"code_bits": 3, "weight_bits": 4, **BRIEF, **SIZES},
    ),
    "autoencoder few": Kind(
        "autoencoder", {"code_width": 16, "code_bits": 2.5, "weight_bits": 4, "block_size": 8, **FIT},
        fine={"code_bits": 8, "weight_bits": 16, **BRIEF, **SIZES},
    ),
    "paper": Kind("paper", FIT, fine=BRIEF | SIZES, budget=25_000),
    "paper few bits": Kind("paper", {"bits": 4.0, **FIT}, r2=0.0, fine={"bits": 4.0, **BRIEF, **SIZES}),
    "compact": Kind("krnet", {"step": 0.25, "components": 20, **COMPACT}, r2=0.5, fine={"step": 0.0625, **COMPACT}),
    "compact values": Kind(
        "krnet", {"step": 0.25, "components": 0, "c1": 8, **COMPACT}, r2=0.5,
        fine={"step": 0.0625, "components": 0, **COMPACT},
    ),
    "krnet by default": Kind("krnet", COMPACT, r2=0.3, fine=COMPACT),
    "images": Kind("images", r2=0.8, budget=14_000),
    "residual": Kind("residual", {"books": 4, "bits": 5}, r2=0.8, fine={"books": 12}, fine_r2=0.99),
    "local-search": Kind(
        "local-search", {"books": 3, "bits": 4, "rounds": 1, "train_rounds": 4}, r2=0.6,
        fine={"books": 16, "bits": 5, "rounds": 1, "train_rounds": 7}, fine_r2=0.9,
    ),
    "rotation": Kind("rotation", {"levels": 16}, r2=0.9, fine={"levels": 256}, fine_r2=0.999),
    "zfp": Kind("zfp", {"step": 0.2}, r2=0.95, fine={"step": 0.01}, fine_r2=0.999),
    "zstd": Kind("zstd", r2=1.0, fine_r2=1.0, budget=30_000),
    "zstd half": Kind("zstd", {"dtype": "float16"}, r2=0.9999, fine={"dtype": "float16"}, fine_r2=0.9999),
    "fp8": Kind("fp8", r2=0.99, fine_r2=0.0, budget=16_000),
}  # fmt: skip
GROWING = ("quantized", "transform", "pca", "pq", "compact", "compact values")


def kinds(wanted: Callable[[Recorder], bool] = lambda recorder: True) -> pytest.MarkDecorator:
    """The kinds of all recorders, or of some."""
    chosen = [name for name, kind in KINDS.items() if wanted(get_recorder(kind.recorder))]
    return pytest.mark.parametrize("kind", [if_usable(name, KINDS[name].recorder) for name in chosen])


def recorders(wanted: Callable[[Recorder], bool] = lambda recorder: True) -> pytest.MarkDecorator:
    chosen = [name for name in recorder_names() if wanted(get_recorder(name))]
    return pytest.mark.parametrize("recorder", [if_usable(name, name) for name in chosen])


every_kind = kinds()
from_features = kinds(lambda recorder: not recorder.required)
growing = pytest.mark.parametrize("kind", GROWING)


# ------------------------------------------------------------------ what is recorded


@cache
def maps() -> tuple[Tensor, Tensor]:
    """Do not change them."""
    features, labels = relu_maps(NUM, SHAPE)
    return features, labels + 10


@cache
def images() -> tuple[Tensor, Tensor, nn.Module]:
    """Smooth images, their features, and the trunk that makes these."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(NUM, 3, 4, 4, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear")
    noisy = smooth + 0.02 * torch.randn(smooth.shape, generator=generator)
    pixels = (noisy.clamp(0, 1) * 255).to(torch.uint8)
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.AvgPool2d(2)).eval()
    with torch.no_grad():
        features = trunk((pixels.float() / 255 - 0.5) / 0.25)
    return pixels, features, trunk


def kind_of(recorder: str) -> str:
    """The first kind of a recorder."""
    return next(name for name, kind in KINDS.items() if kind.recorder == recorder)


def trunk_of(kind: str) -> nn.Module | None:
    return images()[2] if KINDS[kind].recorder == "images" else None


def inputs(kind: str) -> dict[str, Any]:
    """What krnet.record is given, but for settings."""
    if KINDS[kind].recorder == "images":
        pixels, features, trunk = images()
        own = {"images": pixels, "trunk": trunk, "mean": 0.5, "std": 0.25}
    else:
        (features, _), own = maps(), {}
    return {"features": features, "labels": maps()[1], "recorder": KINDS[kind].recorder, "device": "cpu", **own}


def record(kind: str, **more: Any) -> krnet.Recording:
    return api.record(**inputs(kind) | KINDS[kind].settings | more)


def reopen(kind: str, path: Path, device: str = "cpu") -> krnet.Recording:
    return krnet.open(path, device, trunk=trunk_of(kind))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Callable[[str], Path]:
    """One file of each kind, made when it is asked for: copy before changing."""
    folder = tmp_path_factory.mktemp("contract")

    @cache
    def path(kind: str) -> Path:
        record(kind, out=folder / f"{kind}.krn")
        return folder / f"{kind}.krn"

    return path


@pytest.fixture
def own(files, tmp_path) -> Callable[[str], Path]:
    """A copy of a kind's file."""

    def copied(kind: str) -> Path:
        path = tmp_path / "x.krn"
        path.write_bytes(files(kind).read_bytes())
        return path

    return copied


def tensors_of(path: Path) -> dict[str, Tensor]:
    kept = archive.open_archive(path)
    return {name: kept.tensor(name) for name in kept.names}


def rewrite(path: Path, name: str, change: Callable[[Tensor], Tensor] | None) -> None:
    """Write the file anew, checksums and all, with one of its tensors changed, or without it."""
    kept, tensors = archive.open_archive(path), tensors_of(path)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name].clone())
    archive.write(path, tensors, kept.metadata)


def some_tensors(path: Path) -> list[str]:
    """All that samples come from; of a network's float weights, which are all read alike, a few."""
    others = {"labels", "low", "high"} if archive.open_archive(path).metadata["recorder"] == "images" else {"labels"}
    own = [name for name in tensors_of(path) if not name.startswith("probe") and name not in others]
    layers = [name for name in own if name.startswith("net.") and "." in name.removeprefix("net.")]
    return [name for name in own if name not in layers or layers.index(name) % 6 == 0]


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_every_registered_recorder_is_among_the_kinds():
    assert {kind.recorder for kind in KINDS.values()} == set(recorder_names())
    assert {KINDS[kind].recorder for kind in GROWING} == {name for name in recorder_names() if get_recorder(name).grows}


# ------------------------------------------------------------------ what comes back


@every_kind
def test_the_saved_file_replays_what_was_measured_and_says_its_size(files, kind):
    recording, given = reopen(kind, files(kind)), inputs(kind)
    info = recording.info()
    assert info["r2"] >= KINDS[kind].r2 and info["bytes"] == recording.nbytes == files(kind).stat().st_size
    assert (info["recorder"], info["num_samples"], info["num_classes"]) == (KINDS[kind].recorder, NUM, 5)
    assert info["feature_bytes"] == given["features"].nbytes
    json.dumps(info, allow_nan=False)
    report = krnet.verify(files(kind), given["features"], trunk=trunk_of(kind))
    assert report["ok"] and report["same_features"] and report["r2"] == pytest.approx(info["r2"], abs=1e-6)
    assert report["mse"] == pytest.approx(info["mse"], rel=1e-5, abs=1e-12)


@every_kind
def test_the_file_holds_just_the_tensors_that_the_recorder_declares(files, kind):
    kept, recorder = archive.open_archive(files(kind)), get_recorder(KINDS[kind].recorder)
    shape, num_samples = inputs(kind)["features"].shape[1:], len(maps()[1])
    declared = recorder.stored(shape, num_samples, kept.metadata["settings"])
    found = {name for name in kept.names if name != "labels" and not name.startswith("probe")}
    assert {name for name, tensor in declared.items() if not tensor.optional} <= found <= set(declared)
    for name in found:
        dtype, stored_shape = kept.spec(name)
        tensor = declared[name]
        assert tensor.shape in (None, stored_shape) and tensor.dtype in (None, dtype), name


@every_kind
def test_labels_come_back(files, kind):
    assert torch.equal(reopen(kind, files(kind)).labels, maps()[1])


@every_kind
def test_a_replay_depends_on_its_ids_alone_and_not_on_batch_or_order(files, kind):
    recording = reopen(kind, files(kind))
    everything = recording[:]
    order = torch.randperm(NUM, generator=torch.Generator().manual_seed(1))
    for size in (1, 7, NUM):
        fresh = reopen(kind, files(kind))
        assert_near(torch.cat([fresh[ids] for ids in order.split(size)]), everything[order])
    assert_near(recording[[3, 3, -1]], everything[[3, 3, NUM - 1]])
    assert recording[[]].shape == (0, *everything.shape[1:])
    assert_near(recording.replay(torch.tensor([9]), "fast"), everything[9:10])
    assert_near(pickle.loads(pickle.dumps(recording))[5:9], everything[5:9])  # as a DataLoader does


def test_another_process_reads_the_same(files, tmp_path):
    usable = [kind for kind in KINDS if get_recorder(KINDS[kind].recorder).is_usable]
    chosen = [kind for kind in usable if trunk_of(kind) is None]
    script = "import sys, torch, krnet; torch.save([krnet.open(p)[:] for p in sys.argv[2:]], sys.argv[1])"
    paths = [str(files(kind)) for kind in chosen]
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "all.pt"), *paths], check=True)
    for kind, found in zip(chosen, torch.load(tmp_path / "all.pt"), strict=True):
        assert_near(found, krnet.open(files(kind))[:])


@every_kind
def test_recording_twice_gives_the_same_tensors_from_memory_as_from_a_file(files, kind, tmp_path):
    """A network's fit draws its batches otherwise where features do not lie in memory."""
    given = inputs(kind)
    if not get_recorder(KINDS[kind].recorder).trains:
        np.save(tmp_path / "features.npy", given["features"].numpy())
        given["features"] = tmp_path / "features.npy"
    record(kind, features=given["features"], out=tmp_path / "x.krn")
    one, other = tensors_of(files(kind)), tensors_of(tmp_path / "x.krn")
    assert one.keys() == other.keys() and [n for n in one if not torch.equal(one[n], other[n])] == []


@pytest.mark.gpu
@every_kind
def test_a_gpu_fits_and_reads_as_a_cpu_does(files, kind):
    on_gpu, on_cpu = (reopen(kind, files(kind), device)[:].cpu() for device in ("cuda", "cpu"))
    assert (on_gpu - on_cpu).abs().max() <= 1e-4 * on_cpu.abs().max()
    one_by_one = reopen(kind, files(kind), "cuda")
    found = torch.stack([one_by_one[i] for i in range(5)]).cpu()
    assert (found - on_cpu[:5]).abs().max() <= 1e-4 * on_cpu.abs().max()
    made, kept = record(kind, device="cuda").info()["r2"], reopen(kind, files(kind)).info()["r2"]
    assert made == pytest.approx(kept, abs=0.1 if get_recorder(KINDS[kind].recorder).trains else 0.02)


# ------------------------------------------------------------------ features of all kinds


@from_features
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_features_of_any_shape_are_recorded(kind, shape, tmp_path):
    features = torch.randn(40, *shape).relu().half() * 50
    recording = krnet.record(
        features, recorder=KINDS[kind].recorder, out=tmp_path / "x.krn", device="cpu", **KINDS[kind].fine
    )
    found = recording[:]
    assert found.shape == features.shape and found.dtype == torch.float32 and found.isfinite().all()
    assert recording.shape == shape and recording[3].shape == shape and recording.labels is None
    assert recording.info()["r2"] >= KINDS[kind].fine_r2
    assert krnet.verify(tmp_path / "x.krn", features)["same_features"]


@from_features
def test_constant_channels_come_back_exactly_and_single_samples_are_recorded(kind):
    own = KINDS[kind].fine | {"recorder": KINDS[kind].recorder, "device": "cpu"}
    constant = torch.full((30, 3, 4), 7.25)
    assert torch.equal(krnet.record(constant, **own)[:], constant)
    half = torch.randn(50, 2, 3)
    half[:, 1] = -3.5
    assert torch.equal(krnet.record(half, **own)[:][:, 1], half[:, 1])
    single = torch.randn(1, 3, 4)  # each channel has a range of its own, and here it is not a point
    found = krnet.record(single, **own)[:]
    assert found.shape == single.shape
    if KINDS[kind].fine_r2 > 0:
        assert (found - single).abs().max() < 0.05


@kinds(lambda recorder: not recorder.required and not recorder.trains)
def test_signed_features_of_bfloat16_are_recorded(kind):
    features = signed_maps(NUM)[0]
    recording = krnet.record(features.to(torch.bfloat16), recorder=KINDS[kind].recorder, **KINDS[kind].fine)
    assert recording.info()["r2"] > 0.97 and recording[:].min() < 0


# ------------------------------------------------------------------ budgets


@recorders()
def test_a_budget_is_kept_with_every_byte_of_the_file_counted(recorder, tmp_path):
    """All settings but the length of a fit are left to the recorder."""
    kind = kind_of(recorder)
    given = BRIEF if get_recorder(recorder).trains else {}
    budget, path = KINDS[kind].budget, tmp_path / "x.krn"
    krnet.record(**inputs(kind), **given, budget=budget, out=path)
    assert 0.5 * budget < path.stat().st_size <= budget
    with pytest.raises(BudgetError, match=r"the budget is 500\b"):
        krnet.record(**inputs(kind), **given, budget=500, out=tmp_path / "x.krn")
    assert [path.name for path in tmp_path.iterdir()] == ["x.krn"] and path.stat().st_size > 500


@every_kind
def test_the_smallest_size_known_before_a_fit_is_never_above_that_of_the_file(files, kind, monkeypatch):
    """For the settings of a file, for those that the caller gave, and for those of a fit under a budget."""
    recorder, shape = get_recorder(KINDS[kind].recorder), inputs(kind)["features"].shape[1:]
    own = {name: value for name, value in KINDS[kind].settings.items() if name in recorder.setting_names}
    of_file = reopen(kind, files(kind)).settings
    for settings in ({}, own, {name: of_file[name] for name in recorder.setting_names & of_file.keys()}):
        assert 0 <= recorder.least_bytes(NUM, shape, settings) <= files(kind).stat().st_size
    jobs, fit = [], type(recorder).fit
    monkeypatch.setattr(type(recorder), "fit", lambda self, job: jobs.append(job) or fit(self, job))
    made = record(kind, budget=KINDS[kind].budget, over_budget=True)
    assert 0 <= recorder.least_bytes(NUM, shape, jobs[-1].settings) <= made.nbytes


@pytest.mark.parametrize("kind", ["raw", "raw half", "autoencoder", "paper"])
def test_a_budget_below_tensors_of_known_size_is_refused_before_the_fit(kind, files, tmp_path, monkeypatch):
    floats = {"paper": {"bits": None}, "autoencoder": {"code_bits": 32, "weight_bits": 32}}.get(kind, {})
    given = {**floats, "budget": int(0.4 * files(kind).stat().st_size), "out": tmp_path / "x.krn"}
    smallest = record(kind, over_budget=True, **given).nbytes
    given["out"].unlink()
    monkeypatch.setattr(type(get_recorder(KINDS[kind].recorder)), "fit", lambda *given: pytest.fail("fitted"))
    why = f"needs a budget of more than .*the budget is {given['budget']}. Nothing was fitted or written"
    with pytest.raises(BudgetError, match=why) as caught:
        record(kind, **given)
    assert 0.7 * smallest < caught.value.needed <= smallest and list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ growth


@growing
def test_growth_leaves_old_samples_bit_for_bit_and_is_the_same_from_memory_and_from_a_file(kind, tmp_path):
    features, labels = maps()
    own = KINDS[kind].settings | {"recorder": KINDS[kind].recorder, "device": "cpu"}
    later = {name: own[name] for name in ("recorder", "device", "iterations") if name in own}
    first = krnet.record(features[:50], labels[:50], out=tmp_path / "1.krn", **own)
    second = krnet.record(features[:71], labels[:71], start=tmp_path / "1.krn", out=tmp_path / "2.krn", **later)
    third = krnet.record(features, labels, start=second, out=tmp_path / "3.krn", **later)
    assert (len(first), len(second), len(third)) == (50, 71, NUM)
    assert torch.equal(second[:50], first[:]) and torch.equal(third[:71], second[:])
    assert torch.equal(krnet.open(tmp_path / "3.krn").labels, labels)
    assert krnet.verify(tmp_path / "3.krn", features)["same_features"]
    np.save(tmp_path / "features.npy", features.numpy())
    for given in (tmp_path / "features.npy", np.load(tmp_path / "features.npy", mmap_mode="r")):
        assert torch.equal(krnet.record(given, labels, start=second, **later)[:], third[:])


@growing
def test_features_that_a_recording_cannot_grow_by_are_refused(files, kind, tmp_path):
    features, labels = relu_maps(NUM + 30, SHAPE)
    features = torch.cat([maps()[0], features[NUM:]])
    labels = torch.cat([maps()[1], labels[NUM:] + 10])
    wrong = labels.clone()
    wrong[NUM - 1] += 1
    other = files("raw")
    cases = {
        f"holds {NUM} samples, and there are {NUM} features": (features[:NUM], labels[:NUM], files(kind)),
        f"holds {NUM} samples, and there are 40 features": (features[:40], labels[:40], files(kind)),
        "need one of the same shape": (features[:, :5], labels, files(kind)),
        "a recording of .* by raw": (features, labels, other),
        f"its labels are not those of the first {NUM}": (features, wrong, files(kind)),
        f"its labels are not those of the first {NUM} samples": (features, None, files(kind)),
        f"holds other features than the first {NUM}": (features.roll(5, 0), labels, files(kind)),  # of the same class
    }
    own = {name: value for name, value in KINDS[kind].settings.items() if name == "iterations"}
    for why, (given, given_labels, start) in cases.items():
        with pytest.raises(InputError, match=why):
            krnet.record(given, given_labels, recorder=KINDS[kind].recorder, start=start, out=tmp_path / "x.krn", **own)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ what makes no sense


@recorders(lambda recorder: bool(recorder.required))
def test_a_missing_input_is_named(recorder, tmp_path):
    for name in sorted(get_recorder(recorder).required):
        with pytest.raises(InputError, match=f"recorder {recorder} needs .*{name}.*; {name} is missing. .*--{name}"):
            record(kind_of(recorder), out=tmp_path / "x.krn", **{name: None})
    assert list(tmp_path.iterdir()) == []


@recorders()
def test_an_unknown_recorder_is_refused_with_the_nearest_name(recorder):
    with pytest.raises(SettingError, match=f"unknown recorder '{recorder}x'; did you mean '{recorder}'"):
        krnet.record(torch.rand(5, 3), recorder=recorder + "x")


@recorders()
def test_unknown_settings_are_refused_with_the_nearest_name(recorder):
    for name in sorted(get_recorder(recorder).setting_names):
        with pytest.raises(SettingError, match=f"unknown setting '{name}x'.*did you mean '{name}'"):
            krnet.record(torch.rand(5, 3), recorder=recorder, **{name + "x": 1})


@recorders(lambda recorder: not recorder.trains)
def test_what_belongs_to_a_network_is_refused_where_none_is_fitted(recorder, tmp_path):
    for name, value in {"gamma": 0.1, "schedule": "paper", "iterations": 5, "time_budget": 1.0, "lr": 0.1}.items():
        with pytest.raises(
            SettingError, match=f"{name} is given, .* {recorder} fits none; .*autoencoder, krnet, paper"
        ):
            krnet.record(torch.rand(5, 3), recorder=recorder, **{name: value})
    for name, value in {"preset": "cifar100", "head": nn.Identity()}.items():
        with pytest.raises(InputError, match=f"{name} is given, and recorder {recorder} has no use for it"):
            record(kind_of(recorder), out=tmp_path / "x.krn", **{name: value})
    assert list(tmp_path.iterdir()) == []
    if not get_recorder(recorder).required:  # what means something without one, too
        made = krnet.record(torch.rand(5, 3), recorder=recorder, seed=3, device="cpu", target_r2=0.5)
        assert made.info()["r2"] > 0.5


# ------------------------------------------------------------------ files that are damaged or forged


@every_kind
def test_a_changed_byte_fails_the_checksum(own, kind):
    path = own(kind)
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    with pytest.raises(ChecksumError):
        krnet.verify(path)


@every_kind
def test_missing_and_misshapen_tensors_are_refused_by_name(own, kind):
    for name in some_tensors(own(kind)):
        path = own(kind)
        rewrite(path, name, None)
        with pytest.raises(MissingTensorError):
            reopen(kind, path)[0]
        path = own(kind)
        rewrite(path, name, lambda tensor: tensor[1:].clone() if tensor.numel() > 1 else tensor.repeat(2))
        with pytest.raises((TensorShapeError, NotARecordingError, OversizedRecordingError)):
            reopen(kind, path)[:]


@every_kind
def test_no_error_of_a_file_is_unnamed(own, kind):
    """Whatever single tensor is set to random numbers of its own type: samples come back, or a RecordingError."""
    generator = torch.Generator().manual_seed(3)

    def scramble(tensor: Tensor) -> Tensor:
        raw = tensor.reshape(-1).view(torch.uint8)
        made = torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8)
        return made.view(tensor.dtype).reshape(tensor.shape)

    for name in [*some_tensors(own(kind)), "labels"]:
        path = own(kind)
        rewrite(path, name, scramble)
        with suppress(RecordingError):
            assert reopen(kind, path)[:].shape == inputs(kind)["features"].shape


@every_kind
def test_settings_of_a_type_that_no_recorder_writes_are_refused(own, kind):
    settings = archive.open_archive(own(kind)).metadata["settings"]
    for name in set(settings) - {"trunk"}:  # which says by its digest that it is another
        for value in ("x", [[]]):
            path = own(kind)
            rewrite_metadata(path, lambda metadata, name=name, value=value: metadata["settings"].update({name: value}))
            with pytest.raises(NotARecordingError, match=r"x\.krn: "):
                reopen(kind, path)[0]


@every_kind
def test_other_numbers_of_samples_and_other_shapes_are_refused_before_anything_is_made_of_them(own, kind):
    shape = list(inputs(kind)["features"].shape[1:])
    edits = [{"num_samples": 300, "classes": None}]
    if trunk_of(kind) is None:  # else the trunk says what comes out
        edits += [{"shape": other} for other in ([6, 2**40], [*shape, 2**30], [2**40], shape[::-1])]
    for edit in edits:
        path = own(kind)
        rewrite_metadata(path, lambda metadata, edit=edit: metadata.update(edit))
        with pytest.raises((TensorShapeError, OversizedRecordingError, NotARecordingError)):
            reopen(kind, path)[0]


@every_kind
def test_a_file_said_to_be_another_recorders_does_not_verify(own, kind):
    own_names = {KINDS[kind].recorder, get_recorder(KINDS[kind].recorder).header_name}
    for other in {name for name in recorder_names() if get_recorder(name).is_usable} - own_names:
        path = own(kind)
        rewrite_metadata(path, lambda metadata, other=other: metadata.update(recorder=other))
        with pytest.raises(RecordingError):
            krnet.verify(path)


# ------------------------------------------------------------------ on the command line


@from_features
def test_the_command_line_records_replays_and_verifies(kind, tmp_path):
    def run(*arguments: object) -> Any:
        return CliRunner().invoke(cli.app, [str(a) for a in arguments])

    def shown(*arguments: object) -> str:
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    features, labels = maps()
    np.save(tmp_path / "f.npy", features.numpy())
    np.save(tmp_path / "l.npy", labels.numpy())
    out, recorder = tmp_path / "x.krn", KINDS[kind].recorder
    settings = dict(KINDS[kind].settings)
    options = ["--iterations", settings.pop("iterations")] if "iterations" in settings else []
    options += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = ["record", tmp_path / "f.npy", "--labels", tmp_path / "l.npy", "--recorder", recorder, "--device", "cpu"]
    info = json.loads(shown(*command, "-o", out, "--json", *options))
    assert info["recorder"] == recorder and info["settings"] == reopen(kind, out).settings
    for name, value in settings.items():
        exact = name != "step" or recorder != "krnet"  # a compact one moves its step while it is fitted
        assert info["settings"][name] == (value if exact else pytest.approx(value, rel=0.5))
    assert info == json.loads(shown("info", out, "--json")) and recorder in shown("info", out)
    shown("replay", out, "--ids", "3,1", "-o", tmp_path / "r.npy", "--labels-out", tmp_path / "y.npy")
    assert_near(torch.from_numpy(np.load(tmp_path / "r.npy")), krnet.open(out)[[3, 1]])
    assert np.load(tmp_path / "y.npy").tolist() == labels[[3, 1]].tolist()
    assert json.loads(shown("verify", out, "--against", tmp_path / "f.npy", "--json"))["same_features"]
    name = sorted(get_recorder(recorder).setting_names)[0]
    refused = run(*command, "-o", tmp_path / "y.krn", "--set", f"{name}x=1")
    assert refused.exit_code == 1 and f"error: unknown setting '{name}x'" in refused.stderr
    assert not (tmp_path / "y.krn").exists()
