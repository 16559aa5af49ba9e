"""DS-AL: ACIL, and a second stream that is solved for what the first one leaves over."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import krnet
from krnet import task_loop as learning
from krnet.errors import SettingError
from krnet.learners import base
from krnet.learners.dsal import Dsal
from learning_tools import SMALL, small_tasks

WIDTH = 128
OWN = {**SMALL, "random_features": WIDTH, "fixed_layers": 3}


def learn(digits, folder, shared, watch=None, resume=False, method="dsal", **settings):
    options = {"out": folder, "settings": {**OWN, **settings}, "shared": shared, "watch": watch, "resume": resume}
    return learning.learn(method, digits, small_tasks(), device="cpu", **options)


def make(digits, folder, method="dsal", **settings):
    learner = base.get_learner(method)
    context = base.Context(digits, small_tasks(), torch.device("cpu"), 0, folder)
    return learner(context, base.make_config(learner, {**OWN, **settings}))


def readings_by_length(learner, num_classes=6, per_class=100):
    """Readings (N, D) and labels (N,): classes that differ in length only. relu(z W) is proportional to the length,
    so the main stream cannot tell those of middle length; tanh saturates, and can."""
    torch.manual_seed(0)
    (num_readings,) = learner.output_shape(learner.reader)
    labels = torch.arange(num_classes).repeat(per_class)
    lengths = 2.0 ** labels[:, None]
    return lengths * (torch.randn(num_readings) + 0.1 * torch.randn(len(labels), num_readings)), labels


def test_compensation_lowers_the_residual_where_the_main_stream_underfits(digits, tmp_path):
    learner = make(digits, tmp_path)
    readings, labels = readings_by_length(learner, num_classes=4)
    learner.expand(0)
    learner.learn_readings(0, readings, labels)
    main, both = learner.heads["main"](readings), learner.frozen_head()(readings)
    left, still_left = ((learner.one_hot(labels) - scores).square().mean() for scores in (main, both))
    assert left > 0.05 and still_left < 0.7 * left, (left, still_left)
    is_right = [(scores.argmax(1) == labels).double().mean() for scores in (main, both)]
    assert is_right[0] < 0.8 and is_right[1] > 0.9, is_right


def test_the_compensation_is_one_regression_on_the_residuals_of_all_tasks_without_old_classes(digits, tmp_path):
    learner = make(digits, tmp_path, random_features=48)
    features, targets = [], []
    readings, labels = readings_by_length(learner)
    for task, chosen in enumerate([labels < 4, labels >= 4]):
        learner.expand(task)
        learner.learn_readings(task, readings[chosen], labels[chosen])
        main = learner.heads["main"](readings[chosen])
        residuals = F.one_hot(labels[chosen], 6) - F.pad(main, (0, 6 - main.shape[1]))
        if task == 1:
            residuals[:, :4] = 0
        features.append(torch.tanh(readings[chosen] @ learner.heads["main"].projection).double())
        targets.append(residuals.double())
    h, y = torch.cat(features), torch.cat(targets)
    expected = torch.linalg.solve(h.T @ h + 0.1 * torch.eye(48), h.T @ y)
    torch.testing.assert_close(learner.heads["compensation"].rows.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_main_stream_is_acil_and_without_compensation_nothing_else_is_left(digits, tmp_path, shared):
    acil = learn(digits, tmp_path / "acil", shared, method="acil")
    alone = learn(digits, tmp_path / "alone", shared, compensation=0.0)
    both = learn(digits, tmp_path / "both", shared)
    for run in (alone, both):
        assert torch.equal(run._learner.heads["main"].rows, acil._learner.heads["head"].rows)
    assert alone["accuracy_matrix"] == acil["accuracy_matrix"]
    with torch.no_grad():
        images = digits.test.images
        assert torch.equal(alone.model(images), acil.model(images))
        assert not torch.allclose(both.model(images), acil.model(images), atol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"reads": "layers"}, {"reads": "layers", "standardise": True}], ids=str)
def test_old_and_new_classes_are_known_at_the_end(digits, tmp_path, shared, settings):
    run = learn(digits, tmp_path, shared, **settings)
    assert run["last"] > 0.75 and min(run["accuracy_matrix"][-1]) > 0.6, run["accuracy_matrix"]


def test_the_two_matrices_are_all_that_is_kept(digits, tmp_path, shared):
    run = learn(digits, tmp_path, shared)
    parts = {"main matrix": WIDTH**2 * 8, "compensation matrix": WIDTH**2 * 8}
    assert {name: run["storage_bytes"][name] for name in parts} == parts
    assert run["storage_bytes"]["total"] == 2 * WIDTH**2 * 8
    saved = krnet.io.archive.open_archive(tmp_path / "state.krn")
    kept = {name: saved.tensor(name) for name in saved.names if name.startswith("extra.")}
    assert base.num_bytes(kept) == run["storage_bytes"]["total"]


def test_a_negative_compensation_is_refused():
    with pytest.raises(SettingError, match="compensation is -1"):
        base.make_config(Dsal, {"compensation": -1.0})
