"""Work `learn`: a method learns tasks of classes, one after the other; its row is that of `krnet learn --ledger`.

    settings of a run -> LearnPlan -> task_loop.learn in the run's folder -> append_row
    row of the ledger -> matches   : is it a finished run of the same settings?

Settings: method, data, sizes (or tasks and base_classes), order, preset, validation, image_size and subset (of a folder
of images), and any setting of the method. `base` may hold {seed}: results/base/cifar100-lucir1993-strong-{seed}.krn.

A row counts whichever recipe made it, and so do rows of earlier versions: their settings are brought up to date before
they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from krnet import task_loop
from krnet.config import check_int, parse_counts
from krnet.data import protocol, registry
from krnet.data.dataset import DataSet
from krnet.errors import InputError, SettingError
from krnet.io import ledger
from krnet.io.kept import roots
from krnet.learners import base, base_task
from krnet.learners.settings import settings_of
from krnet.reproduce.works.base import Place, Work, register
from krnet.run import Run, append_row, has_row

IMAGE_SHAPES = {"digits": (1, 8, 8), "cifar100": (3, 32, 32)}
"""(C, H, W) of data sets by name, so that settings can be compared where the data set is not at hand."""
OF_FOLDERS = ("image_size", "subset")
"""Settings that a row does not have by itself; rows of this work keep them among their metrics."""


@dataclass(frozen=True)
class Shape:
    image_shape: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class LearnPlan:
    """The settings of a run: those of the data and tasks, and those of the method."""

    method: str
    data: str
    sizes: tuple[int, ...] | None = None
    """Number of classes of each task."""
    tasks: int | None = None
    base_classes: int | None = None
    order: str | tuple[int, ...] = protocol.DEFAULT_ORDER
    preset: str | None = None
    validation: int = 0
    image_size: int | None = None
    subset: str | None = None
    given: Mapping[str, Any]
    """Settings of the method."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], seed: int) -> LearnPlan:
        own = {item.name for item in fields(cls)} - {"given"}
        values = {name: settings[name] for name in own if name in settings}
        given = {name: value for name, value in settings.items() if name not in own}
        for name in ("method", "data"):
            if not isinstance(values.get(name), str):
                raise SettingError(f"{name} is {values.get(name)!r}; expected the name of a {name.replace('_', ' ')}")
        for name in ("tasks", "base_classes", "image_size"):
            if name in values:
                check_int(name, values[name], 1)
        check_int("validation", values.get("validation", 0), 0)
        if "sizes" in values:
            values["sizes"] = _as_sizes(values["sizes"])
            if "tasks" in values or "base_classes" in values:
                raise SettingError("sizes is given, and tasks or base_classes, too; give either")
        if isinstance(values.get("order"), list):
            values["order"] = tuple(values["order"])
        if "base" in given:
            given["base"] = _find_base(str(given["base"]).replace("{seed}", str(seed)))
        return cls(**values, given=given)

    def split(self, num_classes: int) -> protocol.TaskSplit:
        return protocol.split(
            self.order, num_classes=num_classes, base_classes=self.base_classes, tasks=self.tasks, sizes=self.sizes
        )

    @property
    def data_name(self) -> str:
        """The name of the data set in the rows of this run."""
        name = self.data if self.data in registry.LOADERS else Path(self.data).name
        return f"{name}-validation{self.validation}" if self.validation else name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings of the method: its defaults for this data set, and those that are given."""
        return settings_of([self.method], self.given, Shape(self._image_shape()), self.preset)[self.method]

    @cached_property
    def config(self) -> base.LearnerConfig:
        return base.make_config(base.get_learner(self.method), self.settings)

    def load(self, data_dir: Path | None) -> DataSet:
        return _load(self.data, data_dir, self.image_size, self.subset)

    def _image_shape(self) -> tuple[int, int, int]:
        if self.data in IMAGE_SHAPES:
            return IMAGE_SHAPES[self.data]
        if self.data in registry.LOADERS:  # a data set that someone registered
            return _load(self.data, None, None, None).image_shape
        if self.image_size is None:
            raise SettingError(
                f"data is {self.data!r}, a folder of images, and no image_size is given; add the pixels at their "
                f"shorter side, such as image_size = 64"
            )
        return (3, self.image_size, self.image_size)


@register
class Learn(Work):
    name = "learn"
    unit = "%"

    def check(self, settings: Mapping[str, Any]) -> None:
        plan = LearnPlan.of(settings, seed=0)
        base.get_learner(plan.method)  # refuses an unknown one
        if plan.data in registry.LOADERS:
            for name in OF_FOLDERS:
                if getattr(plan, name) is not None:
                    raise SettingError(f"{name} is for folders of images; leave it out for {plan.data}")
        if isinstance(plan.order, str) and plan.order not in protocol.ORDERS:
            raise protocol.unknown_order(plan.order)
        _ = plan.config  # refuses unknown settings and wrong values

    def matches(self, row: Mapping[str, Any], settings: Mapping[str, Any], seed: int) -> bool:
        metrics, saved = row.get("metrics") or {}, row.get("settings") or {}
        # The cheapest checks first: a recipe asks this of every row of the ledger, for each of its runs.
        if row.get("outcome") != "ok" or row.get("seed") != seed or metrics.get("method") != settings.get("method"):
            return False
        plan = _plan_of(_frozen(settings), seed)
        if saved.get("data", metrics.get("data")) != plan.data_name:
            return False
        if (metrics.get("validation") or 0) != plan.validation:
            return False
        if plan.data not in registry.LOADERS and any(metrics.get(n) != getattr(plan, n) for n in OF_FOLDERS):
            return False
        tasks = saved.get("tasks", metrics.get("tasks"))
        return _same_tasks(plan, tasks, metrics.get("order_hash")) and _same_settings(plan, saved)

    def perform(self, recipe: str, settings: Mapping[str, Any], seed: int, place: Place) -> Mapping[str, Any]:
        plan = LearnPlan.of(settings, seed)
        images = plan.load(place.data_dir)
        split = plan.split(images.num_classes)
        run = task_loop.learn(
            plan.method, images, split, out=place.folder, settings=plan.settings, seed=seed, device=place.device,
            resume=True, shared=place.shared, validation=plan.validation, watch=place.watch,
        )  # fmt: skip
        if has_row(run):  # a process was killed between its run and what came after
            return _row_of(run)
        of_folder = {name: getattr(plan, name) for name in OF_FOLDERS if plan.data not in registry.LOADERS}
        return append_row(run, recipe, **of_folder)

    def value(self, row: Mapping[str, Any], x: str = "", unit: str = "") -> float | None:
        """Percent of right answers after task x, or after the last one."""
        accuracy = (row.get("metrics") or {}).get("accuracy") or []
        task = len(accuracy) - 1 if x == "" else int(x) if x.isdecimal() else -1
        if unit not in ("", self.unit) or not 0 <= task < len(accuracy) or accuracy[task] is None:
            return None
        return 100 * accuracy[task]


@cache
def _load(name: str, data_dir: Path | None, image_size: int | None, subset: str | None) -> DataSet:
    choose = None if subset is None else protocol.subset(subset)
    return registry.load(name, data_dir, image_size=image_size, choose=choose)


def _as_sizes(value: Any) -> tuple[int, ...]:
    try:
        sizes: Sequence[Any] = parse_counts(value) if isinstance(value, str) else value
        for size in sizes:
            check_int("sizes", size, 1)
    except (TypeError, ValueError) as error:
        raise SettingError(f"sizes is {value!r}; expected such as 50,5x10: 50 classes, then ten tasks of 5") from error
    return tuple(sizes)


def _find_base(name: str) -> str:
    """The file of a base task, which may lie in the clone and not in the current folder; other names stay."""
    if name == base_task.PAPER or name in base_task.RECIPES:
        return name
    candidates = (Path(name), *(root / name for root in roots()))
    return str(next((path for path in candidates if path.is_file()), name))


# ------------------------------------------------------------------ rows


def _frozen(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Settings as the key of a cache."""
    return tuple(sorted((name, _hashable(value)) for name, value in settings.items()))


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Table(_frozen(value))
    return tuple(value) if isinstance(value, list) else value


