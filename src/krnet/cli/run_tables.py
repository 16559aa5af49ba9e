"""Tables of runs of `krnet learn`: accuracies, forgetting, stored bytes and time, on stdout.

one seed and class order -> show_runs    -> a line per method
several of them          -> show_summary -> a line per method: mean and standard deviation over its runs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from krnet.cli.output import percent, print_unwrapped, short_size, titled_table
from krnet.config import plain_text


def show_runs(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per method: accuracies after each task and their summary in percent, stored bytes, time.

    A method with several classifiers, such as iCaRL (nme and cnn), has a line for each. "as images" is the number of
    uncompressed images that take as many bytes as are stored.
    """
    first = runs[0]
    tasks = "+".join(map(str, first["tasks"]))
    title = f"{first['data']}, classes {tasks}, order {first['order']} ({first['order_hash']}), seed {first['seed']}"
    title += _held_out_text(first)
    table = titled_table(title, "method")
    for task in range(len(first["tasks"])):
        table.add_column(f"task {task}" if task else "base", justify="right")
    for name in ("average", "without base", "forgetting", "stored", "as images", "seconds"):
        table.add_column(name, justify="right")
    for run in runs:
        for row, scores in (run.get("rows") or {run["row"]: run}).items():
            name = run["method"] if len(run.get("rows") or {}) < 2 else f"{run['method']} ({row})"
            table.add_row(
                plain_text(name),
                *[percent(value) for value in scores["accuracy"]],
                *[percent(scores[key]) for key in ("average", "average_without_base", "forgetting")],
                short_size(run["storage_bytes"]["total"]),
                f"{run['storage_bytes']['equivalent_exemplars']:,.0f}",
                f"{run['seconds']:,.0f}",
            )
    print_unwrapped(table)
    _explain_forgetting(
        [scores["forgetting"] for run in runs for scores in (run.get("rows") or {run["row"]: run}).values()]
    )


def show_summary(runs: Sequence[Mapping[str, Any]], summary: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per method: mean and standard deviation over its runs, accuracies and forgetting in percent.

    Bytes have a standard deviation only where the runs differ. The parts of the stored bytes follow the table.
    """
    first = runs[0]
    orders = list(dict.fromkeys(f"{run['order']} ({run['order_hash']})" for run in runs))
    seeds = list(dict.fromkeys(str(run["seed"]) for run in runs))
    title = f"{first['data']}, classes {'+'.join(map(str, first['tasks']))}, {_listed('order', orders)}, "
    title += _listed("seed", seeds)
    title += _held_out_text(first)
    if len(orders) * len(seeds) > 1:
        title += "\nmean ± standard deviation (n - 1) over the runs of a method"
    table = titled_table(title, "method")
    for name in ("runs", "last", "average", "without base", "forgetting", "stored", "network", "seconds"):
        table.add_column(name, justify="right")
    rows = [entry["method"] for entry in summary]
    for entry in summary:
        name = entry["method"] if rows.count(entry["method"]) == 1 else f"{entry['method']} ({entry['row']})"
        table.add_row(
            name,
            f"{entry['num_runs']}",
            *[_spread_text(entry[key], percent) for key in ("last", "average", "average_without_base", "forgetting")],
            *[_size_text(size) for size in (entry["storage_bytes"]["total"], entry["network_bytes"])],
            _spread_text(entry["seconds"], "{:,.1f}".format if entry["seconds"]["mean"] < 100 else "{:,.0f}".format),
        )
    print_unwrapped(table)
    _explain_forgetting([entry["forgetting"]["mean"] for entry in summary])
    for entry in {entry["method"]: entry for entry in summary}.values():
        sums = ("total", "equivalent_exemplars")
        parts = [f"{part} {_size_text(s)}" for part, s in entry["storage_bytes"].items() if part not in sums]
        if parts:
            print(f"{entry['method']} stores: {', '.join(parts)}")


def _held_out_text(run: Mapping[str, Any]) -> str:
    if not run.get("validation"):
        return ""
    return f"\njudged on {run['validation']} held-out training images a class"


def _explain_forgetting(values: Sequence[float | None]) -> None:
    if any(value is not None and value < 0 for value in values):
        print("Forgetting below 0: on average, old classes are recognised better after the last task than ever before.")


def _listed(name: str, values: Sequence[str]) -> str:
    return f"{name}{'s' if len(values) > 1 else ''} {', '.join(values)}"


def _spread_text(spread: Mapping[str, float | None], text: Callable[[float], str]) -> str:
    mean, std = spread["mean"], spread["std"]
    if mean is None:
        return "-"
    return text(mean) if std is None else f"{text(mean)} ± {text(std)}"


def _size_text(spread: Mapping[str, float | None]) -> str:
    """A size; its standard deviation is left out where it is below a byte."""
    exact = {**spread, "std": None} if (spread["std"] or 0.0) < 0.5 else spread
    return _spread_text(exact, lambda num_bytes: short_size(round(num_bytes)))
