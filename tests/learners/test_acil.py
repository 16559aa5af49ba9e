"""ACIL: the head after all tasks is that of one ridge regression on all samples, which it has not kept."""

from __future__ import annotations

import pytest
import torch

import krnet
from krnet import task_loop as learning
from krnet.errors import SettingError
from krnet.learners import base
from krnet.learners.acil import Acil
from learning_tools import SMALL, small_tasks

WIDTH = 128
OWN = {**SMALL, "random_features": WIDTH, "fixed_layers": 3}
READS = [{}, {"standardise": True}, {"reads": "layers"}, {"reads": "layers", "standardise": True}]


def learn(digits, folder, shared, watch=None, resume=False, method="acil", **settings):
    options = {"out": folder, "settings": {**OWN, **settings}, "shared": shared, "watch": watch, "resume": resume}
    return learning.learn(method, digits, small_tasks(), device="cpu", **options)


@pytest.mark.parametrize("settings", READS, ids=str)
def test_the_rows_after_all_tasks_are_those_of_one_regression_on_all_samples(digits, tmp_path, shared, settings):
    learner = learn(digits, tmp_path, shared, **settings)._learner
    head, context = learner.heads["head"], base.Context(digits, small_tasks(), torch.device("cpu"), 0, tmp_path)
    readings = learner.apply(learner.reader, context.train, torch.arange(len(context.train)))
    features = head.random_features(readings).double()
    answers = torch.eye(8, dtype=torch.float64)[context.train_labels]
    system = features.T @ features + 0.1 * torch.eye(WIDTH)
    expected = torch.linalg.solve(system, features.T @ answers)
    # Features of one layer nearly depend on each other, so rows may differ where scores do not.
    torch.testing.assert_close(features @ head.rows.double(), features @ expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(learner.grams["head"], system, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", READS, ids=str)
def test_old_and_new_classes_are_known_at_the_end(digits, tmp_path, shared, settings):
    run = learn(digits, tmp_path, shared, **settings)
    assert run["last"] > 0.75 and min(run["accuracy_matrix"][-1]) > 0.6, run["accuracy_matrix"]


class ForgetsItsMatrix(Acil):
    def learn_readings(self, task, readings, labels):
        self.grams = {}
        super().learn_readings(task, readings, labels)


def test_without_the_matrix_old_classes_are_forgotten(digits, tmp_path, shared, monkeypatch):
    kept = learn(digits, tmp_path / "kept", shared)
    monkeypatch.setitem(base._REGISTRY, "acil", ForgetsItsMatrix)
    lost = learn(digits, tmp_path / "lost", shared)
    assert lost["accuracy"][0] == kept["accuracy"][0]
    assert lost["accuracy_matrix"][-1][0] < kept["accuracy_matrix"][-1][0] - 0.3


def test_the_matrix_is_all_that_is_kept_and_the_rows_belong_to_the_network(digits, tmp_path, shared):
    run = learn(digits, tmp_path, shared)
    assert run["storage_bytes"]["total"] == run["storage_bytes"]["head matrix"] == WIDTH**2 * 8
    assert run["storage_bytes_by_task"] == [WIDTH**2 * 8] * 3
    saved = krnet.io.archive.open_archive(tmp_path / "state.krn")
    assert set(saved.names) >= {"head.rows", "extra.head matrix"} and "head.projection" not in saved.names
    learner = run._learner
    network = base.num_bytes(learner.model.state_dict()) + base.num_bytes(learner.heads["head"].state_dict())
    assert run["network_bytes"] == network


@pytest.mark.parametrize("method", ["acil", "dsal"])
@pytest.mark.parametrize("settings", [{}, {"reads": "layers", "standardise": True}], ids=str)
def test_a_loaded_or_resumed_run_answers_alike(digits, tmp_path, shared, method, settings):
    whole = learn(digits, tmp_path / "whole", shared, method=method, **settings)

    def stop(progress):
        if "task 1 of 2 done" in progress.name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(digits, tmp_path / "cut", shared, watch=stop, method=method, **settings)
    resumed = learn(digits, tmp_path / "cut", shared, resume=True, method=method, **settings)
    assert resumed["accuracy_matrix"] == whole["accuracy_matrix"]
    labels = whole.predict(digits.test.images)
    for run in (resumed, krnet.load_run(tmp_path / "whole"), krnet.load_run(tmp_path / "cut")):
        assert torch.equal(run.predict(digits.test.images), labels)
        assert torch.equal(run.model(digits.test.images).argmax(1), labels)


def test_the_network_stays_as_the_base_task_left_it(digits, tmp_path):
    learn(digits, tmp_path / "run", tmp_path / "shared")
    trained = krnet.io.archive.open_archive(next((tmp_path / "shared").iterdir()))
    state = krnet.io.archive.open_archive(tmp_path / "run" / "state.krn")
    names = [name for name in trained.names if name.startswith("modules.backbone.")]
    assert names
    for name in names:
        assert torch.equal(trained.tensor(name), state.tensor(name.replace("modules.", "model."))), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"random_features": 0}, "random_features is 0"),
        ({"ridge": -0.1}, "ridge is -0.1"),
        ({"standardise": 3}, "standardise is 3"),
        ({"reads": "pixels"}, "reads is 'pixels'"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        base.make_config(Acil, settings)


def test_a_ridge_too_small_to_solve_the_head_is_named(digits, tmp_path, shared):
    with pytest.raises(SettingError, match="larger ridge"):
        learn(digits, tmp_path, shared, ridge=0.0, random_features=256)
