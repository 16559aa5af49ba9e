"""The ledger: rows go in whole, stay apart, and say where they come from."""

import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from krnet.errors import InputError, KrnetError
from krnet.io import ledger

NUM_ROWS = 50


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "ledger.jsonl"


def append(path: Path | None, **changes) -> dict:
    row = {"settings": {"bits": 8}, "metrics": {"accuracy": 0.5}, "seconds": 1.5} | changes
    return ledger.append("table1", **row, path=path)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, "-c", "core.hooksPath=/dev/null", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


# --- what a row says ---


def test_a_row_reads_back_as_it_was_returned(path):
    row = append(path, seed=3, class_order="seed1993", command="krnet bench table1", corrects="2024-01-01")
    assert ledger.read(path) == [row]
    assert row["recipe"] == "table1" and row["outcome"] == "ok" and row["command"] == "krnet bench table1"
    assert row["seed"] == 3 and row["class_order"] == "seed1993" and row["corrects"] == "2024-01-01"
    assert row["seconds"] == 1.5 and row["date"].endswith("+00:00")
    assert set(row["versions"]) == {"python", "torch", "numpy", "krnet"}
    assert row["versions"]["torch"] == torch.__version__


def test_every_row_has_every_column(path):
    expected = (
        "recipe command commit settings seed class_order device versions seconds peak_memory_bytes metrics "
        "date outcome corrects bytes"
    )
    assert set(append(path)) == set(expected.split())


def test_rows_keep_their_order_and_old_bytes_never_change(path):
    append(path, seed=0)
    before = path.read_bytes()
    append(path, seed=1, outcome="crashed: out of memory")
    assert path.read_bytes().startswith(before)
    assert [row["seed"] for row in ledger.read(path)] == [0, 1]


def test_device_names_the_cpu_and_its_threads_where_no_gpu_was_used(path):
    if torch.cuda.is_initialized():
        pytest.skip("this process has used a GPU")
    assert append(path)["device"].endswith(f", {torch.get_num_threads()} threads")


def test_peak_memory_is_in_bytes(path):
    # This process has torch loaded: tens of MB in any case, and less than 1 TB if the unit is right.
    assert 30e6 < append(path)["peak_memory_bytes"] < 1e12


