"""What a report shows of each recipe: its runs, its figures, and the paper's numbers for it.

rows of a ledger -> recipe_sections -> Chosen of every recipe that has been run -> krnet.report.write
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from krnet.io import ledger
from krnet.report.published import read_published
from krnet.report.sections import Chosen
from krnet.reproduce.compare import entries
from krnet.reproduce.recipe import read_recipe, recipe_names


def recipe_sections(rows: Sequence[Mapping[str, Any]]) -> list[Chosen]:
    """Recipes without a row are left out; rows that are no results, or not as a ledger's are, belong to none."""
    results = [row for row in rows if _is_whole(row) and ledger.is_result(row)]
    published = read_published()
    sections = []
    for name in recipe_names():
        recipe = read_recipe(name)
        found = entries(recipe, results)
        if found:
            paper = [number for number in published if number.recipe == name]
            sections.append(
                Chosen(
                    name=name,
                    title=recipe.title,
                    text=_paragraphs(recipe.opening),
                    views=recipe.figures,
                    entries=found,
                    paper=paper,
                )
            )
    return sections


def _paragraphs(opening: str) -> str:
    """Hardware and time stand in paragraphs of their own."""
    for word in ("Hardware:", "Time:"):
        opening = opening.replace(f"\n{word}", f"\n\n{word}")
    return opening


def _is_whole(row: Mapping[str, Any]) -> bool:
    """Whether a row has what every row has that the ledger wrote."""
    mappings = all(isinstance(row.get(key), dict) for key in ("metrics", "settings"))
    return mappings and row.get("outcome") == "ok" and "seed" in row
