"""Methods x class orders x seeds: the same tasks learned many times, to see how far the results scatter.

    methods, splits (one per class order), seeds -> learn_many -> OUT/ORDER/seed-N/METHOD/run.json
    the runs -> krnet.learners.scores.summarize -> mean and standard deviation by method

Each folder OUT/ORDER/seed-N is what `learn_all` writes: its methods share base tasks. Several processes share the runs:
each learns some, and whoever needs a base task that another one trains waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from krnet import task_loop
from krnet.config import check_unique
from krnet.data.dataset import DataSet
from krnet.data.protocol import CUSTOM_ORDER_NAME, TaskSplit
from krnet.io.atomic import AnyPath
from krnet.learners.settings import settings_of
from krnet.progress import Progress, Watch, closing_watch
from krnet.run import Run


@closing_watch
def learn_many(
    methods: Sequence[str],
    data: DataSet,
    splits: Sequence[TaskSplit],
    seeds: Sequence[int],
    *,
    out: AnyPath,
    settings: Mapping[str, Any] | None = None,
    preset: str | None = None,
    shared: AnyPath | None = None,
    device: str | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    log: Callable[[Path], Watch] | None = None,
    finished: Callable[[Run], None] | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[Run]:
    """Learn with every method in every class order with every seed. Returns the runs: by order, then seed, then method.

    Errors in the settings of any run are found before the first one is trained. `resume` reads the runs that are
    finished and goes on with the others; so a seed, an order or a method may be added later.

    splits    a task split for each class order
    out       folder; a run is in OUT/ORDER/seed-N/METHOD
    shared    folder for base tasks; by default one for each order and seed, in OUT/ORDER/seed-N
    watch     as for `krnet.learn`; the names it is told hold the order and the seed
    log       called with each folder OUT/ORDER/seed-N; returns a watcher of the runs in it
    finished  called with each run as soon as it ends, and with those that `resume` finds finished
    share     (k, n): this process has run k and each n-th one after it, and others have the rest; returns its own runs
    """
    check_unique("methods", methods)
    check_unique("seeds", seeds)
    check_unique("orders", [_order_folder(split) for split in splits])
    own_settings = settings_of(methods, settings or {}, data, preset)
    pairs = [(split, seed) for split in splits for seed in seeds]
    groups = [
        (split, seed, run_folder(out, split, seed), own)
        for group, (split, seed) in enumerate(pairs)
        if (own := own_share(methods, share, first=group * len(methods)))
    ]
    for split, seed, folder, own in groups:
        task_loop.check_all(
            own, data, split, out=folder, settings=own_settings, seed=seed, device=device, resume=resume
        )
    runs: list[Run] = []
    for split, seed, folder, own in groups:
        watch_group = _watch_group(f"{split.order_name} seed {seed}", watch, log(folder) if log else None)
        runs += task_loop.learn_all(
            methods, data, split, out=folder, settings=settings, preset=preset, shared=shared, only=own, seed=seed,
            device=device, resume=resume, watch=watch_group, finished=finished,
        )  # fmt: skip
    return runs


def own_share(methods: Sequence[str], share: tuple[int, int], first: int = 0) -> list[str]:
    """The methods that are this process's, if runs are counted from `first` on."""
    number, count = share
    return [method for run, method in enumerate(methods, first) if run % count == number]


def run_folder(out: AnyPath, split: TaskSplit, seed: int) -> Path:
    """The folder of the runs of one class order and seed."""
    return Path(out) / _order_folder(split) / f"seed-{seed}"


def _order_folder(split: TaskSplit) -> str:
    """Name of the order; the hash tells several orders of the user's own apart."""
    return f"{CUSTOM_ORDER_NAME}-{split.hash}" if split.order_name == CUSTOM_ORDER_NAME else split.order_name


def _watch_group(where: str, watch: Watch | None, log: Watch | None) -> Watch | None:
    """Tell both watchers; `watch` sees the runs of all groups, so it is also told which group it sees."""
    if watch is None and log is None:
        return None

    def tell(progress: Progress) -> None:
        if watch:  # "kril, task 2 of 10: F2" -> "kril lucir1993 seed 0, task 2 of 10: F2"
            method, comma, rest = progress.name.partition(",")
            watch(replace(progress, name=f"{method} {where}{comma}{rest}"))
        if log:
            log(progress)

    return tell
