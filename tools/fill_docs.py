"""Write the generated blocks of the documentation.

config classes, recipes, results/ledger.jsonl, results/paper.csv
    -> BLOCKS, recipe tables -> the text between <!-- generated: NAME --> and <!-- end -->

    python tools/fill_docs.py            # rewrites every block in README.md and docs/
    python tools/fill_docs.py --check    # writes nothing; exit code 1 and the file's name if a block is out of date

A block `recipe NAME KIND` holds a table of `krnet.report.tables` with the newest row of each run and seed of a recipe:
summary, curves, rate, rivals, parts or compared. Other tables find their rows by recipe and settings, and of equal ones
show the newest.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from decimal import Decimal
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from krnet.config import default_text, describe, same_settings
from krnet.io.ledger import is_result
from krnet.learners.base import LearnerConfig, get_learner, learner_names
from krnet.recorders.base import get_recorder, recorder_names
from krnet.report import tables
from krnet.report.figure import Entry
from krnet.report.published import read_published
from krnet.report.rivals import rivals, side_by_side
from krnet.report.tables import markdown as table
from krnet.report.tables import percent, rounded
from krnet.reproduce.compare import Comparison, compare, entries
from krnet.reproduce.recipe import Recipe, read_recipe, recipe_names
from krnet.train.config import FitConfig

ROOT = Path(__file__).resolve().parent.parent
LEDGER = ROOT / "results" / "ledger.jsonl"
BLOCK = re.compile(r"(<!-- generated: ([\w -]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
MAX_NAMED = 40  # runs that are not done; of more, their number
Row = dict[str, Any]


# ------------------------------------------------------------------ settings


def settings_table(config: type, *, without: Collection[str] = ()) -> str:
    """Name, default and description of each setting of a config."""
    texts = describe(config)
    lines = [
        [f"`{field.name}`", shown_default(field), texts[field.name].replace("|", "\\|")]
        for field in fields(config)
        if field.name not in without
    ]
    return table(["setting", "default", "what it does"], lines)


def shown_default(field: Field[Any]) -> str:
    text = default_text(field)
    if field.default is MISSING:
        return text
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{text}`"


def recorder_abilities() -> str:
    """What each recorder declares: whether it trains, grows and projects, and which inputs it takes beside features."""
    lines = []
    for name in recorder_names():
        recorder = get_recorder(name)
        inputs = [f"`{item}`" for item in ("head", "start", "preset", "images", "trunk") if item in recorder.inputs]
        flags = ["yes" if flag else "no" for flag in (recorder.trains, recorder.grows, recorder.projects)]
        extra = f"`krnet[{recorder.extra}]`" if recorder.extra else ""
        lines.append([f"`{name}`", *flags, ", ".join(inputs), extra])
    return table(["recorder", "trains a network", "grows", "projects", "other inputs", "extra"], lines)


def recorder_settings() -> str:
    parts = []
    for name in recorder_names():
        recorder = get_recorder(name)
        parts.append(f"### `{name}`\n\n{settings_table(recorder.config_class, without=recorder.derived)}")
    return "\n\n".join(parts)


def learner_settings() -> str:
    parts = [f"### All methods\n\n{settings_table(LearnerConfig)}"]
    for name in learner_names():
        config = get_learner(name).config_class
        same = same_settings(config, LearnerConfig)
        own = [field.name for field in fields(config) if field.name not in same]
        text = settings_table(config, without=same) if own else "No settings of its own."
        parts.append(f"### `{name}`\n\n{text}")
    return "\n\n".join(parts)


# ------------------------------------------------------------------ recipes


@cache
def recipe_named(name: str) -> Recipe:
    return read_recipe(name)


@cache
def recipe_entries(name: str, path: Path) -> list[Entry]:
    """The newest row of each run and seed of a recipe; `path` is the ledger."""
    return entries(recipe_named(name), results(path))


def recipe_block(name: str, kind: str) -> str:
    """A table of the rows that a recipe has, and what it lacks."""
    recipe, shown = recipe_named(name), recipe_entries(name, LEDGER)
    found = {entry.series for entry in shown}
    lacking = [run.name for run in recipe.runs if run.name not in found]
    command = f"`krnet reproduce {name}`"
    if not shown:
        return f"{recipe.title}: not run yet. {command}"
    parts = [f"{command}: {recipe.title}.", recipe_table(recipe, kind, shown)]
    if lacking:
        few = len(lacking) <= MAX_NAMED
        parts.append(f"Not run yet: {'; '.join(lacking) if few else f'{len(lacking)} of {len(recipe.runs)} runs'}.")
    return "\n\n".join(parts)


def recipe_table(recipe: Recipe, kind: str, shown: Sequence[Entry]) -> str:
    paper = [number for number in read_published() if number.recipe == recipe.name]
    if kind == "rate":
        return tables.rate(shown)
    if kind == "rivals":
        return rivals(shown)
    if kind == "parts":
        return side_by_side(shown)
    if kind == "compared":
        return compared_table(compare(recipe, [entry.row for entry in shown], paper))
    return {"summary": tables.learn_summary, "curves": tables.learn_curves}[kind](shown, paper)


def compared_table(compared: Sequence[Comparison]) -> str:
    """Ours beside the paper's; what the paper derives from other numbers has none of ours."""

    def cell(value: float | None, unit: str) -> str:
        return "" if value is None else f"{value:.2e} {unit}" if abs(value) < 0.05 else f"{value:,.2f} {unit}"

    lines = [
        [one.series, one.x, cell(one.ours, one.unit), str(one.num_seeds), cell(one.paper, one.unit), one.place]
        for one in compared
        if one.ours is not None
    ]
    return table(["what", "at", "ours", "runs", "the paper", "where in the paper"], lines)


