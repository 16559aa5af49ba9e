"""FeTrIL: old classes imitated by translated readings of new ones, and a linear SVM over all classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.svm import LinearSVC

from krnet import task_loop as learning
from krnet.errors import SettingError
from krnet.learners import base
from krnet.learners.fetril import fit_svm, translated
from learning_tools import settings_for, small_tasks


def make(digits, folder, **settings):
    context = base.Context(digits, small_tasks(), torch.device("cpu"), 0, folder)
    kind = base.get_learner("fetril")
    return kind(context, base.make_config(kind, {**settings_for("fetril"), **settings}))


def test_an_old_class_is_the_new_class_of_the_largest_cosine_moved_to_the_old_mean():
    rng = np.random.default_rng(0)
    readings, labels = rng.gamma(2, size=(30, 4)), 3 + np.arange(30) % 2
    old_means = rng.gamma(2, size=(3, 4))
    new_means = np.stack([readings[labels == label].mean(0) for label in (3, 4)])
    found, found_labels = translated(
        torch.tensor(readings), torch.tensor(labels), torch.tensor(np.concatenate([old_means, new_means])), 3
    )
    expected, expected_labels = [], []
    for old, mean in enumerate(old_means):
        cosines = [mean @ new / np.linalg.norm(mean) / np.linalg.norm(new) for new in new_means]
        nearest = int(np.argmax(cosines))
        for reading in readings[labels == 3 + nearest]:
            expected.append(reading + mean - new_means[nearest])
            expected_labels.append(old)
    np.testing.assert_allclose(found.numpy(), expected)
    assert found_labels.tolist() == expected_labels
    for old, mean in enumerate(old_means):  # what is known of an old class stays true of its pseudo-readings
        np.testing.assert_allclose(found[found_labels == old].mean(0), mean)


@pytest.mark.parametrize("cost", [1.0, 0.1])
def test_the_svm_is_that_of_scikit_learn(cost):
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 5
    readings = rng.normal(size=(5, 8))[labels] + rng.normal(size=(300, 8))
    readings /= np.linalg.norm(readings, axis=1, keepdims=True)
    expected = LinearSVC(C=cost, dual=False, tol=1e-8).fit(readings, labels)
    weight, bias = fit_svm(torch.tensor(readings).float(), torch.tensor(labels), 5, cost, 200)
    np.testing.assert_allclose(weight, expected.coef_, atol=2e-3)
    np.testing.assert_allclose(bias, expected.intercept_, atol=2e-3)


def test_without_translation_the_old_classes_are_lost(digits, tmp_path):
    runs = {}
    for translate in (True, False):
        settings = {**settings_for("fetril"), "base_epochs": 8, "translate": translate}
        out = tmp_path / str(translate)
        runs[translate] = learning.learn(
            "fetril", digits, small_tasks(), out=out, settings=settings, shared=tmp_path / "shared", device="cpu"
        )
    assert runs[True]["accuracy_matrix"][0] == runs[False]["accuracy_matrix"][0]
    assert min(runs[True]["accuracy_matrix"][-1]) > 0.6 and max(runs[False]["accuracy_matrix"][-1][:2]) < 0.1


def test_the_means_are_stored_and_the_svm_belongs_to_the_network(digits, tmp_path):
    learner = make(digits, tmp_path)
    dim = learner.model.backbone.feature_dim
    rng = torch.Generator().manual_seed(0)
    for task, classes in enumerate((4, 6)):
        if task:
            learner.task = 0
            learner.expand(1)
        labels = torch.arange(40) % (classes - 4 * task) + 4 * task
        learner.learn_readings(task, torch.rand(40, dim, generator=rng), labels)
        assert learner.storage_bytes() == {"means": classes * dim * 4}
        assert base.num_bytes(learner.deployed()["svm"].state_dict()) == classes * (dim + 1) * 4
        assert learner.frozen_head()(torch.rand(3, dim)).shape == (3, classes)


@pytest.mark.parametrize(
    ("settings", "message"), [({"cost": 0.0}, "cost is 0"), ({"svm_iterations": 0}, "svm_iterations is 0")], ids=str
)
def test_settings_out_of_range_are_refused(digits, tmp_path, settings, message):
    with pytest.raises(SettingError, match=message):
        make(digits, tmp_path, **settings)
