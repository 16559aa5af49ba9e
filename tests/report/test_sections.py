"""Sections: which rows share a figure, what runs are called, and what is counted but not drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from krnet.errors import InputError, RunError
from krnet.io import ledger
from krnet.report import series
from krnet.report.figure import Entry
from krnet.report.sections import FAILED, HELD_OUT, UNREADABLE, Chosen, make_report
from krnet.report.sources import read_rows
from report.rows import hostile, learned, toy_rows

LEDGER = Path(__file__).parents[2] / "results" / "ledger.jsonl"


def with_settings(method, seed=0, date="2026-01-01", **settings):
    row = learned(method, seed, date=date)
    return {**row, "settings": {**row["settings"], **settings}}


def names(rows, **options):
    return sorted({entry.series for entry in series.make_entries(rows, **options)})


def test_a_run_is_named_by_its_method_where_nothing_else_differs():
    assert names([with_settings("kril", 0), with_settings("kril", 1), with_settings("mas")]) == ["kril", "mas"]


def test_a_name_holds_the_settings_that_differ_and_no_others():
    rows = [with_settings("kril", budget=6_100_000, epochs=9), with_settings("kril", budget=3_100_000, epochs=9)]
    assert names(rows) == ["kril, budget 3.1 MB", "kril, budget 6.1 MB"]


def test_the_file_of_a_base_task_tells_no_runs_apart_by_its_seed():
    rows = [with_settings("kril", seed, base=f"results/base/cifar100-strong-{seed}.krn") for seed in (0, 1)]
    assert names(rows) == ["kril"]


def test_of_equal_settings_and_seed_the_newest_row_counts():
    rows = [with_settings("kril", date=date, budget=9) for date in ("2026-02-01", "2026-03-01", "2026-01-01")]
    assert [entry.row["date"] for entry in series.make_entries(rows)] == ["2026-03-01"]


def test_data_sets_and_divisions_into_tasks_share_no_figure():
    other = learned("kril")
    other["metrics"]["tasks"], other["metrics"]["accuracy"] = [2, 2, 2, 2], [0.9, 0.8, 0.7, 0.6]
    (section,) = make_report("t", "", [learned("kril"), other]).sections
    titles = [figure.title for figure in section.figures if figure.name.endswith("curves")]
    assert titles == [
        "Accuracy after each task: digits, 4 + 2 × 2 classes",
        "Accuracy after each task: digits, 2 + 3 × 2 classes",
    ]


def test_failures_and_held_out_runs_are_counted_with_their_reason():
    found = make_report("t", "", toy_rows()).left_out
    assert [(row.reason, row.method) for row in found] == [(FAILED, "mas"), (HELD_OUT, "ncm")]
    assert found[0].detail == "RuntimeError: it broke"


def test_every_row_of_the_real_ledger_is_drawn_or_counted_or_superseded():
    rows = ledger.read(LEDGER)
    report = make_report("t", "", rows)
    drawn = {(p.date, p.seed) for section in report.sections for figure in section.figures for p in figure.points}
    counted = {row.date for row in report.left_out}
    newest = {}
    for row in rows:
        newest[row["recipe"], series.identity(row)] = row
    missing = [r for r in newest.values() if (r["date"], r["seed"]) not in drawn and r["date"] not in counted]
    assert not missing
    assert {row.reason for row in report.left_out} == {FAILED, HELD_OUT, UNREADABLE}


def test_a_recipe_comes_first_and_its_rows_are_shown_once():
    rows = [learned("kril"), learned("mas")]
    chosen = Chosen(
        name="mine", title="Mine", text="", views=("last",), entries=[Entry(series="KRIL", row=rows[0])], paper=()
    )
    first, other = make_report("t", "", rows, [chosen]).sections
    assert (first.title, other.title) == ("Mine", "Other runs: toy")
    assert {point.series for figure in other.figures for point in figure.points if figure.kind != "matrix"} == {"mas"}


def test_an_earlier_row_of_a_run_that_a_recipe_shows_is_superseded():
    rows = [learned("kril", date=date) for date in ("2026-01-01", "2026-02-01")]
    chosen = Chosen(
        name="mine", title="Mine", text="", views=("last",), entries=[Entry(series="KRIL", row=rows[1])], paper=()
    )
    report = make_report("t", "", rows, [chosen])
    assert [section.name for section in report.sections] == ["mine"] and not report.left_out


@pytest.mark.parametrize("key", ["metrics", "settings", "outcome", "date", "recipe", "seed", "command"])
@pytest.mark.parametrize("value", [None, 7, "text", [1], {"a": 1}])
def test_a_row_with_anything_anywhere_stops_no_report(key, value):
    report = make_report("t", "", [{**learned("kril"), key: value}, hostile(), {}])
    assert report.sections and report.left_out


# ------------------------------------------------------------------ where rows come from


def write_run(folder: Path, **more):
    folder.mkdir(parents=True)
    row = learned("kril", 1)
    run = {**row["metrics"], "seed": 1, "settings": row["settings"], "commits": ["abc"], "seconds": 3.0, **more}
    (folder / "run.json").write_text(json.dumps(run))


def test_runs_of_one_method_of_several_and_of_products_are_found(tmp_path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "several" / "kril")
    write_run(tmp_path / "product" / "natural" / "seed-1" / "kril")
    for name in ("one", "several", "product"):
        (row,) = read_rows([tmp_path / name])
        assert (row["metrics"]["method"], row["seed"], row["commit"], row["outcome"]) == ("kril", 1, "abc", "ok")


def test_runs_judged_on_held_out_images_are_drawn_apart_in_their_own_folder(tmp_path):
    write_run(tmp_path / "held", validation=50)
    report = make_report("t", "", read_rows([tmp_path / "held"]))
    assert [section.title for section in report.sections] == ["Judged on 50 held-out images a class: no results"]


def test_a_path_that_is_no_source_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere: no such file or folder; expected a ledger"):
        read_rows([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty: no finished run in it"):
        read_rows([tmp_path / "empty"])
    (tmp_path / "binary").write_bytes(b"\xff\x00\n")
    with pytest.raises(InputError, match="binary:1: not a ledger row"):
        read_rows([tmp_path / "binary"])


@pytest.mark.parametrize(
    ("text", "message"), [("{", "cannot be read"), ("[]", "cannot be read"), ("{}", "lacks method")]
)
def test_a_run_that_is_none_is_named(tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match=message):
        read_rows([tmp_path])
