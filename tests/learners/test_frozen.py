"""Learners that freeze the network: only what is kept changes after the base task, and a saved run answers the same."""

from __future__ import annotations

import pytest
import torch

import krnet
from krnet import task_loop as learning
from krnet.errors import SettingError
from krnet.io import archive
from krnet.learners import base
from krnet.learners.frozen import FrozenLearner
from learning_tools import settings_for, small_tasks

METHODS = [name for name in base.learner_names() if issubclass(base.get_learner(name), FrozenLearner)]
READS = [{}, {"reads": "layers", "fixed_layers": 3}]
every_method = pytest.mark.parametrize("method", METHODS)


def learn(method, digits, folder, shared, **options):
    settings = {**settings_for(method), "base_epochs": 8, **options.pop("settings", {})}
    return learning.learn(method, digits, small_tasks(), out=folder, settings=settings, shared=shared, **options)


@every_method
@pytest.mark.parametrize("reads", READS, ids=("features", "layers"))
def test_all_classes_are_known_at_the_end_and_a_saved_run_answers_the_same(digits, tmp_path, shared, method, reads):
    run = learn(method, digits, tmp_path, shared, settings=reads)
    assert run["last"] > 0.75 and min(run["accuracy_matrix"][-1]) > 0.5
    labels = run.predict(digits.test.images)
    assert (labels == digits.test.labels).double().mean().item() == pytest.approx(run["last"])
    assert torch.equal(run.model(digits.test.images).argmax(1), labels)
    assert torch.equal(krnet.load_run(tmp_path).predict(digits.test.images), labels)


@every_method
def test_the_network_is_that_of_the_base_task_and_all_that_is_kept_is_counted(digits, tmp_path, shared, method):
    run = learn(method, digits, tmp_path, shared)
    state = archive.open_archive(tmp_path / "state.krn")
    (trained,) = (archive.open_archive(path) for path in shared.iterdir())  # all of these methods share it
    for name in trained.names:
        if "backbone." in name:
            assert torch.equal(trained.tensor(name), state.tensor(name.replace("modules.", "model."))), name
    kept = {name.removeprefix("extra."): state.tensor(name) for name in state.names if name.startswith("extra.")}
    sizes = {name: value.numel() * value.element_size() for name, value in kept.items()}
    stored = {name: size for name, size in run["storage_bytes"].items() if name in sizes}
    assert stored == sizes and run["storage_bytes"]["total"] == sum(sizes.values()) > 0


@every_method
def test_a_stopped_run_goes_on_to_the_same_end(digits, tmp_path, shared, method):
    def stop(progress):
        if progress.name == f"{method}, task 1 of 2 done":
            raise KeyboardInterrupt

    whole = learn(method, digits, tmp_path / "whole", shared)
    with pytest.raises(KeyboardInterrupt):
        learn(method, digits, tmp_path / "cut", shared, watch=stop)
    resumed = learn(method, digits, tmp_path / "cut", shared, resume=True)
    assert resumed["accuracy_matrix"] == whole["accuracy_matrix"]
    one, other = (archive.open_archive(tmp_path / name / "state.krn") for name in ("whole", "cut"))
    for name in one.names:
        assert torch.equal(one.tensor(name), other.tensor(name)), name


@every_method
@pytest.mark.parametrize("name", ["outputs_per_class", "transform"])
def test_several_outputs_per_class_and_transforms_are_refused(digits, tmp_path, method, name):
    declared = {"outputs_per_class": 4, "transform": lambda self, images, labels: (images, labels)}
    parent = base.get_learner(method)
    child = type("Child", (parent,), {name: declared[name]})
    context = base.Context(digits, small_tasks(), torch.device("cpu"), 0, tmp_path)
    with pytest.raises(SettingError, match=f"Child declares its own {name}"):
        child(context, base.make_config(parent, settings_for(method)))
