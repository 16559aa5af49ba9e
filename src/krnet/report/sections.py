"""Sort rows into sections of figures, and set aside those that no figure may show.

rows -> Report: sections (a recipe each, or other runs), left out (failed, or judged on held-out images)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from krnet.report import series, views
from krnet.report.figure import Entry, Figure, PaperNumber
from krnet.report.sources import RUN_KEY
from krnet.report.views.base import seed_of, short

Row = Mapping[str, Any]
LEARNED = ("curves", "last", "bytes", "forgetting", "matrix")
RECORDED = ("rate", "replay-accuracy")
OTHER = ("table", "embedding", "speed", "steps")
FAILED, HELD_OUT, UNREADABLE = "failed", "judged on held-out training images", "no figure shows such a row"


@dataclass(frozen=True, kw_only=True)
class Section:
    name: str
    """Anchor on the page."""
    title: str
    text: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A row that is counted, but not drawn."""

    reason: str
    """One of the constants above."""
    detail: str
    recipe: str
    method: str
    seed: str
    date: str
    commit: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Report:
    title: str
    text: str
    sections: tuple[Section, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a recipe shows: a section before the other runs."""

    name: str
    title: str
    text: str
    views: Sequence[str]
    entries: Sequence[Entry]
    paper: Sequence[PaperNumber]


def make_report(title: str, text: str, rows: Iterable[Row], recipes: Sequence[Chosen] = ()) -> Report:
    """Sections of the recipes, then of the rows that no recipe has chosen, then those that are left out."""
    drawn, left_out = [], []
    for row in rows:
        reason = _why_left_out(row)
        drawn.append(row) if reason is None else left_out.append(_left_out(row, *reason))
    sections = [_recipe_section(recipe) for recipe in recipes]
    # Earlier rows of a run that a recipe shows are superseded by its row, whatever they were appended as.
    taken = {series.identity(entry.row) for recipe in recipes for entry in recipe.entries}
    rest = [row for row in drawn if series.identity(row) not in taken]
    for name, own in sorted(_grouped(rest, _section_name), key=_newest, reverse=True):
        section, unseen = _other_section(name, own)
        sections.append(section)
        left_out += [_left_out(row, UNREADABLE, "it holds none of their numbers") for row in unseen]
    return Report(
        title=title,
        text=text,
        sections=tuple(section for section in sections if section.figures),
        left_out=tuple(left_out),
    )


def _why_left_out(row: Row) -> tuple[str, str] | None:
    outcome, metrics = row.get("outcome"), row.get("metrics")
    if not isinstance(metrics, dict):
        return UNREADABLE, "it has no metrics"
    if outcome != "ok":
        return FAILED, short(outcome) or "it does not say how it ended"
    if metrics.get("validation") and RUN_KEY not in row:
        return HELD_OUT, f"{short(str(metrics['validation']))} images a class, to choose settings"
    return None


def _left_out(row: Row, reason: str, detail: str) -> LeftOut:
    seed = row.get("seed")
    return LeftOut(
        reason=reason, detail=detail, recipe=short(row.get("recipe")), method=short(series.method_of(row)),
        seed="" if seed is None else short(str(seed)), date=short(row.get("date")), commit=short(row.get("commit")),
        command=short(row.get("command")),
    )  # fmt: skip


# ------------------------------------------------------------------ sections


def _recipe_section(recipe: Chosen) -> Section:
    figures = [_draw(view, recipe.name, "", recipe.entries, recipe.paper) for view in recipe.views]
    return Section(name=recipe.name, title=recipe.title, text=recipe.text, figures=_kept(figures))


def _section_name(row: Row) -> str:
    if RUN_KEY in row:
        validation = row["metrics"].get("validation")
        return f"Judged on {validation} held-out images a class: no results" if validation else "Runs"
    return short(row.get("recipe")) or "unnamed"


def _other_section(name: str, rows: Sequence[Row]) -> tuple[Section, list[Row]]:
    """A section of rows that no recipe describes; and those of them that no figure shows."""
    is_run = RUN_KEY in rows[0]
    anchor = _anchor(("" if is_run else "other-") + name)
    figures: list[Figure | None] = []
    groups = list(_grouped(rows, _setting_of_tasks))
    for number, (what, own) in enumerate(groups, 1):
        shown = f"{anchor}-{number}" if len(groups) > 1 else anchor
        for names, skip in ((LEARNED, ()), (RECORDED, ("budget",)), (OTHER, ())):
            entries = series.make_entries(own, skip=skip)
            found = [_draw(view, shown, what, entries, ()) for view in names]
            if names is LEARNED and any(found):
                found.append(_draw("time", shown, what, entries, ()))
            figures += found
    drawn = _kept(figures)
    seen = {(point.date, point.seed, point.command) for figure in drawn for point in figure.points}
    unseen = [
        row for row in rows if (short(row.get("date")), seed_of(row.get("seed")), short(row.get("command"))) not in seen
    ]
    newest = {series.identity(row): row for row in sorted(rows, key=lambda row: str(row.get("date")))}
    text = "" if is_run else "Rows of the ledger under this name; of equal settings and seed, the newest."
    title = name if is_run else f"Other runs: {name}"
    section = Section(name=anchor, title=title, text=text, figures=drawn)
    return section, [row for row in unseen if newest[series.identity(row)] is row]


def _newest(group: tuple[str, list[Row]]) -> str:
    return max(str(row.get("date")) for row in group[1])


def _setting_of_tasks(row: Row) -> str:
    """Rows that share a figure: of one data set and one division into tasks; anything else shares by itself."""
    metrics, settings = row["metrics"], row.get("settings")
    data = short(metrics.get("data"))
    tasks = metrics.get("tasks")
    if isinstance(tasks, list) and tasks:
        return f"{data or 'images'}, {_describe_tasks(tasks)} classes"
    num_samples = settings.get("num_samples") if isinstance(settings, dict) else None
    if isinstance(num_samples, int):
        return f"{num_samples:,} samples"
    return data


def _describe_tasks(tasks: Sequence[Any]) -> str:
    """[50, 5, 5] -> 50 + 2 × 5"""
    parts = [(size, len(list(run))) for size, run in groupby(tasks[1:])]
    return " + ".join([short(str(tasks[0])), *(f"{count} × {short(str(size))}" for size, count in parts)])


def _draw(view: str, section: str, what: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    heading = views.heading(view)
    return views.draw(view, f"{section}-{view}", f"{heading}: {what}" if what else heading, entries, paper)


def _kept(figures: Iterable[Figure | None]) -> tuple[Figure, ...]:
    """Those that show something, each under a name of its own."""
    kept: dict[str, Figure] = {}
    for figure in figures:
        if figure is None:
            continue
        name, again = figure.name, 2
        while name in kept:
            name, again = f"{figure.name}-{again}", again + 1
        kept[name] = replace(figure, name=name)
    return tuple(kept.values())


def _grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> Iterable[tuple[str, list[Row]]]:
    """In the order in which the groups first appear."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups.items()


def _anchor(text: str) -> str:
    """A name for links and files: letters, digits and dashes."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower())
    return "-".join(filter(None, plain.split("-")))[:60] or "runs"
