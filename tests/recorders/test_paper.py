"""Fitting a KRNet: it learns, stops when told, goes on after a kill, and reads features from where they lie."""

import os
import subprocess
import sys
import textwrap
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import krnet
from krnet import recorders
from krnet.errors import NonFiniteLossError, ResumeError
from krnet.features.metrics import Fidelity, fidelity
from krnet.features.samples import Samples
from krnet.features.source import open_features
from krnet.features.stats import scan
from krnet.io import archive
from krnet.nn.loaded import read_head
from krnet.recorders.base import Job
from krnet.recorders.fit import TARGET_EVERY, learning_rate
from krnet.recorders.paper.groups import GroupTable
from krnet.recorders.paper.recorder import KRNetFit, PaperRecorder
from krnet.train import loop as training
from krnet.train.config import FitConfig
from maps import relu_maps, signed_maps
from watchers import of_fits, raise_at

SIZES: dict[str, Any] = {"d0": 16, "c0": 8, "c1": 8}
TINY: dict[str, Any] = {"recorder": "paper", **SIZES}


def content(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a file, less what may differ between equal runs."""
    kept = archive.open_archive(path)
    return {name: kept.tensor(name) for name in kept.names}, kept.metadata | {"times": None}


def assert_same_content(a: Path, b: Path) -> None:
    (tensors, metadata), (others, other_metadata) = content(a), content(b)
    assert metadata == other_metadata and tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


def trainee(features: Tensor, head: nn.Module | None = None, **fit: Any) -> KRNetFit:
    """A fit that is not yet begun."""
    source = open_features(features)
    samples = Samples(len(source), source.shape, None)
    job = Job(source, samples, scan(source), FitConfig(**fit), torch.device("cpu"), head=head, settings=SIZES)
    config = PaperRecorder().config(job)
    return KRNetFit(job, config, GroupTable.build(len(source), None, config.group_size))


# ---------------------------------------------------------------- what is learned


@pytest.mark.slow
def test_250_iterations_on_a_few_hundred_maps_reach_an_r2_of_0_4():
    features, labels = relu_maps(210, (8, 6, 6))
    info = krnet.record(features, labels, recorder="paper", iterations=250).info()
    assert info["r2"] >= 0.4 and info["iterations"] == 250


@pytest.mark.slow
def test_250_iterations_on_images_of_digits_reach_an_r2_of_0_4():
    digits = load_digits()
    recording = krnet.record(digits.images[:120, None], digits.target[:120], recorder="paper", iterations=250)
    assert recording.info()["r2"] >= 0.4
    assert recording[7].shape == (1, 8, 8) and recording.labels.tolist() == digits.target[:120].tolist()


def test_vectors_are_learned_and_stored_without_convolutions(tmp_path):
    features, labels = relu_maps(300, (6, 8, 8))
    recording = krnet.record(features.flatten(1), labels, out=tmp_path / "x.krn", iterations=250)
    assert recording.info()["r2"] >= 0.4 and recording.shape == (384,)
    assert all(tensor.dim() <= 2 for tensor in content(tmp_path / "x.krn")[0].values())


@pytest.mark.slow
def test_signed_maps_keep_their_own_amplitude_and_lose_it_with_the_last_norm():
    features, amplitude = signed_maps(100, (2, 8, 8))
    correlation, ratio = {}, {}
    for last_norm in (False, True):
        replayed = krnet.record(features, iterations=180, recorder="paper", last_norm=last_norm)[:]
        spread = replayed.std((1, 2, 3))
        correlation[last_norm] = torch.corrcoef(torch.stack([spread, amplitude]))[0, 1].item()
        ratio[last_norm] = (spread / amplitude).median().item()
    assert correlation[False] > 0.9 and 0.85 < ratio[False] < 1.15
    assert correlation[True] < 0.6 and not 0.85 < ratio[True] < 1.15


SHAPES = [(384,), (3, 17, 11), (2048, 7, 7), (5, 9), (2, 3, 4, 5), (1, 1, 1), (7, 1, 30), (1,), ()]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), ((3, 17, 11), torch.float16), ((5, 9), torch.bfloat16)],
    ids=str,
)
def test_any_shape_and_type_is_recorded_and_comes_back_as_float32(shape, dtype, tmp_path):
    features = torch.randn(7, *shape).to(dtype)
    recording = krnet.record(features, [0, 1, 0, 1, 0, 1, 1], out=tmp_path / "x.krn", iterations=2)
    assert recording.shape == shape and recording[3].shape == shape
    assert recording[:].shape == (7, *shape) and recording[:].dtype == torch.float32
    assert recording[:].isfinite().all()
    assert krnet.verify(tmp_path / "x.krn", features)["same_features"]


@pytest.mark.parametrize(
    "change",
    [lambda x: x.double(), lambda x: (x * 40).byte(), lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)],
    ids=["float64", "uint8", "transposed"],
)
def test_other_layouts_of_the_same_values_fit_as_well(change):
    features = change(relu_maps(30, (4, 5, 6))[0])
    recording = krnet.record(features, iterations=80, **TINY)
    assert recording.info()["r2"] > 0.15 and recording.shape == (4, 5, 6)


def test_channels_are_normalised_each_by_itself(tmp_path):
    features = relu_maps(30, (4, 5, 6))[0]
    scale = 2.0 ** torch.tensor([-30.0, 0.0, 5.0, 40.0]).view(4, 1, 1)  # exact in float32: all roundings are the same
    plain = krnet.record(features, out=tmp_path / "a", iterations=5, **TINY)
    scaled = krnet.record(features * scale, out=tmp_path / "b", iterations=5, **TINY)
    weights, others = content(tmp_path / "a")[0], content(tmp_path / "b")[0]
    assert all(torch.equal(weights[name], others[name]) for name in weights if name.startswith("net."))
    assert torch.equal(plain[:] * scale, scaled[:])
    assert scaled.info()["r2"] == pytest.approx(plain.info()["r2"])


def test_groups_are_those_of_the_labels_or_without_any_of_all_samples():
    features, labels = relu_maps(64, (4, 5, 6), num_classes=2)
    info = krnet.record(features, labels, iterations=1, group_size=16, **TINY).info()
    assert info["settings"]["groups"] == [16, 16, 16, 16]
    assert krnet.record(features, iterations=1, group_size=48, **TINY).info()["settings"]["groups"] == [48, 16]


# ---------------------------------------------------------------- loss and schedule


def test_the_loss_sums_over_a_sample_and_averages_over_the_batch():
    features = torch.randn(20, 3, 4, 5)
    head = nn.Sequential(nn.Flatten(), nn.Linear(60, 7))
    fit = trainee(features, head, gamma=0.3)
    ids = torch.tensor([3, 19, 4])
    first, total = fit._losses(ids, features[ids])
    output = fit.net(fit.group[ids], fit.slot[ids])
    low, high = features.amin((0, 2, 3)).view(3, 1, 1), features.amax((0, 2, 3)).view(3, 1, 1)
    kr1 = sum(((o - (x - low) / (high - low)) ** 2).sum() for o, x in zip(output, features[ids])) / 3
    kr2 = sum(
        ((head(o * (high - low) + low) - head(x)) ** 2).sum() for o, x in zip(output[:, None], features[ids][:, None])
    )
    torch.testing.assert_close(first, kr1)
    torch.testing.assert_close(total, kr1 + 0.3 * kr2 / 3)


def test_the_papers_schedule_is_constant_then_linear_to_a_thousandth():
    fit = trainee(relu_maps(40, (3, 4, 5))[0], schedule="paper", lr=2e-3)
    (optimizer,) = fit.optimizers
    assert isinstance(optimizer, torch.optim.Adam)
    for iteration in range(0, 40, 3):
        fit.step(iteration, iteration / 40)
        done = max(0.0, (iteration - 20) / 20)  # of the second half
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-3 * (1 + done * (1e-3 - 1)))
    assert learning_rate("paper", 1.0) == pytest.approx(1e-3)


def test_the_fast_schedule_rises_to_its_peak_and_falls_to_zero():
    shares = [learning_rate("fast", i / 1000) for i in range(1001)]
    peak = shares.index(max(shares))
    assert 0 < shares[0] < 0.1 and max(shares) == pytest.approx(1) and shares[-1] == 0
    assert shares[: peak + 1] == sorted(shares[: peak + 1]) and shares[peak:] == sorted(shares[peak:], reverse=True)


@pytest.mark.parametrize("schedule", ["fast", "paper"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (6,)], ids=str)
def test_every_weight_is_updated_by_one_optimizer_without_weight_decay(schedule, shape):
    fit = trainee(torch.randn(40, *shape), schedule=schedule)
    groups = [group for optimizer in fit.optimizers for group in optimizer.param_groups]
    updated = [id(p) for group in groups for p in group["params"]]
    assert sorted(updated) == sorted(id(p) for p in fit.net.parameters())
    assert all(group.get("weight_decay", 0) == 0 for group in groups)


def test_weights_that_the_loss_does_not_reach_stay_as_they_are():
    fit = trainee(relu_maps(40, (3, 4, 5))[0], schedule="paper")
    fit._losses = lambda ids, values: (fit.net(fit.group[ids], fit.slot[ids]).sum() * 0,) * 2
    before = [p.detach().clone() for p in fit.net.parameters()]
    for iteration in range(3):
        fit.step(iteration, 0.1)
    assert all(torch.equal(p, old) for p, old in zip(fit.net.parameters(), before))


# ---------------------------------------------------------------- seen through a head


class Corner(nn.Module):
    """A head that sees one channel of the features, and would change if it were trained or run in its own mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(x[:, :1])).flatten(1))


