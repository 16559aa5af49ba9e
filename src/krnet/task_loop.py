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

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from krnet.config import check_int
from krnet.data import protocol, registry
from krnet.data.dataset import DataSet
from krnet.data.protocol import TaskSplit
from krnet.data.spec import DataSpec
from krnet.device import exact_math, pick_device
from krnet.errors import ResumeError, SettingError
from krnet.io import archive, ledger
from krnet.io.atomic import AnyPath, write_json
from krnet.io.lock import making, working_in
from krnet.io.overlap import refuse_overlap
from krnet.io.run_file import RUN_FILE
from krnet.io.temporary import TemporaryFolder
from krnet.learners import base
from krnet.learners.base_task import check_base
from krnet.learners.config import plain_settings
from krnet.learners.settings import settings_of
from krnet.nn.heads import Classifier
from krnet.progress import Progress, Watch, closing_watch
from krnet.run import Run, Setup
from krnet.run_files import (
    DATA_KEY,
    KEPT_KEY,
    SETTINGS_FILE,
    STATE_FILE,
    check_results,
    check_same,
    checksum_of,
    read_saved,
    reading,
    start_again_advice,
    with_advice,
)
from krnet.task_results import Results, count_correct, num_test_images, restore_results, summarize
from krnet.train.classifier import Saving
from krnet.work_files import digest_of, run_or_load, shared_path, watch_work


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
            results = restore_results(folder, learner, plan.fingerprint)
            results.note_commit(ledger.commit(), folder)
            call = _Call(folder, resume, Path(shared) if shared else None, watch, checkpoint_s)
            for task in range(results.tasks_done, split.num_tasks):
                _run_task(learner, task, results, call)
        result = summarize(learner, results, data)
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
        name = "base" if work.shared is None else f"base-{digest_of(work.shared)}"  # other settings have other files
        done, saving = folder / f"{name}.done", Saving(folder / f"{name}.partial", True, checkpoint_s)
        tell = watch_work(watch, f"base task: {work.name}", work.epochs)
        with making(done), with_advice("Remove this file: the base task is then trained again"):
            run_or_load(work, saving, done, shared_path(work, shared_folder), tell)
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
        "settings": plain_settings(config),
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
        saved = {"validation": 0, **read_saved(folder / SETTINGS_FILE)}  # earlier versions could hold out no images
        if isinstance(saved.get("settings"), dict):
            saved["settings"] = plan.config.renewed(saved["settings"])
        check_same(folder / SETTINGS_FILE, saved, plan.fingerprint)
    if not (folder / RUN_FILE).exists():
        return None
    finished = read_saved(folder / RUN_FILE)
    with reading(folder / RUN_FILE, ResumeError):
        check_results(folder / RUN_FILE, finished)
    return finished


@dataclass(frozen=True)
class _Call:
    """What one call of `learn` was told, besides what identifies the run."""

    folder: Path
    resume: bool
    shared: Path | None
    watch: Watch | None
    checkpoint_s: float


def _run_task(learner: base.Learner, task: int, results: Results, call: _Call) -> None:
    """Learn one task, score it, and write the state that the next one starts from."""
    started, earlier_s = time.perf_counter(), 0.0
    context, folder = learner.context, call.folder
    files: list[Path] = []
    task_name = f"{learner.name}, " + (f"task {task} of {context.split.num_tasks - 1}" if task else "base task")
    for number, work in enumerate(_works(learner, task, folder)):
        watch_started = time.perf_counter()
        tell = watch_work(call.watch, f"{task_name}: {work.name}", work.epochs)
        started += time.perf_counter() - watch_started  # do not count it: the first call imports TensorBoard
        partial, done = folder / f"task-{task}-{number}.partial", folder / f"task-{task}-{number}.done"
        files += [partial, done]
        saving = Saving(partial, call.resume, call.checkpoint_s)
        with with_advice(f"Remove this file: {work.name} of {protocol.task_name(task)} is then trained again"):
            seconds, commit = run_or_load(work, saving, done, shared_path(work, call.shared), tell)
        earlier_s += seconds
        results.note_commit(commit, folder)
    accuracy = _score(learner, task, results)
    if call.watch and accuracy:
        call.watch(Progress(f"{task_name} done", done=task, unit="tasks", values=accuracy))
    results.task_seconds.append(time.perf_counter() - started + earlier_s)
    results.storage.append(learner.storage_bytes())
    metadata = {"kind": "learner", **results.to_json(), DATA_KEY: DataSpec.of(context.data).to_json()}
    metadata[KEPT_KEY] = {path.name: checksum_of(path) for path in learner.kept_files().values()}
    archive.write(folder / STATE_FILE, learner.state(), metadata)
    for path in files:
        path.unlink(missing_ok=True)


def _works(learner: base.Learner, task: int, folder: Path) -> Iterator[base.Work]:
    """The pieces of work of a task, each after the one before it is done."""
    works = learner.learn(task)
    for number in count():
        # Seed again: the random draws must not depend on whether the previous work was run or read from its file.
        torch.manual_seed(learner.context.seed_for(task, 1 + number))
        with with_advice(start_again_advice(folder)):  # a recording of the previous task may be damaged
            work = next(works, None)
        if work is None:
            return
        yield work


def _score(learner: base.Learner, task: int, results: Results) -> dict[str, float]:
    """Note the right answers after a task. Returns accuracies by name, the main row's first; {} if it is skipped."""
    if not learner.learns(task):
        for correct_by_task in results.correct.values():
            correct_by_task.append(None)
        return {}
    rows = count_correct(learner, task)
    for row, correct in rows.items():
        results.correct.setdefault(row, []).append(correct)
    num_images = sum(num_test_images(learner.context)[: task + 1])
    return {
        "accuracy" if row == learner.main_row else f"accuracy {row}": sum(correct) / num_images
        for row, correct in sorted(rows.items(), key=lambda item: item[0] != learner.main_row)
    }


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
