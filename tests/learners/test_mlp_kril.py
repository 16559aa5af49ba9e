"""KRIL as it is by default: vectors of all layers are recorded, and a head with a hidden layer learns from them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from krnet import api
from krnet import task_loop as learning
from krnet.cli.progress import Display
from krnet.errors import SettingError
from krnet.learners import base
from krnet.learners.kril.batches import ReadingBatches
from krnet.learners.kril.recordings import Recordings
from krnet.learners.settings import settings_of
from krnet.nn.mlp_head import MLPHead
from learning_tools import ctrl_c_at, settings_for, small_tasks

QUICK = {"head": "mlp", "base_epochs": 12, "fixed_layers": 3, "head_width": 128, "head_epochs": 20}
KRIL = {**settings_for("kril"), **QUICK}


def learn(digits, folder, shared, resume=False, **settings):
    options = {"out": folder, "settings": {**KRIL, **settings}, "shared": shared, "resume": resume}
    return learning.learn("kril", digits, small_tasks(), **options)


@pytest.fixture(scope="module")
def run(digits, shared, tmp_path_factory):
    return learn(digits, tmp_path_factory.mktemp("run"), shared)


def test_old_and_new_classes_are_known_at_the_end(run):
    assert run["last"] > 0.75 and min(run["accuracy_matrix"][-1]) > 0.6


def test_the_recording_holds_what_the_head_reads_and_keeps_the_default_budget(run, digits):
    learner = run._learner
    (path,) = learner.recordings.files(learner.task)
    recording = api.open(path)
    assert recording.shape == (learner.reading_head.inner.in_features,)
    assert learner.recordings.budget == 64_000  # one bit a value would be less
    assert run["storage_bytes"]["total"] == path.stat().st_size <= 64_000


def test_one_bit_a_value_is_the_default_budget_of_larger_features(digits, tmp_path):
    context = base.Context(digits, small_tasks(), torch.device("cpu"), 0, tmp_path)
    config = base.make_config(base.get_learner("kril"), KRIL)
    recordings = Recordings(context, config, nn.Identity(), nn.Identity(), torch.Size([8, 1000]))
    assert recordings.budget == sum(recordings.counts) * 1000


def test_a_stopped_head_goes_on_to_the_same_end(digits, shared, run, tmp_path):
    with pytest.raises(KeyboardInterrupt), ctrl_c_at(3), Display() as display:
        learning.learn("kril", digits, small_tasks(), out=tmp_path, settings=KRIL, shared=shared, watch=display)
    found = learn(digits, tmp_path, shared, resume=True)
    assert found["accuracy_matrix"] == run["accuracy_matrix"]


def test_without_replays_of_old_classes_the_head_forgets_them(digits, shared, tmp_path, monkeypatch):
    kril = base.get_learner("kril")
    read = kril._read_replays

    def only_new(self, task):
        readings, labels = read(self, task)
        new = labels >= self.context.new_classes(task).start
        return readings[new], labels[new]

    monkeypatch.setattr(kril, "_read_replays", only_new)
    assert learn(digits, tmp_path, shared)["accuracy_matrix"][-1][0] < 0.1


def test_a_recipe_is_the_default_and_the_paper_has_its_preset(digits):
    chosen = settings_of(["kril"], {}, digits)["kril"]
    config = base.make_config(base.get_learner("kril"), chosen)
    assert (config.base, config.head, config.plastic, config.recorded) == ("strong", "mlp", False, "vectors")
    assert (config.recorder, config.new_features, config.limited) == ("pca", "replayed", True)
    chosen = settings_of(["kril"], {}, digits, "paper")["kril"]
    config = base.make_config(base.get_learner("kril"), chosen)
    assert (config.base, config.head, config.plastic, config.recorded) == ("paper", "trained", True, "maps")
    assert (config.recorder, config.new_features, config.limited) == ("paper", "flip", False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("vectors", "pca", 19, False)),
        ({"plastic": True}, ("maps", "krnet", 23, True)),
        ({"through_recorder": True}, ("maps", "krnet", 23, False)),
        ({"recorder": "images"}, ("maps", "images", 23, False)),
        ({"recorder": "raw"}, ("vectors", "raw", 19, False)),
        ({"head": "trained"}, ("maps", "paper", 23, True)),
        ({"head": "trained", "budget": 1000}, ("maps", "krnet", 23, True)),
    ],
    ids=str,
)
def test_settings_that_are_not_given_follow_from_the_others(given, expected):
    config = base.make_config(base.get_learner("kril"), given)
    assert (config.recorded, config.recorder, config.fixed_layers, config.plastic) == expected


def test_no_budget_means_the_size_of_the_recorder():
    kril = base.get_learner("kril")
    assert not base.make_config(kril, {"budget": 0}).limited
    assert not base.make_config(kril, {"recorder_settings": {"step": 0.1}}).limited
    with pytest.raises(SettingError, match="budget"):
        base.make_config(kril, {"budget": -1})


def test_dropout_keeps_the_mean_and_depends_on_seed_and_iteration_alone():
    readings, labels = torch.randn(100, 5), torch.arange(100) % 4
    batches = ReadingBatches(readings, labels, 50, 3, 400, 0.25)
    ids, factors = batches.inputs(7)
    assert torch.equal(batches.inputs(7)[1], factors) and not torch.equal(batches.inputs(8)[1], factors)
    torch.testing.assert_close(factors.unique(), torch.tensor([0.0, 4 / 3]))
    assert abs(factors.mean() - 1) < 0.02
    assert torch.equal(batches.tensors(ids, factors)[1], labels[ids])


def test_the_head_starts_anew_from_its_seed_and_reads_standardised_readings():
    head = MLPHead(6, 16, 3)
    head.set_scale(10 + 4 * torch.randn(1000, 6, generator=torch.Generator().manual_seed(0)))
    head.restart(1)
    first = head.inner.weight.clone()
    head.grow(2)
    head.restart(1)
    assert torch.equal(head.inner.weight, first) and head.outer.out_features == 5
    readings = torch.full((2, 6), 10.0)
    torch.testing.assert_close(head.standardised(readings), torch.zeros(2, 6), atol=0.15, rtol=0)
    assert head(readings, torch.zeros(2, 16)).equal(head.outer.bias.expand(2, 5))


def test_settings_of_a_run_that_named_the_width_otherwise_are_read():
    today = base.plain_settings(base.make_config(base.get_learner("kril"), {"budget": 6_100_000}))
    saved = {"hidden" if name == "head_width" else name: value for name, value in today.items()}
    renewed = base.get_learner("kril").config_class.renewed(saved)
    assert base.plain_settings(base.make_config(base.get_learner("kril"), renewed)) == today