README_ROWS: tuple[tuple[str, str, str], ...] = (
    ("**KRIL**", "accuracy", "KRIL, 6.1 MB"),
    ("**KRIL**, fewer bytes", "accuracy", "KRIL, 1.6 MB"),
    ("DS-AL, the best rival on the same network", "accuracy", "DS-AL"),
    ("LUCIR, which keeps some images", "accuracy", "LUCIR"),
    ("all images kept (`joint`)", "accuracy", "joint"),
    ("KRIL as published (`--preset paper`)", "cifar100-10", "KRIL"),
    ("GFR, which keeps a generator", "cifar100-10", "GFR"),
)


def readme_table() -> str:
    lines = []
    for title, recipe, series in README_ROWS:
        runs = [entry.row["metrics"] for entry in recipe_entries(recipe, LEDGER) if entry.series == series]
        last, average = (tables.spread([run[key] for run in runs]) for key in ("last", "average"))
        printed = [n.value for n in read_published() if (n.recipe, n.series) == (recipe, series) and n.x in ("", "10")]
        shown = f"**{last}**" if title.startswith("**") else last
        shown += f" (in the paper {printed[-1]:.1f})" if printed else ""
        kept = tables.size(max(run["storage_bytes"]["total"] for run in runs))
        lines.append([title, kept, shown, average, str(len(runs))])
    return table(["method", "kept between tasks", "last", "average", "seeds"], lines)


def rate_shares() -> str:
    """The bytes that krnet needs for the R2 of the best rival at each size, as a share of that rival's bytes.

    They are interpolated between krnet's points, log bytes over log error; sizes outside its range are left out.
    """
    points: dict[str, list[tuple[int, int, float]]] = {}
    for entry in recipe_entries("rate", LEDGER):
        row = entry.row
        found = (row["settings"]["budget"], row["metrics"]["bytes"], row["metrics"]["r2"])
        points.setdefault(entry.line, []).append(found)
    ours = sorted((math.log(1 - r2), math.log(num_bytes)) for _, num_bytes, r2 in points["krnet"])
    rivals = {line: found for line, found in points.items() if not line.startswith("krnet")}
    shares = []
    for budget in sorted(budget for budget, _, _ in points["krnet"]):
        at_budget = [(r2, num_bytes, line) for line, own in rivals.items() for b, num_bytes, r2 in own if b == budget]
        r2, num_bytes, line = max(at_budget)
        error = math.log(1 - r2)
        pair = next((pair for pair in pairwise(ours) if pair[0][0] <= error <= pair[1][0]), None)
        if pair is not None:
            (x0, y0), (x1, y1) = pair
            share = math.exp(y0 + (y1 - y0) * (error - x0) / (x1 - x0)) / num_bytes
            shares.append(f"{rounded(round(share, 6), 2)} at {budget / 1e6:g} MB ({line})")
    return f"For the R² of the best rival, krnet needs this share of its bytes: {', '.join(shares)}."


# ------------------------------------------------------------------ other rows


