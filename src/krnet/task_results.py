"""The results of a run: right answers after each task, kept between tasks, and the scores at the end.

learner, task -> count_correct -> Results <-> DIR/state.krn
Results -> summarize -> what run.json holds
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from krnet.data.dataset import DataSet
from krnet.errors import ResumeError
from krnet.io import archive, ledger
from krnet.io.atomic import write_json
from krnet.learners import base
from krnet.learners.scores import scores, storage
from krnet.run_files import (
    COMMITS_KEY,
    SETTINGS_FILE,
    STATE_FILE,
    check_kept_files,
    read_saved,
    reading,
    start_again_advice,
    with_advice,
)
from krnet.work_files import UNKNOWN_COMMIT


@dataclass
class Results:
    """The results of the tasks that a run has finished."""

    fingerprint: dict[str, Any]
    correct: dict[str, list[list[int] | None]]
    """correct[row][t][j]: right answers on the test images of task j, after task t; None if task t was left out."""
    task_seconds: list[float]
    """Time of each task. Work that was read from a file counts with the time it took when it was run."""
    storage: list[dict[str, int]]
    """Bytes kept after each task, by part."""
    commits: list[str]
    """Commits of the code that has worked on the run, each once, in the order of their first work."""

    @property
    def tasks_done(self) -> int:
        return len(self.task_seconds)

    def check(self, num_tasks: int) -> None:
        """Refuse results that no run of so many tasks has: they may come from any file."""
        rows = self.correct.values()
        if not 0 < len(self.task_seconds) <= num_tasks or not all(map(math.isfinite, self.task_seconds)):
            raise ValueError(f"times of {len(self.task_seconds)} tasks; expected 1 to {num_tasks}")
        if len(self.storage) != self.tasks_done or any(len(row) != self.tasks_done for row in rows) or not rows:
            raise ValueError(f"results of other tasks than the {self.tasks_done} that have times")
        for parts in self.storage:
            sum(parts.values())
        for row in rows:
            for correct in row:
                sum(correct or [])

    def to_json(self) -> dict[str, Any]:
        return {"correct": self.correct, "task_seconds": self.task_seconds, "storage": self.storage}

    def note_commit(self, commit: str, folder: Path) -> None:
        """Write a new commit beside the settings at once: a kill within the task must not lose it."""
        if commit in self.commits:
            return
        self.commits.append(commit)
        write_json(folder / SETTINGS_FILE, {**self.fingerprint, COMMITS_KEY: self.commits})


def count_correct(learner: base.Learner, task: int) -> dict[str, list[int]]:
    """By row: the number of right answers on the test images of each task so far."""
    context = learner.context
    for module in learner.modules().values():
        module.eval()
    correct: dict[str, list[int]] = {}
    for tested_task in range(task + 1):
        ids = context.split.samples(context.data.test.labels, tested_task)
        num_right: dict[str, int] = {}
        for part in ids.to(context.device).split(base.EVALUATION_BATCH):
            with torch.no_grad():
                for row, logits in learner.predict(context.test.take(part)).items():  # (B, classes seen)
                    labels = context.test_labels.to(logits.device)[part]
                    num_right[row] = num_right.get(row, 0) + int((logits.argmax(1) == labels).sum())
        for row, number in num_right.items():
            correct.setdefault(row, []).append(number)
    return correct


def num_test_images(context: base.Context) -> list[int]:
    """Number of test images of each task."""
    return [len(context.split.samples(context.data.test.labels, t)) for t in range(context.split.num_tasks)]


def restore_results(folder: Path, learner: base.Learner, fingerprint: dict[str, Any]) -> Results:
    commits: list[str] = []
    if (folder / SETTINGS_FILE).exists():
        commits = read_saved(folder / SETTINGS_FILE).get(COMMITS_KEY, [UNKNOWN_COMMIT])
        if not isinstance(commits, list) or not all(isinstance(commit, str) for commit in commits):
            raise ResumeError(
                f"{folder / SETTINGS_FILE}: {COMMITS_KEY} is {commits!r:.99}; expected a list of commits. "
                f"{start_again_advice(folder)}"
            )
    if not (folder / STATE_FILE).exists():
        return Results(fingerprint, {}, [], [], commits)
    with with_advice(start_again_advice(folder)), reading(folder / STATE_FILE, ResumeError):
        saved = archive.open_archive(folder / STATE_FILE)
        meta = saved.metadata
        results = Results(fingerprint, meta["correct"], meta["task_seconds"], meta["storage"], commits)
        results.check(learner.context.split.num_tasks)
        check_kept_files(folder, meta)
        learner.restore(results.tasks_done - 1, saved.tensors())
    return results


def summarize(learner: base.Learner, results: Results, data: DataSet) -> dict[str, Any]:
    counts = num_test_images(learner.context)
    rows = {row: scores(correct, counts) for row, correct in results.correct.items()}
    fingerprint = results.fingerprint
    image_bytes = data.train.images[0].numel()
    result = {
        "method": learner.name,
        "data": data.name,
        "data_digest": fingerprint["data_digest"],
        "validation": fingerprint["validation"],
        "order": fingerprint["order"],
        "order_hash": fingerprint["order_hash"],
        "class_order": list(learner.context.split.order),
        "tasks": fingerprint["tasks"],
        "seed": fingerprint["seed"],
        "row": learner.main_row,
        **rows[learner.main_row],
        "storage_bytes": storage(results.storage[-1], image_bytes),
        "storage_bytes_by_task": [storage(parts, image_bytes)["total"] for parts in results.storage],
        "storage_files": {part: path.name for part, path in learner.kept_files().items()},
        "network_bytes": sum(base.num_bytes(module.state_dict()) for module in learner.deployed().values()),
        "seconds": sum(results.task_seconds),
        "task_seconds": results.task_seconds,
        "settings": fingerprint["settings"],
        "device": ledger.device_name() if fingerprint["device"] == "cuda" else "cpu",
        "versions": ledger.versions(),
        "commits": results.commits,
    }
    if len(rows) > 1:
        result["rows"] = rows
    return result
