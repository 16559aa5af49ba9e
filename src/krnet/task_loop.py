"""The one task loop: every method learns the same tasks, is judged the same way, and can be killed at any time.

    data, class order, tasks, method -> learn -> DIR/run.json, and the learner as it ended

    for each task:   learner.learn(task) -> Work -> run, or taken from its file if it was finished before
                     predict on the test images of all tasks so far -> scores
                     the learner's state into DIR/state.krn, with the scores so far

What is written before a kill is used after it; the same command with `resume` ends in the same run.json, times aside.
One process at a time works in a DIR; the folder of shared base tasks is for any number.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from krnet.config import check_int
from krnet.data.dataset import DataSet
from krnet.data.protocol import TaskSplit
from krnet.device import exact_math, pick_device
from krnet.errors import RecordingError, ResumeError, SettingError
from krnet.io import archive, ledger
from krnet.io.atomic import AnyPath, make_folder, read_json, write_json
from krnet.io.header import RESTORE
from krnet.io.lock import working_in
from krnet.learners import base
from krnet.learners.scores import scores, storage
from krnet.learners.settings import settings_of
from krnet.train.classifier import Saving
from krnet.train.loop import Status

STATE, RUN, SETTINGS = "state.krn", "run.json", "settings.json"


class Watcher(Protocol):
    """Told what goes on; the command line draws it, TensorBoard keeps it."""

    def work(self, method: str, task: int, num_tasks: int, name: str, epochs: int | None = None) -> None: ...

    def status(self, status: Status) -> None: ...

    def accuracy(self, method: str, task: int, rows: Mapping[str, float]) -> None: ...


class SilentWatcher:
    def work(self, method: str, task: int, num_tasks: int, name: str, epochs: int | None = None) -> None: ...

    def status(self, status: Status) -> None: ...

    def accuracy(self, method: str, task: int, rows: Mapping[str, float]) -> None: ...


@dataclass
class Progress:
    """What a run has so far."""

    fingerprint: dict[str, Any]
    correct: dict[str, list[list[int] | None]]
    task_seconds: list[float]
    """What each task takes alone: work taken over from a file counts what it took when it was done."""
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
    preset: str | None = None,
    seed: int = 0,
    device: str | None = None,
    resume: bool = False,
    shared: AnyPath | None = None,
    watcher: Watcher | None = None,
    checkpoint_s: float = 60.0,
) -> dict[str, Any]:
    """Learn all tasks and write DIR/run.json, which is returned; DIR/state.krn keeps the network as it ended.

    settings  over the method's own and those that follow from the size of the images
    preset  settings to start from, of a method that has some of that name (gfr: own)
    out     folder of this run; a finished one is returned as it is if `resume`, else refused. No other process may
            work in it meanwhile
    shared  folder for base tasks, so that methods whose base task is the same train it once
    checkpoint_s  seconds between checkpoints inside a task

    `seconds` and `task_seconds` in run.json are what the run takes alone and at one go: the time before a kill counts,
    as far as a checkpoint or a file knows of it, and so does a base task that another method has trained.
    """
    plan = _plan(method, data, split, settings_of([method], settings or {}, data, preset)[method], seed, device)
    folder = Path(out)
    with working_in(folder):
        finished = _finished(folder, resume, plan)
        if finished is not None:
            return finished
        watcher = watcher or SilentWatcher()
        with torch.random.fork_rng(devices=[]), exact_math():
            torch.manual_seed(seed)
            context = base.Context(data, split, plan.device, seed, folder)
            learner = plan.learner_class(context, plan.config)  # may refuse its settings: nothing is written before
            write_json(folder / SETTINGS, plan.fingerprint)
            progress = _restore(folder / STATE, learner, plan.fingerprint)
            common = Path(shared) if shared else None
            for task in range(progress.tasks_done, split.num_tasks):
                _run_task(learner, task, progress, folder, resume, common, watcher, checkpoint_s)
        result = _summary(learner, progress, data)
        write_json(folder / RUN, result)
        learner.finish()
        return result


@dataclass(frozen=True)
class Plan:
    """A run, before anything is read or written for it."""

    learner_class: type[base.Learner]
    config: base.LearnerConfig
    device: torch.device
    fingerprint: dict[str, Any]


def _plan(
    method: str, data: DataSet, split: TaskSplit, settings: Mapping[str, Any], seed: int, device: str | None
) -> Plan:
    check_int("seed", seed, 0, 2**31)
    where = pick_device(device)
    learner_class = base.get_learner(method)
    config = base.make_config(learner_class, settings)
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
    return Plan(learner_class, config, where, fingerprint)


def _finished(folder: Path, resume: bool, plan: Plan) -> dict[str, Any] | None:
    """The result that a folder holds, if any; a run that is not to be taken up, or is another one, is refused."""
    held = (folder / SETTINGS).exists() or (folder / RUN).exists()
    if held and not resume:
        raise SettingError(f"{folder}: holds a run already. Give --resume to go on with it, or another folder")
    if held:
        saved = _read_json(folder / SETTINGS)
        if isinstance(saved.get("settings"), dict):
            saved["settings"] = plan.config.renewed(saved["settings"])
        _check_same(folder / SETTINGS, saved, plan.fingerprint)
    return _read_json(folder / RUN) if (folder / RUN).exists() else None


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
    number, earlier_s = 0, 0.0
    while True:
        # Whether the work before was run or taken from a file must not show in what is drawn now.
        torch.manual_seed(context.seed_for(task, 1 + number))
        with _advice(_start_again(folder)):  # a recording of the task before may be damaged
            work = next(works, None)
        if work is None:
            break
        told = time.perf_counter()
        watcher.work(learner.name, task, context.split.num_tasks, work.name, work.epochs)
        started += time.perf_counter() - told  # the first time, it imports TensorBoard
        partial, done = folder / f"task-{task}-{number}.partial", folder / f"task-{task}-{number}.done"
        files += [partial, done]
        common = None if shared is None or work.shared is None else shared / f"base-{_digest(work.shared)}.krn"
        saving = Saving(partial, resume, checkpoint_s)
        with _advice(f"Remove this file: {work.name} of task {task} is then trained again"):
            earlier_s += _do(work, saving, done, common, watcher)
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
    progress.task_seconds.append(time.perf_counter() - started + earlier_s)
    progress.storage.append(learner.storage_bytes())
    archive.write(folder / STATE, learner.state(), {"kind": "learner", **progress.to_json()})
    for path in files:
        path.unlink(missing_ok=True)


def _do(work: base.Work, saving: Saving, done: Path, common: Path | None, watcher: Watcher) -> float:
    """Run it, or take over what it came to before; the seconds that it took before now."""
    sources = ([done] if saving.resume else []) + ([common] if common is not None else [])
    source = next((path for path in sources if path.exists()), None)
    if source is not None:
        kept = archive.open_archive(source)
        work.take({name: kept.tensor(name) for name in kept.names})
        earlier_s = seconds = float(kept.metadata.get("seconds", 0.0))  # older files do not say
    else:
        earlier_s = base.seconds_before(work, saving.path) if saving.resume else 0.0
        begun = time.perf_counter()
        work.run(saving, watcher.status)
        seconds = time.perf_counter() - begun + earlier_s
    targets = [] if common is None or common.exists() else [common]
    # A copy of its own, too: another process that trains the same meanwhile may replace the shared one.
    targets += [done] if source != done else []
    for target in targets:
        make_folder(target.parent)
        archive.write(target, work.result(), {"kind": "work", "settings": work.shared or {}, "seconds": seconds})
    return earlier_s


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
    with _advice(_start_again(path.parent)):
        kept = archive.open_archive(path)
        meta = kept.metadata
        progress = Progress(fingerprint, meta["correct"], meta["task_seconds"], meta["storage"])
        learner.restore(progress.tasks_done - 1, {name: kept.tensor(name) for name in kept.names})
    return progress


@contextmanager
def _advice(text: str) -> Iterator[None]:
    """What to do about a damaged file here, where it is part of a run, instead of what an archive can say of any."""
    try:
        yield
    except RecordingError as error:
        raise type(error)(f"{str(error).removesuffix(f'. {RESTORE}')}. {text}") from error


def _start_again(folder: Path) -> str:
    return f"The run cannot go on from here: start again in another folder, or remove {folder}"


def _check_same(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            _check_same(path, found[name], value)  # names the one setting that differs
        elif found.get(name) != value:
            raise ResumeError(
                f"{path}: made with {name} {found.get(name)!r}; this run has {value!r}. Give the same settings, or "
                f"another folder"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ResumeError(f"{path}: cannot be read ({error}). {_start_again(path.parent)}") from error


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


def learn_all(
    methods: Sequence[str],
    data: DataSet,
    split: TaskSplit,
    *,
    out: AnyPath,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    shared: AnyPath | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Several methods, each in a folder of its own under `out`; a base task in common is trained once."""
    given = settings_of(methods, settings or {}, data, preset)
    folder, cpu = Path(out), torch.device("cpu")
    seed, resume = options.get("seed", 0), options.get("resume", False)
    for m in methods:  # what would be refused is refused now, not after hours of the methods before
        plan = _plan(m, data, split, given[m], seed, options.get("device"))
        with working_in(folder / m), torch.random.fork_rng(devices=[]):
            if _finished(folder / m, resume, plan) is None:
                plan.learner_class(base.Context(data, split, cpu, seed, folder / m), plan.config)
    common = shared or folder / "shared"
    return [learn(m, data, split, out=folder / m, settings=given[m], shared=common, **options) for m in methods]
