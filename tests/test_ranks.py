"""Several processes share the work of a command; torchrun starts them, or their shares are given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import krnet
from krnet.cli.app import app
from krnet.encoding import encode_share
from krnet.errors import BusyFolderError, RankError, ResumeError, SettingError
from krnet.io.lock import LOCK_NAME, working_in
from krnet.ranks import Rank, this_rank, wait
from maps import relu_maps

STEP = 256  # samples in a part
pytestmark = pytest.mark.filterwarnings("ignore::krnet.errors.KrnetWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A model, features with labels, images and a trunk; and what one process makes of them: coded/ and features/."""
    folder = tmp_path_factory.mktemp("files")
    features, labels = relu_maps(1500, (4, 6, 6))
    krnet.record(features[:300], recorder="pca", step=0.1, out=folder / "model.krn")
    np.save(folder / "f.npy", features.numpy())
    np.save(folder / "labels.npy", labels.numpy())
    images = torch.randint(0, 256, (100, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    np.save(folder / "images.npy", images.numpy())
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()).eval()
    torch.jit.script(trunk).save(folder / "trunk.pt")
    encode(files=folder, out=folder / "coded")
    krnet.extract(trunk, images, out=folder / "features/", shard_size="8kB", batch_size=32)
    return folder


def encode(files: Path, out: Path, share: tuple[int, int] = (0, 1), **options) -> krnet.Recording | None:
    where = {"labels": files / "labels.npy", "out": out, "part_samples": STEP}
    return encode_share(files / "model.krn", files / "f.npy", share=share, **where, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def as_rank(number: int, count: int, **more: object) -> dict[str, str]:
    """The environment of a process that torchrun has started."""
    given = {"TORCHELASTIC_RUN_ID": "job", "RANK": number, "WORLD_SIZE": count, "LOCAL_RANK": number, **more}
    return {name: str(value) for name, value in given.items()}


def run(*words: object, env: dict[str, str] | None = None, code: int = 0) -> tuple[str, str]:
    done = CliRunner().invoke(app, list(map(str, words)), env=env)
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


# ------------------------------------------------------------------ shares of an encode


@pytest.mark.parametrize("count", [2, 3, 8])
def test_any_number_of_processes_encodes_to_the_same_bytes(files, tmp_path, count):
    """Eight are more than there are parts."""
    order = list(range(count))[::-1]
    found = [encode(files, tmp_path / "out", (number, count)) for number in order]
    assert contents(tmp_path / "out") == contents(files / "coded")
    assert found[0] is None and len(found[-1]) == 1500 and len(found[-1].labels) == 1500


def test_the_work_of_a_dead_process_is_done_by_another_number(files, tmp_path):
    out = tmp_path / "out"
    assert encode(files, out, (1, 2)) is None  # process 0 of 2 did nothing
    kept = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
    with pytest.raises(ResumeError, match=r"holds part-.* already.*--resume"):
        encode(files, out, (0, 3))
    for number in range(3):
        encode(files, out, (number, 3), resume=True)
    assert contents(out) == contents(files / "coded")
    assert kept == {path: path.stat().st_mtime_ns for path in kept} and len(kept) == 3


def test_parts_of_other_features_are_not_collected(files, tmp_path):
    encode(files, tmp_path / "out", (0, 2))
    with pytest.raises(ResumeError, match=r"is a part of .* Do all processes get the same model"):
        encode_share(files / "model.krn", files / "f.npy", out=tmp_path / "out", share=(1, 2), part_samples=STEP)
    assert not (tmp_path / "out" / "manifest.json").exists()


# ------------------------------------------------------------------ the folder's lock


def test_processes_that_share_a_folder_keep_others_out_and_the_last_removes_the_lock(tmp_path):
    with working_in(tmp_path, together=True):
        with working_in(tmp_path, together=True), pytest.raises(BusyFolderError), working_in(tmp_path):
            pass
        assert (tmp_path / LOCK_NAME).exists()
        with pytest.raises(BusyFolderError), working_in(tmp_path):
            pass
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_folder_that_one_process_has_is_closed_to_those_that_share(tmp_path, monkeypatch):
    monkeypatch.setattr("krnet.io.lock.LEAVING_S", 0.1)
    alone, refused = working_in(tmp_path), pytest.raises(BusyFolderError, match=f"PID {os.getpid()}")
    with alone, refused, working_in(tmp_path, together=True):
        pass


# ------------------------------------------------------------------ ranks


def test_a_rank_is_what_torchrun_says_and_nothing_else():
    assert this_rank(as_rank(2, 4, TORCHELASTIC_RESTART_COUNT=1)) == Rank(2, 4, 2, 1)
    assert this_rank({"RANK": "2", "WORLD_SIZE": "4"}) == Rank(), "another launcher"
    assert (Rank().share, Rank().prefix, Rank().leads, Rank(0, 2).leads) == ((0, 1), "", False, True)
    for wrong in (as_rank(4, 4), as_rank(0, 2) | {"RANK": "first"}):
        with pytest.raises(SettingError, match="RANK is"):
            this_rank(wrong)


@pytest.mark.parametrize("command", ["append x.krn f.npy", "demo", "bench rate"])
def test_commands_that_cannot_be_shared_are_refused_under_torchrun(files, command, monkeypatch):
    monkeypatch.chdir(files)
    before = contents(files / "coded"), sorted(files.iterdir())
    _, message = run(*command.split(), env=as_rank(1, 2), code=1)
    assert message.startswith(f"rank 1 of 2: error: `krnet {command.split()[0]}` runs in one process")
    assert "without torchrun" in message and before == (contents(files / "coded"), sorted(files.iterdir()))


def test_a_wait_ends_when_all_is_there_and_is_given_up_when_nothing_changes():
    left, said = [3, 3, 2, 1, 0], []
    wait(lambda: ("part-x" * bool(left[0]), left.pop(0)), "out", said.append, patience_s=0.2)
    assert not left and said[0] == "waiting for the other processes: part-x"
    with pytest.raises(RankError, match=r"out: part-y missing, and nothing came for 0 s.*--resume"):
        wait(lambda: ("part-y", 1), "out", said.append, patience_s=0.1)


def test_torchrun_finds_the_reason_of_an_error(files, tmp_path):
    env, before = as_rank(1, 2, TORCHELASTIC_ERROR_FILE=tmp_path / "error.json"), int(time.time())
    run("encode", "--model", files / "no.krn", files / "f.npy", "-o", tmp_path / "out", env=env, code=1)
    found = json.loads((tmp_path / "error.json").read_text())["message"]
    assert found["message"].startswith("rank 1 of 2: error: ") and "no.krn" in found["message"]
    assert before <= int(found["extraInfo"]["timestamp"]) <= time.time()


# ------------------------------------------------------------------ commands under torchrun


def test_ranks_encode_their_shares_and_the_first_prints(files, tmp_path):
    command = ("encode", "--model", files / "model.krn", files / "f.npy", "--labels", files / "labels.npy")
    command = (*command, "--part-samples", STEP, "-o", tmp_path / "out", "--json")
    assert run(*command, env=as_rank(1, 2)) == ("", "")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert json.loads(run(*command, env=as_rank(0, 2))[0])["num_samples"] == 1500
    assert contents(tmp_path / "out") == contents(files / "coded")
    run(*command, env=as_rank(0, 2, TORCHELASTIC_RESTART_COUNT=1))  # torchrun has started the job again
    _, message = run(*command, "--share", "0/2", env=as_rank(0, 2), code=1)
    assert "Leave --share out" in message


def test_a_share_without_torchrun_says_what_is_there(files, tmp_path):
    command = ("encode", "--model", files / "model.krn", files / "f.npy", "--part-samples", STEP, "-o", tmp_path, "-q")
    _, message = run(*command, "--share", "1/2")
    assert "share 1/2 is done; 3 parts are in" in message
    assert "1,500 of 4×6×6" in run(*command, "--share", "0/2")[0]


def test_ranks_extract_their_shares_and_the_first_prints(files, tmp_path):
    command = ("extract", files / "images.npy", "--trunk", files / "trunk.pt", "--shard-size", "8kB")
    command = (*command, "--batch-size", 32, "-o", f"{tmp_path}/out/", "--json", "-q")
    assert run(*command, env=as_rank(1, 2)) == ("", "")
    printed = json.loads(run(*command, env=as_rank(0, 2))[0])
    assert (printed["num_samples"], printed["missing"]) == (100, "")
    assert sorted(contents(tmp_path / "out")) == sorted(contents(files / "features"))
    for more, reason in {
        ("-o", "a.safetensors"): "expected a folder",
        ("--first-id", "end"): "expected a number",
    }.items():
        assert reason in run(*command, *more, env=as_rank(0, 2), code=1)[1]


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")]
)
def test_each_rank_of_a_machine_takes_a_gpu_of_its_own(monkeypatch, asked, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Rank(7, 8, local=3).device(asked) == expected and Rank().device(asked) == asked
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Rank(7, 8, local=3).device(None) is None


# ------------------------------------------------------------------ torchrun itself


def torchrun(count: int, *words: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count, "-m", "krnet", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), **pipes)


@pytest.mark.slow
def test_a_job_whose_rank_is_killed_ends_and_goes_on_with_one_or_three(tmp_path):
    features = torch.rand(40_000, 16, generator=torch.Generator().manual_seed(0)).cumsum(1)
    krnet.record(features[:500], recorder="pca", step=0.1, out=tmp_path / "model.krn")
    np.save(tmp_path / "f.npy", features.numpy())
    words = (
        "encode",
        "--model",
        tmp_path / "model.krn",
        tmp_path / "f.npy",
        "--part-samples",
        STEP,
        "-q",
        "--json",
        "-o",
    )
    run(*words, tmp_path / "expected")
    for count in (1, 3):
        job = torchrun(2, *words, tmp_path / f"{count}")
        while not list((tmp_path / f"{count}").glob("part-*")):
            assert job.poll() is None, job.communicate()[1]
            time.sleep(0.01)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        stdout, stderr = job.communicate(timeout=60)
        assert job.returncode and not stdout and "SIGKILL" in stderr, stderr
        assert not (tmp_path / f"{count}" / "manifest.json").exists()
        again = torchrun(count, *words, tmp_path / f"{count}", "--resume")
        stdout, stderr = again.communicate(timeout=60)
        assert again.returncode == 0 and json.loads(stdout)["num_samples"] == 40_000, stderr
        assert contents(tmp_path / f"{count}") == contents(tmp_path / "expected")


@pytest.mark.slow
def test_a_fit_whose_rank_is_killed_goes_on_with_another_number(tmp_path):
    features, _ = relu_maps(1000, (4, 6, 6))
    np.save(tmp_path / "f.npy", features.numpy())
    words = ("record", tmp_path / "f.npy", "-q", "--json", "--iterations", 80, "--set", "checkpoint_s=0.1")
    words = (*words, "--set", "step=0.3", "--device", "cpu", "-o")
    alone = json.loads(run(*words, tmp_path / "alone.krn")[0])
    out = tmp_path / "out.krn"
    for count in (2, 3):
        job = torchrun(count, *words, out, *(["--resume"] if count == 3 else []))
        before = (tmp_path / "out.krn.ckpt").stat().st_mtime_ns if count == 3 else 0
        while not (path := tmp_path / "out.krn.ckpt").exists() or path.stat().st_mtime_ns == before:
            assert job.poll() is None, job.communicate()[1]
            time.sleep(0.01)
        os.kill(int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[-1]), signal.SIGKILL)
        stdout, stderr = job.communicate(timeout=60)
        assert job.returncode and not stdout and "SIGKILL" in stderr, stderr
        assert not out.exists()
    for more, count in {"--resume": 1, "-q": 2}.items():
        done = torchrun(count, *words, out, more)
        stdout, stderr = done.communicate(timeout=300)
        assert done.returncode == 0, stderr
        assert abs(json.loads(stdout)["r2"] - alone["r2"]) < 1e-4 and stdout.count("\n") == 1
        assert [path.name for path in tmp_path.glob("out*")] == ["out.krn"]
