"""FeCAM: Mahalanobis distances with a covariance per class."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from krnet.errors import SettingError
from krnet.learners import base, fecam
from learning_tools import settings_for, small_digits, small_tasks

TASKS = (range(4), range(4, 6), range(6, 8))


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    digits, folder = small_digits(), tmp_path_factory.mktemp("fecam")

    def made(method="fecam", **settings):
        context = base.Context(digits, small_tasks(), torch.device("cpu"), 0, folder)
        kind = base.get_learner(method)
        return kind(context, base.make_config(kind, {**settings_for(method), **settings}))

    return made


def teach(learner, readings, labels):
    """All tasks, from readings instead of images."""
    for task, classes in enumerate(TASKS):
        rows = np.isin(labels, classes)
        learner.learn_readings(task, torch.tensor(readings[rows]).float(), torch.tensor(labels[rows]))
    return learner


def uneven(number, seed):
    """Eight classes whose means are near each other and who vary along directions of their own."""
    rng, shape = np.random.default_rng(seed), np.random.default_rng(0)
    labels = np.arange(number) % 8
    readings = np.empty((number, 6))
    for label in range(8):
        axes = np.linalg.qr(shape.normal(size=(6, 6)))[0] * np.array([2.0, 2.0, 1.0, 0.2, 0.1, 0.1])
        mean = 10 + 0.5 * shape.normal(size=6)
        rows = labels == label
        readings[rows] = mean + rng.normal(size=(rows.sum(), 6)) @ axes.T
    return np.maximum(readings, 0), labels


def by_numpy(readings, labels, new, tukey, diagonal, rest, per_class):
    """The method as the paper and its code have it, class by class."""

    def shrunk(cov):
        eye = np.eye(len(cov))
        off = cov[~eye.astype(bool)].mean()
        return cov + diagonal * np.diag(cov).mean() * eye + rest * off * (1 - eye)

    if not per_class:
        common = 0
        for classes in TASKS:
            common = common + len(classes) / 8 * np.cov(readings[np.isin(labels, classes)].T ** tukey)
    units = new**tukey / np.linalg.norm(new**tukey, axis=1, keepdims=True)
    scores = []
    for label in range(8):
        own = readings[labels == label]
        mean = own.mean(0) ** tukey
        cov = shrunk(shrunk(np.cov(own.T**tukey) if per_class else common))
        if per_class:
            cov = cov / np.sqrt(np.outer(np.diag(cov), np.diag(cov)))
        away = units - mean / np.linalg.norm(mean)
        scores.append(-np.einsum("bi,ij,bj->b", away, np.linalg.pinv(cov), away))
    return np.stack(scores, 1)


@pytest.mark.parametrize(
    "settings",
    [(0.5, 1.0, 1.0, True), (1.0, 0.3, 0.0, True), (0.5, 1.0, 1.0, False), (0.7, 0.0, 0.0, False)],
    ids=str,
)
def test_scores_are_those_of_the_formula(make, settings):
    names = ("tukey", "shrink_diagonal", "shrink_rest", "per_class")
    readings, labels = uneven(160, 1)
    learner = teach(make(**dict(zip(names, settings))), readings, labels)
    new = uneven(20, 2)[0]
    expected = by_numpy(readings, labels, new, *settings)
    np.testing.assert_allclose(learner.frozen_head()(torch.tensor(new)).numpy(), expected, rtol=1e-3, atol=1e-5)
    num_covs = 8 if settings[-1] else 1
    assert learner.storage_bytes() == {"means": 8 * 6 * 4, "covariances": num_covs * 6 * 6 * 4}


def test_two_rounds_of_shrinking_by_one_are_one_by_three():
    cov = fecam.covariance(torch.rand(30, 6)).double()
    torch.testing.assert_close(fecam.shrink(fecam.shrink(cov, 1, 1), 1, 1), fecam.shrink(cov, 3, 3))


def test_a_covariance_per_class_beats_a_common_one_and_plain_means(make):
    """Measured: 0.73, 0.41 and 0.38 of the readings are right."""
    readings, labels = uneven(1600, 1)
    test, expected = uneven(800, 2)
    right = {}
    shrinkage = {"shrink_diagonal": 0.01, "shrink_rest": 0.0}
    for name, learner in {
        "own": make(**shrinkage), "common": make(per_class=False, **shrinkage), "ncm": make("ncm"),
    }.items():  # fmt: skip
        scores = teach(learner, readings, labels).frozen_head()(torch.tensor(test).float())
        right[name] = (scores.argmax(1).numpy() == expected).mean()
    assert right["own"] > right["common"] + 0.1 and right["own"] > right["ncm"] + 0.1, right


def test_without_covariances_the_distances_are_plain_ones(make, monkeypatch):
    readings, labels = uneven(160, 1)
    test = torch.tensor(uneven(20, 2)[0]).float()
    own = teach(make(tukey=1.0), readings, labels).frozen_head()(test)
    monkeypatch.setattr(fecam.FeCAM, "_metric", lambda self, cov: torch.eye(len(cov), dtype=cov.dtype))
    plain = teach(make(tukey=1.0), readings, labels)
    means = torch.nn.functional.normalize(plain.head.means, dim=1)
    expected = -torch.cdist(torch.nn.functional.normalize(test, dim=1), means).square()
    torch.testing.assert_close(plain.frozen_head()(test), expected, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(own, expected, rtol=1e-2)


def test_a_class_of_one_image_and_readings_that_never_change_give_finite_scores(make):
    readings, labels = uneven(17, 1)
    readings[:, 2] = 0
    keep = np.concatenate([np.arange(8), np.flatnonzero(labels < 6)[6:]])  # of classes 6 and 7 one image each
    learner = teach(make(), readings[keep], labels[keep])
    assert learner.frozen_head()(torch.tensor(readings).float()).isfinite().all()
    assert torch.equal(learner._metric(torch.zeros(6, 6)), torch.eye(6))


def test_negative_readings_become_zero_unless_the_transform_is_off():
    readings = torch.tensor([[-1.0, 4.0]])
    assert fecam.transform(readings, 0.5).tolist() == [[0.0, 2.0]]
    assert fecam.transform(readings, 1.0).tolist() == [[-1.0, 4.0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"tukey": 0.0}, "tukey is 0"), ({"shrink_rest": -1.0}, "shrink_rest is -1"), ({"per_class": 3}, "per_class is")],
    ids=str,
)
def test_settings_out_of_range_are_refused(make, settings, message):
    with pytest.raises(SettingError, match=message):
        make(**settings)
