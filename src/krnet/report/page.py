"""Write a report as one HTML page that needs nothing else: no network, no other file.

    Report -> write_page -> report.html: text by the template, numbers as JSON, drawn by the scripts in the page

Everything in a report may come from a stranger's ledger. The template escapes text; the numbers are JSON in which no
character can end the script element; scripts write text as text only; and the page's own policy (CSP) runs no script
but those whose digests it lists.
"""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import datetime, timezone
from functools import cache
from importlib import resources
from typing import Any

from krnet.io.atomic import AnyPath, atomic_write
from krnet.io.ledger import package_version
from krnet.report.figure import OURS, Figure, Point
from krnet.report.sections import Report

LIBRARIES = {
    "d3-7.9.2.min.js": ("LICENSE.d3",),
    "plot-0.6.17.umd.min.js": (
        "LICENSE.plot",
        "LICENSE.interval-tree-1d",
        "LICENSE.binary-search-bounds",
        "LICENSE.isoformat",
    ),
}
"""In the order they are loaded; each with the licences of what it holds."""
SCRIPTS = ("numbers.js", "plots.js", "tables.js", "filters.js", "page.js")
RUN_FIELDS = ("seed", "data", "method", "commit", "date", "command", "note")
"""Of a point; numbers.js lists the same."""
DIGITS = 7  # of a number on the page


def write_page(path: AnyPath, report: Report) -> None:
    """Write the page; it appears complete or not at all."""
    page = render_page(report).encode("utf-8")
    with atomic_write(path) as file:
        file.write(page)


def render_page(report: Report) -> str:
    import jinja2  # here: every import of krnet would wait for it
    from markupsafe import Markup

    scripts = [*map(_library, LIBRARIES), *map(_script, SCRIPTS)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_read("assets", "page.html.j2")).render(
        report=report,
        version=package_version(),
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup(_read("assets", "page.css")),
        data=Markup(embed_json(pack(report))),
        scripts=[Markup(script) for script in scripts],
        script_hashes=Markup(" ".join(map(_digest, scripts))),
    )


# ------------------------------------------------------------------ the numbers


def pack(report: Report) -> dict[str, Any]:
    """The report's numbers; each run is listed once, and points name it by its place."""
    runs: dict[tuple[Any, ...], int] = {}
    sections = [
        {"name": section.name, "figures": [_pack_figure(figure, runs) for figure in section.figures]}
        for section in report.sections
    ]
    return {"sections": sections, "runs": [list(run) for run in runs]}


def _pack_figure(figure: Figure, runs: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    series: dict[str, int] = {}
    labels: dict[str, int] = {}

    def pack_point(point: Point) -> list[Any]:
        run = tuple(getattr(point, field) for field in RUN_FIELDS)
        return [
            series.setdefault(point.series, len(series)), _rounded(point.x), _rounded(point.y),
            0 if point.source == OURS else 1, labels.setdefault(point.label, len(labels)),
            runs.setdefault(run, len(runs)),
        ]  # fmt: skip

    points = [pack_point(point) for point in figure.points]
    return {
        "name": figure.name,
        "title": figure.title,
        "kind": figure.kind,
        "x": vars(figure.x),
        "y": vars(figure.y),
        "series": list(series),
        "labels": list(labels),
        "points": points,
    }


def _rounded(value: float | str) -> float | str:
    return value if isinstance(value, str) else float(f"{value:.{DIGITS}g}")


def embed_json(value: Any) -> str:
    """JSON for a script element: without <, > and &, nothing in it can end the element or open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ------------------------------------------------------------------ scripts


@cache
def _read(folder: str, name: str) -> str:
    return resources.files("krnet.report").joinpath(folder, name).read_text(encoding="utf-8")


def _library(name: str) -> str:
    licences = "\n".join(_read("vendor", licence).replace("*/", "* /") for licence in LIBRARIES[name])
    return _embeddable(f"/*!\n{licences}\n*/\n{_read('vendor', name)}", name)


def _script(name: str) -> str:
    return _embeddable(_read("assets", name), name)


def _embeddable(script: str, name: str) -> str:
    """A script that can stand inside a script element. Browsers read line ends as \\n, and so does its digest."""
    lower = script.lower()
    assert "</script" not in lower and "<!--" not in lower and "<script" not in lower, f"{name} would end its element"
    return script.replace("\r\n", "\n")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}'"
