"""From ledgers and run folders to a page, and to pictures.

paths -> write_report -> report.html, DIR/*.png, DIR/*.svg
DIR of `krnet learn` -> leave_page -> DIR/report.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from krnet.io.overlap import refuse_overlap
from krnet.report.page import write_page
from krnet.report.pictures import write_pictures
from krnet.report.sections import Chosen, Report, make_report
from krnet.report.sources import RUN_KEY, read_rows

PAGE_FILE = "report.html"


def write_report(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    inputs: Sequence[Path],
    recipes: Sequence[Chosen] = (),
    pictures: Path | None = None,
) -> Report:
    """Write the page of rows that were read from the inputs, and with `pictures` a PNG and SVG of each figure there."""
    refuse_overlap("report", [out], inputs)
    report = make_report(_title(inputs), _describe(rows, inputs), rows, recipes)
    write_page(out, report)
    if pictures is not None:
        for section in report.sections:
            for figure in section.figures:
                write_pictures(figure, pictures)
    return report


def leave_page(folder: Path, command: str = "") -> Path:
    """Write FOLDER/report.html, of all finished runs in the folder; returns its path. command: that made them."""
    rows = [{**row, "command": command} for row in read_rows([folder])]
    out = folder / PAGE_FILE
    write_report(out, rows, [folder])
    return out


def _title(inputs: Sequence[Path]) -> str:
    names = [path.resolve().name if path.is_dir() else path.name for path in inputs]
    return "krnet results" if not any(path.is_dir() for path in inputs) else f"krnet: {', '.join(names)}"


def _describe(rows: Sequence[Mapping[str, Any]], inputs: Sequence[Path]) -> str:
    """604 rows of ledger.jsonl, the newest of 2026-11-18."""
    names = ", ".join(path.resolve().name if path.is_dir() else path.name for path in inputs)
    kind = "run" if all(RUN_KEY in row for row in rows) else "row"
    newest = max((str(row.get("date", ""))[:10] for row in rows), default="")
    dated = f", the newest of {newest}" if newest else ""
    return f"{len(rows):,} {kind}{'' if len(rows) == 1 else 's'} of {names}{dated}."
