"""`krnet reproduce`: run the recipes of `recipes/`, and show what came out beside the numbers of the paper.

NAME or all -> krnet.reproduce.loop -> rows of the ledger -> krnet.reproduce.compare -> a table or JSON on stdout
--list      -> which recipes there are, what has been run, when, and how far from the paper
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import DataDir, Device, Json, Quiet, option
from krnet.cli.output import say
from krnet.config import parse_seeds

if TYPE_CHECKING:
    from krnet.reproduce.compare import Comparison, Standing

ALL = "all"


def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|all", help="Recipe, or all of them.", show_default=False)
    ] = None,
    seeds: Annotated[
        Any,
        typer.Option(
            parser=option(parse_seeds),
            metavar="N,N,...",
            help="Seeds of every run.",
            show_default="those of the recipe",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            help="Only the runs of NAME that have this name, or these parts of it; may be given several times.",
            show_default="all",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Tiny settings on the digits, in minutes: whether it runs at all. Its rows are kept apart."
        ),
    ] = False,
    list_all: Annotated[
        bool,
        typer.Option(
            "--list", help="Print the recipes: what has been run, when, and how far it is from the paper; and exit."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Folder of the runs.",
            show_default="runs/reproduce; with --quick runs/reproduce-quick",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", help="Runs that go side by side, each in a process of its own.")
    ] = 1,
    data_dir: DataDir = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Appends a row to results/ledger.jsonl for each run of the recipe that it lacks; prints ours beside the paper's.

    Runs that were cut off go on where they stopped, when the same command is given again; finished ones are left alone.
    With --quick the rows go to DIR/ledger.jsonl, and the folder of --out is runs/reproduce-quick.

    \b
    Example:
      krnet reproduce storage-table
      krnet reproduce cifar100-10 --seeds 0,1,2 --jobs 3
      krnet reproduce --list
    """
    from krnet.cli.progress import Display
    from krnet.io import ledger
    from krnet.report.published import read_published
    from krnet.reproduce.compare import compare, standing
    from krnet.reproduce.loop import ledger_of, out_folder
    from krnet.reproduce.loop import reproduce as run_recipe
    from krnet.reproduce.recipe import read_recipe, recipe_names

    if name is None and not list_all:
        raise typer.BadParameter(
            f"none given; expected {', '.join(recipe_names())}, or all; --list describes them", param_hint="'NAME'"
        )
    if only and name in (None, ALL):
        raise typer.BadParameter("--only names runs of one recipe; give its NAME")
    names = recipe_names() if name in (None, ALL) else [str(name)]
    recipes = [read_recipe(one, quick=quick) for one in names]  # all mistakes now, not after hours
    published = read_published()
    folder = out_folder(out, quick)
    if list_all:
        with ledger_of(folder, quick):
            rows, where = ledger.read(), ledger.default_path()
        found = [standing(recipe, rows, published, seeds) for recipe in recipes]
        if as_json:
            output.show_json([_standing_json(one) for one in found])
        else:
            _show_standings(found)
            say(f"runs and dates are those of {where}")
        return
    errors: list[str] = []
    results = []
    told = (lambda text: None) if quiet else say
    try:
        for recipe in recipes:
            with Display(quiet) as display:
                errors += run_recipe(
                    recipe.name, seeds=seeds, only=only, quick=quick, out=out, jobs=jobs, data_dir=data_dir,
                    device=device, watch=display, say=told,
                )  # fmt: skip
            with ledger_of(folder, quick):
                results.append((recipe, compare(recipe, ledger.read(), [] if quick else published)))
            if not as_json:
                _show_comparison(recipe.title, results[-1][1])
    except KeyboardInterrupt:
        say(f"stopped; what was done is in {folder}. To go on, give the same command again")
        raise typer.Exit(130) from None
    if as_json:
        output.show_json(
            {
                "recipes": [
                    {"name": recipe.name, "title": recipe.title, "results": [_comparison_json(one) for one in compared]}
                    for recipe, compared in results
                ],
                "errors": errors,
            }
        )
    for error in errors:
        say(f"error: {error}")
    if errors:
        raise typer.Exit(1)


# ------------------------------------------------------------------ tables


def _show_comparison(title: str, compared: Sequence[Comparison]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("series", "at", "ours", "seeds", "paper", "difference", ""):
        table.add_column(column, justify="left" if column in ("series", "") else "right", no_wrap=True)
    for one in compared:
        table.add_row(
            one.series, one.x, _with_spread(one), str(one.num_seeds or "-"), _number(one.paper, one.unit),
            _number(one.difference, "", sign=True, beside=one.paper), one.verdict,
        )  # fmt: skip
    output.print_unwrapped(table)
    print()


def _show_standings(found: Sequence[Standing]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("recipe", "what", "runs", "newest", "farthest from the paper", "time"):
        table.add_column(column, justify="right" if column == "runs" else "left", no_wrap=True)
    for one in found:
        table.add_row(
            one.recipe.name, one.recipe.title, f"{one.done}/{one.asked}", one.newest[:10] or "-", _farthest(one),
            one.recipe.time,
        )  # fmt: skip
    output.print_unwrapped(table)


def _farthest(one: Standing) -> str:
    if one.farthest is None:
        return "-"
    at = f" at {one.farthest.x}" if one.farthest.x else ""
    gap = _number(one.farthest.difference, one.farthest.unit, sign=True, beside=one.farthest.paper)
    return f"{gap}, {one.farthest.series}{at}"


def _with_spread(one: Comparison) -> str:
    if one.ours is None or one.spread is None:
        return _number(one.ours, one.unit)
    return f"{_number(one.ours, '')} ± {_number(one.spread, one.unit, beside=one.ours)}"


def _number(value: float | None, unit: str, sign: bool = False, beside: float | None = None) -> str:
    """Two decimals; three digits of a small number, no decimals of a large one. `beside` decides for a difference."""
    if value is None:
        return "-"
    small = abs(value if beside is None else beside) < 0.05
    digits = ".2e" if small and value else ".2f" if abs(value) < 10_000 else ",.0f"
    shown = value if small else round(value, 2) + 0.0  # no -0.00
    return f"{shown:{'+' if sign else ''}{digits}} {unit}".rstrip()


def _comparison_json(one: Comparison) -> Mapping[str, Any]:
    from dataclasses import asdict

    return {**asdict(one), "difference": one.difference, "verdict": one.verdict}


def _standing_json(one: Standing) -> Mapping[str, Any]:
    return {
        "name": one.recipe.name,
        "title": one.recipe.title,
        "time": one.recipe.time,
        "done": one.done,
        "asked": one.asked,
        "newest": one.newest,
        "farthest": None if one.farthest is None else _comparison_json(one.farthest),
    }
