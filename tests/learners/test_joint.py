"""Joint training skips tasks without changing what it learns in the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from krnet import task_loop as learning
from krnet.data.dataset import DataSet
from krnet.errors import SettingError
from krnet.learners.joint import JointConfig
from learning_tools import assert_same_run, small_digits, small_tasks

QUICK = {"base": "paper", "backbone": "resnet8", "base_epochs": 1, "epochs": 1, "batch_size": 16}


@pytest.fixture(scope="module")
def images() -> DataSet:
    return small_digits(12, 4)


def learn(images: DataSet, out: Path, resume: bool = False, **settings: Any) -> dict[str, Any]:
    return learning.learn(
        "joint", images, small_tasks(4), out=out, settings={**QUICK, **settings}, device="cpu", resume=resume
    )


def test_tasks_that_are_not_named_are_skipped_and_the_others_learn_the_same(images, tmp_path):
    every = learn(images, tmp_path / "every")["accuracy"]
    found = learn(images, tmp_path / "some", learned_tasks="0,2,4")
    assert found["accuracy"] == [every[0], None, every[2], None, every[4]]
    assert found["last"] == every[4] and found["average"] is None
    assert found["settings"]["learned_tasks"] == [0, 2, 4]


def test_the_base_task_and_the_last_one_need_no_naming(images, tmp_path):
    only_last = learn(images, tmp_path / "last", only_last=True)["accuracy"]
    assert learn(images, tmp_path / "none", learned_tasks=[])["accuracy"] == only_last
    assert [a is None for a in learn(images, tmp_path / "one", learned_tasks=3)["accuracy"]] == [False, True, True] + [
        False
    ] * 2


def test_a_run_of_a_version_without_the_setting_goes_on(images, tmp_path):
    first = learn(images, tmp_path / "run", only_last=True)
    path = tmp_path / "run" / "settings.json"
    saved = json.loads(path.read_text())
    del saved["settings"]["learned_tasks"]
    path.write_text(json.dumps(saved))
    assert_same_run(learn(images, tmp_path / "run", resume=True, only_last=True), first)


@pytest.mark.parametrize("given", ["0,x", "all", [0.5], [-1], [True], {"a": 1}])
def test_what_is_no_list_of_tasks_is_refused(given):
    with pytest.raises(SettingError, match=r"learned_tasks is .*expected numbers of tasks, such as 0,5,10"):
        JointConfig(learned_tasks=given)


def test_a_task_that_there_is_not_and_both_settings_at_once_are_refused(images, tmp_path):
    with pytest.raises(SettingError, match="learned_tasks holds 9; the last task is 4"):
        learn(images, tmp_path / "run", learned_tasks="0,9")
    with pytest.raises(SettingError, match="give one of them"):
        JointConfig(learned_tasks="0,3", only_last=True)
