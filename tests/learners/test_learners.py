"""The contract of a learner: all of them learn the same tasks, are judged alike, and can be stopped at any time."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import fields

import pytest
import torch

from krnet import task_loop as learning
from krnet.errors import ResumeError, SettingError
from krnet.learners import base
from krnet.train.classifier import Saving
from learning_tools import settings_for, small_tasks
from watchers import of_fits

METHODS = base.learner_names()
KEYS = {
    "method", "data", "order", "order_hash", "seed", "accuracy_matrix", "accuracy", "last", "average",
    "average_without_base", "forgetting", "storage_bytes", "seconds", "settings", "tasks",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole_runs(digits, tmp_path_factory):
    """Each learner once, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole")
    runs = {}

    def run(method):
        if method not in runs:
            runs[method] = learn(method, digits, folder / method)
        return runs[method]

    return run


def learn(method, digits, out, **options):
    options = {"settings": settings_for(method), "device": "cpu", "seed": 1, **options}
    return learning.learn(method, digits, small_tasks(), out=out, **options)


def stop_at(number):
    """Ctrl-C at the n-th look at the loss."""
    seen = []

    def stop(progress):
        seen.append(progress)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGINT)

    return of_fits(stop)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_says_what_was_learned_and_what_it_cost(whole_runs, method):
    run = whole_runs(method)
    assert run.keys() >= KEYS and run["method"] == method
    assert [len(row) for row in run["accuracy_matrix"]] == [1, 2, 3]
    assert all(0 <= value <= 1 for row in run["accuracy_matrix"] for value in row)
    # 8 test images a class: 32 of the base task, 16 of each later one.
    counts = [32, 16, 16]
    for row, overall in zip(run["accuracy_matrix"], run["accuracy"], strict=True):
        right = sum(value * number for value, number in zip(row, counts))
        assert overall == pytest.approx(right / sum(counts[: len(row)]))
    parts = {k: v for k, v in run["storage_bytes"].items() if k not in ("total", "equivalent_exemplars")}
    assert run["storage_bytes"]["total"] == sum(parts.values())
    json.dumps(run, allow_nan=False)


@pytest.mark.parametrize("method", METHODS)
def test_the_base_task_is_learned(whole_runs, method):
    assert whole_runs(method)["accuracy"][0] > 0.5


def run_task(learner, task, folder, known=()):
    """Learn a task as the task loop does, taking over what its first pieces of work came to; what all came to."""
    works, results = learner.learn(task), []
    while True:
        torch.manual_seed(learner.context.seed_for(task, 1 + len(results)))
        if (work := next(works, None)) is None:
            return results
        if len(results) < len(known):
            work.take(known[len(results)])
        else:
            work.run(Saving(folder / f"{task}-{len(results)}"), None)
        results.append({name: value.clone() for name, value in work.result().items()})


@pytest.mark.parametrize("method", METHODS)
def test_a_learner_restored_from_its_state_predicts_and_learns_on_as_if_nothing_had_happened(digits, tmp_path, method):
    """A run that was stopped in the last piece of work of a task: those before it are taken over."""
    quick = {"base_epochs": 1, "epochs": 2, "gan_epochs": 1, "recorder_iterations": 5}
    config = base.make_config(
        base.get_learner(method), settings_for(method) | {k: v for k, v in quick.items() if k in settings_of(method)}
    )

    def make(folder, seed):
        torch.manual_seed(seed)  # the second starts from other weights
        return base.get_learner(method)(base.Context(digits, small_tasks(), torch.device("cpu"), 1, folder), config)

    (tmp_path / "a").mkdir()
    learner = make(tmp_path / "a", 0)
    run_task(learner, 0, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    other = make(tmp_path / "b", 99)
    other.restore(0, {name: value.clone() for name, value in learner.state().items()})
    assert other.storage_bytes() == learner.storage_bytes()
    images = learner.context.test.take(torch.arange(20))
    assert_same_predictions(learner, other, images)
    results = run_task(learner, 1, tmp_path / "a")
    run_task(other, 1, tmp_path / "b", known=results[:-1])
    assert_same_predictions(learner, other, images)
    for name, value in learner.state().items():
        assert torch.equal(other.state()[name], value), name


def settings_of(method):
    return {field.name for field in fields(base.get_learner(method).config_class)}


def assert_same_predictions(one, other, images):
    for learner in (one, other):
        for module in learner.modules().values():
            module.eval()
    with torch.no_grad():
        for row, found in one.predict(images).items():
            assert torch.equal(other.predict(images)[row], found)


def test_methods_with_the_same_base_task_train_it_once(digits, tmp_path):
    names = []

    note = of_fits(lambda progress: names.append(progress.done))
    one = learn("finetune", digits, tmp_path / "a", shared=tmp_path / "shared", watch=note)
    first = len(names)
    two = learn("joint", digits, tmp_path / "b", shared=tmp_path / "shared", watch=note)
    assert len(list((tmp_path / "shared").iterdir())) == 1
    assert two["accuracy"][0] == one["accuracy"][0] and len(names) - first < 3 * first


def test_a_folder_that_holds_a_run_is_not_overwritten(digits, tmp_path):
    quick = {"settings": settings_for("finetune") | {"base_epochs": 1, "epochs": 1}}
    learn("finetune", digits, tmp_path / "run", **quick)
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(SettingError, match="--resume"):
        learn("finetune", digits, tmp_path / "run", **quick)
    learn("finetune", digits, tmp_path / "run", resume=True, **quick)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_a_run_is_not_taken_up_with_other_settings(digits, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        learn("finetune", digits, tmp_path / "run", watch=stop_at(3))
    with pytest.raises(ResumeError, match="seed"):
        learning.learn(
            "finetune", digits, small_tasks(), out=tmp_path / "run", settings=settings_for("finetune"), device="cpu",
            seed=2, resume=True,
        )  # fmt: skip


def test_unknown_settings_and_methods_are_refused_with_the_nearest_name(digits, tmp_path):
    with pytest.raises(SettingError, match="did you mean 'epochs'"):
        learning.learn("finetune", digits, small_tasks(), out=tmp_path, settings={"epoch": 3}, device="cpu")
    with pytest.raises(SettingError, match="finetune"):
        learning.learn("finetun", digits, small_tasks(), out=tmp_path, device="cpu")
