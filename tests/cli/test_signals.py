"""SIGTERM and SIGHUP save what is done, as Ctrl-C does, and end with the codes that shells know them by."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import krnet
from krnet.cli.signals import stopping_like_ctrl_c

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def hangup_is_not_ignored():
    """Under nohup SIGHUP is ignored, and the commands started here would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def start(*words: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "krnet", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def wait_for(found: Callable[[], object], process: subprocess.Popen) -> None:
    for _ in range(600):
        if found():
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    raise AssertionError("it never came so far")


def end(process: subprocess.Popen, signum: int) -> str:
    process.send_signal(signum)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == CODES[signum], stderr
    return stderr


@pytest.fixture
def features(tmp_path: Path) -> Path:
    np.save(tmp_path / "f.npy", np.random.default_rng(0).random((200, 4, 6, 6), np.float32))
    return tmp_path / "f.npy"


@pytest.mark.parametrize("signum", CODES, ids=lambda signum: signum.name)
def test_a_stopped_record_leaves_a_checkpoint_and_resumes_to_the_same_file(tmp_path, features, signum):
    words = ["record", features, "-q", "--iterations", 400, "--set", "checkpoint_s=0.05", "-o"]
    process = start(*words, tmp_path / "a.krn")
    wait_for((tmp_path / "a.krn.ckpt").exists, process)
    message = end(process, signum)
    assert "a.krn.ckpt" in message and "--resume" in message and "Traceback" not in message
    assert not (tmp_path / "a.krn").exists()
    for name, more in {"a": ["--resume"], "b": []}.items():
        done = start(*words, tmp_path / f"{name}.krn", *more)
        assert done.wait(120) == 0, done.stderr.read()
    found, expected = (krnet.open(tmp_path / f"{name}.krn") for name in "ab")
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
def test_a_stopped_extract_keeps_its_rows(tmp_path, signum):
    import torch

    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                x = torch.nn.functional.avg_pool2d(x, 3, 1, 1)
            return x

    torch.jit.trace(Slow(), torch.zeros(1, 3, 32, 32)).save(tmp_path / "trunk.pt")
    np.save(tmp_path / "images.npy", np.zeros((2000, 3, 32, 32), np.uint8))
    out = tmp_path / "a.safetensors"
    process = start(
        "extract", tmp_path / "images.npy", "--trunk", tmp_path / "trunk.pt", "-o", out, "--batch-size", 4, "-q"
    )
    partial = tmp_path / "a.safetensors.partial"
    wait_for(lambda: partial.exists() and partial.stat().st_size > 10_000, process)
    assert "--resume" in end(process, signum)
    assert (tmp_path / "a.safetensors.partial.json").exists() and not out.exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
@pytest.mark.parametrize("command", ["learn", "bench"])
def test_a_stopped_run_says_how_to_go_on(tmp_path, features, command, signum):
    out = tmp_path / "out"
    if command == "learn":
        process = start("learn", "finetune", "--data", "digits", "-o", out, "-q", "--epochs", 500)
        wait_for((out / "settings.json").exists, process)
    else:
        process = start("bench", "rate", features, "-o", out, "--recorders", "krnet", "--iterations", 10**6, "-q")
        wait_for((out / "features.json").exists, process)
    assert "To go on" in end(process, signum)


def test_a_second_signal_stops_at_once(tmp_path, features):
    process = start("record", features, "-q", "--iterations", 10**6, "--set", "checkpoint_s=0.05", "-o", tmp_path / "a")
    wait_for((tmp_path / "a.ckpt").exists, process)
    process.send_signal(signal.SIGTERM)
    end(process, signal.SIGTERM)


def test_a_signal_that_is_ignored_from_the_start_is_ignored_still(tmp_path, features):
    words = ["record", features, "-q", "--iterations", 10**6, "--set", "checkpoint_s=0.05", "-o", tmp_path / "a"]
    process = start(*words, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for((tmp_path / "a.ckpt").exists, process)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    end(process, signal.SIGTERM)


def test_where_ctrl_c_is_ignored_sigterm_stops_all_the_same(tmp_path, features):
    """A shell script starts what it puts in the background so."""
    words = ["record", features, "-q", "--iterations", 10**6, "--set", "checkpoint_s=0.05", "-o", tmp_path / "a"]
    process = start(*words, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    wait_for((tmp_path / "a.ckpt").exists, process)
    assert "checkpoint saved" in end(process, signal.SIGTERM)


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in CODES]
    with pytest.raises(KeyboardInterrupt), stopping_like_ctrl_c() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert stop.exit_code == 143
    assert [signal.getsignal(number) for number in CODES] == before
