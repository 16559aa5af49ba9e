"""`krnet report` as a user meets it, and the page that `krnet learn` leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from krnet.cli import app as cli
from report.rows import toy_rows


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def toy_ledger(tmp_path: Path) -> Path:
    path = tmp_path / "toy.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in toy_rows()))
    return path


def test_a_page_is_written_of_the_ledger_that_is_named(toy_ledger, tmp_path):
    result = run("report", toy_ledger, "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "of 13 rows, 2 rows left out" in result.stderr and result.stdout == ""
    assert "13 rows of toy.jsonl, the newest of 2026-01-05." in (tmp_path / "page.html").read_text()


def test_without_a_name_it_is_the_ledger_of_the_clone(toy_ledger, tmp_path, monkeypatch):
    monkeypatch.setenv("KRNET_LEDGER", str(toy_ledger))
    monkeypatch.chdir(tmp_path)
    assert run("report", "--quiet").exit_code == 0
    assert (tmp_path / "report.html").is_file()


def test_pictures_are_written_beside_it(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(toy_rows()[0]) + "\n")
    assert run("report", path, "-o", tmp_path / "p.html", "--pictures", tmp_path / "pictures").exit_code == 0
    names = {file.name for file in (tmp_path / "pictures").iterdir()}
    assert {"other-toy-curves.png", "other-toy-curves.svg"} <= names


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file or folder"),
        (lambda path: path.mkdir(), "no finished run in it"),
        (lambda path: path.write_text("nonsense\n"), "not a ledger row"),
    ],
)
def test_a_source_that_is_none_is_refused_and_nothing_is_written(tmp_path, make, message):
    make(tmp_path / "source")
    result = run("report", tmp_path / "source", "-o", tmp_path / "page.html")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_stood_there_stays_when_the_new_one_cannot_be_made(toy_ledger, tmp_path):
    result = run("report", toy_ledger, "-o", tmp_path / "no" / "page.html")
    assert result.exit_code == 1 and "no folder" in result.stderr
    assert run("report", toy_ledger, "-o", toy_ledger).exit_code == 1
    assert toy_ledger.read_text().count("\n") == len(toy_rows())


# ------------------------------------------------------------------ krnet learn

QUICK = ["--data", "digits", "--sizes", "4,3,3", "--device", "cpu", "--epochs", "1", "--quiet"]


def test_learn_leaves_a_page_of_its_runs(few_digits, tmp_path):
    assert run("learn", "ncm", "finetune", *QUICK, "-o", tmp_path / "several").exit_code == 0
    text = (tmp_path / "several" / "report.html").read_text()
    assert "2 runs of several" in text and "digits, 4 + 2 × 3 classes" in text


def test_learn_with_seeds_leaves_one_page_of_all(few_digits, tmp_path):
    assert run("learn", "ncm", *QUICK, "--seeds", "0,1", "-o", tmp_path / "seeds").exit_code == 0
    assert "2 runs of seeds" in (tmp_path / "seeds" / "report.html").read_text()
    assert len(list((tmp_path / "seeds").rglob("report.html"))) == 1


def test_a_page_that_cannot_be_written_is_a_message_and_the_run_is_done(few_digits, tmp_path):
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    result = run("learn", "ncm", *QUICK, "-o", tmp_path / "run")
    assert result.exit_code == 0
    assert "no page was written" in result.stderr and "krnet report" in result.stderr
    assert (tmp_path / "run" / "run.json").is_file()
