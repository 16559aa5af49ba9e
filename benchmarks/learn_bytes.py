"""Measure last accuracy against stored bytes: KRIL with every recorder, and exemplar methods, at the same budgets.

    methods x budgets -> krnet.learn, the base task trained once -> OUT/POINT/run.json and a ledger row per point
    ledger rows of recipes learn and learn-bytes -> plot_bytes.py -> a table on stdout, OUT/bytes.png

    python benchmarks/learn_bytes.py --data cifar100 --data-dir DIR --out runs/bytes --jobs 4
    python benchmarks/learn_bytes.py --data cifar100 --draw-only results/ledger.jsonl -o bytes.png

A method is NAME[:RECORDER][:SETTING=VALUE]...[@BUDGET]: kril:pca, kril:krnet:kr2=false, lucir@6.16MB. It is learned at
each of --budgets, or at the budget after @. It is learned once, without a budget, after @none (kril:raw@none) and if it
has no such setting (finetune, joint). A budget limits the bytes that are stored after the last task, without the
current classifier.

A point is one method at one budget. A finished point is not learned again, a killed one continues, and one that fails
leaves a row with its error. Exemplar methods keep the same number of images of each class: 1.54, 3.08, 6.16 and
12.31 MB are 5, 10, 20 and 40 CIFAR images per class.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import plot_bytes

from krnet import data, task_loop
from krnet.config import format_size, parse_setting, parse_size, parse_sizes, unknown_setting
from krnet.data import protocol
from krnet.data.dataset import DataSet
from krnet.device import pick_device
from krnet.errors import KrnetError, SettingError
from krnet.io import ledger
from krnet.learners import base
from krnet.learners.settings import settings_of
from krnet.run import Run, append_row

RECIPE = "learn-bytes"
BUDGETS = "1.54MB,3.08MB,6.16MB,12.31MB"
METHODS = "kril:krnet,kril:pca,kril:quantized,kril:transform,kril:pq,kril:autoencoder,kril:images,lucir,icarl"


@dataclass(frozen=True)
class Point:
    """A method with given settings, at one budget or without a budget."""

    method: str
    settings: dict[str, Any]
    budget: int | None

    @property
    def name(self) -> str:
        others = {k: v for k, v in self.settings.items() if k != "recorder"}
        parts = [self.method, self.settings.get("recorder"), *(f"{name}={value}" for name, value in others.items())]
        return ":".join(part for part in parts if part) + (
            "" if self.budget is None else f"@{format_size(self.budget)}"
        )


def parse_points(methods: str, budgets: Sequence[int]) -> list[Point]:
    """Read the methods; points without a budget come first, then budget after budget.

    In this order the points that are finished when time runs out can be compared.
    """
    points = []
    for text in filter(None, (part.strip() for part in methods.split(","))):
        description, at, budget = text.partition("@")
        name, *parts = description.split(":")
        known = {field.name for field in fields(base.get_learner(name).config_class)}
        if parts and "=" not in parts[0] and "recorder" in known:
            parts[0] = f"recorder={parts[0]}"
        try:
            settings = dict(parse_setting(part) for part in parts)
        except ValueError as error:
            raise SettingError(f"method {text!r}: {error}") from error
        for setting in settings:
            if setting not in known - {"budget"}:
                raise unknown_setting(setting, known - {"budget"})
        if budget == "none" or ("budget" not in known and not at):
            sizes: list[int | None] = [None]
        elif "budget" not in known:
            raise SettingError(f"method {text!r}: {name} has no budget; leave {at}{budget} out")
        else:
            sizes = [parse_size(budget, f"budget of {description}")] if at else [*budgets]
        points += [Point(name, settings, size) for size in sizes]
    if not points:
        raise SettingError(f"methods is {methods!r}; expected names such as kril:krnet,lucir")
    unique = [point for place, point in enumerate(points) if point not in points[:place]]
    return sorted(unique, key=lambda point: point.budget or 0)


@dataclass(frozen=True)
class Plan:
    """The inputs that all points share."""

    data: str
    data_dir: Path | None
    order: str
    tasks: int
    base_classes: int | None
    seed: int
    device: str | None
    out: Path
    given: dict[str, dict[str, Any]]
    """Settings by method; the settings of a point replace them."""
    validation: int = 0
    """Training images of each class to hold out and judge on."""

    def load(self) -> tuple[DataSet, protocol.TaskSplit]:
        images = load_data(self.data, self.data_dir, self.validation)
        split = protocol.split(
            self.order, num_classes=images.num_classes, base_classes=self.base_classes, tasks=self.tasks
        )
        return images, split

    def settings(self, point: Point) -> dict[str, Any]:
        budget = {} if point.budget is None else {"budget": point.budget}
        return {**self.given[point.method], **point.settings, **budget}

    def folder(self, point: Point) -> Path:
        """Name the folder by a digest of everything that changes the result, so that no two points share one."""
        images, split = self.load()
        config = base.plain_settings(base.make_config(base.get_learner(point.method), self.settings(point)))
        kind = pick_device(self.device).type
        identity = [config, images.digest, split.hash, [len(c) for c in split.tasks], self.seed, kind]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        return self.out / f"{re.sub('[:/ ]+', '-', point.name)}-{digest}"


@cache
def load_data(name: str, folder: Path | None, validation: int = 0) -> DataSet:
    images = data.load(name, folder)
    return images.with_validation(validation) if validation else images


class Watch:
    """Print a line per task on stderr, and let one process at a time train a base task, which the others then read."""

    def __init__(self, name: str, lock: TextIO):
        self.name, self.lock, self.has_begun = name, lock, False

    def __call__(self, progress):
        if progress.unit == "tasks":
            self.release()
            values = ", ".join(f"{name} {100 * value:.2f}" for name, value in progress.values.items())
            say(f"{self.name} task {progress.done}: {values}")
        elif progress.share is None:  # a piece of work begins
            self.release()
            if ", task 0 of" in progress.name and not self.has_begun:
                fcntl.flock(self.lock, fcntl.LOCK_EX)
            self.has_begun = True

    def release(self):
        fcntl.flock(self.lock, fcntl.LOCK_UN)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def learn_point(plan: Plan, point: Point, command: str) -> None:
    """Learn a point and append its row; an error becomes a row too."""
    started = time.perf_counter()
    try:
        images, split = plan.load()
        folder, shared = plan.folder(point), plan.out / "shared"
        shared.mkdir(parents=True, exist_ok=True)
        with open(shared / "lock", "w") as lock:  # released when the file is closed or this process dies
            run = task_loop.learn(
                point.method, images, split, out=folder, settings=plan.settings(point), seed=plan.seed,
                device=plan.device, resume=True, shared=shared, watch=Watch(point.name, lock),
            )  # fmt: skip
    except Exception as error:  # any error: the other points go on
        append_failure(plan, point, f"{type(error).__name__}: {error}", command, time.perf_counter() - started)
        return
    append_run(run, point.budget, command)


def append_run(run: Run, budget: int | None, command: str) -> None:
    """Append a row, unless the ledger has it: a process may have been killed between its run and its row."""
    # Times identify a run: no two runs take the same microseconds.
    if any(row["metrics"].get("task_seconds") == run["task_seconds"] for row in ledger.read()):
        return
    over = {} if budget is None else {"over_budget": run.storage_bytes > budget}
    append_row(run, RECIPE, command=command, **over)


def append_failure(plan: Plan, point: Point, error: str, command: str, seconds: float) -> None:
    images, split = plan.load()
    say(f"{point.name} failed: {error}")
    tasks = [len(classes) for classes in split.tasks]
    ledger.append(
        RECIPE, settings={**plan.settings(point), "tasks": tasks, "data": images.name},
        metrics={"method": point.method}, seconds=seconds, seed=plan.seed,
        class_order=f"{split.order_name} ({split.hash})", outcome=error, command=command,
    )  # fmt: skip


def learn_points(plan: Plan, points: Sequence[Point], jobs: int) -> None:
    """Learn the points one after the other in this process, or in up to `jobs` processes, one per point."""
    command = ledger.command_line()
    numbered = [(f"[{number}/{len(points)}] {point.name}", point) for number, point in enumerate(points, 1)]
    waiting = []
    for name, point in numbered:
        try:
            is_missing = not (plan.folder(point) / task_loop.RUN_FILE).exists()
        except KrnetError:  # a refused setting: learn_point appends a row that says so, without a process
            is_missing = False
        if is_missing and jobs > 1:
            waiting.append((name, point))
            continue
        say(name if is_missing else f"{name}: nothing to learn")
        learn_point(plan, point, command)
    # Spawn, not fork: a process that has used a GPU or threads cannot be forked.
    spawn = multiprocessing.get_context("spawn")
    running: dict[Any, tuple[Any, Point, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, point = waiting.pop(0)
                say(name)
                process = spawn.Process(target=learn_point, args=(plan, point, command))
                process.start()
                running[process.sentinel] = process, point, time.perf_counter()
            for sentinel in multiprocessing.connection.wait(list(running)):
                process, point, started = running.pop(sentinel)
                process.join()
                if process.exitcode:
                    error = f"its process ended with {process.exitcode}"
                    append_failure(plan, point, error, command, time.perf_counter() - started)
    finally:
        for process, _, _ in running.values():
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar100", help="data set, or folder of images (%(default)s)")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets ($KRNET_DATA, or the user's cache)")
    parser.add_argument("--out", type=Path, default=Path("runs/bytes"), help="folder of all points (%(default)s)")
    parser.add_argument("--budgets", default=BUDGETS, help="stored bytes after the last task (%(default)s)")
    parser.add_argument("--methods", default=METHODS, help="see above (%(default)s)")
    parser.add_argument("--tasks", type=int, default=10, help="number of tasks after the base task (%(default)s)")
    parser.add_argument("--base-classes", type=int, help="number of classes of the base task (half of all)")
    parser.add_argument("--order", default="lucir1993", help="class order (%(default)s)")
    parser.add_argument(
        "--epochs", type=int, help="epochs of each task; also draws only rows with this number (the method's own)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (%(default)s)")
    parser.add_argument(
        "--validation", type=int, default=0, metavar="N",
        help="hold out N training images of each class and judge on them, to choose settings (test images)",
    )  # fmt: skip
    parser.add_argument("--device", help="cpu, cuda or cuda:N (cuda if there is one)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting for every method that has it"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of processes, one per point (%(default)s)")
    parser.add_argument(
        "--draw-only", nargs="*", type=Path, metavar="LEDGER", help="learn nothing; draw the rows of these ledgers"
    )
    parser.add_argument("-o", "--picture", type=Path, help="PNG to write (OUT/bytes.png)")
    args = parser.parse_args()
    ledger.commit()  # looked up now: the source may change before the run ends
    name, order = args.data, args.order  # the names in the rows
    try:
        if args.draw_only is None:
            points = parse_points(args.methods, parse_sizes(args.budgets))
            given = dict(parse_setting(item) for item in args.set)
            if "budget" in given:
                raise SettingError("budget is set for all; give --budgets, or METHOD@BUDGET for one of its own")
            given |= {} if args.epochs is None else {"epochs": args.epochs, "base_epochs": args.epochs}
            by_method = settings_of(
                list(dict.fromkeys(point.method for point in points)), given, load_data(args.data, args.data_dir)
            )
            plan = Plan(args.data, args.data_dir, args.order, args.tasks, args.base_classes, args.seed, args.device,
                        args.out, by_method, args.validation)  # fmt: skip
            images, split = plan.load()  # refuses an impossible split before anything is learned
            name, order = images.name, split.order_name
            learn_points(plan, points, args.jobs)
            if args.validation:
                say("judged on held-out training images: the rows are in the ledger, and no picture is drawn of them")
                return
        ledgers = args.draw_only or [ledger.default_path()]
        rows = [row for path in dict.fromkeys(ledgers) for row in ledger.read(path)]
        rows = plot_bytes.choose_rows(rows, name, order, args.tasks, args.base_classes, args.epochs)
    except (KrnetError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    picture = args.picture or args.out / "bytes.png"
    plot_bytes.draw(picture, rows)
    plot_bytes.show(plot_bytes.gather(rows))
    say(f"drawn: {picture}")


if __name__ == "__main__":
    main()
