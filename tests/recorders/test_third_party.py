"""A recorder, a learner, a backbone and a data set from outside the package plug in and keep the contracts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import test_recorder_contract as contract
import torch
from test_recorder_contract import files, own  # noqa: F401  fixtures of the contract
from torch import Tensor, nn

import krnet
from krnet.bench.rate import bench
from krnet.config import check_choice, from_dict
from krnet.data import registry
from krnet.errors import InputError, NotARecordingError, SettingError
from krnet.features.samples import Samples, class_index
from krnet.learners import base as learners
from krnet.learners.base import Learner, LearnerConfig, Work
from krnet.nn import backbones
from krnet.recorders import base as recorders
from krnet.recorders.base import Content, Job, Recorder, Replayer, Stored, TensorStore
from learning_tools import small_digits, small_tasks

# ------------------------------------------------------------------ a recorder: the mean map of each class

DTYPES = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class MeansConfig:
    dtype: str = "float32"
    """float32 or float16."""
    num_classes: int = 1
    """Classes; follows from the labels."""

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)
        if type(self.num_classes) is not int or self.num_classes < 1:
            raise SettingError(f"num_classes is {self.num_classes!r}; expected a number of classes")


class MeansReplayer(Replayer):
    def __init__(self, means: Tensor, index: Tensor, device: torch.device):
        self.means, self.index = means.to(device), index

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        return self.means[self.index[ids].to(self.means.device)].float()


def index_of(samples: Samples) -> Tensor:
    return torch.zeros(samples.num_samples).long() if samples.labels is None else class_index(samples.labels)[0]


class MeansRecorder(Recorder):
    name = "means"
    config_class = MeansConfig
    derived = frozenset({"num_classes"})
    fast_is_exact = True

    def fit(self, job: Job) -> Content:
        config, index = from_dict(MeansConfig, job.settings), index_of(job.samples)
        sums = torch.zeros(int(index.max()) + 1, *job.source.shape, dtype=torch.float64)
        for ids in torch.arange(len(job.source)).split(256):
            sums.index_add_(0, index[ids], job.source.read(ids).double())
        counts = torch.bincount(index).view(-1, *[1] * len(job.source.shape))
        settings = {"dtype": config.dtype, "num_classes": len(sums)}
        return Content({"means": (sums / counts).to(DTYPES[config.dtype])}, settings)

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        config = from_dict(MeansConfig, settings)
        return {"means": Stored((config.num_classes, *shape), DTYPES[config.dtype])}

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> MeansReplayer:
        try:
            ((name, means),) = self.stored(samples.shape, samples.num_samples, settings).items()
            index = index_of(samples)
            if means.shape is None or means.shape[0] != int(index.max()) + 1:
                raise SettingError("a mean for other classes than the labels have")
        except InputError as error:
            raise NotARecordingError(f"settings of recorder means refused: {error}") from error
        return MeansReplayer(store.tensor(name, shape=means.shape, dtype=means.dtype), index, device)


@pytest.fixture
def means(monkeypatch) -> str:
    monkeypatch.setitem(recorders._REGISTRY, "means", MeansRecorder())
    monkeypatch.setitem(contract.KINDS, "means", contract.Kind("means", r2=0.2, fine_r2=-1.0, budget=20_000))
    return "means"


def contract_tests() -> list[Any]:
    """Of the recorders' contract, what every recorder that needs only features has to pass."""
    found = []
    for name, test in vars(contract).items():
        marks = getattr(test, "pytestmark", [])
        is_test = name.startswith("test_") and len(marks) == 1 and marks[0].args[0] == "kind"
        kinds = [getattr(kind, "values", [kind])[0] for kind in marks[0].args[1]] if is_test else []
        if {"raw", "paper", "pca", "compact"} <= set(kinds):
            found.append(pytest.param(test, id=name.removeprefix("test_")))
    return found


@pytest.mark.parametrize("test", contract_tests())
def test_a_recorder_from_outside_keeps_the_contract(test, means, request):
    if test.__name__.startswith("test_constant_channels"):
        pytest.skip("a mean of several samples is none of them")
    names = inspect.signature(test).parameters
    test(**{name: means if name == "kind" else request.getfixturevalue(name) for name in names})


def test_a_recorder_from_outside_is_in_bench_rate_and_in_kril(means, tmp_path):
    features, labels = contract.maps()
    found = bench(features, labels, out=tmp_path / "rate", budgets=["20kB"], recorders=["means:dtype=float16", "raw"])
    assert [point["recorder"] for point in found["points"]] == ["means", "raw"] and not found["errors"]
    assert found["points"][0]["bytes"] < 10_000 and found["points"][0]["r2"] > 0.2
    settings = {"backbone": "resnet8", "fixed_layers": 3, "base_epochs": 2, "epochs": 2, "recorder": "means"}
    settings["head_epochs"] = 2
    run = krnet.learn("kril", small_digits(), small_tasks(), out=tmp_path / "run", settings=settings, device="cpu")
    assert len(run["accuracy"]) == 3 and run["settings"]["recorder"] == "means"


# ------------------------------------------------------------------ a learner: rotations as classes of their own


@dataclass(frozen=True, kw_only=True)
class TurningConfig(LearnerConfig):
    turn_base: bool = True
    """Show rotated images in the base task: matters to it, and so is not among `later`."""


