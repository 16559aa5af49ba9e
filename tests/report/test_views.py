"""Views: rows to figures. Rows of any age or author never stop them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krnet.errors import SettingError
from krnet.io import ledger
from krnet.report import views
from krnet.report.figure import PAPER, Entry, PaperNumber
from report.rows import learned, recorded, toy_rows

LEDGER = Path(__file__).parents[2] / "results" / "ledger.jsonl"


def entries(rows, name=None):
    return [Entry(series=name or row["metrics"].get("method", "run"), row=row) for row in rows]


def draw(view, rows, paper=(), name=None):
    return views.draw(view, f"toy-{view}", "Toy", entries(rows, name), paper)


def published(series, x, value, unit="%", error=None):
    return PaperNumber(recipe="toy", series=series, x=x, value=value, unit=unit, place="Table I", reading_error=error)


def test_a_curve_is_in_percent_over_the_classes_seen():
    figure = draw("curves", [learned("kril", seed=2)])
    assert [(point.x, point.y) for point in figure.points] == [(4, 90.0), (6, 80.0), (8, 70.0)]
    assert {(point.seed, point.method, point.data, point.commit) for point in figure.points} == {
        (2, "kril", "digits", "abc1234")
    }


def test_a_curve_is_over_tasks_where_the_paper_counts_tasks():
    figure = draw("curves", [learned("kril")], [published("kril", "1", 79.5), published("kril", "2", 71.0)])
    assert [point.x for point in figure.points] == [0, 1, 2, 1, 2]
    assert [point.source for point in figure.points][3:] == [PAPER, PAPER]
    assert figure.x.label == "task"


def test_skipped_tasks_are_no_points():
    row = learned("joint")
    row["metrics"]["accuracy"] = [0.9, None, 0.7]
    assert [point.x for point in draw("curves", [row]).points] == [4, 8]


def test_of_a_paper_curve_the_last_value_is_shown():
    paper = [published("kril", "9", 60.0), published("kril", "10", 55.2), published("gain", "10", 1, unit="points")]
    shown = [point for point in draw("last", [learned("kril")], paper).points if point.source == PAPER]
    assert [(point.series, point.y, point.note) for point in shown] == [("kril", 55.2, "Table I")]


def test_a_value_read_off_a_figure_says_so():
    (shown,) = draw("last", [], [published("kril", "10", 55.0, error=0.5)]).points
    assert shown.note == "Table I, read off the figure to ± 0.5 %"


def test_a_difference_within_the_spread_is_not_told_apart():
    rows = [learned("a", seed, 0.01 * seed) for seed in range(3)] + [
        learned("b", seed, 0.01 * seed) for seed in range(3)
    ]
    text = draw("last", rows).text
    assert "Within the spread of seeds of it: b." in text
    assert "best" not in text and "better" not in text


def test_a_difference_beyond_the_spread_is_said():
    rows = [learned("a", seed, 0.1 + 0.001 * seed) for seed in range(3)] + [learned("b", seed) for seed in range(3)]
    assert "Every other mean is lower by more than both deviations together." in draw("last", rows).text


def test_one_seed_claims_nothing():
    assert "with one seed" in draw("last", [learned("a"), learned("b", 0, -0.5)]).text


def test_a_method_that_keeps_nothing_is_named_and_not_drawn_on_the_logarithmic_axis():
    nothing = learned("finetune")
    nothing["metrics"]["storage_bytes"] = {"total": 0}
    figure = draw("bytes", [learned("kril"), nothing])
    assert {point.series for point in figure.points} == {"kril"}
    assert "1 run that keeps nothing cannot be placed" in figure.text


def test_rate_and_replay_accuracy_are_against_the_bytes_on_disk():
    rows = [recorded("pca", 10_000, 0.9, seed) for seed in (0, 1)]
    rate, replay = draw("rate", rows, name="pca"), draw("replay-accuracy", rows, name="pca")
    assert [(point.x, point.y, point.label) for point in rate.points] == [
        (0.009999, 0.9, "budget 10 kB"), (0.009989, 0.9, "budget 10 kB"),
    ]  # fmt: skip
    assert [point.y for point in replay.points] == [90.0, 90.0]
    assert "On real features it is 99 %" in replay.text


def test_the_matrix_says_whose_it_is():
    figure = draw("matrix", [learned("kril")])
    assert [(point.series, point.x, point.y, point.label) for point in figure.points][-1] == (
        "after task 2",
        2,
        60.0,
        "kril",
    )


def test_the_storage_table_counts_in_the_units_of_the_paper():
    row = {**learned("plan"), "metrics": {"quantity": "feature_bytes", "values": {"50": 12 * 2**30}}}
    figure = views.draw("table", "t", "T", [Entry(series="raw", row=row)], [published("raw", "50", 12.0, "GB")])
    assert [(point.x, point.y) for point in figure.points] == [(50, 12288.0), (50, 12288.0)]


def test_an_embedding_reads_the_file_that_its_row_names(tmp_path):
    (tmp_path / "tsne").mkdir()
    (tmp_path / "tsne" / "points.csv").write_text("x,y,label\n1,2,cat\n3,4.5,dog\n")
    row = {**learned("pca"), "metrics": {"points": "tsne/points.csv"}, "ledger_folder": str(tmp_path)}
    figure = draw("embedding", [row], name="pca")
    assert [(point.x, point.y, point.label) for point in figure.points] == [(1, 2, "cat"), (3, 4.5, "dog")]


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../../etc/hosts.csv", "missing.csv", 7, None])
def test_an_embedding_reads_no_file_elsewhere(tmp_path, name):
    folder = tmp_path / "a" / "b" / "c" / "d"
    folder.mkdir(parents=True)
    (tmp_path / "hosts.csv").write_text("x,y,label\n1,2,cat\n")
    row = {**learned("pca"), "metrics": {"points": name}, "ledger_folder": str(folder)}
    assert draw("embedding", [row]) is None


def test_rows_that_lack_a_number_are_counted():
    broken = learned("kril")
    broken["metrics"]["last"] = "high"
    assert draw("last", [learned("kril"), broken]).text.endswith(
        "Not drawn: 1 row that lacks a number this figure needs."
    )


def test_a_view_without_points_is_no_figure():
    for view in views.view_names():
        assert draw(view, []) is None


def test_an_unknown_view_is_named_with_the_nearest():
    with pytest.raises(SettingError, match="curves"):
        views.draw("curve", "n", "t", [])


def test_no_view_stops_at_any_row_of_the_real_ledger():
    rows = ledger.read(LEDGER)
    drawn = {view: draw(view, rows, name="all") for view in views.view_names()}
    for view in (
        "curves",
        "last",
        "bytes",
        "forgetting",
        "matrix",
        "rate",
        "replay-accuracy",
        "speed",
        "steps",
        "time",
    ):
        assert len(drawn[view].points) > 10, view


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
def test_no_view_stops_at_a_row_with_any_value_anywhere(data):
    row = copy.deepcopy(data.draw(st.sampled_from(toy_rows())))
    place = data.draw(st.sampled_from([row, row["metrics"], row["settings"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(json_values)
    for view in views.view_names():
        figure = draw(view, [{"metrics": {}, **row}], name="any")
        assert figure is None or json.dumps([vars(point) for point in figure.points], allow_nan=False)
