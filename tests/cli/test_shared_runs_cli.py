"""`krnet learn` in the processes of torchrun: each learns some of the runs, and rank 0 prints those of all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from krnet.cli import app as cli
from krnet.io import ledger

QUICK = [
    "--data", "digits", "--sizes", "6,4", "--device", "cpu", "--epochs", "1", "--base", "paper", "--set",
    "batch_size=64", "--json", "-q",
]  # fmt: skip


def run(*words: object, rank: tuple[int, int] | None = None, code: int = 0, **more: object) -> tuple[str, str]:
    env = {} if rank is None else {"TORCHELASTIC_RUN_ID": "job", "RANK": rank[0], "WORLD_SIZE": rank[1], **more}
    done = CliRunner().invoke(
        cli.app, ["learn", *map(str, words), *QUICK], env={name: str(value) for name, value in env.items()}
    )
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


def numbers(printed: str) -> list[tuple]:
    found = json.loads(printed)
    return [(one["method"], one["seed"], one["accuracy"]) for one in found.get("runs", [])]


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("more", [("--seeds", "0,1"), ("--orders", "natural")])
def test_ranks_share_the_runs_and_the_first_prints_those_of_all(tmp_path: Path, more: tuple[str, str]) -> None:
    command = ("finetune", "ncm", *more)
    alone, _ = run(*command, "-o", tmp_path / "alone")
    assert run(*command, "-o", tmp_path / "out", rank=(1, 2)) == ("", "")
    learned = {path.parent.name for path in (tmp_path / "out").rglob("run.json")}
    assert learned == {"ncm"}, "each second run"
    together, _ = run(*command, "-o", tmp_path / "out", rank=(0, 2))
    assert numbers(together) == numbers(alone) and len(numbers(alone)) in (2, 4)
    assert (tmp_path / "out" / "report.html").exists()
    again, _ = run(*command, "-o", tmp_path / "out", rank=(0, 2), TORCHELASTIC_RESTART_COUNT=1)  # goes on by itself
    assert numbers(again) == numbers(alone)


@pytest.mark.usefixtures("few_digits")
def test_each_run_has_one_row_whoever_learned_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    command = ("finetune", "ncm", "fetril", "--ledger", "-o", tmp_path / "out")
    for rank in ((2, 3), (1, 3), (0, 3)):
        printed, _ = run(*command, rank=rank)
    assert [one["method"] for one in json.loads(printed)] == ["finetune", "ncm", "fetril"]
    assert sorted(row["metrics"]["method"] for row in ledger.read()) == ["fetril", "finetune", "ncm"]


@pytest.mark.usefixtures("few_digits")
def test_fewer_runs_than_processes_are_refused(tmp_path: Path) -> None:
    for number in range(2):
        _, message = run("finetune", "-o", tmp_path / "out", rank=(number, 2), code=1)
        assert (
            message.startswith(f"rank {number} of 2: error: torchrun has started 2 processes") and "--seeds" in message
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_torchrun_starts_processes_that_share_a_base_task(tmp_path: Path) -> None:
    words = ["finetune", "ncm", "fetril", "--data", "digits", "--sizes", "6,4", "--epochs", "2", "-o", tmp_path / "out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "krnet", "learn"]
    done = subprocess.run([*torchrun, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(done.stdout.count(method) == 1 for method in ("finetune", "ncm", "fetril"))