class Turning(Learner):
    """Fine-tuning with four outputs a class, one for each rotation by a right angle, as in PASS (Zhu et al. 2021)."""

    name = "turning"
    config_class = TurningConfig
    config: TurningConfig
    outputs_per_class: ClassVar[int] = 4

    def transform(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.task == 0 and not self.config.turn_base:
            return images, 4 * labels
        turns = torch.arange(len(images), device=images.device) % 4
        every = torch.stack([torch.rot90(images, turn, (2, 3)) for turn in range(4)])
        return every[turns, torch.arange(len(images), device=images.device)], 4 * labels + turns

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        if task == 0:
            yield self.base_work()
            return
        loss = lambda images, labels: self.classification_loss(self.model(images), labels)  # noqa: E731
        yield self.descent("classifier", self.batches(self.context.task_ids(task)), loss)


SMALL = {"backbone": "resnet8", "base_epochs": 6, "epochs": 2, "batch_size": 32, "base_lr": 0.05, "lr": 0.05}


@pytest.fixture
def turning(monkeypatch) -> str:
    monkeypatch.setitem(learners._REGISTRY, "turning", Turning)
    return "turning"


def test_a_learner_from_outside_has_outputs_transforms_and_a_base_task_of_its_own(turning, tmp_path):
    data, tasks, shared = small_digits(), small_tasks(), tmp_path / "shared"
    runs = {}
    for name, own_settings in (("on", {}), ("off", {"turn_base": False}), ("again", {"epochs": 1})):
        settings = {**SMALL, **own_settings}
        out = tmp_path / name
        runs[name] = krnet.learn(turning, data, tasks, out=out, settings=settings, shared=shared, device="cpu")
    state = krnet.learn("finetune", data, tasks, out=tmp_path / "plain", settings=SMALL, shared=shared, device="cpu")
    assert runs["on"]["accuracy"][0] > 0.45, "the first output of a class, one of four, is its own"
    assert runs["again"]["accuracy"][0] == runs["on"]["accuracy"][0]
    # One base task for both lengths of later tasks, one without rotations, and fine-tuning's own.
    assert len(list(shared.glob("base-*.krn"))) == 3 and len(state["accuracy"]) == 3
    again = krnet.learn(turning, data, tasks, out=tmp_path / "on", settings=SMALL, resume=True, device="cpu")
    assert again == runs["on"]
    loaded = krnet.load_run(tmp_path / "on", device="cpu")
    answers = [loaded.predict(data.test.images), loaded.model(data.test.images).argmax(1)]
    assert [float((found == data.test.labels).double().mean()) for found in answers] == [again["last"]] * 2


# ------------------------------------------------------------------ a backbone and a data set


class Plain(nn.Module):
    """Two convolutions, cut by name."""

    feature_dim = 12
    cuts = ("first",)

    def __init__(self, in_channels: int):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1, bias=False), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, bias=False), nn.ReLU())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def cut(self, at: str) -> tuple[nn.Module, nn.Module]:
        return self.first, nn.Sequential(self.second, self.pool)

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(self.second(self.first(images)))


def make_plain(in_channels: int) -> Plain:
    return Plain(in_channels)


def test_a_backbone_is_given_as_a_function_or_by_a_registered_name(monkeypatch, tmp_path):
    monkeypatch.setitem(backbones.BACKBONES, "plain", make_plain)
    for name, backbone in (("function", make_plain), ("name", "plain")):
        settings = {**SMALL, "backbone": backbone, "base_epochs": 2, "fixed_layers": "first", "recorder": "raw"}
        settings["head_epochs"] = 2
        run = krnet.learn("kril", small_digits(), small_tasks(), out=tmp_path / name, settings=settings, device="cpu")
        assert len(run["accuracy"]) == 3
        assert run["settings"]["backbone"] == ("plain" if name == "name" else "test_third_party.make_plain")


def test_base_tasks_of_other_backbones_are_not_shared(tmp_path):
    class Other(Plain):
        def __init__(self, in_channels: int):
            super().__init__(in_channels)
            self.pool = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten())

    for name, backbone in (
        ("mean", lambda in_channels: Plain(in_channels)),
        ("max", lambda in_channels: Other(in_channels)),
    ):
        settings = {**SMALL, "backbone": backbone, "base_epochs": 1}
        out, shared = tmp_path / name, tmp_path / "shared"
        krnet.learn("finetune", small_digits(), small_tasks(), out=out, settings=settings, shared=shared, device="cpu")
    assert len(list((tmp_path / "shared").iterdir())) == 2


def test_a_backbone_without_cuts_or_without_a_length_is_refused(tmp_path):
    class NoCuts(Plain):
        cuts = ()

    for backbone, message in ((lambda in_channels: NoCuts(in_channels), "no cuts"), (nn.Identity, "feature_dim")):
        settings = {**SMALL, "backbone": backbone, "recorder": "raw"}
        with pytest.raises(SettingError, match=message):
            krnet.learn("kril", small_digits(), small_tasks(), out=tmp_path / "x", settings=settings, device="cpu")
    assert not (tmp_path / "x").exists()


def test_a_data_set_from_outside_is_known_by_name(monkeypatch):
    def load_mine(folder: Any, download: bool, say: Any) -> krnet.data.DataSet:
        images = np.zeros((8, 1, 4, 4), np.uint8)
        return krnet.data.from_arrays(images, [0, 1] * 4, images, [0, 1] * 4, name="mine", layout="NCHW")

    monkeypatch.setattr(registry, "LOADERS", dict(registry.LOADERS))
    krnet.data.register("mine")(load_mine)
    assert krnet.data.load("mine").num_classes == 2
    with pytest.raises(SettingError, match="did you mean 'mine'"):
        krnet.data.load("minee")
