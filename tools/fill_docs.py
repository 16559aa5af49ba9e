"""Write the generated blocks of the documentation.

config classes, results/ledger.jsonl -> BLOCKS -> the text between <!-- generated: NAME --> and <!-- end -->

    python tools/fill_docs.py            # rewrites every block in README.md and docs/
    python tools/fill_docs.py --check    # writes nothing; exit code 1 and the file's name if a block is out of date

A table of results names the ledger rows it shows by recipe, commit and settings. New rows of other commits change
nothing: to show them, change the selection here.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from krnet.config import default_text, describe, same_settings
from krnet.io.ledger import is_result
from krnet.learners.base import LearnerConfig, get_learner, learner_names
from krnet.recorders.base import get_recorder, recorder_names
from krnet.train.config import FitConfig

ROOT = Path(__file__).resolve().parent.parent
LEDGER = ROOT / "results" / "ledger.jsonl"
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows)


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
        lines.append([f"`{name}`", *flags, ", ".join(inputs)])
    return table(["recorder", "trains a network", "grows", "projects", "other inputs"], lines)


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


# ------------------------------------------------------------------ results


def ledger(*, held_out: bool = False) -> list[Row]:
    """All rows that a table of results may show, or else (`held_out`) those judged on held-out training images."""
    rows = [json.loads(line) for line in LEDGER.read_text().splitlines()]
    return [row for row in rows if is_result(row) != held_out]


def find(rows: Sequence[Row], recipe: str, commit: str, **settings: Any) -> Row:
    """The one row of this recipe, commit and settings; a setting that a row lacks counts as None."""
    found = [
        row
        for row in rows
        if (row["recipe"], row["commit"], row["outcome"]) == (recipe, commit, "ok")
        and all({**row["settings"], "method": row["metrics"].get("method")}.get(k) == v for k, v in settings.items())
    ]
    assert len(found) == 1, f"{len(found)} rows of {recipe}, {commit}, {settings}; expected one"
    return found[0]


def rounded(value: float, digits: int) -> str:
    """Round half up, from the decimal digits: 0.6105 is 61.1 %, which binary fractions would make 61.0 or 61.1."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)).replace("-", "−")


def percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else str((Decimal(str(share)) * 100).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def size(num_bytes: int) -> str:
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.0f} kB" if num_bytes else "0"
    return f"{num_bytes / 1e6:.{0 if num_bytes >= 1e8 else 1}f} MB"


RATE_COMMIT = "529b10d"
RATE_BUDGETS = (1_300_000, 3_300_000, 6_500_000, 12_300_000, 24_000_000)
# Title, recorder, settings that were given: one mapping, or one for each budget.
RATE_SERIES: tuple[tuple[str, str, Any], ...] = (
    ("krnet", "krnet", [{"c1": 64}, {"c1": 96}, {"c1": 128}, {"c1": 128}, {"c1": 128}]),
    ("krnet, narrower network", "krnet", {}),
    ("krnet, narrower network, head not seen (`gamma=0`)", "krnet", {"gamma": 0}),
    ("autoencoder", "autoencoder", {}),
    ("pca", "pca", {}),
    ("pca, for a classifier (`centroid=-0.5`)", "pca", {"centroid": -0.5}),
    ("transform", "transform", {}),
    ("transform, for a classifier (`centroid=-0.5`)", "transform", {"centroid": -0.5}),
    ("quantized", "quantized", {}),
    ("quantized, for a classifier (`centroid=0.5`)", "quantized", {"centroid": 0.5}),
    ("pq", "pq", {}),
    ("images, through the trunk again", "images", {}),
)


def rate_table() -> str:
    """R2 and replay accuracy of each recorder at each budget; the best of a column in bold."""
    rows, cells = ledger(), []
    for _, recorder, given in RATE_SERIES:
        by_budget = given if isinstance(given, list) else [given] * len(RATE_BUDGETS)
        selection = {"recorder": recorder, "iterations": None}
        found = [
            find(rows, "rate", RATE_COMMIT, budget=budget, given=own, **selection)["metrics"]
            for budget, own in zip(RATE_BUDGETS, by_budget, strict=True)
        ]
        cells.append([(rounded(m["r2"], 4), percent(m["replay_accuracy"], 2)) for m in found])
    best = [[max((line[i][j] for line in cells), key=_number) for j in (0, 1)] for i in range(len(RATE_BUDGETS))]
    lines = []
    for (title, *_), line in zip(RATE_SERIES, cells, strict=True):
        shown = [
            [f"**{text}**" if text == best[i][j] else text for j, text in enumerate(cell)]
            for i, cell in enumerate(line)
        ]
        lines.append([title, *(f"{r2}, {accuracy} %" for r2, accuracy in shown)])
    heads = [f"{budget / 1e6:g} MB" for budget in RATE_BUDGETS]
    return table(["recorder", f"{heads[0]}: R², replay accuracy", *heads[1:]], lines)