class _Table(tuple[Any, ...]):
    """A mapping as a tuple, to be told from a list."""


@cache
def _plan_of(settings: tuple[tuple[str, Any], ...], seed: int) -> LearnPlan:
    """One plan for all rows that it is compared with: its config is made once."""
    return LearnPlan.of({name: dict(v) if isinstance(v, _Table) else v for name, v in settings}, seed)


def _same_tasks(plan: LearnPlan, sizes: Any, order_hash: Any) -> bool:
    if not isinstance(sizes, list) or not sizes:
        return False
    try:
        split = plan.split(sum(sizes))
    except InputError:  # another number of classes
        return False
    return [len(classes) for classes in split.tasks] == sizes and split.hash == order_hash


def _same_settings(plan: LearnPlan, saved: Mapping[str, Any]) -> bool:
    """Compare all settings of the method with those of a row, brought up to date."""
    learner = base.get_learner(plan.method)
    values = {name: value for name, value in saved.items() if name not in ("tasks", "data")}
    try:
        found = base.make_config(learner, learner.config_class.renewed(values)).comparable()
    except (InputError, KeyError, TypeError):  # settings that no longer exist
        return False
    expected = plan.config.comparable()
    for settings in (found, expected):
        settings["base"] = Path(settings["base"]).name  # rows have it from the project on, or from the last folder
    return found == expected


def _row_of(run: Run) -> Mapping[str, Any]:
    return next(
        row for row in reversed(ledger.read()) if row["metrics"].get("task_seconds") == run["task_seconds"]
    )  # fmt: skip