def test_l_kr2_brings_replays_nearer_as_the_head_sees_them_and_leaves_the_callers_module_alone():
    features = relu_maps(60, (6, 5, 6))[0]
    head = Corner()
    head.last.bias.requires_grad_(False)
    head.last.weight.grad = torch.ones_like(head.last.weight)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    seen = {}
    for gamma in (0.0, 3.0):
        replayed = krnet.record(features, head=head, gamma=gamma, iterations=80, **TINY)[:]
        frozen = Corner().eval()
        frozen.load_state_dict(head.state_dict())
        with torch.no_grad():
            seen[gamma] = (frozen(replayed) - frozen(features)).square().mean().item()
    assert seen[3.0] < 0.7 * seen[0.0]

    assert head.training and head.norm.training and head.drop.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())
    assert torch.equal(head.last.weight.grad, torch.ones_like(head.last.weight)) and head.norm.weight.grad is None
    assert [name for name, p in head.named_parameters() if not p.requires_grad] == ["last.bias"]


def test_the_head_is_shown_a_part_of_a_batch():
    sizes = []

    class Head(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return x.flatten(1)

    features, ids = torch.randn(600, 3, 4, 5), torch.arange(200)
    for options, shown in (
        ({}, 200),
        ({"head_share": 0.25}, 50),
        ({"head_share": 0.9}, 180),
        ({"head_share": 0.0}, 32),
    ):
        fit = trainee(features, Head(), gamma=1.0, **options)
        sizes.clear()
        first, total = fit._losses(ids, features[ids])
        assert sizes == [shown, shown]
        low, high = fit.low.view(3, 1, 1), fit.high.view(3, 1, 1)
        output = fit.net(fit.group[ids], fit.slot[ids]).view(200, 3, 4, 5)[:shown] * (high - low) + low
        torch.testing.assert_close(total - first, (output - features[:shown]).square().sum() / shown)


@pytest.mark.parametrize("options", [TINY, {"recorder": "krnet"}], ids=["paper", "compact"])
def test_a_head_may_be_scripted(tmp_path, options):
    torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(60, 7))).save(tmp_path / "head.pt")
    head = read_head(tmp_path / "head.pt", torch.device("cpu")).trainable
    features = torch.randn(20, 3, 4, 5)
    assert (
        krnet.record(features, head=head, gamma=1e-3, iterations=3, device="cpu", **options).info()["iterations"] == 3
    )


