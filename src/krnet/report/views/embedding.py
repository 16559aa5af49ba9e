"""t-SNE of features, real and replayed: one panel a recorder.

rows whose metrics name a points file (CSV with the columns x, y, label) -> embedding
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from krnet.errors import InputError
from krnet.io import ledger
from krnet.report.figure import Axis, Entry, Figure, PaperNumber, Point
from krnet.report.views.base import figure, number, point, read_points, register, short

TEXT = "Features in two dimensions by t-SNE, coloured by class. Distances between groups say little; mixed groups do."
FOLDER_KEY = "ledger_folder"
"""Of a row: the folder of the ledger it was read from (krnet.report.sources sets it); points files lie near it."""
MAX_POINTS = 4000  # of one file; more are thinned evenly: the page would be slow
MAX_BYTES = 20_000_000
PARENTS = 3  # runs/reproduce-quick/ledger.jsonl names files relative to the folder that runs/ lies in


@register("embedding", "Features in two dimensions")
def embedding(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """The paper's figure holds no numbers."""
    thinned = 0

    def read(entry: Entry) -> Iterator[Point]:
        nonlocal thinned
        path = points_path(entry)
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        step = -(-len(rows) // MAX_POINTS) or 1
        thinned += step > 1
        for row in rows[::step]:
            x, y = (round(number(float(row[key])), 3) for key in "xy")
            yield point(entry, x, y, label=short(row["label"]))

    points, num_unusable = read_points(entries, read)
    text = TEXT + (f" Every panel shows at most {MAX_POINTS:,} points." if thinned else "")
    return figure(name, title, text, "embedding", Axis(label=""), Axis(label=""), points, num_unusable)


def points_path(entry: Entry) -> Path:
    """The file that a row names, relative to its ledger's folder or to the project around it; nothing else is read."""
    name = entry.row["metrics"]["points"]
    if not isinstance(name, str):
        raise TypeError(f"points is {name!r}; expected the name of a file")
    folder = Path(entry.row.get(FOLDER_KEY) or ledger.default_path().parent).resolve()
    for root in (folder, *folder.parents[:PARENTS]):
        path = (root / name).resolve()
        if path.suffix == ".csv" and path.is_relative_to(root) and path.is_file():
            if path.stat().st_size > MAX_BYTES:
                raise InputError(f"{path}: more than {MAX_BYTES:,} bytes; expected the points of one figure")
            return path
    raise InputError(f"{name}: no such CSV file near {folder}")
