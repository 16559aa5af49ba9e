"""The task loop: every method learns the same tasks and is scored the same way, and a run can be killed at any time.

    data, task split, method, settings -> learn -> DIR/run.json, DIR/state.krn (the learner after its last task)
                                       -> learn_base -> the network after the base task alone

    for each task:   learner.learn(task) -> pieces of Work; each is run, or read from its file if it was finished
                     learner.predict(test images of all tasks so far) -> correct answers
                     learner state and correct answers -> DIR/state.krn

A killed run goes on from its files: the same command with `resume` ends in the same run.json, except for the times.
Only one process may work in a DIR; any number may share the folder of base tasks.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from krnet.config import check_int
from krnet.data import protocol, registry
from krnet.data.dataset import DataSet
from krnet.data.protocol import TaskSplit
from krnet.data.spec import DataSpec
from krnet.device import exact_math, pick_device
from krnet.errors import RecordingError, ResumeError, SettingError
from krnet.io import archive, ledger
from krnet.io.atomic import AnyPath, make_folder, read_json, write_json
from krnet.io.header import RESTORE
from krnet.io.lock import making, working_in
from krnet.io.overlap import refuse_overlap
from krnet.io.temporary import TemporaryFolder
from krnet.learners import base
from krnet.learners.base_task import check_base
from krnet.learners.scores import scores, storage
from krnet.learners.settings import settings_of
from krnet.nn.heads import Classifier
from krnet.progress import Progress, Watch, closing_watch
from krnet.run import (
    DATA_KEY,
    KEPT_KEY,
    RUN_FILE,
    SETTINGS_FILE,
    STATE_FILE,
    Run,
    Setup,
    check_kept_files,
    check_results,
    checksum_of,
    reading,
)
from krnet.train.classifier import Saving

COMMITS_KEY = "commits"
UNKNOWN_COMMIT = "unknown"  # of files that an earlier version of krnet wrote


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


@closing_watch
def learn(
    method: str,
    data: DataSet | str,
    split: TaskSplit | None = None,
    *,
    out: AnyPath | None = None,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    seed: int = 0,
    device: str | None = None,
    resume: bool = False,
    shared: AnyPath | None = None,
    validation: int = 0,
    watch: Watch | None = None,
    checkpoint_s: float = 60.0,
) -> Run:
    """Learn classes task after task. Returns the Run: the contents of DIR/run.json as a dict, and the final network.

    method  name of a learner: kril, finetune, joint, ...; `krnet.list_learners()` has them all
    data    a data set, or the name of one for `krnet.data.load`
    split   the classes of each task; by default half of all classes, then ten tasks (fewer, if there are not enough
            classes), in order lucir1993
    settings  override the method's defaults and the defaults for this image size
    preset  name of a set of settings to start from; the method must have it (kril: paper, gfr and pass: own)
    out     folder DIR of this run; by default a temporary folder that lives as long as the Run. If DIR holds a run,
            `resume` continues or returns it; without `resume` it is an error. Only one process may work in it
    shared  folder for base tasks: methods with the same base task train it once
    validation  training images of each class to hold out and judge on, instead of the test images: for choosing
            settings. See `DataSet.with_validation`; run.json says so
    watch   called with a Progress every few steps and after each task; `krnet.show_progress` draws a bar
    checkpoint_s  seconds between checkpoints inside a task

    `seconds` and `task_seconds` in run.json say how long the run would take without interruption and without shared
    files. Time before a kill counts as far as a checkpoint or file recorded it; so does a base task that another
    method trained.

    >>> import krnet
    >>> run = krnet.learn("finetune", "digits", settings={"base_epochs": 1, "epochs": 1})
    >>> run["tasks"], len(run.accuracy)
    ([5, 1, 1, 1, 1, 1], 6)
    >>> run.predict(krnet.data.load("digits").test.images).shape
    torch.Size([355])
    """
    base.get_learner(method)  # refuses an unknown name before any data are loaded
    sources = registry.folders_of(data) if isinstance(data, str) else []
    if isinstance(data, str):
        data = registry.load(data)
    data = _hold_out(data, validation)
    if split is None:
        split = protocol.split(protocol.DEFAULT_ORDER, num_classes=data.num_classes)
    plan = _make_plan(method, data, split, settings_of([method], settings or {}, data, preset)[method], seed, device)
    keeper: TemporaryFolder | None = None
    if out is None:
        if resume:
            raise SettingError("resume is given without out; give the folder of the run to go on with")
        keeper = TemporaryFolder()
        out = keeper.path
    folder, config = Path(out), plan.config
    refuse_overlap("learn", [folder], [*sources, *([config.base] if Path(config.base).is_file() else [])])
    setup = Setup(data=DataSpec.of(data), config=config, device=plan.device, keeper=keeper)
    with working_in(folder):
        finished_run = _read_finished_run(folder, resume, plan)
        if finished_run is not None:
            return Run(finished_run, folder, setup)
        with torch.random.fork_rng(devices=[]), exact_math():
            torch.manual_seed(seed)
            context = base.Context(data, split, plan.device, seed, folder)
            learner = plan.learner_class(context, plan.config)  # raises on bad settings, so write nothing before
            results = _restore_results(folder, learner, plan.fingerprint)
            results.note_commit(ledger.commit(), folder)
            shared_folder = Path(shared) if shared else None
            for task in range(results.tasks_done, split.num_tasks):
                _run_task(learner, task, results, folder, resume, shared_folder, watch, checkpoint_s)
        result = _summarize(learner, results, data)
        write_json(folder / RUN_FILE, result)
        learner.finish()
        return Run(result, folder, setup)


def learn_base(
    data: DataSet,
    split: TaskSplit,
    *,
    out: AnyPath,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    seed: int = 0,
    device: str | None = None,
    shared: AnyPath | None = None,
    watch: Watch | None = None,
    checkpoint_s: float = 60.0,
) -> Classifier:
    """Train the network of the base task alone, as `learn` does for methods with a linear head. Returns it.

    An interrupted training goes on from what it left in folder `out`; another process that asks for it waits. A base
    task that a run of `learn` left in `shared` is read, and a new one is left there for later runs.
    """
    method = "finetune"
    plan = _make_plan(method, data, split, settings_of([method], settings or {}, data, preset)[method], seed, device)
    folder, shared_folder = Path(out), Path(shared) if shared else None
    with torch.random.fork_rng(devices=[]), exact_math():
        torch.manual_seed(seed)
        context = base.Context(data, split, plan.device, seed, folder)
        learner = plan.learner_class(context, plan.config)
        learner.expand(0)
        torch.manual_seed(context.seed_for(0, 1))  # as before the first work of `learn`
        work = learner.base_work()
        name = "base" if work.shared is None else f"base-{_digest(work.shared)}"  # other settings have other files
        done, saving = folder / f"{name}.done", Saving(folder / f"{name}.partial", True, checkpoint_s)
        watch_work = _watch_work(watch, f"base task: {work.name}", work.epochs)
        with making(done), _with_advice("Remove this file: the base task is then trained again"):
            _run_or_load(work, saving, done, _shared_path(work, shared_folder), watch_work)
    learner.model.eval().requires_grad_(False)
    return learner.model


def _hold_out(data: DataSet, validation: int) -> DataSet:
    check_int("validation", validation, 0)
    return data.with_validation(validation) if validation else data


@dataclass(frozen=True)
class RunPlan:
    """What identifies a run, known before any file is read or written."""

    learner_class: type[base.Learner]
    config: base.LearnerConfig
    device: torch.device
    fingerprint: dict[str, Any]


def _make_plan(
    method: str, data: DataSet, split: TaskSplit, settings: Mapping[str, Any], seed: int, device: str | None
) -> RunPlan:
    check_int("seed", seed, 0, 2**31)
    torch_device = pick_device(device)
    learner_class = base.get_learner(method)
    config = base.make_config(learner_class, settings)
    check_base(config.base)
    fingerprint = {
        "method": method,
        "validation": data.validation,
        "data": data.name,
        "data_digest": data.digest,
        "samples": [data.train.num_samples, data.test.num_samples],
        "order": split.order_name,
        "order_hash": split.hash,
        "tasks": [len(classes) for classes in split.tasks],
        "seed": seed,
        "device": torch_device.type,
        "settings": base.plain_settings(config),
    }
    return RunPlan(learner_class, config, torch_device, fingerprint)


def _read_finished_run(folder: Path, resume: bool, plan: RunPlan) -> dict[str, Any] | None:
    """Return run.json if the folder holds a finished run.

    Raises an error if it holds any run and `resume` is off, or a run with other settings.
    """
    has_run = (folder / SETTINGS_FILE).exists() or (folder / RUN_FILE).exists()
    if has_run and not resume:
        raise SettingError(
            f"{folder}: holds a run already. Give --resume (in Python, resume=True) to go on with it, or another folder"
        )
    if not has_run:
        return None
    with reading(folder / SETTINGS_FILE, ResumeError):
        saved = {"validation": 0, **_read_json(folder / SETTINGS_FILE)}  # earlier versions could hold out no images
        if isinstance(saved.get("settings"), dict):
            saved["settings"] = plan.config.renewed(saved["settings"])
        _check_same(folder / SETTINGS_FILE, saved, plan.fingerprint)
    if not (folder / RUN_FILE).exists():
        return None
    finished = _read_json(folder / RUN_FILE)
    with reading(folder / RUN_FILE, ResumeError):
        check_results(folder / RUN_FILE, finished)
    return finished


def _run_task(
    learner: base.Learner,
    task: int,
    results: Results,
    folder: Path,
    resume: bool,
    shared: Path | None,
    watch: Watch | None,
    checkpoint_s: float,
) -> None:
    started = time.perf_counter()
    context = learner.context
    files: list[Path] = []
    works = learner.learn(task)
    task_name = f"{learner.name}, " + (f"task {task} of {context.split.num_tasks - 1}" if task else "base task")
    number, earlier_s = 0, 0.0
    while True:
        # Seed again: the random draws must not depend on whether the previous work was run or read from its file.
        torch.manual_seed(context.seed_for(task, 1 + number))
        with _with_advice(_start_again_advice(folder)):  # a recording of the previous task may be damaged
            work = next(works, None)
        if work is None:
            break
        watch_started = time.perf_counter()
        watch_work = _watch_work(watch, f"{task_name}: {work.name}", work.epochs)
        started += time.perf_counter() - watch_started  # do not count it: the first call imports TensorBoard
        partial, done = folder / f"task-{task}-{number}.partial", folder / f"task-{task}-{number}.done"
        files += [partial, done]
        shared_file = _shared_path(work, shared)
        saving = Saving(partial, resume, checkpoint_s)
        with _with_advice(f"Remove this file: {work.name} of {protocol.task_name(task)} is then trained again"):
            seconds, commit = _run_or_load(work, saving, done, shared_file, watch_work)
        earlier_s += seconds
        results.note_commit(commit, folder)
        number += 1
    if learner.learns(task):
        rows = _count_correct(learner, task)
        for row, correct in rows.items():
            results.correct.setdefault(row, []).append(correct)
        counts = num_test_images(context)
        accuracy = {
            "accuracy" if row == learner.main_row else f"accuracy {row}": sum(correct) / sum(counts[: task + 1])
            for row, correct in sorted(rows.items(), key=lambda item: item[0] != learner.main_row)
        }
        if watch:
            watch(Progress(f"{task_name} done", done=task, unit="tasks", values=accuracy))
    else:
        for correct_by_task in results.correct.values():
            correct_by_task.append(None)
    results.task_seconds.append(time.perf_counter() - started + earlier_s)
    results.storage.append(learner.storage_bytes())
    metadata = {"kind": "learner", **results.to_json(), DATA_KEY: DataSpec.of(context.data).to_json()}
    metadata[KEPT_KEY] = {path.name: checksum_of(path) for path in learner.kept_files().values()}
    archive.write(folder / STATE_FILE, learner.state(), metadata)
    for path in files:
        path.unlink(missing_ok=True)


def _shared_path(work: base.Work, shared: Path | None) -> Path | None:
    """The file in the folder of base tasks where runs look for this work; None if they do not share it."""
    return None if shared is None or work.shared is None else shared / f"base-{_digest(work.shared)}.krn"


def _watch_work(watch: Watch | None, name: str, epochs: int | None) -> Watch | None:
    """Tell that a piece of work begins, and return the watcher of its results."""
    if watch is None:
        return None
    watch(Progress(name))

    def watch_work(progress: Progress) -> None:
        epoch = {} if epochs is None else {"epoch": round((progress.share or 0.0) * epochs, 1)}
        full_name = name if progress.share is not None else f"{name}, {progress.name}"  # an announcement
        watch(replace(progress, name=full_name, values={**epoch, **progress.values}))

    return watch_work


def _run_or_load(
    work: base.Work, saving: Saving, done: Path, shared_file: Path | None, watch: Watch | None
) -> tuple[float, str]:
    """Run the work, or load its result if a file has it.

    Returns the seconds that it took before this process, less those of waiting for another one, and the commit of the
    code that finished it.
    """
    asked = time.perf_counter()
    is_done = saving.resume and done.exists()
    must_make = shared_file is not None and not is_done and not shared_file.exists()
    # Another process may be training the same base task: wait for its file.
    with making(shared_file) if must_make and shared_file else nullcontext():
        waited_s = time.perf_counter() - asked
        earlier_s, commit = _run_or_load_now(work, saving, done, shared_file, watch)
    return earlier_s - waited_s, commit


def _run_or_load_now(
    work: base.Work, saving: Saving, done: Path, shared_file: Path | None, watch: Watch | None
) -> tuple[float, str]:
    sources = ([done] if saving.resume else []) + ([shared_file] if shared_file is not None else [])
    source = next((path for path in sources if path.exists()), None)
    if source is not None:
        saved = archive.open_archive(source)
        work.take({name: saved.tensor(name) for name in saved.names})
        earlier_s = seconds = float(saved.metadata.get("seconds", 0.0))  # old files lack it
        commit = str(saved.metadata.get("commit", UNKNOWN_COMMIT))
    else:
        earlier_s = base.saved_time_s(work, saving.path) if saving.resume else 0.0
        run_started = time.perf_counter()
        work.run(saving, watch)
        seconds, commit = time.perf_counter() - run_started + earlier_s, ledger.commit()
    targets = [] if shared_file is None or shared_file.exists() else [shared_file]
    # Also keep a copy in this run's folder: another process may train the same base task and replace the shared file.
    targets += [done] if source != done else []
    for target in targets:
        make_folder(target.parent)
        metadata = {"kind": "work", "settings": work.shared or {}, "seconds": seconds, "commit": commit}
        archive.write(target, work.result(), metadata)
    return earlier_s, commit


def _count_correct(learner: base.Learner, task: int) -> dict[str, list[int]]:
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


def _restore_results(folder: Path, learner: base.Learner, fingerprint: dict[str, Any]) -> Results:
    commits: list[str] = []
    if (folder / SETTINGS_FILE).exists():
        commits = _read_json(folder / SETTINGS_FILE).get(COMMITS_KEY, [UNKNOWN_COMMIT])
        if not isinstance(commits, list) or not all(isinstance(commit, str) for commit in commits):
            raise ResumeError(
                f"{folder / SETTINGS_FILE}: {COMMITS_KEY} is {commits!r:.99}; expected a list of commits. "
                f"{_start_again_advice(folder)}"
            )
    if not (folder / STATE_FILE).exists():
        return Results(fingerprint, {}, [], [], commits)
    with _with_advice(_start_again_advice(folder)), reading(folder / STATE_FILE, ResumeError):
        saved = archive.open_archive(folder / STATE_FILE)
        meta = saved.metadata
        results = Results(fingerprint, meta["correct"], meta["task_seconds"], meta["storage"], commits)
        results.check(learner.context.split.num_tasks)
        check_kept_files(folder, meta)
        learner.restore(results.tasks_done - 1, {name: saved.tensor(name) for name in saved.names})
    return results


@contextmanager
def _with_advice(text: str) -> Iterator[None]:
    """Replace the general advice in a damaged file's error by advice that fits a file of a run."""
    try:
        yield
    except RecordingError as error:
        raise type(error)(f"{str(error).removesuffix(f'. {RESTORE}')}. {text}") from error


