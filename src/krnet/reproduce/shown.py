"""What a report shows of each recipe: its runs, its figures, and the paper's numbers for it.

rows of a ledger -> recipe_sections -> Chosen of every recipe that has been run -> krnet.report.write
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from krnet.io import ledger
from krnet.report.figure import Entry
from krnet.report.published import read_published
from krnet.report.sections import Chosen
from krnet.report.views.base import READ_ERRORS
from krnet.reproduce.compare import entries
from krnet.reproduce.recipe import Recipe, read_recipe, recipe_names

Row = Mapping[str, Any]
FORM: Mapping[str, Any] = {"date": str, "recipe": str, "settings": dict, "metrics": dict, "seed": (int, type(None))}


def recipe_sections(rows: Sequence[Mapping[str, Any]]) -> list[Chosen]:
    """Recipes without a row are left out. Rows that are no results, or that no ledger wrote, belong to none."""
    results = [row for row in rows if _is_whole(row) and ledger.is_result(row)]
    published = read_published()
    sections = []
    for name in recipe_names():
        recipe = read_recipe(name)
        found = _entries(recipe, results)
        if found:
            sections.append(
                Chosen(
                    name=name,
                    title=recipe.title,
                    text=_paragraphs(recipe.opening),
                    views=recipe.figures,
                    entries=found,
                    paper=[number for number in published if number.recipe == name],
                )
            )
    return sections


def _entries(recipe: Recipe, rows: Sequence[Row]) -> list[Entry]:
    """Of a ledger with rows that no work can read, those of the others."""
    try:
        return entries(recipe, rows)
    except READ_ERRORS:
        return entries(recipe, [row for row in rows if _is_readable(recipe, row)])


def _is_readable(recipe: Recipe, row: Row) -> bool:
    try:
        entries(recipe, [row])
    except READ_ERRORS:
        return False
    return True


def _is_whole(row: Row) -> bool:
    """Whether a row has the form of all that the ledger wrote; others come from elsewhere."""
    return row.get("outcome") == "ok" and all(
        key in row and isinstance(row[key], kind) and not isinstance(row[key], bool) for key, kind in FORM.items()
    )


def _paragraphs(opening: str) -> str:
    """Hardware and time stand in paragraphs of their own."""
    for word in ("Hardware:", "Time:"):
        opening = opening.replace(f"\n{word}", f"\n\n{word}")
    return opening
