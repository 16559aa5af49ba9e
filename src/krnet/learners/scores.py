"""Turn counts of correct answers into the numbers that papers report.

    correct (tasks learned, tasks tested), counts (tasks,) -> accuracy matrix -> accuracy, last, average, forgetting

Accuracies are fractions. Row t of the matrix is measured after task t, column j on the test images of task j; the
logits of all classes seen by then compete. `accuracy` is the fraction over all test images of the classes seen, so
every class has the same weight (LUCIR, PyCIL, GFR). `task_mean` gives every task the same weight (Mammoth). With a
large base task the two differ by percentage points. If a method leaves a task out, its row is None, and so are the
averages and the forgetting.

    run.json, run.json, ... -> summarize -> by method: mean and standard deviation over the runs
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

FORGETTING = "mean over tasks before the last of (best accuracy on it so far - accuracy on it after the last task)"
SUMMARY_SCORES = ("last", "average", "average_without_base", "forgetting")
CIFAR_IMAGE_BYTES = 3072  # 3 channels of 32 x 32 pixels


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values; None if there are no values or one of them is None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def scores(correct: Sequence[Sequence[int] | None], counts: Sequence[int]) -> dict[str, Any]:
    """Compute the accuracies and the forgetting of a run.

    correct[t][j]  right answers after task t on the test images of task j <= t; correct[t] is None if t was left out
    counts[j]      test images of task j
    """
    matrix = [[] if row is None else [right / counts[j] for j, right in enumerate(row)] for row in correct]
    overall = [None if row is None else sum(row) / sum(counts[: len(row)]) for row in correct]
    by_task = [mean(row) for row in matrix]
    return {
        "accuracy_matrix": [row or None for row in matrix],
        "accuracy": overall,
        "task_mean": by_task,
        "last": overall[-1],
        "average": mean(overall),
        "average_without_base": mean(overall[1:]),
        "average_task_mean": mean(by_task),
        "average_task_mean_without_base": mean(by_task[1:]),
        "forgetting": None if None in overall else forgetting(matrix),
        "forgetting_definition": FORGETTING,
    }


def forgetting(matrix: Sequence[Sequence[float]]) -> float | None:
    """Mean over all tasks but the last of (best earlier accuracy - final accuracy); None for a single task."""
    last = matrix[-1]
    drops = [max(row[j] for row in matrix[:-1] if len(row) > j) - last[j] for j in range(len(last) - 1)]
    return mean(drops)


def storage(parts: dict[str, int], image_bytes: int = CIFAR_IMAGE_BYTES) -> dict[str, Any]:
    """Bytes by part and in total, and the number of raw images that would take as many bytes."""
    total = sum(parts.values())
    return {**parts, "total": total, "equivalent_exemplars": total / image_bytes}


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample standard deviation (n - 1) of one number over several runs.

    Both are None if a run lacks the number. The standard deviation of a single run is None.
    """
    known = [value for value in values if value is not None]
    complete = len(known) == len(values)
    return {"mean": mean(values), "std": statistics.stdev(known) if complete and len(known) > 1 else None}


def summarize(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Summarize runs that differ in seed or class order: an entry for each method, and for each of its classifiers.

    runs  contents of run.json, in any order

    An entry has the number of runs, and the `spread` over them of the accuracies, the forgetting, the stored bytes (by
    part and in total; a part that a run does not have counts as 0), the bytes of the network, and the seconds.
    """
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_method.setdefault(run["method"], []).append(run)
    entries = []
    for method, own in by_method.items():
        parts = list(dict.fromkeys(part for run in own for part in run["storage_bytes"]))
        shared = {
            "storage_bytes": {part: spread([run["storage_bytes"].get(part, 0) for run in own]) for part in parts},
            "network_bytes": spread([run.get("network_bytes") for run in own]),  # earlier versions did not write it
            "seconds": spread([run["seconds"] for run in own]),
        }
        for row in own[0].get("rows") or [own[0]["row"]]:
            found = [(run.get("rows") or {run["row"]: run})[row] for run in own]
            numbers = {name: spread([one[name] for one in found]) for name in SUMMARY_SCORES}
            entries.append({"method": method, "row": row, "num_runs": len(own), **numbers, **shared})
    return entries
