"""The network of the base task alone: the same as that of a whole run, shared with it, and resumed."""

from __future__ import annotations

import torch

from krnet import task_loop
from krnet.nn.fingerprint import fingerprint
from krnet.train.classifier import Descent
from learning_tools import settings_for, small_digits, small_tasks


def test_it_is_the_base_task_of_a_run_and_each_finds_the_others(tmp_path, monkeypatch):
    data, split, given = small_digits(), small_tasks(), settings_for("finetune")
    alone = task_loop.learn_base(data, split, out=tmp_path / "alone", settings=given, shared=tmp_path / "own")
    kril = settings_for("kril") | {"recorder": "raw"}  # its base task is that of all methods with a linear head
    task_loop.learn("kril", data, split, out=tmp_path / "run", settings=kril, shared=tmp_path / "shared")
    monkeypatch.setattr(Descent, "run", None)  # nothing may train from here on
    found = task_loop.learn_base(data, split, out=tmp_path / "other", settings=given, shared=tmp_path / "shared")
    again = task_loop.learn_base(data, split, out=tmp_path / "alone", settings=given)
    assert fingerprint(alone) == fingerprint(found) == fingerprint(again)
    assert {path.name for path in (tmp_path / "own").iterdir()} == {p.name for p in (tmp_path / "shared").iterdir()}
    logits = alone(torch.zeros(2, *data.input_shape))
    assert logits.shape == (2, len(split.tasks[0])) and not logits.requires_grad
