"""Draw and print the results of learn_bytes.py: last accuracy against stored bytes, from ledger rows.

    ledger rows -> choose_rows (one data set, class order and split) -> lines_of -> draw (PNG)
                                                                     -> gather -> [Dot] -> show (table)

The figure has a line a method and at most six labels; the table has every method, with every setting that was tried.
The rule for the figure, the same for all methods: rows with the method's default settings count, those with other
settings are left out. The number of epochs may differ: of rows that store about the same bytes, those with the most
epochs a task are taken, of these the newest of each seed, and seeds are averaged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from krnet.config import format_size
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.io.atomic import atomic_write
from krnet.learners import base

RECIPES = ("learn", "learn-bytes")
# Recorders of KRIL, and other methods, in the order of the table.
KINDS = (
    "krnet", "paper", "pca", "quantized", "transform", "pq", "autoencoder", "images", "raw", "lucir", "icarl",
)  # fmt: skip
TITLES = {"kril": "KRIL", "lucir": "LUCIR", "icarl": "iCaRL", "finetune": "fine-tuning", "joint": "all images"}
# Settings that follow from the data, and epochs, which the caption names: a series is named by them only where its
# method has rows with different values.
DATA_SETTINGS = frozenset({"head_width", "backbone", "fixed_layers", "batch_size", "base_epochs", "epochs"})
SHOWN_ELSEWHERE = frozenset({"recorder", "budget", "tasks", "data", "method"})  # in the series' name, axis or heading
IRRELEVANT_TO_LAST = frozenset({"only_last"})  # joint learns the last task from scratch, whatever came before
SAME_SIZE = 0.05  # rows whose bytes differ by a smaller share are one point of a line
SAME_ACCURACY = 1.0  # percentage points; runs of one seed and setting differ by half of it (rounding on a GPU)
MAX_LABELS = 6
# The methods that the figure shows first, by name: label, colour, and the side of a point that the label is on.
STORY = {
    "KRIL krnet": ("KRIL with krnet", "#c2410c", "above"),
    "KRIL paper": ("KRIL as in its paper", "#7c2d12", "above"),
    "all images": ("all old images kept", "#475569", "below"),
    "LUCIR": ("LUCIR, keeps old images", "#1d4ed8", "right"),
    "iCaRL": ("iCaRL, keeps old images", "#0f766e", "right"),
    "GFR": ("GFR", "#7e22ce", "left"),
}
OTHER_COLOURS = ("#be185d", "#65a30d", "#0284c7", "#a16207", "#15803d", "#94a3b8")
# Side -> offset of the label in points, and its alignment.
SIDES = {
    "above": ((8, 9), "right", "bottom"),
    "below": ((8, -9), "right", "top"),
    "left": ((-9, 0), "right", "center"),
    "right": ((9, 0), "left", "center"),
}
RESOLVED = ("new_features", "plastic", "recorded", "fixed_layers")  # settings of KRIL that follow from others


@dataclass(frozen=True, eq=False)
class Dot:
    """A series at one budget, averaged over seeds."""

    series: str
    """Method, recorder, and settings that differ from the defaults."""
    kind: str
    """The recorder of KRIL, or the method."""
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
    """Return the rows of one data set, class order and task split, the oldest first; refuse rows of several splits.

    Rows that were judged on held-out training images are left out.
    """
    chosen = []
    for row in rows:
        settings = row["settings"]
        sizes = settings.get("tasks")
        if row["recipe"] not in RECIPES or settings.get("data") != name or "method" not in row["metrics"]:
            continue
        if not ledger.is_result(row):
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
    config_class = base.get_learner(method).config_class
    if method == "kril":
        by_default = config_class(head=settings.get("head", "trained"), budget=settings.get("budget"))
        # The row of a failed point holds only the settings that were given.
        settings = {"recorder": by_default.recorder, "recorder_settings": {}, **settings}
    settings = config_class.renewed(settings)
    if method == "kril":
        settings |= {name: None for name in RESOLVED if settings.get(name) == getattr(by_default, name)}
    if settings.get("budget") == 0:  # no limit
        settings["budget"] = None
    if settings.get("gamma") == 1e-3 and settings.get("recorder_schedule") == "fast":
        settings["gamma"] = None
    return row | {"settings": settings}


def title(row: Mapping[str, Any]) -> str:
    """Return the method, with the preset that its settings contain: GFR own."""
    method, settings = row["metrics"]["method"], row["settings"]
    named = {k: {n: x for n, x in v.items() if n != "base"} for k, v in base.get_learner(method).presets.items()}
    presets = [k for k, v in named.items() if v and as_json_values(v).items() <= settings.items()]
    return " ".join([TITLES.get(method, method.upper()), *presets])


def name_of(row: Mapping[str, Any]) -> str:
    """Return the title and, for KRIL, the recorder: KRIL krnet."""
    return " ".join(filter(None, [title(row), row["settings"].get("recorder")]))


def as_json_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn tuples into lists, as JSON does."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def defaults(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default settings of the method, or of its preset."""
    learner = base.get_learner(row["metrics"]["method"])
    own = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(learner.config_class)
    }
    preset, settings = title(row).split(" ")[-1], row["settings"]
    if settings.get("base") == "paper":
        own["base"] = "paper"
    if settings.get("head") == "trained":
        own["head"] = "trained"
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
        series = ", ".join([name_of(row), *own])
        found.setdefault((series, settings.get("budget")), {})[row["seed"]] = row
    dots = []
    for (series, budget), by_seed in found.items():
        succeeded = tuple(row for _, row in sorted(by_seed.items()) if row["outcome"] == "ok")
        kept = succeeded or tuple(by_seed.values())
        method, predictions = kept[0]["metrics"]["method"], sorted(kept[0]["metrics"].get("rows", {}), reverse=True)
        kind = kept[0]["settings"].get("recorder", method)
        if method == "icarl" and succeeded:
            dots += [Dot(f"{series} ({r.upper()})", kind, budget, kept, r) for r in predictions]
        else:
            dots.append(Dot(series, kind, budget, kept, None))
    places = {kind: place for place, kind in enumerate(KINDS)}
    return sorted(
        dots, key=lambda dot: (places.get(dot.kind, len(KINDS)), dot.series, dot.budget is None, dot.budget or 0)
    )


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


