"""The one task loop: every method learns the same tasks, is judged the same way, and can be killed at any time.

    data, class order, tasks, method -> learn -> DIR/run.json, and the learner as it ended

    for each task:   learner.learn(task) -> Work -> run, or taken from its file if it was finished before
                     predict on the test images of all tasks so far -> scores
                     the learner's state into DIR/state.krn, with the scores so far

What is written before a kill is used after it; the same command with `resume` ends in the same run.json, times aside.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from krnet import archive, learners, ledger, parallel
from krnet.config import check_int, unknown_setting
from krnet.data import DataSet
from krnet.descent import Saving
from krnet.errors import ResumeError, SettingError
from krnet.files import AnyPath, atomic_write
from krnet.learners import base
from krnet.protocol import TaskSplit
from krnet.scores import scores, storage
from krnet.training import Status

for _module in pkgutil.iter_modules(learners.__path__):  # each registers itself
    importlib.import_module(f"krnet.learners.{_module.name}")

STATE, RUN, SETTINGS = "state.krn", "run.json", "settings.json"


class Watcher(Protocol):
    """Told what goes on; the command line draws it, TensorBoard keeps it."""

    def work(self, method: str, task: int, num_tasks: int, name: str, epochs: int | None = None) -> None: ...

    def status(self, status: Status) -> None: ...

    def accuracy(self, method: str, task: int, rows: Mapping[str, float]) -> None: ...


class Silent:
    def work(self, method: str, task: int, num_tasks: int, name: str, epochs: int | None = None) -> None: ...

    def status(self, status: Status) -> None: ...

    def accuracy(self, method: str, task: int, rows: Mapping[str, float]) -> None: ...


@dataclass
class Progress:
    """What a run has so far."""

    fingerprint: dict[str, Any]
    correct: dict[str, list[list[int] | None]]
    task_seconds: list[float]
    storage: list[dict[str, int]]

    @property
    def tasks_done(self) -> int:
        return len(self.task_seconds)

    def to_json(self) -> dict[str, Any]:
        return {"correct": self.correct, "task_seconds": self.task_seconds, "storage": self.storage}


def learn(
    method: str,
    data: DataSet,
    split: TaskSplit,
    *,
    out: AnyPath,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str | None = None,
    resume: bool = False,
    shared: AnyPath | None = None,
    watcher: Watcher | None = None,
    checkpoint_s: float = 60.0,
) -> dict[str, Any]:
    """Learn all tasks and write DIR/run.json, which is returned; DIR/state.krn keeps the network as it ended.

    settings  over the method's own and those that follow from the size of the images
    out     folder of this run; a finished one is returned as it is if `resume`, else refused
    shared  folder for base tasks, so that methods whose base task is the same train it once
    checkpoint_s  seconds between checkpoints inside a task
    """
    check_int("seed", seed, 0, 2**31)
    folder, where = Path(out), parallel.pick_device(device)
    learner_class = base.choose(method)
    config = base.make_config(learner_class, settings_of([method], settings or {}, data)[method])
    fingerprint = {
        "method": method,
        "data": data.name,
        "data_digest": data.digest,
        "samples": [data.train.num_samples, data.test.num_samples],
        "order": split.order_name,
        "order_hash": split.hash,
        "tasks": [len(classes) for classes in split.tasks],
        "seed": seed,
        "device": where.type,
        "settings": base.plain_settings(config),
    }
    if _holds_a_run(folder, resume):
        _check_same(folder / SETTINGS, json.loads((folder / SETTINGS).read_text()), fingerprint)
    if (folder / RUN).exists():
        result: dict[str, Any] = json.loads((folder / RUN).read_text())
        return result
    watcher = watcher or Silent()
    with torch.random.fork_rng(devices=[]), parallel.exact():
        torch.manual_seed(seed)
        context = base.Context(data, split, where, seed, folder)
        learner = learner_class(context, config)  # may refuse its settings: nothing is written before
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / SETTINGS, fingerprint)
        progress = _restore(folder / STATE, learner, fingerprint)
        for task in range(progress.tasks_done, split.num_tasks):
            _run_task(learner, task, progress, folder, resume, Path(shared) if shared else None, watcher, checkpoint_s)
    result = _summary(learner, progress, data)
    _write_json(folder / RUN, result)
    learner.finish()
    return result


def _holds_a_run(folder: Path, resume: bool) -> bool:
    held = (folder / SETTINGS).exists() or (folder / RUN).exists()
    if held and not resume:
        raise SettingError(f"{folder}: holds a run already. Give --resume to go on with it, or another folder")
    return held


def _run_task(
    learner: base.Learner,
    task: int,
    progress: Progress,
    folder: Path,
    resume: bool,
    shared: Path | None,
    watcher: Watcher,
    checkpoint_s: float,
) -> None:
    started = time.perf_counter()
    context = learner.context
    files: list[Path] = []
    works = learner.learn(task)
    number = 0
    while True:
        # Whether the work before was run or taken from a file must not show in what is drawn now.
        torch.manual_seed(context.seed_for(task, 1 + number))
        work = next(works, None)
        if work is None:
            break
        watcher.work(learner.name, task, context.split.num_tasks, work.name, work.epochs)
        partial, done = folder / f"task-{task}-{number}.partial", folder / f"task-{task}-{number}.done"
        files += [partial, done]
        common = None if shared is None or work.shared is None else shared / f"base-{_digest(work.shared)}.krn"
        finished = next((path for path in (done, common) if path is not None and path.exists()), None)
        if finished is not None and (resume or finished == common):
            kept = archive.open_archive(finished)
            work.take({name: kept.tensor(name) for name in kept.names})
        else:
            work.run(Saving(partial, resume, checkpoint_s), watcher.status)
            target = common or done
            target.parent.mkdir(parents=True, exist_ok=True)
            archive.write(target, work.result(), {"kind": "work", "settings": work.shared or {}})
        number += 1
    if learner.learns(task):
        rows = _judge(learner, task)
        for row, found in rows.items():
            progress.correct.setdefault(row, []).append(found)
        counts = test_counts(context)
        watcher.accuracy(learner.name, task, {row: sum(v) / sum(counts[: task + 1]) for row, v in rows.items()})
    else:
        for answers in progress.correct.values():
            answers.append(None)
    progress.task_seconds.append(time.perf_counter() - started)
    progress.storage.append(learner.storage_bytes())
    archive.write(folder / STATE, learner.state(), {"kind": "learner", **progress.to_json()})
    for path in files:
        path.unlink(missing_ok=True)


def _judge(learner: base.Learner, task: int) -> dict[str, list[int]]:
    """Right answers on the test images of each task so far, by row."""
    context = learner.context
    for module in learner.modules().values():
        module.eval()
    correct: dict[str, list[int]] = {}
    for earlier in range(task + 1):
        ids = context.split.samples(context.data.test.labels, earlier)
        right: dict[str, int] = {}
        for part in ids.to(context.device).split(base.EVALUATION_BATCH):
            with torch.no_grad():
                for row, found in learner.predict(context.test.take(part)).items():
                    labels = context.test_labels.to(found.device)[part]
                    right[row] = right.get(row, 0) + int((found.argmax(1) == labels).sum())
        for row, number in right.items():
            correct.setdefault(row, []).append(number)
    return correct


def test_counts(context: base.Context) -> list[int]:
    """Test images of each task."""
    return [len(context.split.samples(context.data.test.labels, t)) for t in range(context.split.num_tasks)]


def _restore(path: Path, learner: base.Learner, fingerprint: dict[str, Any]) -> Progress:
    if not path.exists():
        return Progress(fingerprint, {}, [], [])
    kept = archive.open_archive(path)
    meta = kept.metadata
    progress = Progress(fingerprint, meta["correct"], meta["task_seconds"], meta["storage"])
    learner.restore(progress.tasks_done - 1, {name: kept.tensor(name) for name in kept.names})
    return progress


def _check_same(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            _check_same(path, found[name], value)  # names the one setting that differs
        elif found.get(name) != value:
            raise ResumeError(
                f"{path}: made with {name} {found.get(name)!r}; this run has {value!r}. Give the same settings, or "
                f"another folder"
            )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


def _summary(learner: base.Learner, progress: Progress, data: DataSet) -> dict[str, Any]:
    counts = test_counts(learner.context)
    rows = {row: scores(correct, counts) for row, correct in progress.correct.items()}
    fingerprint = progress.fingerprint
    image_bytes = data.train.images[0].numel()
    result = {
        "method": learner.name,
        "data": data.name,
        "data_digest": fingerprint["data_digest"],
        "order": fingerprint["order"],
        "order_hash": fingerprint["order_hash"],
        "class_order": list(learner.context.split.order),
        "tasks": fingerprint["tasks"],
        "seed": fingerprint["seed"],
        "row": learner.main_row,
        **rows[learner.main_row],
        "storage_bytes": storage(progress.storage[-1], image_bytes),
        "storage_bytes_by_task": [storage(parts, image_bytes)["total"] for parts in progress.storage],
        "seconds": sum(progress.task_seconds),
        "task_seconds": progress.task_seconds,
        "settings": fingerprint["settings"],
        "device": ledger.device_name() if fingerprint["device"] == "cuda" else "cpu",
        "versions": ledger.versions(),
    }
    if len(rows) > 1:
        result["rows"] = rows
    return result


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=list).encode()).hexdigest()[:16]


def defaults_for(data: DataSet) -> dict[str, Any]:
    """Settings that follow from the size of the images, where the learners' own are for CIFAR's 32 pixels."""
    size = max(data.image_shape[1:])
    if size <= 16:
        return {"backbone": "resnet8", "fixed_layers": 5, "base_epochs": 20, "epochs": 20, "batch_size": 64}
    if size <= 32:
        return {}
    backbone = "resnet18-small" if size <= 96 else "resnet18"
    return {"backbone": backbone, "fixed_layers": 13, "base_epochs": 100, "epochs": 100}


def settings_of(
    methods: Sequence[str], given: Mapping[str, Any], data: DataSet, preset: str | None = None
) -> dict[str, dict[str, Any]]:
    """What each method is given of the caller's settings: those that it has. One that none has is refused.

    preset  settings to start from, of the methods that have some of that name (gfr: own)
    """
    presets = {m: base.choose(m).presets for m in methods}
    if preset is not None and not any(preset in found for found in presets.values()):
        known_presets = sorted({name for found in presets.values() for name in found})
        raise SettingError(f"preset is {preset!r}; these methods have {', '.join(known_presets) or 'none'}")
    known = {m: {f.name for f in fields(base.choose(m).config_class)} for m in methods}
    for name in given:
        if not any(name in names for names in known.values()):
            raise unknown_setting(name, set().union(*known.values()))
    merged = {m: {**defaults_for(data), **presets[m].get(preset or "", {}), **given} for m in methods}
    return {m: {k: v for k, v in merged[m].items() if k in known[m]} for m in methods}


def learn_all(
    methods: Sequence[str],
    data: DataSet,
    split: TaskSplit,
    *,
    out: AnyPath,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Several methods, each in a folder of its own under `out`; a base task in common is trained once."""
    given = settings_of(methods, settings or {}, data, preset)
    folder = Path(out)
    for m in methods:  # what would be refused is refused now, not after hours of the methods before
        base.make_config(base.choose(m), given[m])
        _holds_a_run(folder / m, options.get("resume", False))
    return [
        learn(m, data, split, out=folder / m, settings=given[m], shared=folder / "shared", **options) for m in methods
    ]