def _number(text: str) -> float:
    return float(text.replace("−", "-"))


TEN_TASKS = {"tasks": [50] + [5] * 10}
LEARN_ROWS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("all images (`joint --set only_last=true`)", "learn", "9cc1c55", {"method": "joint"}),
    ("KRIL on real features (`--recorder raw`)", "learn", "f1b6632", {"method": "kril", "recorder": "raw"}),
    ("**KRIL**, two KRNets of the paper's size", "learn", "9cc1c55", {"method": "kril", "budget": None}),
    ("**KRIL within 6.1 MB** (`--budget 6.1MB`)", "learn", "529b10d", {"method": "kril", "budget": 6_100_000}),
    ("… with `new_features=flip`, as in the paper", "learn", "9cc1c55", {"method": "kril", "budget": 6_100_000}),
    ("LUCIR, 20 exemplars a class", "learn", "f1b6632", {"method": "lucir"}),
    ("GFR, on the same ResNet-32", "learn", "9cc1c55", {"method": "gfr"}),
    ("GFR, on its own ResNet-18 (`--preset own`)", "learn", "9f17127", {"method": "gfr"}),
    ("iCaRL (NME), 20 exemplars a class", "learn", "f1b6632", {"method": "icarl"}),
    ("MAS", "learn", "f1b6632", {"method": "mas"}),
    ("EWC", "learn", "9cc1c55", {"method": "ewc", "strength": 30}),
    ("fine-tuning", "learn", "f1b6632", {"method": "finetune"}),
)
PAPER_LAST = {"**KRIL**, two KRNets of the paper's size": "55.2", "GFR, on its own ResNet-18 (`--preset own`)": "48.9"}


def learn_row(title: str) -> Row:
    recipe, commit, settings = next(row[1:] for row in LEARN_ROWS if row[0] == title)
    # Some rows keep the task sizes among the settings, others only among the metrics.
    rows = [row for row in ledger() if row["metrics"].get("tasks") == TEN_TASKS["tasks"]]
    return find(rows, recipe, commit, **settings)


def learn_table() -> str:
    lines = []
    for title, _, commit, _ in LEARN_ROWS:
        row = learn_row(title)
        metrics = row["metrics"]
        average = None if row["settings"].get("only_last") else metrics["average"]
        accuracies = [percent(metrics["accuracy"][0]), percent(metrics["last"]), PAPER_LAST.get(title, "")]
        kept = size(metrics["storage_bytes"]["total"])
        lines.append([title, *accuracies, percent(average), kept, f"`{commit}`"])
    head = ["method", "after the base task", "last", "last, the paper", "average", "kept between tasks", "commit"]
    return table(head, lines)


ACCURACY_COMMIT = "eba60c9"
SPLITS_COMMIT = "412d2ca"  # other task splits, and rivals that read KRIL's layers
SEEDS = (0, 1, 2)
KRIL = {"method": "kril", "budget": 6_100_000}
KRIL_TITLE = "**KRIL**, `--budget 6.1MB`"
RIVALS = {"DS-AL": "dsal", "ACIL": "acil", "FeCAM": "fecam", "FeTrIL": "fetril", "nearest class mean": "ncm"}
ACCURACY_HEAD = ("method", "last", "average", "without the base task", "kept between tasks", "network")
Runs = Sequence[Mapping[str, Any]]


def accuracy_runs(commit: str, **settings: Any) -> Runs:
    """The metrics of all seeds."""
    rows = ledger()
    seeded = [[row for row in rows if row["seed"] == seed] for seed in SEEDS]
    return [find(own, "accuracy", commit, **settings)["metrics"] for own in seeded]


def rival_runs(commit: str, **settings: Any) -> dict[str, Runs]:
    return {title: accuracy_runs(commit, method=method, **settings) for title, method in RIVALS.items()}


def mean(runs: Runs, key: str) -> float:
    return round(statistics.mean(run[key] for run in runs), 6)


def spread(runs: Runs, key: str) -> str:
    """Mean and standard deviation (n - 1) in percent."""
    return f"{percent(mean(runs, key))} ± {percent(round(statistics.stdev(run[key] for run in runs), 6))}"


