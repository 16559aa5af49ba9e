"""Run what the ledger lacks of a recipe: resume what was cut off, append a row for each run, go on after failures.

    Recipe, seeds -> missing -> Job ... -> Work.perform in OUT/RECIPE/RUN-seedN-DIGEST -> a row of the ledger

A run that fails leaves a row that says why, and is tried again by the next call. With --quick the rows go to a ledger
of their own in OUT: tiny runs must not stand among results.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from krnet.config import check_int, unknown_setting
from krnet.errors import BusyFolderError
from krnet.io import ledger
from krnet.progress import Progress, Watch
from krnet.reproduce.compare import newest_rows
from krnet.reproduce.recipe import Recipe, RecipeRun, read_recipe
from krnet.reproduce.works.base import Place, get_work

OUT, QUICK_OUT = Path("runs/reproduce"), Path("runs/reproduce-quick")
LEDGER_VARIABLE = "KRNET_LEDGER"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run with one seed, and where to work."""

    recipe: str
    run: RecipeRun
    seed: int
    out: Path
    data_dir: Path | None
    device: str | None

    @property
    def name(self) -> str:
        return f"{self.recipe}, {self.run.name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """The digest keeps runs apart whose recipe was changed in between."""
        identity = json.dumps([self.run.work, dict(self.run.settings)], sort_keys=True, default=str)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        return self.out / self.recipe / f"{slug(self.run.name)}-seed{self.seed}-{digest}"

    def place(self, watch: Watch | None) -> Place:
        shared = self.out / "shared"
        return Place(
            folder=self.folder, shared=shared, data_dir=self.data_dir, device=self.device, watch=watch
        )  # fmt: skip


def slug(text: str) -> str:
    """A name for a folder: "KRIL, 6.1 MB" -> KRIL-6.1-MB"""
    return re.sub(r"[^\w.]+", "-", text).strip("-")


def reproduce(
    name: str,
    *,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    quick: bool = False,
    out: Path | None = None,
    jobs: int = 1,
    data_dir: Path | None = None,
    device: str | None = None,
    watch: Watch | None = None,
    say: Say = lambda text: None,
) -> list[str]:
    """Run what is missing of a recipe; returns the errors of runs that failed, by name.

    seeds  instead of those of the recipe
    only   names of runs, or parts of names: the others are left out
    quick  tiny settings, in minutes on the digits; the ledger is then OUT/ledger.jsonl
    out    folder of all runs; by default runs/reproduce, or runs/reproduce-quick
    jobs   processes that work side by side, each at one run
    """
    check_int("jobs", jobs, 1)
    recipe = read_recipe(name, quick=quick)
    if only is not None:
        recipe = chosen_runs(recipe, only)
    folder = out_folder(out, quick)
    ledger.commit()  # looked up now: the source may change before the last run ends
    with ledger_of(folder, quick):
        waiting = [
            Job(recipe=recipe.name, run=run, seed=seed, out=folder, data_dir=data_dir, device=device)
            for run, seed in missing(recipe, ledger.read(), seeds)
        ]
        if jobs == 1 or len(waiting) == 1:
            return _run_here(waiting, watch, say)
        return _run_in_processes(waiting, jobs, watch, say)


def chosen_runs(recipe: Recipe, names: Sequence[str]) -> Recipe:
    """The recipe with the runs alone that have one of these names, or whose name has all the parts of one of them.

    Of "pca, lm, 1" the parts are "pca", "lm" and "1".
    """
    chosen = set()
    for name in names:
        found = {run.name for run in recipe.runs if run.name == name or _parts(name) <= _parts(run.name)}
        if not found:
            names_known = {run.name for run in recipe.runs}
            parts_known = set().union(*map(_parts, names_known))
            raise unknown_setting(name, names_known if ", " in name else parts_known, "run")
        chosen |= found
    return replace(recipe, runs=tuple(run for run in recipe.runs if run.name in chosen))


def _parts(name: str) -> set[str]:
    return set(name.split(", "))


def out_folder(out: Path | None, quick: bool) -> Path:
    return out or (QUICK_OUT if quick else OUT)


@contextmanager
def ledger_of(folder: Path, quick: bool) -> Iterator[None]:
    """Let all rows go to the ledger of quick runs, also those of processes that are started inside."""
    if not quick:
        yield
        return
    before = os.environ.get(LEDGER_VARIABLE)
    os.environ[LEDGER_VARIABLE] = str((folder / "ledger.jsonl").absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ[LEDGER_VARIABLE]
        else:
            os.environ[LEDGER_VARIABLE] = before


def missing(
    recipe: Recipe, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int] | None = None
) -> list[tuple[RecipeRun, int]]:
    """The runs and seeds that no row of the ledger holds. All runs of the first seed come first."""
    done = newest_rows(recipe, rows)
    asked = [(run, seed, number) for run in recipe.runs for number, seed in enumerate(seeds or run.seeds)]
    asked.sort(key=lambda item: item[2])  # stable: the order of the recipe within a seed
    return [(run, seed) for run, seed, _ in asked if not _holds(done[run.name], seed)]


def _holds(rows: Mapping[int | None, Any], seed: int) -> bool:
    return seed in rows or None in rows  # a row without a seed is of a work that draws nothing at random


# ------------------------------------------------------------------ one run


def _perform(job: Job, watch: Watch | None) -> str | None:
    """Do one run; returns its error, which is then a row of the ledger, too."""
    started = time.perf_counter()
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        get_work(job.run.work).perform(job.recipe, job.run.settings, job.seed, job.place(watch))
    except BusyFolderError as error:  # no result of this run: another process is at it
        return f"{job.name}: {error}"
    except Exception as error:  # any error: the other runs go on
        return _append_failure(job, f"{type(error).__name__}: {error}", time.perf_counter() - started)
    return None


def _append_failure(job: Job, error: str, seconds: float) -> str:
    settings = {"work": job.run.work, "run": job.run.name, **job.run.settings}
    metrics = {name: settings[name] for name in ("method",) if name in settings}  # tables tell rows of learning by it
    ledger.append(job.recipe, settings=settings, metrics=metrics, seconds=seconds, seed=job.seed, outcome=error)
    return f"{job.name}: {error}"


def _run_here(jobs: Sequence[Job], watch: Watch | None, say: Say) -> list[str]:
    errors = []
    for number, job in enumerate(jobs, 1):
        say(f"[{number}/{len(jobs)}] {job.name}")
        error = _perform(job, watch)
        if error:
            say(f"failed: {error}")
            errors.append(error)
    return errors


# ------------------------------------------------------------------ several processes


def _run_in_processes(jobs: Sequence[Job], limit: int, watch: Watch | None, say: Say) -> list[str]:
    # Spawn, not fork: a process that has used a GPU or threads cannot be forked.
    spawn = multiprocessing.get_context("spawn")
    waiting, errors = list(enumerate(jobs, 1)), []
    running: dict[Any, tuple[Any, Job, float]] = {}  # pipe from a process -> process, its job, time of its start
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                number, job = waiting.pop(0)
                say(f"[{number}/{len(jobs)}] {job.name}")
                incoming, sender = spawn.Pipe(duplex=False)
                process = spawn.Process(target=_work_in_process, args=(job, sender))
                process.start()
                sender.close()  # so that the other end sees when the process ends
                running[incoming] = process, job, time.perf_counter()
            for receiver in multiprocessing.connection.wait(list(running)):
                process, job, started = running[receiver]
                message: Any
                try:
                    message = receiver.recv()  # type: ignore[union-attr, call-arg]
                except EOFError:
                    process.join()
                    del running[receiver]
                    if process.exitcode:
                        text = f"its process ended with {process.exitcode}"
                        message = _append_failure(job, text, time.perf_counter() - started)
                    else:
                        continue
                if isinstance(message, Progress):
                    if watch:
                        watch(message)
                else:
                    say(f"failed: {message}")
                    errors.append(message)
    finally:
        for process, _, _ in running.values():
            process.terminate()
            process.join()
    return errors


def _work_in_process(job: Job, sender: Any) -> None:
    """Do one run; send what it tells after each task, and its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who then ends this process

    def watch(progress: Progress) -> None:
        if progress.unit == "tasks" or progress.share is None:  # bars of several runs would overwrite each other
            sender.send(Progress(f"{job.run.name}, seed {job.seed}: {progress.name}", values=progress.values))

    error = _perform(job, watch)
    if error:
        sender.send(error)
    sender.close()