def test_sizes_of_files_are_measured_on_disk(path, tmp_path):
    for folder, size in (("a", 10), ("b", 20)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.krn").write_bytes(bytes(size))
    row = append(path, files=[tmp_path / "a" / "x.krn", str(tmp_path / "b" / "x.krn")])
    assert row["bytes"] == {"x.krn": 10, "b/x.krn": 20}


def test_a_missing_or_repeated_file_is_refused(path, tmp_path):
    file = tmp_path / "x.krn"
    with pytest.raises(InputError, match="no such file"):
        append(path, files=[file])
    file.write_bytes(b"1")
    with pytest.raises(InputError, match="named twice"):
        append(path, files=[file, file, file])
    assert not path.exists()


def test_parts_and_files_are_listed_by_name(path, tmp_path):
    (tmp_path / "x.krn").write_bytes(bytes(10))
    row = append(path, files={"recording": tmp_path / "x.krn"}, parts={"labels": 4})
    assert row["bytes"] == {"labels": 4, "recording": 10}
    with pytest.raises(InputError, match="already lists a file labels"):
        append(path, files={"labels": tmp_path / "x.krn"}, parts={"labels": 4})


@dataclass(frozen=True)
class Setting:
    bits: int
    source: Path


def test_arrays_scalars_and_dataclasses_are_stored_as_plain_values(path):
    metrics = {"matrix": np.eye(2), "mean": np.float32(0.5), "loss": torch.tensor(2.0), "pair": (1, None)}
    row = append(path, metrics=metrics, settings={"record": Setting(4, Path("data/x.npy"))}, seed=np.int64(7))
    assert ledger.read(path) == [row]
    assert row["metrics"] == {"matrix": [[1, 0], [0, 1]], "mean": 0.5, "loss": 2.0, "pair": [1, None]}
    assert row["settings"] == {"record": {"bits": 4, "source": "data/x.npy"}}
    assert row["seed"] == 7


# --- what is refused ---


@pytest.mark.parametrize("bad", [np.nan, float("inf"), -np.inf, np.float32("nan"), torch.tensor(np.nan)])
def test_nan_and_infinity_are_refused_by_name_and_nothing_is_written(path, bad):
    with pytest.raises(InputError, match=r"metrics\.tasks\[1\]"):
        append(path, metrics={"tasks": [0.5, bad]})
    with pytest.raises(InputError, match=r"settings\.rate"):
        append(path, settings={"rate": bad})
    assert not path.exists()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_duration_that_is_none_is_refused(path, seconds):
    with pytest.raises(InputError, match="seconds"):
        append(path, seconds=seconds)


def test_values_and_keys_that_json_cannot_hold_are_refused(path):
    with pytest.raises(InputError, match=r"settings\.x is a object"):
        append(path, settings={"x": object()})
    with pytest.raises(InputError, match="read the same"):
        append(path, metrics={1: 0.5, "1": 0.6})


# --- the file ---


def _append_many(path: Path, seed: int, start) -> None:
    # Rows well over one page: short ones might survive a broken lock by luck.
    metrics = {"matrix": [[0.125] * 100] * 20}
    start.wait()
    for number in range(NUM_ROWS):
        append(path, metrics=metrics, settings={"number": number}, seed=seed)


@pytest.mark.slow
def test_two_processes_append_at_once_and_every_row_parses(path, monkeypatch):
    monkeypatch.setenv("KRNET_COMMIT", "abc1234")
    context = multiprocessing.get_context("spawn")  # not fork: torch has threads
    start = context.Barrier(2)
    processes = [context.Process(target=_append_many, args=(path, seed, start)) for seed in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    rows = ledger.read(path)
    for seed in (0, 1):
        assert [row["settings"]["number"] for row in rows if row["seed"] == seed] == list(range(NUM_ROWS))


def test_append_waits_for_whoever_holds_the_lock(path):
    append(path, seed=0)
    thread = threading.Thread(target=append, args=(path,), kwargs={"seed": 1})
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and file.read().count(b"\n") == 1
    thread.join(60)
    assert [row["seed"] for row in ledger.read(path)] == [0, 1]


def test_a_line_cut_short_by_a_crash_is_not_glued_to_the_next_row(path):
    append(path, seed=0)
    with open(path, "ab") as file:
        file.write(b'{"recipe": "tab')
    row = append(path, seed=1)
    lines = path.read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[2]) == row
    with pytest.raises(InputError, match=r"ledger\.jsonl:2: not a ledger row"):
        ledger.read(path)


def test_a_whole_last_row_that_lost_only_its_newline_is_kept(path):
    append(path, seed=0)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    append(path, seed=1)
    assert [row["seed"] for row in ledger.read(path)] == [0, 1]


@pytest.mark.parametrize("line", [b"{]", b"\xff\xfe", b'{"a": NaN}', b"[1]", b"3"])
def test_a_corrupted_line_is_reported_with_its_number(path, line):
    append(path)
    append(path)
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, line, second, b""]))
    with pytest.raises(InputError, match=r"ledger\.jsonl:2: "):
        ledger.read(path)


def test_a_write_that_stops_half_way_leaves_the_ledger_as_it_was(path, monkeypatch):
    append(path)
    before = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    with pytest.raises(KrnetError, match="full"):
        append(path)
    assert path.read_bytes() == before


def test_a_named_ledger_that_is_missing_is_an_error_and_an_unnamed_one_is_empty(path, monkeypatch):
    with pytest.raises(InputError, match="no such ledger"):
        ledger.read(path)
    monkeypatch.setenv("KRNET_LEDGER", str(path))
    assert ledger.read() == []