@dataclass(frozen=True)
class Point:
    """A method at one number of bytes: rows with the same epochs, one of each seed."""

    rows: tuple[dict[str, Any], ...]

    @property
    def megabytes(self) -> float:
        return sum(stored_bytes(row) for row in self.rows) / len(self.rows) / 1e6

    @property
    def lasts(self) -> list[float]:
        """Accuracy after the last task, in percent, of each seed."""
        return [100 * row["metrics"]["last"] for row in self.rows]

    @property
    def last(self) -> float:
        return sum(self.lasts) / len(self.rows)


def stored_bytes(row: Mapping[str, Any]) -> int:
    return int(row["metrics"]["storage_bytes"]["total"])


def epochs_of(row: Mapping[str, Any]) -> int:
    return int(row["settings"]["epochs"])


def lines_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[Point]]:
    """Return the lines of the figure by name, of rows that come oldest first; the fewest bytes of a line come first.

    The module's docstring has the rule. Methods that store nothing have no place on a log axis and are left out.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {}
    usual = [row for row in rows if row["outcome"] == "ok" and not unusual(row).keys() - IRRELEVANT_TO_LAST]
    newest_first = [row for row in reversed(usual) if stored_bytes(row)]
    for row in sorted(newest_first, key=epochs_of, reverse=True):  # stable: the newest stay first
        points = found.setdefault(name_of(row), [])
        near = next((p for p in points if abs(stored_bytes(p[0]) / stored_bytes(row) - 1) < SAME_SIZE), None)
        if near is None:
            points.append([row])
        elif epochs_of(near[0]) == epochs_of(row) and row["seed"] not in [other["seed"] for other in near]:
            near.append(row)
    names = sorted(found, key=lambda name: [*STORY, name].index(name))[:MAX_LABELS]
    return {name: sorted((Point(tuple(p)) for p in found[name]), key=lambda p: p.megabytes) for name in names}


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    figure = make_figure(lines_of(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def make_figure(lines: Mapping[str, Sequence[Point]]) -> Any:
    """Draw last accuracy over log bytes: a line a method, its label beside it. Bars span the seeds."""
    from matplotlib import ticker  # here, because it takes half a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=200, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # inches
    axes = figure.add_subplot()
    axes.set_xscale("log")
    colours = iter(OTHER_COLOURS)
    for name, points in lines.items():
        label, colour, side = STORY.get(name) or (name, next(colours), "right")
        x, y = [point.megabytes for point in points], [point.last for point in points]
        spread = [[p.last - min(p.lasts) for p in points], [max(p.lasts) - p.last for p in points]]
        width, is_ours = (3.2, True) if name.startswith("KRIL") else (2, False)
        axes.errorbar(
            x, y, yerr=spread if any(map(any, spread)) else None, color=colour, linewidth=width, capsize=3,
            marker="o" if is_ours else "s", markersize=9 if is_ours else 7,
        )  # fmt: skip
        offset, ha, va = SIDES[side]
        axes.annotate(
            label, (x[-1], y[-1]), xytext=offset, textcoords="offset points", ha=ha, va=va, color=colour, fontsize=12,
            fontweight="bold" if is_ours else "normal",
        )  # fmt: skip
    message = draw_message(axes, lines)
    figure.suptitle(message, x=0.015, ha="left", fontsize=15, fontweight="bold")
    axes.set_title(describe(lines), loc="left", fontsize=11, color="0.35", pad=10)
    axes.set_xlabel("stored between tasks", fontsize=12)
    axes.set_ylabel("accuracy at the end (%)", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} MB")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.margins(x=0.12, y=0.1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_message(axes: Any, lines: Mapping[str, Sequence[Point]]) -> str:
    """Return the title. If krnet is as accurate as the paper's network, it says so; an arrow joins both."""
    ours, paper = lines.get("KRIL krnet"), lines.get("KRIL paper")
    if ours and paper and paper[0].last - ours[-1].last < SAME_ACCURACY and ours[-1].megabytes < paper[0].megabytes:
        ends = [(point.megabytes, point.last) for point in (ours[-1], paper[0])]
        arrow = {"arrowstyle": "-|>,head_width=0.35,head_length=0.7", "color": "0.55", "linewidth": 1.5, "shrinkA": 8}
        axes.annotate("", *ends, arrowprops=arrow | {"shrinkB": 8, "linestyle": (0, (4, 3))})
        return f"The same accuracy in {ends[1][0] / ends[0][0]:.0f} times fewer bytes, no old image kept"
    return "Accuracy after the last task, by the bytes that a method stores"


def describe(lines: Mapping[str, Sequence[Point]]) -> str:
    rows = [row for points in lines.values() for point in points for row in point.rows]
    if not rows:
        return "no method has a row with its default settings that stores something"
    first, *later = rows[0]["settings"]["tasks"]
    data = rows[0]["settings"]["data"].replace("cifar", "CIFAR-")
    split = f"{len(later)} tasks of {later[0]}" if len(set(later)) == 1 else f"tasks of {', '.join(map(str, later))}"
    counts = [len(point.rows) for points in lines.values() for point in points]
    seeds = "one seed" if max(counts) == 1 else f"mean of {min(counts)} to {max(counts)} seeds"
    return f"{data} learned class after class: {first} classes, then {split} ({seeds})"


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
