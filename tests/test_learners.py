"""The contract of a learner: all of them learn the same tasks, are judged alike, and can be stopped at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from krnet import task_loop as learning
from krnet.errors import ResumeError, SettingError
from krnet.learners import base
from krnet.train.classifier import Saving
from learning_tools import settings_for, small_digits, small_tasks

METHODS = base.names()
KEYS = {
    "method", "data", "order", "order_hash", "seed", "accuracy_matrix", "accuracy", "last", "average",
    "average_without_base", "forgetting", "storage_bytes", "seconds", "settings", "tasks",
}  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    return small_digits()


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
    return learning.learn(
        method, digits, small_tasks(), out=out, settings=settings_for(method), device="cpu", seed=1, **options
    )


def without_times(run):
    return {key: value for key, value in run.items() if "seconds" not in key}


class Stop(learning.Silent):
    """Ctrl-C at the n-th look at the loss."""

    def __init__(self, after):
        self.after, self.seen = after, 0

    def status(self, status):
        self.seen += 1
        if self.seen == self.after:
            os.kill(os.getpid(), signal.SIGINT)


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


@pytest.mark.parametrize(
    "after, method", [(3, m) for m in METHODS] + [(n, m) for n in (1, 5) for m in ("kril", "lucir")]
)
def test_interrupted_and_resumed_a_run_ends_as_if_nothing_had_happened(whole_runs, digits, tmp_path, method, after):
    with pytest.raises(KeyboardInterrupt):
        learn(method, digits, tmp_path / "run", watcher=Stop(after))
    resumed = learn(method, digits, tmp_path / "run", resume=True)
    assert without_times(resumed) == without_times(whole_runs(method))


KILLED = """
    import os, signal, sys
    sys.path[:0] = {paths!r}
    from learning_tools import settings_for, small_digits, small_tasks
    from krnet import learning
    class Die(learning.Silent):
        seen = 0
        def status(self, status):
            Die.seen += 1
            if Die.seen == {after}:
                os.kill(os.getpid(), signal.SIGKILL)
    learning.learn({method!r}, small_digits(), small_tasks(), out={out!r}, settings=settings_for({method!r}),
                   device="cpu", seed=1, watcher=Die(), checkpoint_s=0.0)
"""


@pytest.mark.parametrize("method", [m for m in ("kril", "icarl") if m in METHODS])
def test_a_run_that_was_really_killed_goes_on_to_the_same_end(whole_runs, digits, tmp_path, method):
    out = str(tmp_path / "run")
    code = textwrap.dedent(KILLED.format(paths=[str(Path(__file__).parent)], method=method, after=5, out=out))
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert without_times(learn(method, digits, out, resume=True)) == without_times(whole_runs(method))


@pytest.mark.parametrize("method", METHODS)
def test_a_learner_restored_from_its_state_predicts_the_same(digits, tmp_path, method):
    config = base.make_config(base.choose(method), settings_for(method))
    context = base.Context(digits, small_tasks(), torch.device("cpu"), 1, tmp_path)
    torch.manual_seed(0)
    learner = base.choose(method)(context, config)
    for task in range(2):
        for number, work in enumerate(learner.learn(task)):
            work.run(Saving(tmp_path / f"{task}-{number}"), None)
    torch.manual_seed(99)  # a new network starts from other weights
    other = base.choose(method)(context, config)
    other.restore(1, {name: value.clone() for name, value in learner.state().items()})
    images = context.test.take(torch.arange(20))
    with torch.no_grad():
        for row, found in learner.predict(images).items():
            assert torch.equal(other.predict(images)[row], found)
    assert other.storage_bytes() == learner.storage_bytes()


def test_methods_with_the_same_base_task_train_it_once(digits, tmp_path):
    names = []

    class Note(learning.Silent):
        def status(self, status):
            names.append(status.iteration)

    one = learn("finetune", digits, tmp_path / "a", shared=tmp_path / "shared", watcher=Note())
    first = len(names)
    two = learn("joint", digits, tmp_path / "b", shared=tmp_path / "shared", watcher=Note())
    assert len(list((tmp_path / "shared").iterdir())) == 1
    assert two["accuracy"][0] == one["accuracy"][0] and len(names) - first < 3 * first


def test_a_folder_that_holds_a_run_is_not_overwritten(digits, tmp_path):
    learn("finetune", digits, tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(SettingError, match="--resume"):
        learn("finetune", digits, tmp_path / "run")
    learn("finetune", digits, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_a_run_is_not_taken_up_with_other_settings(digits, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        learn("finetune", digits, tmp_path / "run", watcher=Stop(3))
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
