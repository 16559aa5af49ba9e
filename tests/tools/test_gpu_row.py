"""tools/test_gpu.py: how the tests on a GPU ended becomes a row of the ledger."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from krnet.io import ledger

spec = importlib.util.spec_from_file_location("gpu_row", Path(__file__).resolve().parents[2] / "tools" / "test_gpu.py")
assert spec is not None and spec.loader is not None
gpu_row = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_row)

# What pytest reports of five tests: two pass, one fails, one is skipped, one fails to be set up.
REPORTS = [
    ("setup", "passed"), ("call", "passed"), ("teardown", "passed"),
    ("setup", "passed"), ("call", "passed"), ("teardown", "passed"),
    ("setup", "passed"), ("call", "failed"), ("teardown", "passed"),
    ("setup", "skipped"), ("teardown", "passed"),
    ("setup", "failed"), ("teardown", "passed"),
]  # fmt: skip


@pytest.fixture
def call(tmp_path, monkeypatch):
    """The script on a machine with a GPU or without, where pytest ends with a status: exit status, rows, arguments."""
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))

    def run(status, has_gpu=True, arguments=()):
        given = []

        def fake_main(arguments, plugins):
            given.extend(arguments)
            for when, outcome in REPORTS:
                plugins[0].pytest_runtest_logreport(SimpleNamespace(when=when, outcome=outcome))
            return pytest.ExitCode(status)

        monkeypatch.setattr(gpu_row.pytest, "main", fake_main)
        monkeypatch.setattr(gpu_row.torch.cuda, "is_available", lambda: has_gpu)
        return gpu_row.main(list(arguments)), ledger.read(), given

    return run


@pytest.mark.parametrize(("status", "outcome"), [(0, "ok"), (1, "failed: pytest ended with 1")])
def test_a_row_counts_the_tests_by_how_they_ended_and_the_exit_status_is_pytests(call, status, outcome):
    found, (row,), _ = call(status)
    assert found == status and (row["recipe"], row["settings"], row["outcome"]) == ("test-gpu", {}, outcome)
    assert row["metrics"] == {"passed": 2, "failed": 2, "skipped": 1} and row["commit"]


def test_a_file_that_cannot_be_imported_counts_as_failed():
    counts = gpu_row.Counts()
    for failed in (True, False):
        counts.pytest_collectreport(SimpleNamespace(failed=failed))
    assert counts.of["failed"] == 1


def test_without_a_gpu_no_row_is_written_and_the_exit_status_is_still_pytests(call, capsys):
    assert call(5, has_gpu=False)[:2] == (5, [])
    assert "no GPU here" in capsys.readouterr().err


def test_it_runs_what_is_marked_gpu_in_one_process_and_hands_arguments_on(call):
    assert call(0, arguments=["-k", "pq"])[2] == ["-m", "gpu", "-p", "no:xdist", "-k", "pq"]
