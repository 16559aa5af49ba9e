"""`krnet report`: everything that has been measured, on one page.

ledgers, folders of runs -> krnet.report -> report.html; with --pictures also DIR/*.png and DIR/*.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from krnet.cli.options import Quiet
from krnet.cli.output import say


def report(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="LEDGER|RUN_DIR",
            help="Ledgers, and folders that `krnet learn` wrote.",
            show_default="results/ledger.jsonl of the clone",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Page to write.")] = Path("report.html"),
    pictures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write each figure as PNG and SVG there; needs matplotlib.", show_default="none"
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    quiet: Quiet = False,
) -> None:
    """Writes FILE, one HTML page that needs no network: figures, their numbers as tables, and CSV to download.

    Runs of a recipe stand beside the paper's numbers; other runs follow. Failed runs and those that were judged on
    held-out images are counted at the end.

    \b
    Example:
      krnet report -o report.html
      krnet report runs/several-digits-3-lucir1993-0 -o digits.html --pictures pictures
    """
    from krnet.io import ledger
    from krnet.report.sources import read_rows
    from krnet.report.write import write_report
    from krnet.reproduce.shown import recipe_sections

    paths = list(sources or [ledger.default_path()])
    rows = read_rows(paths)
    made = write_report(out, rows, paths, recipe_sections(rows), pictures)
    if not quiet:
        num_figures = sum(len(section.figures) for section in made.sections)
        left_out = f", {len(made.left_out)} rows left out" if made.left_out else ""
        say(f"written to {out}: {num_figures} figures of {len(rows):,} rows{left_out}")
        if pictures is not None:
            say(f"pictures written to {pictures}")
    if open_page:
        typer.launch(str(out.absolute()))