def test_a_head_of_any_precision_may_be_checkpointed(tmp_path):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return x.bfloat16() * self.scale

    features = relu_maps(20, (4, 5, 6))[0]
    krnet.record(features, head=Half(), out=tmp_path / "x.krn", iterations=3, checkpoint_s=0, **TINY)


# ---------------------------------------------------------------- when it stops


def test_it_stops_at_the_target_and_the_file_keeps_the_promise(tmp_path):
    features, labels = relu_maps(60, (6, 5, 6))
    krnet.record(features, labels, stop_at_r2=0.3, iterations=2000, out=tmp_path / "x.krn", **TINY)
    info = krnet.open(tmp_path / "x.krn").info()
    assert info["stopped_by"] == "target" and info["r2"] >= 0.3 and info["iterations"] < 2000
    assert krnet.verify(tmp_path / "x.krn", features)["r2"] >= 0.3


def test_the_running_loss_proposes_the_end_and_all_features_decide(monkeypatch):
    features = relu_maps(30, (4, 5, 6))[0]
    measured: list[float] = []

    def doubting(*arguments: Any) -> Fidelity:
        found = fidelity(*arguments)
        measured.append(found.r2)
        return found if len(measured) > 1 else Fidelity(found.mse, -100.0, found.digest)

    monkeypatch.setattr(recorders.fit, "fidelity", doubting)
    info = krnet.record(features, stop_at_r2=-10.0, iterations=2000, **TINY).info()
    assert len(measured) == 2 and info["iterations"] == 2 * TARGET_EVERY


