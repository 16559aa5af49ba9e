"""What a run tells while it goes: a line that names method, task and time left, and logs that begin with the run."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from krnet.cli.progress import Display, TensorBoardLog, several
from krnet.progress import Progress


@pytest.fixture
def display(monkeypatch):
    monkeypatch.setattr("krnet.cli.progress.LINE_EVERY_S", 0.0)  # each one is printed
    return Display()


def looked(name, share, done, loss):
    """A look at the loss after a minute and a half."""
    return Progress(name, share, done, "iterations", 90.0, {"loss": loss})


def after_task(method, task, **rows):
    name = f"task {task} of 2" if task else "base task"
    return Progress(f"{method}, {name} done", done=task, unit="tasks", values=rows)


def test_the_line_names_method_task_work_share_loss_and_time_left(display, capsys):
    name = "kril, task 2 of 10: F2"
    display(Progress(name))
    display(looked(name, 0.25, 1500, 0.123456))
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first == name
    assert second == f"{name}   25 %  1,500 iterations  16.7/s  loss 0.1235  elapsed 1:30  left 4:30"


def test_the_line_keeps_the_accuracy_of_the_task_before_and_drops_that_of_another_method(display, capsys):
    display(after_task("icarl", 0, **{"accuracy": 0.7654321, "accuracy cnn": 0.5}))
    display(looked("icarl, task 1 of 2: classifier", 0.5, 10, 1.0))
    first, second = capsys.readouterr().err.splitlines()
    accuracy = "accuracy 76.54 %  accuracy cnn 50.00 %"
    assert first == f"icarl, base task done  {accuracy}" and second.endswith(f"last task: {accuracy}")
    display(looked("lucir, base task: classifier", 0.5, 10, 1.0))
    assert "accuracy" not in capsys.readouterr().err


class Writer:
    """In the place of TensorBoard's."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, folder):
        self.folder, self.scalars, self.flushed = folder, [], 0
        Writer.made.append(self)

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))

    def flush(self):
        self.flushed += 1


@pytest.fixture
def writers(monkeypatch):
    monkeypatch.setattr(Writer, "made", [])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    return Writer.made


def test_logs_hold_losses_by_work_and_accuracies_by_task(writers, tmp_path):
    board = TensorBoardLog(tmp_path / "tensorboard")
    for task in range(2):
        work = f"kril, {'task 1 of 2' if task else 'base task'}: F2"
        board(Progress(work))
        board(looked(work, 0.5, 10, 0.25))
        board(after_task("kril", task, accuracy=0.75))
    (writer,) = writers
    assert writer.folder == str(tmp_path / "tensorboard") and writer.flushed == 2
    assert writer.scalars == [
        ("loss/kril, base task: F2", 0.25, 10), ("accuracy/kril", 0.75, 0),
        ("loss/kril, task 1 of 2: F2", 0.25, 10), ("accuracy/kril", 0.75, 1),
    ]  # fmt: skip


def test_no_log_is_begun_before_there_is_work(writers, tmp_path):
    TensorBoardLog(tmp_path / "tensorboard")
    assert writers == []


def test_without_tensorboard_there_are_no_logs_and_no_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    board = TensorBoardLog(tmp_path / "tensorboard")
    board(looked("kril, base task: F2", 0.5, 10, 0.25))
    board(after_task("kril", 0, accuracy=0.75))
    assert list(tmp_path.iterdir()) == []


def test_several_watchers_are_told_the_same(writers, display, tmp_path, capsys):
    both = several(display, TensorBoardLog(tmp_path))
    both(Progress("kril, base task: F2"))
    both(looked("kril, base task: F2", 0.5, 10, 0.25))
    both(after_task("kril", 0, accuracy=0.75))
    assert len(capsys.readouterr().err.splitlines()) == 3 and len(writers[0].scalars) == 2
