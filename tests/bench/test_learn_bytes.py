"""benchmarks/learn_bytes.py: last accuracy against stored bytes, as learned and as drawn."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from krnet import task_loop as learning
from krnet.data import registry
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.learners import base
from learning_tools import small_digits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import learn_bytes
import plot_bytes
from learn_bytes import Point, parse_points


@pytest.fixture
def call(tmp_path, monkeypatch):
    """The script with these arguments, on few digits; gives back the rows of the ledger."""
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    monkeypatch.setattr(registry, "load_digits", small_digits)
    learn_bytes.load_data.cache_clear()

    def run(*arguments):
        common = ["--data", "digits", "--base-classes", "4", "--tasks", "2", "--epochs", "1", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["learn_bytes.py", *common, "--out", str(tmp_path / "out"), *arguments])
        learn_bytes.main()
        return ledger.read()

    yield run
    learn_bytes.load_data.cache_clear()


# ------------------------------------------------------------------ what is learned


def test_a_method_is_learned_at_every_budget_its_own_or_none():
    points = parse_points("kril:pca,kril:raw@none,lucir@2kB,finetune,kril:pca:kr2=false@3kB,kril:pca", [1000, 5000])
    assert points == [
        Point("kril", {"recorder": "raw"}, None),
        Point("finetune", {}, None),
        Point("kril", {"recorder": "pca"}, 1000),
        Point("lucir", {}, 2000),
        Point("kril", {"recorder": "pca", "kr2": False}, 3000),
        Point("kril", {"recorder": "pca"}, 5000),
    ]
    assert len({point.name for point in points}) == 6


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ("lucri", "lucir"),
        ("lucir:pca", "not a setting"),
        ("kril:pca:gama=1", "gamma"),
        ("finetune@3kB", "has no budget"),
        ("lucir@much", "budget of lucir"),
        ("kril:budget=3000", "budget"),
        (" ,", "expected names"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_learned(methods, message):
    with pytest.raises(SettingError, match=message):
        parse_points(methods, [1000])


def test_a_budget_for_all_is_given_as_budgets(call, capsys):
    with pytest.raises(SystemExit):
        call("--methods", "lucir", "--set", "budget=5000")
    assert "--budgets" in capsys.readouterr().err and not ledger.read()


def test_points_stay_below_their_budget_and_a_failing_one_leaves_its_error(call, tmp_path, capsys):
    rows = call("--methods", "kril:quantized,kril:nonsense,kril:raw,lucir,icarl,finetune", "--budgets", "15kB")
    found = {row["metrics"]["method"] + ":" + row["settings"].get("recorder", ""): row for row in rows}
    assert len(rows) == 6 and {row["recipe"] for row in rows} == {"learn-bytes"}
    for name in ("kril:quantized", "lucir:", "icarl:"):
        assert found[name]["outcome"] == "ok" and not found[name]["metrics"]["over_budget"]
        assert 0 < found[name]["metrics"]["storage_bytes"]["total"] <= 15000 == found[name]["settings"]["budget"]
    assert "nonsense" in found["kril:nonsense"]["outcome"] and "BudgetError" in found["kril:raw"]["outcome"]
    # Base tasks: KRIL, iCaRL and fine-tuning have the same one, LUCIR's head is another.
    assert len(list((tmp_path / "out" / "shared").glob("base-*"))) == 2
    assert (tmp_path / "out" / "bytes.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "class order lucir1993 (" in printed and "seed 0; epochs a task: 1" in printed
    assert "failed: KRIL nonsense at 15 kB: SettingError" in printed

    # Again: what is finished is not learned again; a row that was lost is written again, from the run.
    Path(os.environ["KRNET_LEDGER"]).write_text(
        "".join(json.dumps(row) + "\n" for row in rows if row != found["lucir:"])
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "_run_task", lambda *a: pytest.fail("learned again"))
        again = call("--methods", "kril:quantized,kril:nonsense,lucir", "--budgets", "15kB")
    assert [row["metrics"]["method"] for row in again[5:]] == ["kril", "lucir"]
    assert again[5]["outcome"] == found["kril:nonsense"]["outcome"]
    assert again[6]["metrics"] == found["lucir:"]["metrics"] and again[6]["settings"] == found["lucir:"]["settings"]


def test_other_settings_are_other_points(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "load_digits", small_digits)
    point = Point("lucir", {}, 5000)
    common = {"data": "digits", "data_dir": None, "order": "natural", "tasks": 2, "base_classes": 4}
    plans = [
        learn_bytes.Plan(**common | more, seed=seed, device="cpu", out=tmp_path, given={"lucir": given})
        for more, seed, given in [
            ({}, 0, {}), ({}, 1, {}), ({}, 0, {"epochs": 3}), ({"order": "lucir1993"}, 0, {}), ({"tasks": 4}, 0, {})
        ]
    ]  # fmt: skip
    assert len({plan.folder(point) for plan in plans}) == 5


def test_a_process_that_dies_leaves_a_row_and_the_others_go_on(call, monkeypatch):
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(learn_bytes.multiprocessing, "get_context", lambda kind: fork)
    fail = learn_bytes.append_failure

    def learn_point(plan, point, command):
        if point.method == "icarl":
            os._exit(9)
        fail(plan, point, "done", command, 1.0)

    monkeypatch.setattr(learn_bytes, "learn_point", learn_point)
    with pytest.raises(SystemExit):  # nothing was learned, so there is nothing to draw
        call("--methods", "icarl,lucir,finetune,joint", "--budgets", "9kB", "--jobs", "2")
    outcomes = {row["metrics"]["method"]: row["outcome"] for row in ledger.read()}
    assert outcomes == {"icarl": "its process ended with 9", "lucir": "done", "finetune": "done", "joint": "done"}


# ------------------------------------------------------------------ what is drawn


def row(method, last, *, budget=None, seed=0, date=0, total=1000, outcome="ok", recipe="learn-bytes", **settings):
    if method == "kril":
        settings = {"recorder": "krnet", **settings}
    metrics = {"method": method, "last": last, "average": last, "storage_bytes": {"total": total}}
    if method == "icarl":
        metrics["rows"] = {name: {"last": last - less, "average": last} for name, less in (("cnn", 0.1), ("nme", 0.0))}
    return {
        "date": f"2026-01-01T00:00:{date:02}",
        "recipe": recipe,
        "settings": {"data": "digits", "tasks": [4, 2, 2], "epochs": 5, "base_epochs": 5, "budget": budget, **settings},
        "seed": seed,
        "class_order": "natural (abc)",
        "metrics": metrics if outcome == "ok" else {"method": method},
        "outcome": outcome,
    }


def dots_of(rows):
    chosen = plot_bytes.choose_rows(rows, "digits", "natural", 2, None, None)
    return {(dot.series, dot.budget): dot for dot in plot_bytes.gather(chosen)}


def test_the_newest_row_that_did_not_fail_is_drawn():
    rows = [
        row("lucir", 0.7, budget=9, date=2),
        row("lucir", 0.5, budget=9, date=1, recipe="learn"),
        row("lucir", 0.0, budget=9, date=3, outcome="Error: full disk"),
        row("kril", 0.0, budget=9, outcome="Error: no disk"),
    ]
    found = dots_of(rows)
    assert found["LUCIR", 9].last == pytest.approx(70) and not found["LUCIR", 9].failed
    assert found["KRIL krnet", 9].failed


def test_seeds_are_averaged_and_named():
    found = dots_of([row("lucir", 0.6, budget=9), row("lucir", 0.8, budget=9, seed=3), row("kril", 0.9, budget=9)])
    assert found["LUCIR", 9].last == pytest.approx(70) and found["LUCIR", 9].lasts == pytest.approx([60, 80])
    assert "seeds 0, 3, 1–2 of them a point" in plot_bytes.caption(list(found.values()))


def test_runs_with_other_epochs_or_settings_are_never_one_line():
    rows = [
        row("kril", 0.6, budget=5),
        row("kril", 0.7, budget=9, epochs=50),
        row("kril", 0.8, budget=9, kr2=False),
        row("lucir", 0.8, budget=9, epochs=7),
    ]
    found = dots_of(rows)
    assert len({series for series, _ in found}) == 4 and ("LUCIR", 9) in found
    assert ("KRIL krnet, epochs=5, kr2=False", 9) in found
    assert "epochs a task where not named: 5 + 7" in plot_bytes.caption(list(found.values()))
    alike = dots_of([row("kril", 0.6, budget=size, kr2=False) for size in (5, 9)])
    assert list(alike) == [("KRIL krnet", 5), ("KRIL krnet", 9)]
    assert "KRIL with kr2=False" in plot_bytes.caption(list(alike.values()))


def test_a_preset_has_its_name_and_settings_that_only_became_implicit_are_the_same():
    own = plot_bytes.as_json_values(base.get_learner("gfr").presets["own"])
    assert {series for series, _ in dots_of([row("gfr", 0.6), row("gfr", 0.5, **own)])} == {"GFR", "GFR own"}
    old, new = ({"recorder_schedule": "fast", "gamma": gamma} for gamma in (1e-3, None))
    found = dots_of([row("kril", 0.6, budget=5, **old), row("kril", 0.7, budget=9, **new)])
    assert {series for series, _ in found} == {"KRIL krnet"}


def test_what_new_features_are_by_default_is_not_named():
    kinds = (None, "flip"), (5, "replayed"), (9, "flip")
    found = dots_of([row("kril", 0.6, budget=size, new_features=kind) for size, kind in kinds])
    assert found.keys() == {("KRIL krnet", None), ("KRIL krnet", 5), ("KRIL krnet, new_features=flip", 9)}


def test_rows_of_other_data_orders_and_tasks_are_left_out_and_of_two_splits_refused():
    rows = [row("lucir", 0.6), row("kril", 0.6, data="cifar100"), row("kril", 0.6, tasks=[4, 2])]
    rows += [row("kril", 0.6, recipe="rate"), {**row("kril", 0.6), "class_order": "icarl (abc)"}]
    assert list(dots_of(rows)) == [("LUCIR", None)]
    with pytest.raises(SettingError, match="--base-classes"):
        dots_of([*rows, row("kril", 0.6, tasks=[3, 2, 2])])
    with pytest.raises(SettingError, match="nothing to draw"):
        plot_bytes.choose_rows(rows, "digits", "gfr1993", 2, None, None)


def test_icarl_is_drawn_both_ways_and_references_near_and_far(tmp_path, capsys):
    rows = [row("icarl", 0.5 + size / 1e5, budget=size, total=size) for size in (5000, 9000)]
    rows += [row("kril", 0.6, total=10**8), row("finetune", 0.02, total=0), row("lucir", 0.55, total=7000)]
    dots = plot_bytes.gather(plot_bytes.choose_rows(rows, "digits", "natural", 2, None, None))
    plot_bytes.draw(tmp_path / "a.png", dots)
    plot_bytes.show(dots)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    both = ["iCaRL (CNN)"] * 2 + ["iCaRL (NME)"] * 2
    assert [line.strip() for line in lines] == ["KRIL krnet", "LUCIR", *both, "fine-tuning"]


def test_names_beside_the_lines_never_overlap_and_stay_inside():
    for values in ([5.0, 5.0, 5.0], [9.9, 9.9, 0.0], [0.1, 0.0, 0.0, 0.0], []):
        places = plot_bytes.spaced(values, 0.0, 10.0)
        assert all(a - b >= 0.4 - 1e-9 for a, b in pairwise(places))
        assert all(0 <= place <= 10 for place in places)