def test_default_path_is_the_environment_then_the_work_tree_then_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "mine.jsonl"))
    assert ledger.default_path() == tmp_path / "mine.jsonl"
    monkeypatch.delenv("KRNET_LEDGER")
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert ledger.default_path() == tmp_path.resolve() / "inner" / "results" / "ledger.jsonl"
    git(tmp_path, "init", "-q")
    assert ledger.default_path() == tmp_path.resolve() / "results" / "ledger.jsonl"


# --- commit ---


def test_commit_is_short_then_dirty_and_results_do_not_count(tmp_path):
    def commit_of(name: str = "code.py") -> str:
        ledger._commit_of.cache_clear()
        return ledger._commit_of(tmp_path / name)

    (tmp_path / "results").mkdir()
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "results" / "ledger.jsonl").write_text("")
    assert commit_of() == "unknown"
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    assert commit_of() == "unknown"
    git(tmp_path, "commit", "-q", "-m", "first")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert commit_of() == head

    (tmp_path / "results" / "ledger.jsonl").write_text("{}\n")
    (tmp_path / "untracked.py").write_text("2")
    assert commit_of() == head
    assert commit_of("untracked.py") == "unknown"  # such as a copy installed inside another project
    (tmp_path / "code.py").write_text("3")
    assert commit_of() == f"{head}+dirty"


def test_commit_from_the_environment_comes_first(path, monkeypatch):
    monkeypatch.setenv("KRNET_COMMIT", "abc1234")
    assert append(path)["commit"] == "abc1234"


# --- no folders of this machine ---


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("/home/someone/data/x.npy", "x.npy"),
        ("--data=/home/someone/data/", "--data=data"),
        ("-o/home/someone/out.krn", "-oout.krn"),
        ("train:/home/a/x.npy,test:/home/a/y.npy", "train:x.npy,test:y.npy"),
        ("../elsewhere/data/x.npy", "x.npy"),
        ("~/data/x.npy", "x.npy"),
        ("file:///home/someone/x.npy", "x.npy"),
        ('{"data": "/home/someone/x.npy"}', '{"data": "x.npy"}'),
        ("failed on /home/someone/x.npy today", "failed on x.npy today"),
        ("{root}/runs/a.krn", "runs/a.krn"),
        ("runs/../b.krn", "b.krn"),
        ("runs/a.krn", "runs/a.krn"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("n/a", "n/a"),
        ("1 / 2", "1 / 2"),
    ],
)
def test_paths_outside_the_project_lose_their_folders(path, tmp_path, monkeypatch, argument, expected):
    project = tmp_path.resolve() / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    argument = argument.replace("{root}", str(project))
    row = append(path, command=f"krnet {argument}", settings={"source": argument})
    assert row["command"] == f"krnet {expected}"
    assert row["settings"] == {"source": expected}


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["/home/someone/.venv/bin/krnet", "record", "/data/x.npy", "--name", "two words"],
         "krnet record x.npy --name 'two words'"),
        (["/home/someone/sweep.py", "--seed", "1"], "python sweep.py --seed 1"),
        (["benchmarks/sweep.py"], "python benchmarks/sweep.py"),
    ],
)  # fmt: skip
def test_the_default_command_is_what_was_typed_without_folders(path, tmp_path, monkeypatch, argv, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert append(path)["command"] == expected


def test_the_default_command_of_a_module_names_the_module(path, tmp_path, monkeypatch):
    append_row = f"ledger.append('t', settings={{}}, metrics={{}}, seconds=0, path={str(path)!r})"
    (tmp_path / "runme.py").write_text(f"from krnet.io import ledger; print({append_row}['command'])")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "runme", "--data", str(tmp_path / "elsewhere" / "x.npy")]
    (tmp_path / "cwd").mkdir()
    done = subprocess.run(command, cwd=tmp_path / "cwd", env=env, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "python -m runme --data x.npy"
