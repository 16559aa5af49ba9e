"""The table of krnet and the best rival: shares of bytes at equal R2 are those of the curves that the points lie on."""

from __future__ import annotations

import math

import pytest

from krnet.report import views
from krnet.report.figure import Entry
from krnet.report.rivals import bytes_for, curves_of, rivals, side_by_side

SIZES = (0.25, 1, 4)


def entry(recorder: str, size: float, num_bytes: float, r2: float, name: str = "maps", **more: object) -> Entry:
    metrics = {"bytes": num_bytes, "r2": r2, "over_budget": False, **more}
    line = f"{recorder}, {name}"
    return Entry(series=f"{line}, {size}", line=line, row={"settings": {"bits_per_value": size}, "metrics": metrics})


def curve(recorder: str, factor: float, name: str = "maps") -> list[Entry]:
    """error = 0.4 / sqrt(bytes / factor): this recorder needs `factor` times the bytes of one with 1."""
    return [entry(recorder, s, 1000 * s, 1 - 0.2 / math.sqrt(s / factor), name) for s in SIZES]


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line][2:]


def test_the_share_is_that_of_the_bytes_at_equal_r2():
    (line,) = cells(rivals([*curve("krnet", 0.5), *curve("pca", 1.0), *curve("pq", 1.3)]))
    assert line[0] == "maps"
    assert all(found.endswith("0.50 of pca") for found in line[1:])
    assert line[2].startswith("0.859, 0.059 ahead")


def test_a_rival_that_is_better_shows_as_a_share_above_one_and_a_lead_below_zero():
    (line,) = cells(rivals([*curve("krnet", 1.25), *curve("pca", 1.0), *curve("pq", 2.0)]))
    assert all(found.endswith("1.25 of pca") for found in line[2:])
    assert "−0.024 ahead" in line[2]


def test_nothing_is_extrapolated():
    (line,) = cells(rivals([*curve("krnet", 0.001), *curve("pca", 1.0)]))
    assert all(found.endswith(" ahead") for found in line[1:])
    points = [(1, 100.0, 0.5), (2, 200.0, 0.8)]
    assert bytes_for(points, 0.5) == pytest.approx(100) and bytes_for(points, 0.8) == pytest.approx(200)
    assert bytes_for(points, 0.49) is None and bytes_for(points, 0.81) is None
    assert bytes_for(points, 1 - math.sqrt(0.5 * 0.2)) == pytest.approx(math.sqrt(100 * 200))


def test_sets_of_other_sizes_have_a_table_of_their_own():
    vectors = [entry(r, s, 10 * s * f, 1 - 0.2 / s, "vectors") for r, f in (("krnet", 1), ("pq", 2)) for s in (1, 2)]
    text = rivals([*curve("krnet", 0.5), *curve("pca", 1.0), *vectors])
    assert text.count("| set |") == 2 and "0.25 bits a value | 1 bits" in text and "| 1 bits a value | 2 bits" in text
    assert "0.50 of pq" in text


def test_files_above_their_budget_are_no_points_and_seeds_are_averaged():
    over = entry("pca", 1, 5000.0, 0.99, over_budget=True)
    seeds = [entry("pca", 1, 100.0, 0.8), entry("pca", 1, 120.0, 0.9)]
    ((_, num_bytes, r2),) = curves_of([over, *seeds])["maps"]["pca"]
    assert num_bytes == 110 and r2 == pytest.approx(0.85)


def test_a_set_without_a_rival_or_without_krnet_has_no_line():
    assert rivals(curve("krnet", 1.0)) == rivals(curve("pca", 1.0)) == ""


def test_the_figure_shows_the_lead_in_as_many_bytes_and_no_file_above_its_budget():
    over = entry("pq", 1, 5000.0, 0.99, over_budget=True)
    found = views.draw("lead", "n", "t", [*curve("krnet", 0.5), *curve("pca", 1.0), over])
    assert found is not None and [point.x for point in found.points] == [0.25, 1, 4]
    assert {point.series for point in found.points} == {"maps"}
    assert found.points[1].y == pytest.approx(0.2 - 0.2 * math.sqrt(0.5))


def test_parts_stand_side_by_side_for_each_set_and_size():
    runs = [entry(part, size, 100, r2, name) for name, size in (("a", 1), ("b", 1), ("a", 0.5))
            for part, r2 in (("krnet", 0.9), ("no network", 0.8))]  # fmt: skip
    assert cells(side_by_side([*runs, entry("whole", 1, 100, 0.7, "b")])) == [
        ["a", "0.5", "0.9000", "0.8000", ""],
        ["a", "1", "0.9000", "0.8000", ""],
        ["b", "1", "0.9000", "0.8000", "0.7000"],
    ]


def test_each_part_of_each_set_has_a_bar_of_what_is_lost():
    runs = [entry(part, 1, 100, r2, name) for part, r2 in (("krnet", 0.9), ("no network", 0.8)) for name in "ab"]
    found = views.draw("parts", "n", "t", runs)
    bars = {"a: krnet": 10, "a: no network": 20, "b: krnet": 10, "b: no network": 20}
    assert {p.series: round(p.y, 9) for p in found.points} == bars
    assert all(p.x == p.series for p in found.points)
