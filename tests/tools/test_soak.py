"""tools/soak: it finds faults that are planted, keeps what shows them, and ends with a row of counts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forked
import krnet
from krnet.errors import ChecksumError
from krnet.io import ledger
from krnet.recorders.base import recorder_names

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "soak"))
import cases
import corpus
import damage
import disk
import forgery
import hostile
import hungry
import kills
import processes
from cases import Found
from tasks import Task
from trials import Trials

SOAK = Path(kills.__file__).parent
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def run_soak(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KRNET_LEDGER": str(folder / "ledger.jsonl")}
    words = [sys.executable, str(SOAK), "--failed", str(folder / "failed"), *map(str, options)]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, timeout=900)


def run_forked_soak(folder: Path, *options: object) -> forked.Done:
    """The same without the seconds of a fresh interpreter."""
    code = f"import runpy; runpy.run_path({str(SOAK)!r}, run_name='__main__')"
    return forked.run(forked.script(code, "--failed", folder / "failed", *options), cwd=folder)


@pytest.fixture(scope="module")
def sample() -> corpus.Sample:
    return corpus.load([GOLDEN / "pca.krn"])[0]


# ------------------------------------------------------------------ hostile files


def test_every_recorder_is_attacked():
    names = set(recorder_names())
    assert {*corpus.FRESH, "images"} == names
    made = {maker for name in names for maker in forgery.MAKERS_OF.get(name, (name,))}
    assert made == set(forgery.LARGEST) <= set(hungry.MAKERS)


@pytest.mark.parametrize("name", ["one", "all", "labels", "lengths", "info"])
def test_a_wrong_value_of_a_damaged_file_is_a_failure(sample, name):
    wrong = {"one": sample.answers["one"] + 1e-6, "all": sample.answers["all"].flip(0), "labels": None, "info": {}}
    wrong["lengths"] = [40]
    answers = {**sample.answers, "verify": ChecksumError("damaged")}
    assert damage.judge(answers, sample.answers) == ""
    assert f"wrong value of {name}" in damage.judge(answers | {name: wrong[name]}, sample.answers)


def test_a_damaged_file_that_verify_passes_is_a_failure(sample):
    assert "verify" in damage.judge(sample.answers, sample.answers)


def test_only_errors_of_krnet_are_refusals():
    assert forgery.judge({"open": ChecksumError("damaged")}) == ""
    for raw in (ValueError("x"), MemoryError(), RecursionError(), KeyError("y")):
        assert f"raw {type(raw).__name__} of one" in forgery.judge({"one": raw})


def test_memory_and_time_above_the_bound_are_failures(tmp_path, sample, monkeypatch):
    path = tmp_path / "forgery.krn"
    path.write_bytes(sample.content)
    found = Found("forgery", "pca", 0)
    assert hostile.examine(replace(found), path, sample, "").fault == ""

    def greedy(path: Path) -> dict[str, object]:
        return {"one": torch.ones(50 << 20).sum()}

    monkeypatch.setattr(corpus, "ask", greedy)
    monkeypatch.setattr(hostile, "FREE_BYTES", 0)
    monkeypatch.setattr(hostile, "FILE_FACTOR", 0)
    assert hostile.examine(replace(found), path, sample, "").fault == "above the bound"
    monkeypatch.setattr(hostile, "FREE_BYTES", 1 << 40)
    monkeypatch.setattr(hostile, "SLOW_S", 0)
    assert hostile.examine(replace(found), path, sample, "").fault == "slow"


def test_what_earlier_files_leave_in_memory_counts(tmp_path, sample):
    path = tmp_path / "forgery.krn"
    path.write_bytes(sample.content)
    at_start = hostile.settle()
    left = torch.ones(25 << 20)  # 100 MB
    found = hostile.examine(Found("forgery", "pca", 0), path, sample, "", at_start)
    assert found.memory_bytes > 4 * len(left) - (16 << 20)


def test_time_is_processor_time(tmp_path, sample, monkeypatch):
    path = tmp_path / "forgery.krn"
    path.write_bytes(sample.content)
    monkeypatch.setattr(corpus, "ask", lambda path: time.sleep(0.5) or {})
    assert hostile.examine(Found("forgery", "pca", 0), path, sample, "").cpu_seconds < 0.3


@pytest.mark.parametrize(("signum", "fault"), [(signal.SIGSEGV, "died"), (signal.SIGPROF, "slow")])
def test_a_process_that_dies_fails_at_its_file_and_the_next_goes_on(tmp_path, monkeypatch, signum, fault):
    """SIGPROF is what ends a process that takes too much processor time."""

    def ask(path: Path) -> dict[str, object]:
        if json.loads((path.parent / "begun").read_text())[0] == 2:
            os.kill(os.getpid(), signum)
        return {}

    samples = corpus.load([GOLDEN / "pca.krn"])
    monkeypatch.setattr(corpus, "load", lambda paths: samples)
    monkeypatch.setattr(corpus, "ask", ask)
    results = cases.Results(tmp_path / "results", tmp_path / "failed")
    done = hostile.batch("damage", range(5), [GOLDEN / "pca.krn"], tmp_path / "work", results, float("inf"))
    found = cases.read([tmp_path / "results"])
    assert done == 5 and [each.seed for each in found] == [0, 1, 2, 3, 4]
    assert [(each.seed, each.name, each.fault) for each in found if each.fault] == [(2, "pca", fault)]
    assert (tmp_path / "failed" / found[2].kept / "damage.krn").exists()


def test_each_failure_is_counted_under_its_name_and_command(tmp_path):
    results = cases.Results(tmp_path / "results", tmp_path / "failed")
    differs = Found("kills", "learn ewc", 1, counts={"kills": 6})
    differs.fail("differs", "other weights")
    for found in (differs, Found("kills", "learn ewc", 2, counts={"kills": 3}), Found("kills", "record pq", 3)):
        results.add(found)
    kills = cases.count(cases.read([results.path]))["kills"]
    assert (kills["learn ewc"]["kills"], kills["learn ewc"]["differs"], kills["record pq"]["differs"]) == (9, 1, 0)
    assert cases.total({"learn": kills})["learn"]["differs"] == 1
    with pytest.raises(AssertionError, match="no fault"):
        differs.fail("wrong value", "kills have no such fault")


@pytest.mark.parametrize("way", forgery.WAYS)
def test_a_forged_file_has_valid_checksums(tmp_path, sample, way, monkeypatch):
    """Where it is refused, then for what it says; some headers are no JSON, or say where no checksum is."""
    monkeypatch.setattr(forgery, "WAYS", {way: (forgery.WAYS[way][0], 1)})
    monkeypatch.setattr(forgery, "headers", lambda *_: None)  # now and then, odd headers come on top
    other, names = corpus.load([GOLDEN / "raw-float32.krn"])[0], []
    for seed in range(5 if way == "hungry" else 20):  # those of a way that asks for memory take long, and are alike
        path = tmp_path / f"{seed}.krn"
        assert forgery.forge(sample, [sample, other], path, random.Random(seed)) == way
        names += [type(answer).__name__ for answer in corpus.ask(path).values()]
    assert way == "headers" or "ChecksumError" not in names


@pytest.fixture(scope="module")
def members(tmp_path_factory) -> list[corpus.Sample]:
    """The files of a folder of parts with sequences."""
    folder = tmp_path_factory.mktemp("parts") / corpus.IN_PARTS
    features, labels = corpus_maps()
    krnet.encode(GOLDEN / "pca.krn", features, labels, lengths=[5, 0, 30, 5], out=folder)
    return corpus.load(sorted(folder.glob("*.krn")))


def corpus_maps() -> tuple[torch.Tensor, torch.Tensor]:
    shape = krnet.open(GOLDEN / "pca.krn").shape
    return torch.rand(40, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


@pytest.mark.filterwarnings("ignore::krnet.errors.KrnetWarning")
def test_damage_of_any_file_of_a_folder_of_parts_is_refused_and_its_originals_stay(members, tmp_path):
    assert [sample.name for sample in members] == ["in-parts model", "in-parts part", "in-parts sequences"]
    assert members[2].answers["lengths"].tolist() == [5, 0, 30, 5] and members[2].answers["verify"] is True
    for number, sample in enumerate(members):
        found = hostile.trial("damage", number, [sample], tmp_path)
        assert (found.name, found.fault, found.counts["refused"]) == (sample.name, "", 1), found.problem
        assert sample.path.read_bytes() == sample.content
    kept = cases.keep(found, tmp_path / "failed")
    assert not hostile.repeat(found, kept).problem
    shutil.copy(members[2].path, kept / "damage-in-parts")
    assert "verify finds nothing wrong" in hostile.repeat(found, kept).problem


@pytest.mark.filterwarnings("ignore::krnet.errors.KrnetWarning")
def test_a_forged_file_of_a_folder_of_parts_is_listed_by_its_manifest(members, tmp_path, monkeypatch):
    """So that what its digest protects is reached: here the check of lengths."""
    monkeypatch.setattr(forgery, "WAYS", {"values": forgery.WAYS["values"]})
    monkeypatch.setattr(forgery, "headers", lambda *_: None)
    path, _ = corpus.place(members[2], tmp_path, "forgery")
    found = set()
    for seed in range(5):
        corpus.place(members[2], tmp_path, "forgery")
        assert forgery.forge(members[2], members, path, random.Random(seed)) == "values"
        answer = corpus.ask(path)["lengths"]
        found.add(type(answer).__name__)
    assert found == {"NotARecordingError"}


def test_a_file_of_one_tensor_may_lose_it(members, tmp_path, monkeypatch):
    monkeypatch.setattr(forgery, "WAYS", {"shapes": forgery.WAYS["shapes"]})
    path, _ = corpus.place(members[2], tmp_path, "forgery")
    for seed in range(100):
        assert forgery.forge(members[2], members, path, random.Random(seed)) == "shapes"


def test_the_same_seed_makes_the_same_damage(sample):
    made = [damage.damage(sample.content, random.Random(seed)) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2] and sample.content not in made


# ------------------------------------------------------------------ commands


@pytest.fixture
def trials(tmp_path) -> Trials:
    features = tmp_path / "features.npy"
    import numpy as np

    np.save(features, np.random.default_rng(0).random((40, 2, 4, 4), np.float32))
    words = ("record", features, "--recorder", "raw", "-q", "-o", "OUT")
    return Trials(tmp_path / "trials", [Task("record raw", words, "out.krn", ("--resume",))])


def test_kills_that_change_nothing_pass_and_a_result_that_differs_fails(trials):
    assert kills.trial(trials, 1).fault == ""
    trials._references["record raw"] = ("another digest", 0.3)
    assert kills.trial(trials, 1).fault == "differs"


def test_a_full_disk_passes_and_a_file_left_under_the_final_name_fails(trials):
    limited = [disk.trial(trials, seed) for seed in range(6)]
    assert not [found.problem for found in limited if found.fault]
    assert sum(found.counts["full"] for found in limited) > 0
    task, folder = trials.tasks[0], trials.fresh("planted")
    out = task.prepare(folder)
    out.write_bytes(b"half a file")
    found = Found("disk", "record raw", 0, counts={})
    disk._judge(found, trials, task, folder, out, 1, "error: full", "no room")
    assert "is there although the command failed" in found.problem
    found = Found("disk", "record raw", 0, counts={})
    disk._judge(found, trials, task, folder, out, 1, "Traceback (most recent call last)", "no room")
    assert "Traceback" in found.problem


def test_a_process_that_hangs_is_ended(tmp_path):
    running = processes.start(lambda: time.sleep(60), tmp_path / "log")
    assert running.wait(0.05) is None
    assert running.end(0.05) == -signal.SIGKILL


# ------------------------------------------------------------------ the whole


def test_a_kept_case_is_repeated(tmp_path, sample):
    case, path = tmp_path / "failed" / "damage-pca-3", tmp_path / "damage.krn"
    shutil.copy(GOLDEN / "quantized.krn", path)  # whole, and another: stands for damage that nobody noticed
    found = Found("damage", "pca", 3, "wrong value", "a problem", files=[str(path), str(sample.path)])
    kept = cases.keep(found, tmp_path / "failed")
    assert kept == case and json.loads((case / "case.json").read_text())["seed"] == 3
    done = run_forked_soak(tmp_path, "--replay", case)
    assert done.returncode == 1 and "verify finds nothing wrong" in done.stdout, done.stderr
    (case / "damage.krn").write_bytes(sample.content[:-1])
    done = run_forked_soak(tmp_path, "--replay", case)
    assert done.returncode == 0 and "nothing failed" in done.stdout


def test_an_unknown_kind_is_refused(tmp_path):
    done = run_forked_soak(tmp_path, "--only", "kills,rats")
    assert done.returncode == 2 and "rats" in done.stderr


@pytest.mark.slow
def test_a_short_soak_fails_nowhere_and_appends_its_row(tmp_path):
    done = run_soak(tmp_path, "--seconds", 20, "--seed", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = ledger.read(tmp_path / "ledger.jsonl")
    assert (row["recipe"], row["seed"], row["outcome"]) == ("soak", 1, "ok")
    totals = row["metrics"]["totals"]
    assert totals["kills"]["trials"] > 0 and totals["damage"]["trials"] > 20 and totals["forgery"]["trials"] > 20
    assert row["metrics"]["num_failed"] == 0 and not row["metrics"]["broken_lanes"]
    for kind, faults in cases.FAULTS.items():
        assert not any(totals.get(kind, {}).get(fault, 0) for fault in faults)
    assert sum(counts["kills"] for counts in row["metrics"]["killed"].values()) == totals["kills"]["kills"]
    assert row["command"].startswith("python tools/soak --failed")
    assert not (tmp_path / "failed").exists()
