"""Tables of results in Markdown, for the documentation.

    entries (a series and a row of the ledger each), numbers of the paper
        -> learn_summary, learn_curves, rate -> Markdown

A cell of several seeds is mean ± standard deviation (n - 1). Percentages are rounded half up from their decimal digits:
0.6105 is 61.1 %, which binary fractions would make 61.0 or 61.1.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from krnet.report.figure import Entry, PaperNumber

Metrics = Mapping[str, Any]
SUMMARY = {"last": "last", "average": "average", "average_without_base": "without the base task"}


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows)


def rounded(value: float, digits: int) -> str:
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)).replace("-", "−")


def percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else rounded(round(100 * share, 6), digits)


def size(num_bytes: float) -> str:
    if num_bytes < 1e6:
        return f"{num_bytes / 1e3:.0f} kB" if num_bytes else "0"
    return f"{num_bytes / 1e6:.{0 if num_bytes >= 1e8 else 1}f} MB"


def spread(values: Sequence[float | None], text: Callable[[float], str] = percent) -> str:
    """Mean and standard deviation; empty if a run lacks the value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return ""
    mean = text(round(statistics.mean(known), 8))
    return mean if len(known) == 1 else f"{mean} ± {text(round(statistics.stdev(known), 8))}"


def by_series(entries: Sequence[Entry]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of each series, in the order of the recipe."""
    series: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        series.setdefault(entry.series, []).append(entry.row)
    return series


def provenance(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cells for the seeds, commits and the command of the newest row."""
    commits = dict.fromkeys(commit for row in rows for commit in row["metrics"].get("commits") or [row["commit"]])
    newest = max(rows, key=lambda row: row["date"])
    seeds = ", ".join(str(row["seed"]) for row in sorted(rows, key=lambda row: str(row["seed"])))
    return [seeds, ", ".join(f"`{commit}`" for commit in commits), f"`{short_command(newest['command'])}`"]


PROVENANCE = ("seeds", "commits", "command of the newest")


def short_command(command: str) -> str:
    """The command without what a reader replaces: how Python was called, where data and results lie."""
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "krnet"]:
        words = ["krnet", *words[3:]]
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("--data-dir", "-o", "--out", "--shared", "--recipe"):
            skip = True
        elif word not in ("--ledger", "-q", "--quiet"):
            kept.append(word)
    return shlex.join(kept).replace("|", "\\|")


def learn_summary(entries: Sequence[Entry], paper: Sequence[PaperNumber] = ()) -> str:
    """A line per series: accuracy after the base task and in the end, averages, bytes kept, the network, provenance."""
    printed = {number.series: number for number in paper if number.x in ("", "last")}
    lines = []
    for name, rows in by_series(entries).items():
        runs = [row["metrics"] for row in rows]
        base = spread([run["accuracy"][0] for run in runs])
        shares = [spread([run.get(key) for run in runs]) for key in SUMMARY]
        own = [f"{printed[name].value:.1f}" if name in printed else ""] if printed else []
        kept = size(max(run["storage_bytes"]["total"] for run in runs))
        sizes = [run["network_bytes"] for run in runs if run.get("network_bytes")]
        network = size(max(sizes)) if sizes else ""  # rows of earlier versions lack it
        lines.append([name, base, shares[0], *own, *shares[1:], kept, network, *provenance(rows)])
    last, *averages = SUMMARY.values()
    columns = ["method", "after the base task", last, *(["last, the paper"] if printed else []), *averages]
    return markdown([*columns, "kept between tasks", "network", *PROVENANCE], lines)


def learn_curves(entries: Sequence[Entry], paper: Sequence[PaperNumber] = ()) -> str:
    """Accuracy after each task of every series, the paper's line above ours."""
    series = by_series(entries)
    num_tasks = max(len(rows[0]["metrics"]["accuracy"]) for rows in series.values())
    lines = []
    for name, rows in series.items():
        printed = {
            number.x: f"{number.value:.1f}" for number in paper if number.series == name and number.x.isdecimal()
        }
        if printed:
            lines.append([f"{name}, the paper", *(printed.get(str(task), "") for task in range(num_tasks))])
        columns = zip(*(row["metrics"]["accuracy"] for row in rows), strict=True)
        lines.append([name, *(spread(column) for column in columns)])
    return markdown(["after task", *map(str, range(num_tasks))], lines)


def rate(entries: Sequence[Entry]) -> str:
    """R2 and replay accuracy of every series at every budget; the best of a column in bold."""
    series = by_series([entry.sized for entry in entries])
    budgets = sorted({entry.row["settings"]["budget"] for entry in entries})
    cells: dict[str, dict[int, tuple[str, str]]] = {}
    for name, rows in series.items():
        own: dict[int, list[Metrics]] = {}
        for row in rows:
            own.setdefault(row["settings"]["budget"], []).append(row["metrics"])
        cells[name] = {
            budget: (
                spread([run["r2"] for run in runs], lambda value: rounded(value, 4)),
                spread([run.get("replay_accuracy") for run in runs], lambda value: percent(value, 2)),
            )
            for budget, runs in own.items()
        }

    def best(budget: int, place: int) -> float:
        return max(_number(line[budget][place]) for line in cells.values() if budget in line)

    def shown(line: Mapping[int, tuple[str, str]], budget: int) -> str:
        if budget not in line:
            return ""
        texts = [
            f"**{text}**" if text and _number(text) == best(budget, place) else text
            for place, text in enumerate(line[budget])
        ]
        return ", ".join([texts[0], *(f"{text} %" for text in texts[1:] if text)])

    heads = [f"{budget / 1e6:g} MB" for budget in budgets]
    lines = [[name, *(shown(line, budget) for budget in budgets)] for name, line in cells.items()]
    return markdown(["recorder", f"{heads[0]}: R², replay accuracy", *heads[1:]], lines)


def _number(text: str) -> float:
    return float(text.split(" ")[0].replace("−", "-")) if text else float("-inf")
