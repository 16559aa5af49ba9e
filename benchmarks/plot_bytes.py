"""Draw and print the results of learn_bytes.py: last accuracy against stored bytes, from ledger rows.

    ledger rows -> choose_rows (one data set, class order and split) -> gather -> [Dot] -> draw (PNG), show (table)

A series is a method with a recorder and settings. A dot is a series at one budget: the newest row of each seed,
averaged over seeds. The text below the figure names class order, seeds and epochs. Settings that differ from a method's
defaults are part of the name of its series.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from krnet.config import format_size
from krnet.errors import SettingError
from krnet.io.atomic import atomic_write
from krnet.learners import base
from krnet.report.figures import COLOURS

RECIPES = ("learn", "learn-bytes")
# Recorders of KRIL, and other methods, in the order of the table.
KINDS = (
    "krnet", "paper", "pca", "quantized", "transform", "pq", "autoencoder", "images", "raw", "lucir", "icarl",
)  # fmt: skip
TITLES = {"kril": "KRIL", "lucir": "LUCIR", "icarl": "iCaRL", "finetune": "fine-tuning", "joint": "all images"}
COLOUR_OF = {"paper": COLOURS[10], **dict(zip([kind for kind in KINDS if kind != "paper"], COLOURS[:10]))}
GREY = "0.35"  # the other methods
# Settings that follow from the data, and epochs, which the caption names: a series is named by them only where its
# method has rows with different values.
DATA_SETTINGS = frozenset({"backbone", "fixed_layers", "batch_size", "base_epochs", "epochs"})
SHOWN_ELSEWHERE = frozenset({"recorder", "budget", "tasks", "data", "method"})  # in the series' name, axis or heading
MIN_SHARE = 0.5  # of the best accuracy; dots below it would squeeze the others together and are listed in the caption


@dataclass(frozen=True, eq=False)
class Dot:
    """A series at one budget, averaged over seeds."""

    series: str
    """Method, recorder, and settings that differ from the defaults."""
    colour: str
    dotted: bool
    """True for a second line of a method: other settings than its defaults, or iCaRL's classifier (cnn)."""
    budget: int | None
    rows: tuple[dict[str, Any], ...]
    """The newest row of each seed; failed rows only if all failed."""
    row: str | None
    """For iCaRL, which of its two predictions: nme or cnn."""

    @property
    def failed(self) -> bool:
        return self.rows[0]["outcome"] != "ok"

    @property
    def bytes(self) -> float:
        return sum(row["metrics"]["storage_bytes"]["total"] for row in self.rows) / len(self.rows)

    @property
    def lasts(self) -> list[float]:
        return [100 * self._scores(row)["last"] for row in self.rows]

    @property
    def last(self) -> float:
        return sum(self.lasts) / len(self.rows)

    @property
    def average(self) -> float | None:
        # With only_last, joint learns the last task alone: the average in its row is of tasks that it did not learn.
        found = [None if row["settings"].get("only_last") else self._scores(row)["average"] for row in self.rows]
        return None if None in found else sum(100 * value for value in found) / len(found)

    @property
    def epochs(self) -> str:
        found = {(row["settings"].get("base_epochs"), row["settings"].get("epochs")) for row in self.rows}
        return " or ".join(f"{later}" if first == later else f"{first} + {later}" for first, later in sorted(found))

    def _scores(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        metrics = row["metrics"]
        return metrics["rows"][self.row] if self.row else metrics


def choose_rows(
    rows: Sequence[dict[str, Any]], name: str, order: str, tasks: int, base_classes: int | None, epochs: int | None
) -> list[dict[str, Any]]:
    """Return the rows of one data set, class order and task split, the oldest first; refuse rows of several splits."""
    chosen = []
    for row in rows:
        settings = row["settings"]
        sizes = settings.get("tasks")
        if row["recipe"] not in RECIPES or settings.get("data") != name or "method" not in row["metrics"]:
            continue
        fits = isinstance(sizes, list) and len(sizes) == 1 + tasks and base_classes in (None, sizes[0])
        fits = fits and (row["class_order"] or "").split(" (")[0] == order
        if fits and (epochs is None or settings.get("epochs") == epochs):
            chosen.append(row)
    splits = {(row["class_order"], *row["settings"]["tasks"]) for row in chosen}
    if len(splits) > 1:
        raise SettingError(f"rows of several splits: {sorted(splits)}. Give --base-classes, to choose one")
    if not any(row["outcome"] == "ok" for row in chosen):
        raise SettingError(f"no row of {name}, {tasks} tasks after the base task, class order {order}: nothing to draw")
    return sorted(map(as_today, chosen), key=lambda row: row["date"])


def as_today(row: dict[str, Any]) -> dict[str, Any]:
    """Convert the settings of a row to today's form, in which one name means one recorder.

    Some rows hold the resolved value of a KRIL setting whose default is None; here they hold None again.
    """
    method, settings = row["metrics"]["method"], dict(row["settings"])
    if method == "kril":  # the row of a failed point holds only the settings that were given
        settings = {"recorder": "paper" if settings.get("budget") is None else "krnet", **settings}
        settings.setdefault("recorder_settings", {})
    settings = base.get_learner(method).config_class.renewed(settings)
    if settings.get("gamma") == 1e-3 and settings.get("recorder_schedule") == "fast":
        settings["gamma"] = None
    if settings.get("new_features") == ("flip" if settings.get("budget") is None else "replayed"):
        settings["new_features"] = None
    return row | {"settings": settings}


def title(row: Mapping[str, Any]) -> str:
    """Return the method, with the preset that its settings contain: GFR own."""
    method, settings = row["metrics"]["method"], row["settings"]
    presets = [
        k for k, v in base.get_learner(method).presets.items() if v and as_json_values(v).items() <= settings.items()
    ]
    return " ".join([TITLES.get(method, method.upper()), *presets])


def as_json_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn tuples into lists, as JSON does."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def defaults(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default settings of the method, or of its preset."""
    learner = base.get_learner(row["metrics"]["method"])
    own = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(learner.config_class)
    }
    preset = title(row).split(" ")[-1]
    return as_json_values(own | dict(learner.presets.get(preset, {})))