def results(path: Path | None = None, *, held_out: bool = False) -> list[Row]:
    """All rows that a table of results may show, or else (`held_out`) those judged on held-out training images."""
    return [row for row in all_rows(path or LEDGER) if is_result(row) != held_out]


@cache
def all_rows(path: Path) -> list[Row]:
    """Read once for all tables: change none of them."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def newest(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row["date"])


def find(rows: Sequence[Row], recipe: str, **settings: Any) -> Row:
    """The newest row of this recipe and these settings; a setting that a row lacks counts as None."""
    found = [
        row
        for row in rows
        if (row["recipe"], row["outcome"]) == (recipe, "ok")
        and all(row["settings"].get(name) == value for name, value in settings.items())
    ]
    assert found, f"no row of {recipe}, {settings}"
    return newest(found)


def strength_table() -> str:
    """Average accuracy on held-out training images with each strength of the ledger; the best of a column in bold."""
    rows = [
        row
        for row in results(held_out=True)
        if (row["recipe"], row["outcome"]) == ("choose-strength", "ok")
        and (row["metrics"]["validation"], row["settings"]["epochs"]) == (50, 40)
    ]
    averages = {(row["metrics"]["method"], row["settings"]["strength"]): row["metrics"]["average"] for row in rows}
    assert len(averages) == len(rows), "a method has two rows of choose-strength with one strength; expected one"
    methods = {"ewc": "EWC", "mas": "MAS"}
    best = {method: max(average for (own, _), average in averages.items() if own == method) for method in methods}

    def cell(method: str, strength: float) -> str:
        average = averages.get((method, strength))
        return f"**{percent(average)}**" if average == best[method] else percent(average)

    strengths = sorted({strength for _, strength in averages})
    lines = [
        [f"{strength:,.0f}" if strength >= 1 else f"{strength:g}", *(cell(method, strength) for method in methods)]
        for strength in strengths
    ]
    return table(["strength", *(f"{title}, average on held-out images" for title in methods.values())], lines)


PAPER_SIZES = {"preset": "cifar100", "schedule": "fast"}
PAPER_SCHEDULE = {**PAPER_SIZES, "schedule": "paper"}
SHORTENED = {"iterations": 1500}
AUTOENCODER = {"recorder": "autoencoder"}
RECORD_ROWS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("paper, preset `cifar100`, the paper's schedule", "cifar100-paper-setting", PAPER_SCHEDULE),
    ("paper, preset `cifar100`, default schedule", "cifar100-default", {**PAPER_SIZES, "iterations": None}),
    ("paper, … without the last norm", "cifar100-default", {**PAPER_SIZES, "last_norm": False}),
    ("paper, preset `cifar100`, default schedule, shortened", "cifar100-choices",
     {**PAPER_SIZES, **SHORTENED, "last_norm": True, "muon_lr": 0.01}),
    ("paper, preset `cifar100`, the paper's schedule, shortened", "cifar100-choices", {**PAPER_SCHEDULE, **SHORTENED}),
    ("paper, no preset: sizes solved from the data", "cifar100-choices", {"preset": None, **SHORTENED}),
    ("autoencoder, the paper's schedule", "cifar100-record", {**AUTOENCODER, **PAPER_SCHEDULE, "iterations": None}),
    ("autoencoder, the paper's schedule, shortened", "cifar100-record", {**AUTOENCODER, **PAPER_SCHEDULE, **SHORTENED}),
    ("autoencoder, default schedule", "cifar100-record", {**AUTOENCODER, **PAPER_SIZES, "iterations": 6000}),
    ("autoencoder, default schedule, shortened", "cifar100-record", {**AUTOENCODER, **PAPER_SIZES, **SHORTENED}),
)  # fmt: skip


def record_table() -> str:
    rows, lines = results(), []
    for title, recipe, settings in RECORD_ROWS:
        row = find(rows, recipe, **settings)
        metrics = row["metrics"]
        mse = f"{Decimal(str(metrics['mse'])) * 10_000:.2f}e-4"
        quality = [mse, rounded(metrics["r2"], 3), percent(metrics["replay_accuracy"], 2) + " %"]
        made = [f"{metrics['bytes'] / 1e6:.0f} MB", f"{metrics['iterations']:,}", *quality]
        lines.append([title, *made, *tables.provenance([row])])
    return table(["recorder", "file", "iterations", "MSE", "R²", "replay accuracy", *tables.PROVENANCE], lines)


# Recorder, iterations: ten steps of 500 maps.
APPEND_ROWS = {"krnet": 1500, "pq": None, "quantized": None, "transform": None, "pca": None}


def append_table() -> str:
    """R2 of ten steps and of all samples at once in as many bytes, without and with a plan (`room`)."""
    rows, lines = results(), []
    for recorder, iterations in APPEND_ROWS.items():
        settings = {"recorder": recorder, "iterations": iterations, "steps": 10, "samples": 5000, "order": "mixed"}
        row = find(rows, "appending", **settings)
        metrics, cells = row["metrics"], []
        for way in ("room", "appended"):
            found = metrics[way]
            cells += [f"{found['bytes'] / 1e6:.2f} MB", rounded(found["r2"], 3), rounded(found["once_r2"], 3)]
        lines.append([recorder, *cells, *tables.provenance([row])])
    ways = [f"{name}{way}" for way in (", with room", ", without") for name in ("bytes", "ten steps", "at once")]
    return table(["recorder", *ways, *tables.PROVENANCE], lines)


def speed_table() -> str:
    """The newest row of each preset on a GPU; for the time until the first step, which other work delays, the range."""
    rows = [row for row in results() if row["recipe"] == "speed" and "NVIDIA" in row["device"]]
    lines = []
    for preset in ("cifar100", "imagenet"):
        own = [row for row in rows if row["settings"]["preset"] == preset]
        row = newest(own)
        steps, replay = row["metrics"]["steps"], row["metrics"]["replay"]
        times = [f"{steps[n]['milliseconds']:.1f} ms, {steps[n]['times_floor']:.1f} ×" for n in ("adam", "muon")]
        # The first schedule that a row timed compiled the kernels.
        ready = [next(iter(other["metrics"]["steps"].values()))["ready_seconds"] for other in own]
        speeds = [f"{replay[batch]['fast']:,.0f}" for batch in ("4096", "1")]
        lines.append([preset, *times, f"{min(ready):.0f} to {max(ready):.0f} s", *speeds, f"`{row['commit']}`"])
    head = ["preset", "a step with Adam, times its floor", "a step of the default schedule", "ready to step after"]
    return table([*head, "`fast` replay, maps a second, 4,096 at once", "one by one", "commit"], lines)


def extract_table() -> str:
    row = find(results(), "extract")
    metrics, seconds = row["metrics"], row["metrics"]["seconds"]["extract"]
    shares = [f"{metrics['images'] / took:,.0f}" for took in seconds]
    bare = f"{metrics['images_per_second']['bare']:,.0f}"
    grown = tables.size(metrics["resident_bytes_growth"])
    line = [", ".join(shares), bare, tables.size(metrics["file_bytes"]), grown, f"`{row['commit']}`"]
    head = ["images a second, in each round", "the trunk alone, features thrown away", "file", "memory grows by"]
    return table([*head, "commit"], [line])


def whole_run() -> str:
    """Every whole run; how long one takes depends on what else the GPU does."""
    lines = []
    for row in results():
        if (row["recipe"], row["outcome"]) == ("whole-run", "ok"):
            metrics = row["metrics"]
            base, *later = metrics["task_seconds"]
            times = [f"{value:,.0f} s" for value in (row["seconds"], base, sum(later))]
            kept = tables.size(metrics["storage_bytes"]["total"])
            lines.append([*times, percent(metrics["last"]), percent(metrics["average"]), kept, f"`{row['commit']}`"])
    head = ["in all", "the base task", "the later tasks", "last", "average", "kept between tasks", "commit"]
    return table(head, sorted(lines, key=lambda line: len(line[0])))


INVERSIONS = {
    "real features": {"recorder": None, "reads": "features"},
    "krnet, 6.1 MB": {"recorder": "krnet", "budget": 6_100_000},
    "krnet, 1.5 MB": {"recorder": "krnet", "budget": 1_500_000},
    "pca, 6.1 MB": {"recorder": "pca", "budget": 6_100_000},
    "pca, 1.5 MB": {"recorder": "pca", "budget": 1_500_000},
    "mean image of the class": {"recorder": None, "reads": "class"},
}
SHORT_ATTACK = {"features": "cifar100-base", "samples": 10_000, "updates": 800, "width": 32}


def inversion(name: str) -> Row:
    """The newest row of the short attack."""
    return find(results(), "inversion", **SHORT_ATTACK, **INVERSIONS[name])["metrics"]


def inversion_table() -> str:
    lines = []
    for name in INVERSIONS:
        found = inversion(name)
        r2 = f"{found['r2']:.2f}" if "r2" in found else "1" if name == "real features" else ""
        lines.append([name, r2, f"{found['ssim']:.2f}", f"{found['psnr']:.1f} dB"])
    return table(["read from", "R²", "SSIM", "PSNR"], lines)


def inversion_sentence() -> str:
    kept, real, guess = (inversion(name) for name in ("krnet, 6.1 MB", "real features", "mean image of the class"))
    return (
        f"No image is stored, but images can be seen: from 6.1 MB of CIFAR-100's maps a small network makes images in "
        f"which most objects can be told (SSIM {kept['ssim']:.2f}; {real['ssim']:.2f} from the maps themselves, "
        f"{guess['ssim']:.2f} for who knows only the class). "
        f"[What a recording gives away](docs/recorders.md#what-a-recording-gives-away)."
    )


def schedule_table() -> str:
    """A billion samples, at the rate of the newest row of benchmarks/encode.py."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import schedule

    row = schedule.measured()
    if row is None:
        return "Not run yet."
    metrics, bits = row["metrics"], 0.25
    rate, values = metrics["samples_per_second"]["encode"], math.prod(metrics["shape"])
    lines = []
    for ranks in (8, 64, 512):
        found = schedule.line(schedule.Job(10**9, rate, ranks), values, bits)
        times = [f"{found[name]:,.1f}" for name in ("ideal_hours", "hours", "queue_hours", "restarts")]
        lines.append([f"{ranks:,}", *times, f"{found['rank_hours']:,.0f}"])
    shape = "×".join(map(str, metrics["shape"]))
    sizes = f"{2e9 * values / 1e12:,.1f} TB as bfloat16, {1e9 * values * bits / 8e12:,.2f} TB at {bits:g} bits a value"
    head = ["processes", "ideal, hours", "simulated", "from a queue", "deaths", "process hours"]
    return (
        f"A billion samples of {shape} are {sizes}. Measured: {rate:,.0f} samples a second of one process with "
        f"recorder {row['settings']['model']} ({row['device']}).\n\n{table(head, lines)}"
    )