def spreads(runs: Runs) -> list[str]:
    return [spread(runs, key) for key in ("last", "average", "average_without_base")]


def kept_bytes(runs: Runs) -> int:
    return max(run["storage_bytes"]["total"] for run in runs)


def accuracy_line(title: str, runs: Runs) -> list[str]:
    return [title, *spreads(runs), size(kept_bytes(runs)), size(runs[0]["network_bytes"])]


def accuracy_table() -> str:
    runs = {
        KRIL_TITLE: accuracy_runs(ACCURACY_COMMIT, **KRIL),
        "**KRIL**, `--budget 3.1MB`": accuracy_runs(ACCURACY_COMMIT, method="kril", budget=3_100_000),
        "**KRIL**, `--budget 1.6MB`": accuracy_runs(ACCURACY_COMMIT, method="kril", budget=1_600_000),
        **rival_runs(ACCURACY_COMMIT, reads="features"),
    }
    return table(ACCURACY_HEAD, [accuracy_line(*item) for item in runs.items()])


def layers_table() -> str:
    """Rivals that read the same layers as KRIL's head, and how far they are from it."""
    kril, lines = accuracy_runs(ACCURACY_COMMIT, **KRIL), []
    for title, runs in rival_runs(SPLITS_COMMIT, reads="layers", **TEN_TASKS).items():
        gap = rounded(round(100 * (mean(runs, "last") - mean(kril, "last")), 4), 1)
        ratio = kept_bytes(runs) / kept_bytes(kril)
        lines.append([*accuracy_line(title, runs), gap, f"{rounded(ratio, 0 if ratio >= 10 else 2)} ×"])
    return table([*ACCURACY_HEAD, "gap to KRIL in 6.1 MB, last", "bytes against KRIL's"], lines)


# Methods that train the network on: one seed. Title, method, settings that name its row.
TRAINED_COMMIT = "7192080"
TRAINED_ROWS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("all images (`joint --set only_last=true`)", "joint", TRAINED_COMMIT, {}),
    ("LUCIR, 20 exemplars a class", "lucir", TRAINED_COMMIT, {}),
    ("PASS", "pass", SPLITS_COMMIT, {}),
    ("iCaRL (NME), 20 exemplars a class", "icarl", TRAINED_COMMIT, {}),
    ("EWC", "ewc", TRAINED_COMMIT, {"strength": 30000}),
    ("MAS", "mas", TRAINED_COMMIT, {"strength": 10}),
    ("fine-tuning", "finetune", TRAINED_COMMIT, {}),
)


def trained_table() -> str:
    rows, lines = ledger(), []
    for title, method, commit, settings in TRAINED_ROWS:
        metrics = find(rows, "accuracy", commit, method=method, **TEN_TASKS, **settings)["metrics"]
        averages = [metrics["average"], metrics["average_without_base"]]
        shares = [percent(share) for share in (metrics["last"], *averages)]
        lines.append([title, *shares, *map(size, (kept_bytes([metrics]), metrics["network_bytes"])), f"`{commit}`"])
    return table([*ACCURACY_HEAD, "commit"], lines)


def cold_table() -> str:
    """Cold start: the base task is as small as the others."""
    selection = {"tasks": [10] * 10, "base": "strong"}
    runs = {
        KRIL_TITLE: accuracy_runs(SPLITS_COMMIT, **KRIL, **selection),
        **rival_runs(SPLITS_COMMIT, reads="features", **selection),
    }
    return table(ACCURACY_HEAD, [accuracy_line(*item) for item in runs.items()])


# Classes, commit, task sizes: 50 classes, then tasks of equal size.
SPLIT_ROWS: tuple[tuple[str, str, list[int]], ...] = (
    ("50 + 5 × 10", SPLITS_COMMIT, [50] + [10] * 5),
    ("50 + 10 × 5", ACCURACY_COMMIT, [50] + [5] * 10),
    ("50 + 25 × 2", SPLITS_COMMIT, [50] + [2] * 25),
)
# The README of the authors' code of DS-AL: 64.04 and 71.28 %. It keeps two matrices of 8192 x 8192 float64.
PUBLISHED_SPLIT = ("50 + 25 × 2", "DS-AL, as published, not run here", "64.0", "71.3", "", "1.07 GB", "")


