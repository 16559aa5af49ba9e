"""benchmarks/learn_bytes.py: last accuracy against stored bytes, as learned and as drawn."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from itertools import combinations
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


@pytest.mark.slow
def test_points_stay_below_their_budget_and_a_failing_one_leaves_its_error(call, tmp_path, capsys):
    rows = call("--methods", "kril:quantized,kril:nonsense,kril:raw,lucir,icarl,finetune", "--budgets", "15kB")
    found = {row["metrics"]["method"] + ":" + row["settings"].get("recorder", ""): row for row in rows}
    assert len(rows) == 6 and {row["recipe"] for row in rows} == {"learn-bytes"}
    for name in ("kril:quantized", "lucir:", "icarl:"):
        assert found[name]["outcome"] == "ok" and not found[name]["metrics"]["over_budget"]
        assert 0 < found[name]["metrics"]["storage_bytes"]["total"] <= 15000 == found[name]["settings"]["budget"]
        assert sum(found[name]["bytes"].values()) == found[name]["metrics"]["storage_bytes"]["total"]
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


def test_settings_are_chosen_on_held_out_images_and_nothing_is_drawn_of_them(call, tmp_path):
    (row,) = call("--methods", "finetune", "--validation", "4")
    assert row["metrics"]["validation"] == 4 and not ledger.is_result(row)
    assert not (tmp_path / "out" / "bytes.png").exists()


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


def test_a_row_judged_on_held_out_images_is_never_drawn():
    """Not even if it names the data set itself, and is the newest and best."""
    held_out = row("lucir", 0.9, budget=9, date=5)
    held_out["metrics"]["validation"] = 50
    real = row("lucir", 0.7, budget=9, date=2)
    real["metrics"]["validation"] = 0
    assert dots_of([held_out, real])["LUCIR", 9].last == pytest.approx(70)
    assert lines_of([held_out, real]) == {"LUCIR": [(1000, 70.0)]}
    with pytest.raises(SettingError, match="nothing to draw"):
        dots_of([held_out])


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


def test_a_failed_row_without_a_recorder_is_of_the_default_one():
    for settings, recorder in (({}, "paper"), ({"budget": 9}, "krnet"), ({"recorder_settings": {"lr": 0.1}}, "paper")):
        failed = {"metrics": {"method": "kril"}, "settings": settings}
        assert plot_bytes.as_today(failed)["settings"]["recorder"] == recorder


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


def test_icarl_is_in_the_table_both_ways(capsys):
    rows = [row("icarl", 0.5 + size / 1e5, budget=size, total=size) for size in (5000, 9000)]
    rows += [row("kril", 0.6, total=10**8), row("finetune", 0.02, total=0), row("lucir", 0.55, total=7000)]
    plot_bytes.show(plot_bytes.gather(plot_bytes.choose_rows(rows, "digits", "natural", 2, None, None)))
    lines = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    both = ["iCaRL (CNN)"] * 2 + ["iCaRL (NME)"] * 2
    assert [line.strip() for line in lines] == ["KRIL krnet", "LUCIR", *both, "fine-tuning"]


def lines_of(rows):
    """The points of each line of the figure, as stored bytes and last accuracy."""
    found = plot_bytes.lines_of(plot_bytes.choose_rows(rows, "digits", "natural", 2, None, None))
    return {name: [(round(1e6 * p.megabytes), round(p.last, 1)) for p in points] for name, points in found.items()}


def test_a_line_has_only_default_settings_and_begins_with_the_fewest_bytes():
    rows = [row("kril", last, budget=total, total=total) for last, total in ((0.7, 9000), (0.5, 4000))]
    rows += [row("kril", 0.9, budget=5000, total=5000, kr2=False), row("lucir", 0.0, total=9, outcome="Error: no disk")]
    rows += [row("joint", 0.8, total=10**5, only_last=True), row("finetune", 0.1, total=0)]
    assert lines_of(rows) == {"KRIL krnet": [(4000, 50.0), (9000, 70.0)], "all images": [(100_000, 80.0)]}


def test_of_rows_with_about_the_same_bytes_the_most_epochs_win_then_the_newest_and_seeds_are_averaged():
    rows = [
        row("lucir", 0.1, total=9000, date=1, epochs=9),
        row("lucir", 0.4, total=9020, date=2, epochs=9),
        row("lucir", 0.6, total=9040, date=1, epochs=9, seed=1),
        row("lucir", 0.9, total=9000, date=3),
        row("lucir", 0.9, total=9000, date=3, seed=2),
        row("lucir", 0.3, total=8000, date=3),
    ]
    assert lines_of(rows) == {"LUCIR": [(8000, 30.0), (9030, 50.0)]}


def figure_of(rows):
    chosen = plot_bytes.choose_rows(rows, "digits", "natural", 2, None, None)
    figure = plot_bytes.make_figure(plot_bytes.lines_of(chosen))
    return figure, [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def test_the_figure_has_at_most_six_labels_and_no_setting_in_them():
    rows = [row(method, 0.5, total=5000) for method in ("mas", "ewc", "gfr", "icarl", "lucir", "joint")]
    rows += [row("kril", 0.6, budget=5000, recorder=name, total=5000) for name in ("pca", "krnet", "paper", "pq")]
    rows += [row("kril", 0.6, budget=5000, total=5000, kr2=False), row("lucir", 0.6, total=9000, epochs=40)]
    figure, labels = figure_of(rows)
    assert labels == [label for label, _, _ in plot_bytes.STORY.values()] and len(labels) == 6
    assert not any("=" in label for label in labels) and figure.axes[0].get_legend() is None
    assert figure_of([row("mas", 0.5), row("kril", 0.6, budget=5, recorder="pq")])[1] == ["KRIL pq", "MAS"]


@pytest.mark.parametrize(("last", "saved"), [(0.599, True), (0.58, False)])
def test_the_title_names_the_bytes_saved_only_where_the_accuracy_is_the_same(last, saved, tmp_path):
    rows = [row("kril", 0.6, recorder="paper", total=10**6), row("kril", last, budget=20_000, total=20_000)]
    figure, labels = figure_of(rows)
    assert len(labels) == 2 and ("50 times fewer bytes" in figure.get_suptitle()) == saved
    plot_bytes.draw(tmp_path / "new" / "a.png", plot_bytes.choose_rows(rows, "digits", "natural", 2, None, None))
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_labels_of_the_picture_in_the_docs_stay_inside_it_and_apart():
    rows = ledger.read(Path(__file__).resolve().parents[2] / "results" / "ledger.jsonl")
    figure = plot_bytes.make_figure(
        plot_bytes.lines_of(plot_bytes.choose_rows(rows, "cifar100", "lucir1993", 10, 50, None))
    )
    figure.draw_without_rendering()
    texts = [text for text in [*figure.texts, *figure.axes[0].texts] if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    assert len(boxes) <= 7  # the title and six labels
    assert all(figure.bbox.x0 <= b.x0 and b.x1 <= figure.bbox.x1 and b.y1 <= figure.bbox.y1 for b in boxes)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
