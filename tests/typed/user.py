"""A user's script that calls the whole public API. Mypy reads it with --strict and must find nothing; it is not run.

Every value has its type spelled out: an Any that slips into a signature would otherwise go unnoticed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import krnet
from krnet import Progress, Recording, Run, data, protocol


def watch(progress: Progress) -> None:
    assert_type(progress.share, float | None)
    assert_type(progress.seconds_left, float)


def record(trunk: nn.Module, images: Tensor, labels: list[int]) -> Recording:
    path = krnet.extract(trunk, images, labels, out="features.safetensors", batch_size=64, mean=0.5, std=(0.25,))
    assert_type(path, Path)
    recording = krnet.record(path, budget="60kB", iterations=10, lr=1e-3, out=Path("maps.krn"), watch=watch)
    assert_type(recording, Recording)
    assert_type(krnet.record(np.zeros((8, 4)), recorder="pca", target_r2=0.9, start=recording, watch=None), Recording)
    assert_type(krnet.verify("maps.krn", path, watch=krnet.show_progress)["ok"] is True, bool)
    found = krnet.invert("maps.krn", images, trunk=trunk, mean=0.5, std=0.25, iterations=9)
    assert_type(found, dict[str, Any])
    assert_type(krnet.encode("maps.krn", ["a.npy", "b.npy"], labels, out="more", moves=0, resume=True), Recording)
    return krnet.open("maps.krn", "cpu", "fast", trunk=trunk)


def texts(states: Tensor) -> None:
    recording = krnet.record(states, lengths=[3, 4], recorder="pca")
    assert_type(recording.lengths, Tensor | None)
    assert_type(recording.sequences[1], Tensor)
    assert_type(recording.sequences[:2], list[Tensor])
    assert_type(recording.append(states, lengths=np.array([7])).sequences.ids([0, -1]), Tensor)


def replay(recording: Recording) -> None:
    assert_type(recording[5], Tensor)
    assert_type(recording[[3, -1]], Tensor)
    assert_type(recording.replay(torch.tensor([1]), precision="exact"), Tensor)
    assert_type(recording.project(recording[:2]), Tensor)
    assert_type(recording.labels, Tensor | None)
    assert_type(recording.shape, tuple[int, ...])
    assert_type((len(recording), recording.nbytes, recording.r2), tuple[int, int, float])
    assert_type((recording.max_bytes, recording.num_classes), tuple[int | None, int | None])
    assert_type((recording.metadata, recording.check()), tuple[dict[str, Any], dict[str, Any]])
    assert_type(recording.load().show(torch.zeros(2, 4)), Tensor)
    assert_type((recording.recorder, recording.fingerprint, recording.precision), tuple[str, str, str])
    assert_type(recording.path, Path)
    assert_type(recording.device, torch.device)
    assert_type(recording.lacks, frozenset[str])
    assert_type(sorted(recording.settings), list[str])
    assert_type(sorted(recording.info()), list[str])
    assert_type(recording.tensor("low", shape=(4,), dtype=torch.float32), Tensor)
    assert_type(recording.rows("low", shape=(4,)).read(0, 2), Tensor)
    assert_type(recording.to("cuda"), Recording)
    assert_type(recording.save("copy.krn"), Path)
    assert_type(recording.append(torch.rand(2, 4), [0, 1], budget=80_000, iterations=10, watch=watch), Recording)
    for sample in recording:
        assert_type(sample, Tensor)
    for features, targets in recording.loader(128, shuffle=True, seed=1):
        assert_type((features, targets), tuple[Tensor, Tensor])
    loader = recording.loader(128, True, drop_last=True, buffer=1000, prefetch=2, num_workers=1, share=(0, 2))
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(3)
    assert_type(len(loader), int)
    assert_type(recording.dataset()[0], tuple[Tensor, Tensor])
    DataLoader(recording.dataset(), batch_size=128)
    assert_type(np.asarray(recording).ndim, int)


def learn(images: Tensor) -> Run:
    digits = krnet.data.load("digits")
    assert_type(digits, data.DataSet)
    assert_type(digits.train, data.Split)
    assert_type(digits.test.images, Tensor)
    own = data.from_arrays(np.zeros((2, 8, 8, 1)), [0, 1], images, torch.tensor([0, 1]), pad=1, layout="NHWC")
    assert_type(own.class_names, tuple[str, ...])
    assert_type(data.channel_stats(images), tuple[tuple[float, ...], tuple[float, ...]])
    tasks = krnet.protocol.split("natural", num_classes=10, base_classes=6, tasks=2)
    assert_type(tasks, protocol.TaskSplit)
    assert_type(tasks.classes_seen(1), list[int])
    assert_type(tasks.samples(digits.train.labels, 0), Tensor)
    assert_type((tasks.hash, tasks.num_tasks, tasks.position), tuple[str, int, Tensor])
    assert_type(protocol.class_order([1, 0], 2), list[int])
    krnet.data.load("images", choose=protocol.subset(2))
    settings = {"base_epochs": 2, "epochs": 2, "recorder": "pca", "budget": 100_000}
    run = krnet.learn("kril", own, tasks, out="runs/mine", settings=settings, device="cpu", watch=print)
    assert_type(run, Run)
    return krnet.load_run(run.folder, data=own, device="cpu")


@data.register("blank")
def load_blank(folder: Path | None, download: bool, say: Callable[[str], None]) -> data.DataSet:
    say("making blank images")
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    return data.from_arrays(images, [0, 1], images, [0, 1])


def look_at(run: Run, images: Tensor) -> None:
    assert_type(run.accuracy, list[float | None])
    assert_type((run.storage_bytes, run.class_names), tuple[int, tuple[str, ...]])
    assert_type(run.folder, Path)
    assert_type(run.predict(images), Tensor)
    assert_type(run.plot("run.png"), Figure)
    logits: Tensor = run.model(images)
    print(run["last"], logits.shape)


def choose() -> None:
    assert_type(krnet.list_recorders() + krnet.list_learners(), list[str])
    for name, setting in krnet.settings("pca").items():
        assert_type((name, setting.help, setting.type), tuple[str, str, str])
    print(krnet.plan((64, 8, 8), class_counts=[500] * 50), krnet.__version__)


def main() -> None:
    try:
        recording = record(nn.Identity(), torch.rand(40, 1, 8, 8), [0, 1] * 20)
    except krnet.errors.BudgetError as error:
        assert_type(error.needed, int)
    except krnet.RecordingError as error:
        assert_type(isinstance(error, krnet.KrnetError), bool)
    else:
        replay(recording)
        look_at(learn(recording[:2]), recording[:2])
