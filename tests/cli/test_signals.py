"""SIGTERM and SIGHUP save what is done, as Ctrl-C does, and end with the codes that shells know them by."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import forked
import krnet
from krnet.cli.signals import stopping_like_ctrl_c

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def start(*words: object, ignored: tuple[int, ...] = ()) -> forked.Running:
    return forked.start(forked.command(*words), ignored=ignored)


def end(process: forked.Running, signum: int) -> str:
    process.send(signum)
    assert process.wait() == CODES[signum], process.stderr
    return process.stderr


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("signals") / "f.npy"
    np.save(path, np.random.default_rng(0).random((200, 4, 6, 6), np.float32))
    return path


RECORD = ["--iterations", 100, "--set", "checkpoint_s=0.05", "-o"]
# Without this, the command might be at its end before the signal comes.
SLOW_RECORD = """
    import time
    from krnet.cli import app, progress

    progress.Display.__call__ = lambda self, progress: time.sleep(0.2)
    app.main()
"""


@pytest.fixture(scope="module")
def never_stopped(features: Path) -> krnet.Recording:
    path = features.with_suffix(".krn")
    assert start("record", features, "-q", *RECORD, path).wait() == 0
    return krnet.open(path)


@pytest.mark.parametrize("signum", CODES, ids=lambda signum: signum.name)
def test_a_stopped_record_leaves_a_checkpoint_and_resumes_to_the_same_file(tmp_path, features, never_stopped, signum):
    out, checkpoint = tmp_path / "a.krn", tmp_path / "a.krn.ckpt"
    process = forked.start(forked.script(SLOW_RECORD, "record", features, *RECORD, out))
    process.until(checkpoint.exists)
    message = end(process, signum)
    assert "a.krn.ckpt" in message and "--resume" in message and "Traceback" not in message
    assert checkpoint.exists() and not out.exists()
    resumed = start("record", features, "-q", *RECORD, out, "--resume")
    assert resumed.wait() == 0, resumed.stderr
    assert np.array_equal(krnet.open(out), never_stopped)


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
    process.until(lambda: partial.exists() and partial.stat().st_size > 10_000)
    assert "--resume" in end(process, signum)
    assert (tmp_path / "a.safetensors.partial.json").exists() and not out.exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP], ids=lambda signum: signum.name)
@pytest.mark.parametrize("command", ["learn", "bench"])
def test_a_stopped_run_says_how_to_go_on(tmp_path, features, command, signum):
    out = tmp_path / "out"
    if command == "learn":
        process = start("learn", "finetune", "--data", "digits", "-o", out, "-q", "--epochs", 500)
        process.until((out / "settings.json").exists)
    else:
        process = start("bench", "rate", features, "-o", out, "--recorders", "krnet", "--iterations", 10**6, "-q")
        process.until((out / "features.json").exists)
    assert "To go on" in end(process, signum)


def test_a_second_signal_stops_at_once(tmp_path, features):
    process = start("record", features, "-q", "--iterations", 10**6, "--set", "checkpoint_s=0.05", "-o", tmp_path / "a")
    process.until((tmp_path / "a.ckpt").exists)
    process.send(signal.SIGTERM)
    end(process, signal.SIGTERM)


def test_a_signal_that_is_ignored_from_the_start_is_ignored_still(tmp_path, features):
    words = ["record", features, "-q", "--iterations", 10**6, "--set", "checkpoint_s=0.05", "-o", tmp_path / "a"]
    process = start(*words, ignored=(signal.SIGHUP,))
    process.until((tmp_path / "a.ckpt").exists)
    process.send(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    end(process, signal.SIGTERM)


def test_where_ctrl_c_is_ignored_sigterm_stops_all_the_same(tmp_path, features):
    """A shell script starts what it puts in the background so."""
    words = ["record", features, "-q", "--iterations", 10**6, "--set", "checkpoint_s=0.05", "-o", tmp_path / "a"]
    process = start(*words, ignored=(signal.SIGINT,))
    process.until((tmp_path / "a.ckpt").exists)
    assert "checkpoint saved" in end(process, signal.SIGTERM)


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in CODES]
    with pytest.raises(KeyboardInterrupt), stopping_like_ctrl_c() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert stop.exit_code == 143
    assert [signal.getsignal(number) for number in CODES] == before


@pytest.mark.parametrize("signum", CODES, ids=lambda signum: signum.name)
def test_a_stop_that_a_package_has_wrapped_in_an_error_is_a_stop(tmp_path, features, signum):
    """Python does so where a class is being defined: as any of matplotlib's, while it is imported."""
    code = """
        import os, signal, sys
        import krnet.api
        from krnet.cli.app import main

        signum, *words = sys.argv[1:]

        class Name:
            def __set_name__(self, owner, name):
                os.kill(os.getpid(), int(signum))

        def open_features(*given, **more):
            class Late:
                name = Name()

        krnet.api.record = open_features
        sys.argv = ["krnet", "record", *words]
        main()
    """
    done = forked.run(forked.script(code, int(signum), features, "-o", tmp_path / "a.krn", "-q"))
    assert (done.returncode, done.stdout) == (CODES[signum], ""), done.stderr
    assert "stopped" in done.stderr and "Traceback" not in done.stderr
