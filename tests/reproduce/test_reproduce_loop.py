"""Runs of a recipe: done once, resumed after a kill, a row even when they fail, and compared by their newest rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from krnet.errors import BusyFolderError
from krnet.io import kept, ledger
from krnet.io.lock import working_in
from krnet.progress import Progress
from krnet.report.figure import PaperNumber
from krnet.reproduce import loop
from krnet.reproduce.compare import ABOVE, ALONE, WITHIN, compare, entries, newest_rows, standing
from krnet.reproduce.recipe import Recipe, RecipeRun, read_recipe
from learning_tools import assert_same_run

pytestmark = pytest.mark.usefixtures("few_digits")

RECIPE = """
# A recipe of tests.
# Time: seconds.
title = "Two methods"
work = "learn"
seeds = [0, 1]

[settings]
data = "digits"
sizes = "4,3x2"
preset = "paper"
base_epochs = 2
epochs = 2

[quick]
epochs = 1
base_epochs = 1

[[runs]]
name = "first"
method = "finetune"

[[runs]]
name = "second"
method = "ncm"
""".lstrip()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write recipes/test.toml of a clone of its own, with a ledger of its own, and work there."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "paper.csv").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "results" / "ledger.jsonl"))
    return lambda text: (tmp_path / "recipes" / "test.toml").write_text(text) and None


def run(**options: Any) -> list[str]:
    return loop.reproduce("test", device="cpu", **options)


def test_the_recipe_of_the_current_clone_comes_first_and_the_shipped_one_last(write, tmp_path, monkeypatch):
    write(RECIPE)
    assert kept.find_kept("recipes") == tmp_path / "recipes"
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    assert kept.find_kept("results/paper.csv") == tmp_path / "results" / "paper.csv"
    assert list(kept.roots())[-1] == kept.SHIPPED
    with pytest.raises(ValueError, match=r"nothing.txt: not found in .*Work in a clone"):
        kept.find_kept("nothing.txt")


def test_every_run_and_seed_has_a_row_and_is_done_once(write, tmp_path):
    write(RECIPE)
    said: list[str] = []
    assert run(say=said.append) == []
    rows = ledger.read()
    assert [(row["recipe"], row["metrics"]["method"], row["seed"]) for row in rows] == [
        ("test", "finetune", 0), ("test", "ncm", 0), ("test", "finetune", 1), ("test", "ncm", 1),
    ]  # fmt: skip
    assert said == [
        "[1/4] test, first, seed 0", "[2/4] test, second, seed 0",
        "[3/4] test, first, seed 1", "[4/4] test, second, seed 1",
    ]  # fmt: skip
    assert run(seeds=[0, 1]) == [] and ledger.read() == rows
    assert run(seeds=[1, 2]) == [] and [row["seed"] for row in ledger.read()[4:]] == [2, 2]
    shared = list((loop.OUT / "shared").glob("base-*.krn"))
    assert len(shared) == 3  # of each seed one base task, for both methods


def test_a_run_that_is_changed_in_the_recipe_is_done_again_in_another_folder(write):
    write(RECIPE)
    run(seeds=[0])
    write(RECIPE.replace("base_epochs = 2\nepochs = 2", "base_epochs = 2\nepochs = 3"))
    run(seeds=[0])
    assert [row["settings"]["epochs"] for row in ledger.read()] == [2, 2, 3, 3]
    assert len(list((loop.OUT / "test").iterdir())) == 4


class Kill:
    """Ctrl-C in the middle of a task."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, progress: Progress) -> None:
        if progress.unit == "iterations" and self.name in progress.name:
            raise KeyboardInterrupt


