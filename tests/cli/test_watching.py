"""What a run tells while it goes: a line that names method, task and time left, and logs that begin with the run."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from krnet.cli.progress import Display, ProgressLine, TensorBoardLog, Watchers
from krnet.train.loop import Status


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr("krnet.cli.progress.LINE_EVERY_S", 0.0)  # each one is printed
    return ProgressLine(Display())


def test_the_line_names_method_task_work_share_loss_and_time_left(line, capsys):
    line.work("kril", 2, 11, "F2")
    line.status(Status(1500, 0.25, 0.123456, 30.0))
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first == "kril  task 2 of 10  F2"
    assert second == "kril  task 2 of 10  F2   25 %  1,500 it  loss 0.1235  elapsed 0:30  left 1:30"


def test_the_line_keeps_the_accuracy_of_the_task_before_and_drops_that_of_another_method(line, capsys):
    line.work("icarl", 0, 3, "classifier")
    line.accuracy("icarl", 0, {"cnn": 0.7654321, "nme": 0.5})
    line.work("icarl", 1, 3, "classifier")
    line.status(Status(10, 0.5, 1.0, 1.0))
    err = capsys.readouterr().err.splitlines()
    assert err[1] == "icarl  task 0 done: cnn 76.54 %, nme 50.00 %"
    assert err[3].endswith("accuracy cnn 76.54 %, nme 50.00 %")
    line.work("lucir", 0, 3, "classifier")
    line.status(Status(10, 0.5, 1.0, 1.0))
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
        board.work("kril", task, 2, "F2")
        board.status(Status(10, 0.5, 0.25, 1.0))
        board.accuracy("kril", task, {"cnn": 0.75})
    (writer,) = writers
    assert writer.folder == str(tmp_path / "tensorboard") and writer.flushed == 2
    assert writer.scalars == [
        ("loss/kril/task 0/F2", 0.25, 10), ("accuracy/kril cnn", 0.75, 0),
        ("loss/kril/task 1/F2", 0.25, 10), ("accuracy/kril cnn", 0.75, 1),
    ]  # fmt: skip


def test_no_log_is_begun_before_there_is_work(writers, tmp_path):
    TensorBoardLog(tmp_path / "tensorboard")
    assert writers == []


def test_without_tensorboard_there_are_no_logs_and_no_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    board = TensorBoardLog(tmp_path / "tensorboard")
    board.work("kril", 0, 2, "F2")
    board.status(Status(10, 0.5, 0.25, 1.0))
    board.accuracy("kril", 0, {"cnn": 0.75})
    assert list(tmp_path.iterdir()) == []


def test_several_watchers_are_told_the_same(writers, line, tmp_path, capsys):
    both = Watchers([line, TensorBoardLog(tmp_path)])
    both.work("kril", 0, 2, "F2")
    both.status(Status(10, 0.5, 0.25, 1.0))
    both.accuracy("kril", 0, {"cnn": 0.75})
    assert len(capsys.readouterr().err.splitlines()) == 3 and len(writers[0].scalars) == 2