def recipe_list() -> str:
    recipes = [recipe_named(name) for name in recipe_names()]
    lines = [[f"`{recipe.name}`", recipe.title, str(len(recipe.runs)), recipe.time] for recipe in recipes]
    return table(["recipe", "what", "series", "time"], lines)


def gpu_tests() -> str:
    row = newest([row for row in results() if row["recipe"] == "test-gpu" and row["outcome"] == "ok"])
    counts = row["metrics"]
    return (
        f"The tests that need a GPU (`make test-gpu`) last passed at `{row['commit']}`, on {row['date'][:10]} and an "
        f"{row['device']}: {counts['passed']} passed, {counts['failed']} failed."
    )


# ------------------------------------------------------------------ files

BLOCKS: dict[str, Callable[[], str]] = {
    "recorder-abilities": recorder_abilities,
    "recorder-settings": recorder_settings,
    "fit-settings": lambda: settings_table(FitConfig),
    "learner-settings": learner_settings,
    "strength-table": strength_table,
    "readme-table": readme_table,
    "rate-shares": rate_shares,
    "record-table": record_table,
    "append-table": append_table,
    "speed-table": speed_table,
    "gpu-tests": gpu_tests,
    "extract-table": extract_table,
    "whole-run": whole_run,
    "inversion-table": inversion_table,
    "inversion-sentence": inversion_sentence,
    "schedule": schedule_table,
    "recipes": recipe_list,
}


def block(name: str) -> str:
    if name.startswith("recipe "):
        _, recipe, kind = name.split()
        return recipe_block(recipe, kind)
    return BLOCKS[name]()


def filled(text: str) -> str:
    """The text with every block as it should be."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{block(match[2])}\n\n{match[3]}", text)


def stale_pages(root: Path) -> dict[Path, str]:
    """Pages with a block that is out of date -> their text as it should be."""
    pages = {path: path.read_text() for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]}
    fresh = {path: filled(text) for path, text in pages.items()}
    return {path: text for path, text in fresh.items() if text != pages[path]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a block is out of date")
    args = parser.parse_args()
    stale = stale_pages(ROOT)
    for path, text in stale.items():
        name = path.relative_to(ROOT)
        if args.check:
            print(f"{name}: a generated block is out of date. Run: python tools/fill_docs.py")
        else:
            path.write_text(text)
            print(f"{name}: written")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
