"""Find what the project keeps beside its code: the recipes, and the numbers of the paper.

    find_kept("recipes")            -> the folder of the recipe files
    find_kept("results/paper.csv")  -> the file

The clone that the current folder lies in comes first, then the one that this package lies in, then the copies that an
installed package holds. So a recipe that was changed in a clone is the one that runs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from krnet.errors import InputError

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = PACKAGE / "kept"
"""Copies in an installed package; pyproject.toml puts them there. A clone has none."""
MARKS = ("recipes", "results/paper.csv")
"""A folder that holds all of these is a clone."""


def find_kept(name: str) -> Path:
    """The path of a kept file or folder; it exists."""
    candidates = [root / name for root in roots()]
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        where = ", ".join(str(path) for path in candidates)
        raise InputError(
            f"{name}: not found in {where}. Work in a clone of the repository, or install krnet again from its wheel"
        )
    return found


def roots() -> Iterator[Path]:
    """Where kept files may be, in the order in which they are looked for."""
    here = Path.cwd()
    for folder in (here, *here.parents, *PACKAGE.parents):
        if all((folder / mark).exists() for mark in MARKS):
            yield folder
    yield SHIPPED
