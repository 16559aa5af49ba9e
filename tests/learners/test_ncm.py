"""Nearest class mean: a mean of unit vectors per class, and cosines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from krnet.learners import base
from learning_tools import settings_for, small_digits, small_tasks


@pytest.fixture
def learner(tmp_path):
    context = base.Context(small_digits(), small_tasks(), torch.device("cpu"), 0, tmp_path)
    kind = base.get_learner("ncm")
    return kind(context, base.make_config(kind, settings_for("ncm")))


def test_scores_rank_classes_by_the_cosine_with_the_mean_unit_vector(learner):
    rng = np.random.default_rng(0)
    readings, labels = rng.gamma(2, size=(60, 5)), np.arange(60) % 8
    for task, classes in enumerate((range(4), range(4, 6), range(6, 8))):
        rows = np.isin(labels, classes)
        learner.learn_readings(task, torch.tensor(readings[rows]), torch.tensor(labels[rows]))
    units = readings / np.linalg.norm(readings, axis=1, keepdims=True)
    means = np.stack([units[labels == label].mean(0) for label in range(8)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    new = rng.gamma(2, size=(7, 5))
    cosines = new / np.linalg.norm(new, axis=1, keepdims=True) @ means.T
    scores = learner.frozen_head()(torch.tensor(new)).numpy()
    np.testing.assert_allclose(scores**2, 2 - 2 * cosines, atol=1e-5)  # |u - m|^2 = 2 - 2 u m
    assert (scores <= 0).all() and learner.storage_bytes() == {"means": 8 * 5 * 4}


def test_every_image_enters_the_mean_of_its_class_by_its_direction_alone(learner):
    """One outlier in nine moves class 0 away from [1, 0], farther than class 1; its length does not count."""
    readings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]).repeat_interleave(9, 0)
    labels = torch.tensor([0, 1, 2, 3]).repeat_interleave(9)
    readings[0] = torch.tensor([0.0, 8.0])
    learner.learn_readings(0, readings, labels)
    assert learner.frozen_head()(torch.tensor([[1.0, 0.0], [0.0, 30.0]])).argmax(1).tolist() == [1, 2]
    torch.testing.assert_close(learner.head.means[0], torch.tensor([8.0, 1.0]) / 65**0.5)
