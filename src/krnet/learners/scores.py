"""From correct answers to the numbers that papers print.

    correct (tasks learned, tasks tested), counts -> accuracy matrix -> overall, last, average, forgetting

Accuracies are fractions. Row t of the matrix is measured after task t, column j on the test images of task j; logits
of all classes seen by then compete. `accuracy` is over all test images of the classes seen, that is class-weighted
(LUCIR, PyCIL, GFR); `task_mean` weighs every task the same (Mammoth). With a large base task they differ by points.
A task that a method left out has None for its row, and then there are no averages and no forgetting either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FORGETTING = "mean over tasks before the last of (best accuracy on it so far - accuracy on it after the last task)"
CIFAR_IMAGE_BYTES = 3072


def mean(values: Sequence[float | None]) -> float | None:
    """None where there are none, or one is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def scores(correct: Sequence[Sequence[int] | None], counts: Sequence[int]) -> dict[str, Any]:
    """correct[t][j] of counts[j] test images of task j, after task t >= j; None where task t was left out."""
    shares = [[] if row is None else [right / counts[j] for j, right in enumerate(row)] for row in correct]
    overall = [None if row is None else sum(row) / sum(counts[: len(row)]) for row in correct]
    by_task = [mean(row) for row in shares]
    return {
        "accuracy_matrix": [row or None for row in shares],
        "accuracy": overall,
        "task_mean": by_task,
        "last": overall[-1],
        "average": mean(overall),
        "average_without_base": mean(overall[1:]),
        "average_task_mean": mean(by_task),
        "average_task_mean_without_base": mean(by_task[1:]),
        "forgetting": None if None in overall else forgetting(shares),
        "forgetting_definition": FORGETTING,
    }


def forgetting(matrix: Sequence[Sequence[float]]) -> float | None:
    """None after the base task alone: there is nothing to forget."""
    last = matrix[-1]
    drops = [max(row[j] for row in matrix[:-1] if len(row) > j) - last[j] for j in range(len(last) - 1)]
    return mean(drops)


def storage(parts: dict[str, int], image_bytes: int = CIFAR_IMAGE_BYTES) -> dict[str, Any]:
    """Bytes by part and in all, and how many raw images of this data set they would hold."""
    total = sum(parts.values())
    return {**parts, "total": total, "equivalent_exemplars": total / image_bytes}