def test_it_stops_when_the_time_is_up_and_learns_meanwhile(monkeypatch):
    """A second of the test's own clock to each look at it, of which there are two an iteration."""
    seconds = count()
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    features, labels = relu_maps(60, (6, 5, 6))
    info = krnet.record(features, labels, time_budget=160.0, **TINY).info()
    assert info["stopped_by"] == "time_budget" and 160 <= info["fit_seconds"] <= 165
    assert info["iterations"] >= 80 and info["r2"] > 0.1


def test_a_loss_that_is_not_finite_leaves_nothing_behind(tmp_path):
    features = relu_maps(30, (4, 5, 6))[0]
    for checkpoint_s in (60.0, 0.0):
        with pytest.raises(NonFiniteLossError, match="Lower the learning"):
            krnet.record(
                features,
                out=tmp_path / "x.krn",
                lr=1e6,
                muon_lr=1e6,
                iterations=30,
                checkpoint_s=checkpoint_s,
                **TINY,
            )
        assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- going on


RESUMED: dict[str, Any] = {"iterations": 40, "checkpoint_s": 0, **TINY}


def test_a_fit_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    features, labels = relu_maps(48, (4, 5, 6))
    krnet.record(features, labels, out=tmp_path / "whole.krn", **RESUMED)
    out, seen = tmp_path / "x.krn", []
    interrupt(out, features, labels)
    krnet.record(
        features, labels, out=out, resume=True, watch=of_fits(lambda progress: seen.append(progress.done)), **RESUMED
    )
    assert seen[0] >= 20
    assert_same_content(out, tmp_path / "whole.krn")
    assert not (tmp_path / "x.krn.ckpt").exists()


class Stop(Exception):
    """Ends a fit from its watcher: what a crash leaves, without a process of its own."""


def interrupt(path: Path, features: Tensor, labels: Any = None, **settings: Any) -> None:
    with pytest.raises(Stop):
        krnet.record(features, labels, out=path, watch=raise_at(20, Stop()), **RESUMED | settings)
    assert path.with_name(path.name + ".ckpt").exists() and not path.exists()


def test_resume_without_a_checkpoint_starts_afresh(tmp_path):
    features = relu_maps(48, (4, 5, 6))[0]
    for name, resume in (("a", True), ("b", False)):
        krnet.record(features, out=tmp_path / name, resume=resume, **RESUMED | {"iterations": 5})
    assert_same_content(tmp_path / "a", tmp_path / "b")


def test_without_resume_a_checkpoint_is_left_aside(tmp_path):
    features = relu_maps(48, (4, 5, 6))[0]
    interrupt(tmp_path / "x.krn", features)
    seen: list[int] = []
    watch = of_fits(lambda progress: seen.append(progress.done))
    krnet.record(features, out=tmp_path / "x.krn", watch=watch, **RESUMED)
    assert seen[0] == 10 and [path.name for path in tmp_path.iterdir()] == ["x.krn"]


SAME: dict[str, Any] = {"features": relu_maps(48, (4, 5, 6))[0], "labels": [0] * 24 + [1] * 24}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """Where a stopped fit would have written; its checkpoint lies beside it: do not change it."""
    path = tmp_path_factory.mktemp("stopped") / "x.krn"
    interrupt(path, **SAME)
    return path


