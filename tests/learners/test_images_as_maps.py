"""KRIL with fixed_layers=0: F1 is the identity, so images are what is recorded, replayed and learned from."""

from __future__ import annotations

import pytest
import torch

import krnet
from krnet import task_loop
from krnet.errors import SettingError
from krnet.nn import backbones
from learning_tools import settings_for, small_digits, small_tasks


def test_the_recording_holds_the_normalised_images_and_the_run_learns_from_them(tmp_path):
    data, split = small_digits(), small_tasks()
    given = settings_for("kril") | {"fixed_layers": 0, "recorder": "raw"}
    run = task_loop.learn("kril", data, split, out=tmp_path / "run", settings=given)
    recording = krnet.open(tmp_path / "run" / "base.krn")
    ids = split.samples(data.train.labels, 0)
    labels = split.position[data.train.labels[ids]]
    by_class = labels.argsort(stable=True)
    mean, std = (torch.tensor(values)[:, None, None] for values in (data.mean, data.std))
    images = (data.train.images[ids][by_class] / 255 - mean) / std
    torch.testing.assert_close(recording[:], images)
    assert torch.equal(recording.labels, labels[by_class])
    assert run["last"] > 1.5 / 8  # more than chance on all classes
    again = krnet.load_run(tmp_path / "run")
    assert torch.equal(again.predict(data.test), run.predict(data.test))


def test_a_network_cut_after_no_layer_is_all_tail():
    network = backbones.build("resnet8").eval()
    trunk, tail = backbones.cut(network, 0)
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(trunk(images), images)
    assert torch.equal(tail(images), network(images))


def test_fewer_than_no_fixed_layers_are_refused():
    with pytest.raises(SettingError, match="fixed_layers is -1; expected at least 0"):
        krnet.learn("kril", small_digits(), small_tasks(), settings=settings_for("kril") | {"fixed_layers": -1})