def test_a_run_that_was_killed_goes_on_and_ends_as_without_the_kill(write, tmp_path):
    write(RECIPE)
    run(seeds=[0], out=tmp_path / "straight")
    (tmp_path / "results" / "ledger.jsonl").rename(tmp_path / "straight.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run(seeds=[0], watch=Kill("task 2 of 2"))
    assert ledger.read() == []  # no row: it is neither done nor failed
    told: list[Progress] = []
    assert run(seeds=[0], watch=told.append) == []
    names = [progress.name for progress in told if "finetune" in progress.name]
    assert names and not any("base task" in name or "task 1 of 2" in name for name in names)
    first, straight = ledger.read()[0], ledger.read(tmp_path / "straight.jsonl")[0]
    assert_same_run(first["metrics"], straight["metrics"])
    assert first["metrics"]["commits"] == [ledger.commit()] and len(first["metrics"]["task_seconds"]) == 3


def test_a_run_that_was_killed_before_its_row_gets_the_row_and_not_two(write):
    write(RECIPE)
    run(seeds=[0])
    path = ledger.default_path()
    rows = ledger.read()
    path.write_text("")
    run(seeds=[0])
    assert [row["metrics"] for row in ledger.read()] == [row["metrics"] for row in rows]
    run(seeds=[0])
    assert len(ledger.read()) == 2


def test_a_run_that_fails_leaves_a_row_with_its_error_and_the_others_go_on(write):
    write(RECIPE.replace('method = "finetune"', 'method = "finetune"\nbase = "missing.krn"'))
    said: list[str] = []
    errors = run(seeds=[0], say=said.append)
    assert len(errors) == 1 and errors[0].startswith("test, first, seed 0: SettingError: base is 'missing.krn'")
    assert f"failed: {errors[0]}" in said
    failed, good = ledger.read()
    assert failed["outcome"].startswith("SettingError: base is 'missing.krn'; expected paper, strong")
    assert failed["settings"]["run"] == "first" and failed["settings"]["method"] == "finetune" and failed["seed"] == 0
    assert good["outcome"] == "ok" and good["metrics"]["method"] == "ncm"
    assert len(run(seeds=[0])) == 1  # a failed run is tried again, a good one is not done again
    assert [row["outcome"] == "ok" for row in ledger.read()] == [False, True, False]


def test_a_folder_where_another_process_works_is_no_failure_of_the_run(write):
    write(RECIPE)
    recipe = read_recipe("test")
    job = loop.Job(recipe="test", run=recipe.runs[0], seed=0, out=loop.OUT, data_dir=None, device="cpu")
    with working_in(job.folder):
        errors = run(seeds=[0])
    assert len(errors) == 1 and "another process" in errors[0] and issubclass(BusyFolderError, ValueError)
    assert [row["metrics"]["method"] for row in ledger.read()] == ["ncm"]


def test_quick_rows_go_to_a_ledger_of_their_own(write, tmp_path):
    write(RECIPE)
    run(seeds=[0], quick=True)
    assert ledger.read() == []
    rows = ledger.read(tmp_path / loop.QUICK_OUT / "ledger.jsonl")
    assert [row["settings"]["epochs"] for row in rows] == [1, 1]
    assert not (tmp_path / loop.OUT).exists()


@pytest.mark.slow
def test_processes_side_by_side_share_base_tasks_and_fail_alone(write, tmp_path):
    """Spawned processes have all digits: about ten seconds each."""
    text = RECIPE + '\n[[runs]]\nname = "third"\nmethod = "finetune"\nbase = "missing.krn"\n'
    write(text.replace("epochs = 2", "epochs = 1"))
    told: list[Progress] = []
    said: list[str] = []
    errors = run(seeds=[0], jobs=2, watch=told.append, say=said.append)
    assert len(errors) == 1 and "third" in errors[0]
    rows = ledger.read()
    assert sorted(row["outcome"] == "ok" for row in rows) == [False, True, True]
    first = {row["metrics"]["accuracy"][0] for row in rows if row["outcome"] == "ok"}
    assert len(first) == 2  # a linear head and class means on one network
    assert len(list((tmp_path / loop.OUT / "shared").iterdir())) == 1
    assert any("first, seed 0: finetune, base task done" in progress.name for progress in told)


# ------------------------------------------------------------------ comparing

RUN = RecipeRun(name="KRIL", work="learn", settings={"method": "ncm", "data": "digits", "sizes": "4,3x2"}, seeds=(0,))
SHOWN = Recipe(name="shown", title="A title", opening="# x", figures=(), runs=(RUN,))


@pytest.fixture(scope="module")
def real_row(tmp_path_factory: pytest.TempPathFactory, few_digits: None) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("row")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KRNET_LEDGER", str(folder / "ledger.jsonl"))
        job = loop.Job(
            recipe="shown",
            run=RecipeRun(
                name="KRIL", work="learn", settings={**RUN.settings, "base": "paper", "base_epochs": 1}, seeds=(0,)
            ),
            seed=0,
            out=folder,
            data_dir=None,
            device="cpu",
        )
        assert loop._perform(job, None) is None
        return json.loads((folder / "ledger.jsonl").read_text())


@pytest.fixture
def shown(real_row) -> Recipe:
    run = RecipeRun(
        name="KRIL", work="learn", settings={**RUN.settings, "base": "paper", "base_epochs": 1}, seeds=(0, 1)
    )
    return Recipe(name="shown", title="A title", opening="# x", figures=(), runs=(run,))


def made(row: dict[str, Any], last: float, **others: Any) -> dict[str, Any]:
    accuracy = [*row["metrics"]["accuracy"][:-1], last]
    return {**row, "metrics": {**row["metrics"], "accuracy": accuracy, "last": last}, **others}


def number(value: float, series: str = "KRIL", x: str = "2", reading_error: float | None = None) -> PaperNumber:
    return PaperNumber(
        recipe="shown", series=series, x=x, value=value, unit="%", place="Table I", reading_error=reading_error
    )


def test_the_newest_row_of_a_seed_counts_whatever_its_place_in_the_ledger(real_row, shown):
    newer = made(real_row, 0.6, date="2027-01-02T00:00:00+00:00", recipe="another")
    older = made(real_row, 0.5, date="2027-01-01T00:00:00+00:00")
    assert newest_rows(shown, [newer, older])["KRIL"] == {0: newer}
    assert [(entry.series, entry.row) for entry in entries(shown, [newer, older])] == [("KRIL", newer)]


def test_a_correction_replaces_the_row_that_it_names(real_row, shown):
    wrong = made(real_row, 0.9, date="2027-01-03T00:00:00+00:00")
    right = made(real_row, 0.5, date="2027-01-01T00:00:00+00:00", corrects="2027-01-03T00:00:00+00:00")
    assert newest_rows(shown, [wrong, right])["KRIL"] == {0: right}
    withdrawn = {**right, "outcome": "withdrawn: learned from the test images"}
    assert newest_rows(shown, [wrong, withdrawn])["KRIL"] == {}
    elsewhere = {**withdrawn, "recipe": "another"}
    assert newest_rows(shown, [wrong, elsewhere])["KRIL"] == {0: wrong}


def test_a_difference_within_the_spread_is_called_neither_above_nor_below(real_row, shown):
    rows = [made(real_row, 0.50, seed=0), made(real_row, 0.54, seed=1)]  # 52.0 ± 2.8
    (one,) = compare(shown, rows, [number(50.0)])
    assert (one.ours, one.num_seeds, one.difference) == (pytest.approx(52), 2, pytest.approx(2))
    assert one.spread == pytest.approx(2.828, abs=1e-3) and one.verdict == WITHIN
    (one,) = compare(shown, rows, [number(49.0)])
    assert one.verdict == ABOVE
    (one,) = compare(shown, rows, [number(49.0, reading_error=0.5)])  # read off a curve: it may be 49.5
    assert one.verdict == WITHIN
    (one,) = compare(shown, rows[:1], [number(40.0)])
    assert one.spread is None and one.verdict == ALONE


def test_numbers_without_a_run_and_runs_without_a_number_are_shown_too(real_row, shown):
    numbers = [number(48.9, series="GFR"), number(99.0, x="7")]
    beyond, gfr = compare(shown, [real_row], numbers)
    assert (beyond.ours, beyond.paper, beyond.verdict) == (None, 99.0, "")  # there is no task 7
    assert (gfr.series, gfr.ours, gfr.paper) == ("GFR", None, 48.9)
    (alone,) = compare(shown, [real_row], [])
    assert alone.ours == pytest.approx(100 * real_row["metrics"]["last"]) and alone.paper is None and alone.unit == "%"


def test_the_standing_counts_runs_of_the_seeds_that_are_asked_for(real_row, shown):
    numbers = [number(48.9), number(50.0, x="1")]
    found = standing(shown, [real_row], numbers)
    assert (found.done, found.asked, found.newest) == (1, 2, real_row["date"])
    assert standing(shown, [real_row], numbers, seeds=[0]).asked == 1
    assert found.farthest is not None and found.farthest.place == "Table I"
    assert standing(shown, [], numbers).farthest is None
