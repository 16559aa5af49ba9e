"""What cannot be written is noticed before the work whose result it is to hold."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import krnet
from krnet.cli.app import app
from krnet.errors import InputError
from krnet.io import atomic

FEATURES = np.random.default_rng(0).random((30, 3, 4, 4), np.float32)


def refuse_any_work(progress) -> None:
    raise AssertionError(f"work began: {progress.name}")


def record(out) -> None:
    krnet.record(FEATURES, out=out, watch=refuse_any_work)


def append(out) -> None:
    krnet.record(FEATURES, recorder="pca", budget=9000).append(FEATURES, out=out, watch=refuse_any_work)


def extract(out) -> None:
    krnet.extract(torch.nn.Flatten(), FEATURES, out=out, watch=refuse_any_work)


ACTS = {"record": record, "append": append, "extract": extract}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is empty"),
        ("a\0b.safetensors", "zero byte"),
        ("x" * 252 + ".safetensors", "takes 264 bytes"),
        ("missing/a.safetensors", "no folder"),
        ("folder.safetensors", "is a folder"),
        ("/proc/a.safetensors", "cannot be written"),
    ],
)
def test_a_name_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, act, name, message):
    monkeypatch.chdir(tmp_path)
    Path("folder.safetensors").mkdir()
    with pytest.raises(InputError, match=message):
        act(name)
    assert os.listdir() == ["folder.safetensors"]


def test_a_name_with_room_for_itself_but_not_for_its_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"256 bytes with the \.ckpt of the file beside it"):
        krnet.record(FEATURES, out=tmp_path / ("x" * 247 + ".krn"), watch=refuse_any_work)
    krnet.record(FEATURES, out=tmp_path / ("x" * 247 + ".krn"), recorder="raw")


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_read_only_folder_is_refused_before_the_work(tmp_path, monkeypatch, act):
    real = os.open

    def read_only(path, flags, *rest, **more):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest, **more)

    recorded = krnet.record(FEATURES, recorder="pca", budget=9000)
    monkeypatch.setattr(atomic.os, "open", read_only)
    with pytest.raises(InputError, match="Read-only file system"):
        if act is append:
            recorded.append(FEATURES, out=tmp_path / "a.safetensors", watch=refuse_any_work)
        else:
            act(tmp_path / "a.safetensors")


def test_no_room_for_the_planned_size_is_refused_before_the_work(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 500))
    for options in ({"recorder": "raw"}, {"budget": 2000}, {"recorder": "pca", "budget": 2000}):
        with pytest.raises(InputError, match="are free there"):
            krnet.record(FEATURES, out=tmp_path / "a.krn", watch=refuse_any_work, **options)
    with pytest.raises(InputError, match="are free there"):
        krnet.extract(torch.nn.Flatten(), FEATURES, out=tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["record", "f.npy", "-o", ""],
        ["replay", "x.krn", "--out", ""],
        ["learn", "finetune", "--out=", "--data", "digits"],
        ["bench", "rate", "f.npy", "-o", ""],
    ],
)
def test_an_empty_output_is_wrong_usage(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "value is empty" in result.stderr
    assert not os.listdir()