@pytest.mark.parametrize(
    "change, name",
    [
        ({"features": relu_maps(48, (4, 5, 6), seed=9)[0]}, "features"),
        ({"features": relu_maps(48, (4, 5, 6))[0].half()}, "features"),
        ({"labels": [0, 1] * 24}, "labels"),
        ({"labels": None}, "labels"),
        ({"seed": 5}, "seed"),
        ({"lr": 1e-3}, "lr"),
        ({"muon_lr": 1e-3}, "muon_lr"),
        ({"schedule": "paper", "last_norm": False}, "schedule"),
        ({"batch_size": 7}, "batch_size"),
        ({"iterations": 41}, "iterations"),
        ({"d0": 32}, "d0"),
        ({"last_norm": True}, "last_norm"),
        ({"head": nn.Identity()}, "head"),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_resume_with_other_features_or_settings_is_refused_by_what_differs(stopped, change, name):
    checkpoint = stopped.with_name("x.krn.ckpt")
    before = checkpoint.read_bytes()
    with pytest.raises(ResumeError, match=rf"x\.krn\.ckpt: made with {name} ") as caught:
        krnet.record(**SAME | RESUMED | change, out=stopped, resume=True)
    assert "remove the checkpoint" in str(caught.value)
    assert checkpoint.read_bytes() == before and not stopped.exists()


def test_resume_from_a_damaged_checkpoint_is_refused(stopped, tmp_path):
    checkpoint, whole = tmp_path / "x.krn.ckpt", stopped.with_name("x.krn.ckpt").read_bytes()
    for damaged in (whole[:-1], whole[:50], b"", whole[:-9] + b"x" + whole[-8:], bytes(len(whole))):
        checkpoint.write_bytes(damaged)
        with pytest.raises(ResumeError, match="remove"):
            krnet.record(**SAME | RESUMED, out=tmp_path / "x.krn", resume=True)
    checkpoint.write_bytes(whole)
    krnet.record(**SAME | RESUMED, out=tmp_path / "x.krn", resume=True)


# ---------------------------------------------------------------- features that do not lie in memory


class Pairs(torch.utils.data.Dataset):
    def __init__(self, values: Tensor):
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.values[index], index


@pytest.fixture(scope="module")
def in_memory() -> float:
    """R2 of a fit of features that lie in memory."""
    return krnet.record(*relu_maps(60, (6, 5, 6)), iterations=60, **TINY).info()["r2"]


@pytest.mark.parametrize("kind", ["npy path", "memmap", "Dataset", "list"])
def test_streamed_features_are_learned_like_those_in_memory(kind, in_memory, tmp_path):
    features, labels = relu_maps(60, (6, 5, 6))
    np.save(tmp_path / "x.npy", features.numpy())
    given = {
        "npy path": tmp_path / "x.npy",
        "memmap": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "Dataset": Pairs(features),
        "list": list(features),
    }[kind]
    recording = krnet.record(given, labels, out=tmp_path / "x.krn", iterations=60, **TINY)
    assert recording.info()["r2"] > max(0.1, in_memory - 0.1)
    assert krnet.verify(tmp_path / "x.krn", features)["same_features"]


@pytest.mark.slow
def test_memory_stays_bounded_while_a_large_file_is_recorded(tmp_path):
    # Sparse on disk, but every page that is read counts as resident until it is handed back.
    array = np.lib.format.open_memmap(tmp_path / "large.npy", "w+", np.float32, (7200, 256, 8, 8))
    array[::500] = 1
    del array
    script = """
        import resource, sys, torch, krnet
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        krnet.record(torch.randn(4, 256, 8, 8), iterations=1, recorder="paper", d0=16, c0=8, c1=8)  # what any fit needs
        baseline = peak()
        sizes = {"recorder": "paper", "d0": 16, "c0": 8, "c1": 8, "group_size": 512}
        recording = krnet.record(sys.argv[1], iterations=3, batch_size=64, **sizes)
        assert len(recording) == 7200
        print(peak() - baseline)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "large.npy")]
    growth_mib = float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert os.stat(tmp_path / "large.npy").st_size >= 450 << 20
    assert growth_mib < 250  # about 195 in fact


def test_the_papers_schedule_for_imagenet_is_longer_and_its_head_weighs_half(monkeypatch):
    fits = []

    def look(self, job):
        fits.append(job.fit)
        raise Done

    monkeypatch.setattr(PaperRecorder, "fit", look)
    for settings in ({"schedule": "paper"}, {"schedule": "paper", "iterations": 7}, {}):
        with pytest.raises(Done):
            krnet.record(torch.rand(4, 2, 4, 4), preset="imagenet", **settings)
    assert [(fit.max_iterations, fit.gamma) for fit in fits] == [(50000, 5e-4), (7, 5e-4), (6000, 1e-3)]


class Done(Exception):
    pass
