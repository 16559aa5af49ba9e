"""iCaRL: distillation, exemplars within their budget, and the nearest mean of exemplars."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from krnet import task_loop as learning
from krnet.errors import SettingError
from krnet.learners import base
from krnet.learners.icarl import distillation
from learning_tools import settings_for, small_tasks


def make(digits, folder, **settings):
    context = base.Context(digits, small_tasks(), torch.device("cpu"), 1, folder)
    torch.manual_seed(0)
    learner = base.get_learner("icarl")
    return learner(context, base.make_config(learner, {**settings_for("icarl"), **settings}))


def finish(learner, task):
    torch.manual_seed(task)
    for work in learner.learn(task):
        work.run(None, None)


def test_distillation_is_the_divergence_of_softened_answers():
    logits, old = torch.randn(6, 4), torch.randn(6, 4)
    total = 0.0
    for row, old_row in zip(logits.tolist(), old.tolist()):
        new_p, old_p = ([math.exp(v / 2) for v in values] for values in (row, old_row))
        new_p, old_p = [v / sum(new_p) for v in new_p], [v / sum(old_p) for v in old_p]
        total += sum(q * math.log(q / p) for p, q in zip(new_p, old_p))
    assert distillation(logits, old, 2.0).item() == pytest.approx(4 * total / 6, rel=1e-5)
    assert distillation(old, old, 2.0).item() == pytest.approx(0, abs=1e-6)


def test_the_reference_setting_weighs_distillation_by_one():
    config = base.get_learner("icarl").config_class()
    assert config.beta * config.temperature**2 == 1
    assert (config.epochs, config.lr, config.weight_decay, config.exemplars_per_class) == (160, 0.1, 5e-4, 20)


def test_exemplars_per_class_grow_and_a_total_is_never_exceeded(digits, tmp_path):
    growing = make(digits, tmp_path, base_epochs=1, epochs=1, exemplars_per_class=3)
    fixed = make(digits, tmp_path, base_epochs=1, epochs=1, memory="total", memory_total=31)
    for task, classes in enumerate((4, 6, 8)):
        before = fixed.exemplars
        for learner, each in ((growing, 3), (fixed, 31 // classes)):
            finish(learner, task)
            assert torch.bincount(learner.exemplars.labels).tolist() == [each] * classes
            assert learner.storage_bytes() == {"exemplars": each * classes * 64, "exemplar_labels": each * classes * 4}
        for label in before.labels.unique():
            first = before.pixels[before.labels == label][: 31 // classes]
            assert torch.equal(fixed.exemplars.pixels[fixed.exemplars.labels == label], first)


def test_old_images_are_reached_through_exemplars_alone(digits, tmp_path):
    """With noise in the place of the base task's images the next task ends the same."""
    ends = []
    for spoilt in (False, True):
        learner = make(digits, tmp_path, base_epochs=1, epochs=2)
        finish(learner, 0)
        if spoilt:
            # The context looks at the data set's own pixels, so these are put elsewhere first.
            learner.context.train.pixels = learner.context.train.pixels.clone()
            learner.context.train.pixels[learner.context.task_ids(0)] = 77
        finish(learner, 1)
        ends.append(learner.state())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("may_flip", [False, True])
@pytest.mark.parametrize("nme_flip", [False, True])
def test_means_take_in_mirror_images_where_images_may_be_mirrored(digits, tmp_path, may_flip, nme_flip):
    learner = make(replace(digits, flip=may_flip), tmp_path, base_epochs=1, nme_flip=nme_flip)
    finish(learner, 0)
    kept = learner.exemplars
    images = (kept.pixels.float() / 255 - digits.mean[0]) / digits.std[0]
    views = [images, images.flip(3)] if may_flip and nme_flip else [images]
    with torch.no_grad():
        features = [torch.nn.functional.normalize(learner.model.features(view), dim=1) for view in views]
    for label in range(4):
        mean = torch.cat([view[kept.labels == label] for view in features]).mean(0)
        torch.testing.assert_close(learner.means[label], mean / mean.norm())


def test_settings_that_cannot_work_are_refused(digits, tmp_path):
    with pytest.raises(SettingError, match="8 classes"):
        make(digits, tmp_path, memory="total", memory_total=7)
    with pytest.raises(SettingError, match="expected seen"):
        make(digits, tmp_path, ce="new")
    with pytest.raises(SettingError, match="per-class"):
        make(digits, tmp_path, memory="fixed")


def old_accuracy(run, row):
    """On the test images of all tasks but the last, after the last."""
    base_task, middle, _ = run["rows"][row]["accuracy_matrix"][-1]
    return (32 * base_task + 16 * middle) / 48


@pytest.mark.slow
def test_without_its_ideas_old_classes_are_forgotten(digits, tmp_path):
    """Distillation is what holds the old logits, and the nearest mean is what is not swayed by many new images."""
    runs = {}
    for beta in (0.25, 0.0):
        settings = {**settings_for("icarl"), "exemplars_per_class": 2, "base_epochs": 15, "epochs": 20, "beta": beta}
        runs[beta] = learning.learn(
            "icarl", digits, small_tasks(), out=tmp_path / str(beta), settings=settings, device="cpu", seed=1
        )
    assert old_accuracy(runs[0.25], "cnn") > old_accuracy(runs[0.0], "cnn") + 0.05
    assert old_accuracy(runs[0.25], "nme") > old_accuracy(runs[0.25], "cnn") + 0.05
    assert runs[0.25]["row"] == "nme" and runs[0.25]["last"] > 0.85


@pytest.mark.parametrize("memory", ["per-class", "total"])
def test_a_budget_of_bytes_is_kept_and_used(digits, tmp_path, memory):
    image = math.prod(digits.image_shape) + 4
    learner = make(digits, tmp_path, memory=memory, budget=3 * 8 * image + image - 1)
    for task in range(3):
        finish(learner, task)
    assert sum(learner.exemplars.storage_bytes().values()) == 3 * 8 * image
    with pytest.raises(SettingError, match=f"at least {8 * image}"):
        make(digits, tmp_path, memory=memory, budget=8 * image - 1)
