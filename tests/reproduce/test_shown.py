"""What a report shows of the recipes: their runs beside the paper's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from krnet.io import ledger
from krnet.report import views
from krnet.report.figure import PAPER
from krnet.report.sections import make_report
from krnet.reproduce.recipe import read_recipe, recipe_names
from krnet.reproduce.shown import recipe_sections
from report.rows import hostile

LEDGER = Path(__file__).parents[2] / "results" / "ledger.jsonl"


@pytest.fixture(scope="module")
def shown():
    rows = ledger.read(LEDGER)
    return make_report("t", "", rows, recipe_sections(rows))


def test_every_figure_that_a_recipe_names_is_a_view():
    for name in recipe_names():
        assert set(read_recipe(name).figures) <= set(views.view_names()), name


def test_a_recipe_that_has_been_run_is_a_section_with_the_numbers_of_the_paper(shown):
    (section,) = [section for section in shown.sections if section.name == "cifar100-10"]
    (curves,) = [figure for figure in section.figures if figure.name == "cifar100-10-curves"]
    theirs = [point for point in curves.points if point.source == PAPER and point.series == "KRIL"]
    assert [point.x for point in theirs] == list(range(1, 11)) and theirs[-1].y == 55.21
    ours = [point for point in curves.points if point.source != PAPER and point.series == "KRIL"]
    assert {point.x for point in ours} == set(range(11))


def test_hardware_and_time_are_paragraphs(shown):
    (section,) = [section for section in shown.sections if section.name == "cifar100-10"]
    starts = [paragraph.partition(":")[0] for paragraph in section.text.split("\n\n")]
    assert starts[-2:] == ["Hardware", "Time"]


def test_no_recipe_stops_at_a_row_of_anyone():
    odd = [
        {**hostile(), key: value}
        for key in ("settings", "seed", "date", "corrects", "metrics")
        for value in (None, [], {}, "x")
    ]
    assert recipe_sections([{}, hostile(), *odd]) == []