def _start_again_advice(folder: Path) -> str:
    return f"The run cannot go on from here: start again in another folder, or remove {folder}"


def _check_same(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            # So the message names the one setting that differs; one that only the file has differs, too.
            _check_same(path, found[name], dict.fromkeys(found[name]) | value)
        elif found.get(name) != value:
            raise ResumeError(
                f"{path}: made with {name} {found.get(name)!r}; this run has {value!r}. Give the same settings (those "
                f"left out have their defaults), or another folder"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ResumeError(f"{path}: cannot be read ({error}). {_start_again_advice(path.parent)}") from error


def _summarize(learner: base.Learner, results: Results, data: DataSet) -> dict[str, Any]:
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
    validation: int = 0,
    only: Sequence[str] | None = None,
    finished: Callable[[Run], None] | None = None,
    **options: Any,
) -> list[Run]:
    """Learn with several methods, each in its own folder under `out`. Methods with the same base task train it once.

    only      the methods that this process learns with, if others have the rest; None: all
    finished  called with each run as soon as it ends, and with those that `resume` finds finished
    """
    data = _hold_out(data, validation)
    settings_by_method = settings_of(methods, settings or {}, data, preset)
    folder = Path(out)
    asked = {name: options[name] for name in ("seed", "device", "resume") if name in options}
    own_methods = methods if only is None else only
    check_all(own_methods, data, split, out=folder, settings=settings_by_method, **asked)
    runs = []
    for m in own_methods:
        own, shared_folder = settings_by_method[m], shared or folder / "shared"
        runs.append(learn(m, data, split, out=folder / m, settings=own, shared=shared_folder, **options))
        if finished:
            finished(runs[-1])
    return runs


def check_all(
    methods: Sequence[str],
    data: DataSet,
    split: TaskSplit,
    *,
    out: Path,
    settings: Mapping[str, Mapping[str, Any]],
    seed: int = 0,
    device: str | None = None,
    resume: bool = False,
) -> None:
    """Find errors in all methods now, not after hours of training the first ones. Writes nothing.

    settings  by method, as `settings_of` makes them
    """
    for m in methods:
        plan = _make_plan(m, data, split, settings[m], seed, device)
        with working_in(out / m), torch.random.fork_rng(devices=[]):
            if _read_finished_run(out / m, resume, plan) is None:
                plan.learner_class(base.Context(data, split, torch.device("cpu"), seed, out / m), plan.config)