def protocols_table() -> str:
    lines: list[Sequence[str]] = []
    for classes, commit, tasks in SPLIT_ROWS:
        runs = accuracy_runs(commit, **KRIL, tasks=tasks)
        lines.append([classes, KRIL_TITLE, *spreads(runs), size(kept_bytes(runs)), f"`{commit}`"])
    return table(["classes", *ACCURACY_HEAD[:-1], "commit"], [*lines, PUBLISHED_SPLIT])


def strength_table() -> str:
    """Average accuracy on held-out training images with each strength of the ledger; the best of a column in bold."""
    rows = [
        row
        for row in ledger(held_out=True)
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


README_ACCURACY = {
    "**KRIL**": KRIL,
    "**KRIL**, fewer bytes": {"method": "kril", "budget": 1_600_000},
    "DS-AL, the best rival on the same network": {"method": "dsal", "reads": "features"},
}
README_ROWS = {
    "KRIL as published (`--preset paper`)": "**KRIL**, two KRNets of the paper's size",
    "GFR, which keeps a generator": "GFR, on the same ResNet-32",
    "LUCIR, which keeps some images": "LUCIR, 20 exemplars a class",
    "all images kept, without the better base task": "all images (`joint --set only_last=true`)",
}


def readme_table() -> str:
    lines = []
    for name, settings in README_ACCURACY.items():
        runs = accuracy_runs(ACCURACY_COMMIT, **settings)
        last, average = (percent(mean(runs, key)) for key in ("last", "average"))
        shown = f"**{last}**" if name.startswith("**") else last
        lines.append([name, size(kept_bytes(runs)), shown, average])
    for name, title in README_ROWS.items():
        row = learn_row(title)
        metrics = row["metrics"]
        last, paper = percent(metrics["last"]), PAPER_LAST.get(title)
        average = None if row["settings"].get("only_last") else metrics["average"]
        shown = f"**{last}**" if name.startswith("**") else last
        kept = size(metrics["storage_bytes"]["total"])
        lines.append([name, kept, shown + (f" (in the paper {paper})" if paper else ""), percent(average)])
    return table(["method", "kept between tasks", "last", "average"], lines)


# Tables of Zhang et al. 2022: CIFAR-100, ten tasks after the base task; "real features" is that of 23 fixed layers.
PAPER_CURVES = {
    "KRIL": "72.4 69.2 67.3 64.6 63.3 61.0 60.0 57.9 55.7 55.2",
    "real features": "72.1 68.8 66.6 64.9 64.1 62.4 61.1 59.6 57.7 56.9",
}
CURVES = (
    ("KRIL", "**KRIL**, two KRNets of the paper's size"),
    ("KRIL within 6.1 MB", "**KRIL within 6.1 MB** (`--budget 6.1MB`)"),
    ("… with `new_features=flip`", "… with `new_features=flip`, as in the paper"),
    ("real features", "KRIL on real features (`--recorder raw`)"),
)


def curves_table() -> str:
    lines = []
    for name, title in CURVES:
        if name in PAPER_CURVES:
            lines.append([f"{name}, the paper", *PAPER_CURVES[name].split()])
        lines.append([name, *map(percent, learn_row(title)["metrics"]["accuracy"][1:])])
    return table(["after task", *map(str, range(1, 11))], lines)


BYTES_BUDGETS = (1_540_000, 3_080_000, 6_160_000)
BYTES_RECORDERS = ("krnet", "autoencoder", "pca", "transform", "pq", "quantized", "images")
EXEMPLAR_ROWS = {3_080_000: ("5b62d8f", 3_080_000), 6_160_000: ("f1b6632", None)}  # 10 and 20 exemplars a class
REPLAYED_COMMITS = ("936cbbb", "529b10d")


def bytes_table() -> str:
    """Last accuracy at each budget; 936cbbb has a base task of 76.5 %, 529b10d (in brackets) one of 76.1 %."""
    rows = ledger()

    def kril(recorder: str, budget: int) -> str:
        found = []
        for commit in REPLAYED_COMMITS:
            settings = {"method": "kril", "recorder": recorder, "budget": budget, "new_features": "replayed"}
            try:
                last = percent(find(rows, "learn-bytes", commit, **settings)["metrics"]["last"])
            except AssertionError:
                continue
            found.append(last if commit == REPLAYED_COMMITS[0] else f"({last})")
        return " ".join(found)

    def exemplars(method: str, budget: int) -> str:
        if budget not in EXEMPLAR_ROWS:
            return ""
        commit, given = EXEMPLAR_ROWS[budget]
        return percent(find(rows, "learn", commit, method=method, budget=given)["metrics"]["last"])

    lines = [
        [f"{budget / 1e6:g} MB", *(kril(name, budget) for name in BYTES_RECORDERS)]
        + [exemplars(method, budget) for method in ("lucir", "icarl")]
        for budget in BYTES_BUDGETS
    ]
    return table(["kept in all", "KRIL, krnet", *BYTES_RECORDERS[1:], "LUCIR", "iCaRL (NME)"], lines)


RECORD_ROWS: tuple[tuple[str, str, str, Mapping[str, Any]], ...] = (
    ("paper, preset `cifar100`, the paper's schedule", "cifar100-paper-setting", "75889a3", {}),
    ("paper, preset `cifar100`, default schedule, `last_norm=False`", "cifar100-default", "7f0735d", {}),
    ("paper, preset `cifar100`, default schedule", "cifar100-choices", "7f0735d", {"last_norm": True, "muon_lr": 0.01}),
    ("paper, preset `cifar100`, the paper's schedule, shortened", "cifar100-choices", "7f0735d", {"schedule": "paper"}),
    ("paper, no preset: sizes solved from the data", "cifar100-choices", "7f0735d", {"preset": None}),
    ("autoencoder, the paper's schedule", "cifar100-record", "e6cb46a", {}),
    ("autoencoder, the paper's schedule, shortened", "cifar100-record", "9f17127", {"schedule": "paper"}),
    ("autoencoder, default schedule", "cifar100-record", "9f17127", {"schedule": "fast"}),
    ("autoencoder, default schedule", "cifar100-record", "9cc1c55", {}),
)


def record_table() -> str:
    rows, lines = ledger(), []
    for title, recipe, commit, settings in RECORD_ROWS:
        metrics = find(rows, recipe, commit, **settings)["metrics"]
        mse = f"{Decimal(str(metrics['mse'])) * 10_000:.2f}e-4"
        quality = [mse, rounded(metrics["r2"], 3), f"{percent(metrics['replay_accuracy'], 2)} %"]
        lines.append([title, f"{metrics['bytes'] / 1e6:.0f} MB", f"{metrics['iterations']:,}", *quality, f"`{commit}`"])
    return table(["recorder", "file", "iterations", "MSE", "R²", "replay accuracy", "commit"], lines)


# Recorder, commit, iterations: ten steps of 500 maps.
APPEND_ROWS: tuple[tuple[str, str, int | None], ...] = (
    ("krnet", "62ef0d3", 1500),
    ("pq", "730a2dc", None),
    ("quantized", "62ef0d3", None),
    ("transform", "730a2dc", None),
    ("pca", "730a2dc", None),
)


def append_table() -> str:
    """R2 of ten steps and of all samples at once in as many bytes, without and with a plan (`room`)."""
    rows, lines = ledger(), []
    for recorder, commit, iterations in APPEND_ROWS:
        settings = {"recorder": recorder, "iterations": iterations, "steps": 10, "samples": 5000, "order": "mixed"}
        metrics = find(rows, "appending", commit, **settings)["metrics"]
        cells = []
        for way in ("room", "appended"):
            found = metrics[way]
            cells += [f"{found['bytes'] / 1e6:.2f} MB", rounded(found["r2"], 3), rounded(found["once_r2"], 3)]
        lines.append([recorder, *cells, f"`{commit}`"])
    ways = [f"{name}{way}" for way in (", with room", ", without") for name in ("bytes", "ten steps", "at once")]
    return table(["recorder", *ways, "commit"], lines)


def newest(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: row["date"])


def speed_table() -> str:
    """The newest row of each preset on a GPU; for the time until the first step, which other work delays, the range."""
    rows = [row for row in ledger() if row["recipe"] == "speed" and "NVIDIA" in row["device"]]
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


def gpu_tests() -> str:
    row = newest([row for row in ledger() if row["recipe"] == "test-gpu" and row["outcome"] == "ok"])
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
    "rate-table": rate_table,
    "learn-table": learn_table,
    "accuracy-table": accuracy_table,
    "layers-table": layers_table,
    "protocols-table": protocols_table,
    "trained-table": trained_table,
    "cold-table": cold_table,
    "strength-table": strength_table,
    "readme-table": readme_table,
    "curves-table": curves_table,
    "bytes-table": bytes_table,
    "record-table": record_table,
    "append-table": append_table,
    "speed-table": speed_table,
    "gpu-tests": gpu_tests,
}


def filled(text: str) -> str:
    """The text with every block as it should be."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n\n{match[3]}", text)


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