def unusual(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults."""
    own, known = {k: v for k, v in row["settings"].items() if k not in DATA_SETTINGS | SHOWN_ELSEWHERE}, defaults(row)
    return {name: value for name, value in own.items() if name not in known or known[name] != value}


def differing(rows: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    """Return, by title, the settings that name a series: those that differ from the defaults and between its rows."""
    found: dict[str, set[str]] = {}
    for row_title in {title(row) for row in rows}:
        own = [row for row in rows if title(row) == row_title]
        full = [defaults(row) | row["settings"] for row in own]  # an older row may lack a newer setting
        names = {name for row in own for name in unusual(row)} | DATA_SETTINGS
        found[row_title] = {name for name in names if len({json.dumps(settings.get(name)) for settings in full}) > 1}
    return found


def gather(rows: Sequence[dict[str, Any]]) -> list[Dot]:
    """Make dots of rows, which come oldest first: of each series, budget and seed the newest row that did not fail."""
    naming = differing(rows)
    found: dict[tuple[str, int | None], dict[int, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["outcome"] == "ok"):
        settings = row["settings"]
        # A setting that the name lacks has its default.
        named = naming[title(row)] & (DATA_SETTINGS & settings.keys() | unusual(row).keys())
        own = [f"{name}={settings[name]}" for name in sorted(named)]
        series = ", ".join([" ".join(filter(None, [title(row), settings.get("recorder")])), *own])
        found.setdefault((series, settings.get("budget")), {})[row["seed"]] = row
    dots = []
    for (series, budget), by_seed in found.items():
        succeeded = tuple(row for _, row in sorted(by_seed.items()) if row["outcome"] == "ok")
        kept = succeeded or tuple(by_seed.values())
        method, predictions = kept[0]["metrics"]["method"], sorted(kept[0]["metrics"].get("rows", {}), reverse=True)
        colour = COLOUR_OF.get(kept[0]["settings"].get("recorder", method), GREY)
        if method == "icarl" and succeeded:
            dots += [Dot(f"{series} ({r.upper()})", colour, r != "nme", budget, kept, r) for r in predictions]
        else:
            is_dotted = bool(naming[title(kept[0])] & unusual(kept[0]).keys())
            dots.append(Dot(series, colour, is_dotted, budget, kept, None))
    places = [*(COLOUR_OF[kind] for kind in KINDS), GREY]
    return sorted(dots, key=lambda dot: (places.index(dot.colour), dot.series, dot.budget is None, dot.budget or 0))


def caption(dots: Sequence[Dot]) -> str:
    """Name what the numbers depend on: class order, seeds, epochs, settings that a method has in all its rows."""
    rows = [row for dot in dots for row in dot.rows]
    order = {row["class_order"] for row in rows}.pop()
    seeds = sorted({row["seed"] for row in rows})
    counts = sorted({len(dot.rows) for dot in dots})
    text = f"class order {order}; seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    if len(seeds) > 1:
        counts_text = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        text += f", {counts_text} of them a point: mean, bars from worst to best"
    epochs: dict[str, list[str]] = {}
    unnamed = [dot for dot in dots if "epochs=" not in dot.series]
    for dot in unnamed:
        epochs.setdefault(dot.epochs, []).append(dot.series)
    usual = max(epochs, key=lambda text: len(epochs[text]), default=None)
    others = [f"{number} of {', '.join(dict.fromkeys(names))}" for number, names in epochs.items() if number != usual]
    where = "" if len(unnamed) == len(dots) else " where not named"
    text += f"; epochs a task{where}: {'; '.join([usual, *others])}" if usual else ""
    naming, shared = differing(rows), {}
    for row in rows:
        own = [f"{name}={value}" for name, value in unusual(row).items() if name not in naming[title(row)]]
        shared[title(row)] = ", ".join(own)
    return "; ".join([text, *(f"{name} with {own}" for name, own in shared.items() if own)])


def say_tasks(sizes: Sequence[int]) -> str:
    """Write the classes of each task as 50 + 10 × 5."""
    first, *later = sizes
    same = len(set(later)) == 1 and len(later) > 1
    return f"{first} + {len(later)} × {later[0]}" if same else " + ".join(map(str, sizes))


def by_series(dots: Sequence[Dot]) -> dict[str, list[Dot]]:
    """Group dots by series; the fewest bytes come first."""
    found: dict[str, list[Dot]] = {}
    for dot in sorted(dots, key=lambda dot: dot.bytes):
        found.setdefault(dot.series, []).append(dot)
    return found


def say_sizes(dots: Sequence[Dot]) -> str:
    """Write the bytes of the first and the last dot as 3.072–6.083 MB, or as one number if they are equal."""
    first, last = (format_size(round(dot.bytes)) for dot in (dots[0], dots[-1]))
    if first == last:
        return first
    return f"{first.split()[0] if first.split()[1] == last.split()[1] else first}–{last}"


def notes(dots: Sequence[Dot], shown: Sequence[Dot]) -> list[str]:
    """Return the lines below the figure: the caption, and the dots that are too low to be shown."""
    hollow = "; hollow: no budget" if any(dot.budget is None and dot.bytes for dot in shown) else ""
    omitted = [
        f"{name} {', '.join(f'{dot.last:.1f}' for dot in points)} % ({say_sizes(points)})"
        for name, points in by_series([dot for dot in dots if dot not in shown]).items()
    ]
    parts = [caption(dots) + hollow, *(["below the picture: " + "; ".join(omitted)] if omitted else [])]
    return [line for part in parts for line in textwrap.wrap(part, 150)]


def draw(path: Path, dots: Sequence[Dot]) -> None:
    """Draw last accuracy over log bytes.

    A line joins the dots of a series. A hollow dot had no budget. A method that stores nothing is a horizontal line.
    """
    from matplotlib.figure import Figure  # here, because it takes half a second to import

    dots = [dot for dot in dots if not dot.failed]
    best = max(dot.last for dot in dots)
    shown = [dot for dot in dots if dot.last >= best * MIN_SHARE]
    series, text = by_series(shown), notes(dots, shown)
    names = {name: f"{name}, {say_sizes(points)}" for name, points in series.items()}

    # In inches. The figure grows with the text beside and below the axes.
    left, bottom, wide, high = 0.85, 0.75 + 0.15 * len(text), 5.8, 4.3
    width = max(9.6, left + wide + 0.3 + 0.068 * max(map(len, names.values())))
    height = bottom + high + 0.55
    figure = Figure(figsize=(width, height), dpi=130)
    axes = figure.add_axes((left / width, bottom / height, wide / width, high / height))
    settings = dots[0].rows[0]["settings"]
    heading = f"{settings['data']}, {say_tasks(settings['tasks'])} classes"
    figure.text(left / width, 1 - 0.35 / height, heading, fontsize=14)
    figure.text(left / width, (bottom - 0.62) / height, "\n".join(text), fontsize=8, color="0.3", va="top")
    set_scales(axes, shown)
    for points in series.values():
        draw_series(axes, points)
    write_names(axes, [points[-1] for points in series.values()], names)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def set_scales(axes: Any, shown: Sequence[Dot]) -> None:
    from matplotlib import ticker

    placed = [dot.bytes for dot in shown if dot.bytes] or [1e6]
    lowest, highest = min(min(dot.lasts) for dot in shown), max(max(dot.lasts) for dot in shown)
    margin = 0.06 * max(highest - lowest, 1.0)
    axes.set_ylim(lowest - margin, highest + margin)
    axes.set_xscale("log")
    axes.set_xlim(min(placed) / 1.3, max(placed) * 1.3)
    axes.set(xlabel="bytes stored when all is learned, the current classifier aside", ylabel="last accuracy (%)")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1,) if max(placed) > 50 * min(placed) else (1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: format_size(round(value)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_series(axes: Any, points: Sequence[Dot]) -> None:
    first, stored = points[0], [dot for dot in points if dot.bytes]
    ours = first.series.startswith("KRIL")
    style = ":" if first.dotted else "-" if ours else "--"
    axes.plot([d.bytes for d in stored], [d.last for d in stored], style, color=first.colour, linewidth=1.4, alpha=0.8)
    for dot in points:
        if not dot.bytes:
            axes.axhline(dot.last, linestyle=(0, (6, 3)), color=dot.colour, linewidth=1, alpha=0.7)
            continue
        spread = [[dot.last - min(dot.lasts)], [max(dot.lasts) - dot.last]] if len(dot.rows) > 1 else None
        axes.errorbar(
            [dot.bytes], [dot.last], yerr=spread, color=dot.colour, capsize=2, zorder=5, marker="o" if ours else "s",
            markersize=5.5, markerfacecolor="white" if dot.budget is None else dot.colour,
        )  # fmt: skip


def write_names(axes: Any, ends: Sequence[Dot], names: Mapping[str, str]) -> None:
    """Write each name at the right of the axes, with a line to the last dot of its series."""
    ends = sorted(ends, key=lambda dot: -dot.last)
    for place, dot in zip(spaced([dot.last for dot in ends], *axes.get_ylim()), ends):
        line = {"arrowstyle": "-", "color": dot.colour, "alpha": 0.35, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            names[dot.series], (dot.bytes or axes.get_xlim()[1], dot.last), xytext=(1.035, place), color=dot.colour,
            textcoords=("axes fraction", "data"), fontsize=8.5, va="center", annotation_clip=False,
            arrowprops=line | {"relpos": (0, 0.5)},
        )  # fmt: skip


def spaced(values: Sequence[float], bottom: float, top: float) -> list[float]:
    """Return heights for names, the highest first: near their values, a step apart, and not below the bottom."""
    step = min(0.04, 1 / max(1, len(values))) * (top - bottom)
    places: list[float] = []
    for value in values:
        places.append(min(value, places[-1] - step) if places else value)
    for number, left in enumerate(reversed(range(len(places)))):
        places[left] = max(places[left], bottom + number * step)
    return places


def show(dots: Sequence[Dot]) -> None:
    """Print a table with a line per dot, then the failed dots with their errors."""
    from rich.console import Console
    from rich.table import Table

    succeeded = [dot for dot in dots if not dot.failed]
    settings = succeeded[0].rows[0]["settings"]
    print(f"{settings['data']}, {say_tasks(settings['tasks'])} classes; {caption(succeeded)}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("method")
    for name in ("budget", "stored MB", "last %", "average %", "seeds", "epochs"):
        table.add_column(name, justify="right")
    for dot in succeeded:
        over = " over" if dot.budget is not None and dot.bytes > dot.budget else ""
        table.add_row(
            dot.series, "-" if dot.budget is None else format_size(dot.budget), f"{dot.bytes / 1e6:,.3f}{over}",
            f"{dot.last:.2f}", "-" if dot.average is None else f"{dot.average:.2f}", str(len(dot.rows)), dot.epochs,
        )  # fmt: skip
    width = Console(width=10_000).measure(table).maximum  # at full width: rich would cut numbers on a narrow terminal
    Console(width=width, highlight=False, markup=False).print(table)
    for dot in (dot for dot in dots if dot.failed):
        budget = "" if dot.budget is None else f" at {format_size(dot.budget)}"
        print(f"failed: {dot.series}{budget}: {dot.rows[-1]['outcome']}")
