"""Class orders and task splits, by name.

    class_order("lucir1993") -> [68, 56, 78, ...]     the classes in the order of learning
    split("lucir1993", num_classes=100, tasks=10)     -> TaskSplit: 50 classes, then 10 tasks of 5

In the literature "seed 1993" stands for several different orders, and the first halves of any two of them share only
about half of their classes. So each order has a name here, states where it comes from, and has a hash to print with
every result.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from krnet.config import check_int
from krnet.errors import SettingError

SEED = 1993
CUSTOM_ORDER_NAME = "custom"
"""Name of an order that the user gave as a list."""
IMAGENET_CLASSES, SUBSET_CLASSES = 1000, 100
DEFAULT_ORDER, DEFAULT_TASKS = "lucir1993", 10
"""The class order, and the number of tasks after the base task, of a caller who gives none."""

AnyOrder = str | Iterable[int]


@dataclass(frozen=True)
class ClassOrder:
    name: str
    provenance: str
    """Where the order comes from, and who uses it."""
    make: Callable[[int], list[int]]
    """Number of classes -> order."""


def _lucir1993(num_classes: int) -> list[int]:
    # RandomState, not default_rng: published orders were drawn with numpy's old generator.
    return [int(label) for label in np.random.RandomState(SEED).permutation(num_classes)]


def _gfr1993(num_classes: int) -> list[int]:
    return [int(label) for label in np.argsort(_lucir1993(num_classes))]


def _icarl(num_classes: int) -> list[int]:
    if num_classes != 100:
        raise SettingError(
            f"class order 'icarl' is one of CIFAR-100's 100 classes, and there are {num_classes}; choose another order"
        )
    random = np.random.RandomState(SEED)
    for _ in range(num_classes):  # the original code first shuffles the 500 training images of each class
        random.permutation(500)
    return [int(label) for label in random.permutation(num_classes)]


ORDERS = {
    order.name: order
    for order in (
        ClassOrder(
            "lucir1993",
            "numpy.random.seed(1993); permutation(n): LUCIR (Hou et al. 2019), PyCIL, PASS, FACIL",
            _lucir1993,
        ),
        ClassOrder(
            "gfr1993",
            "inverse of lucir1993, as labels are mapped by targets = permutation[targets]: GFR-IL (Liu et al. 2020), "
            "Mammoth with --permute_classes 1 --seed 1993",
            _gfr1993,
        ),
        ClassOrder(
            "icarl",
            "numpy.random.seed(1993), then 100 shuffles of 500 indices, then the classes: iCaRL's own code (Rebuffi "
            "et al. 2017), copied by PODNet, AFC, DER (trial 2); CIFAR-100 only",
            _icarl,
        ),
        ClassOrder("natural", "0, 1, 2, ...: as the data set numbers its classes", lambda n: list(range(n))),
    )
}


def class_order(order: AnyOrder, num_classes: int = 100) -> list[int]:
    """The classes, given by their labels, in the order in which they are learned.

    order        lucir1993, gfr1993, icarl (CIFAR-100 only) or natural (0, 1, 2, ...); or your own order, as a list
                 [3, 1, 2, ...] or as text "3,1,2,..."
    num_classes  number of classes of the data set

    Papers that say "seed 1993" mean one of the first three, which differ: name the one of the results you compare with.

    >>> import krnet
    >>> krnet.protocol.class_order("lucir1993")[:5]
    [68, 56, 78, 8, 23]
    >>> krnet.protocol.class_order("2,0,1", num_classes=3)
    [2, 0, 1]
    """
    check_int("num_classes", num_classes, 1)
    if not isinstance(order, str):
        return _check_permutation(list(order), num_classes)
    if order in ORDERS:
        return ORDERS[order].make(num_classes)
    if "," in order or order.strip().isdecimal():
        parts = [part.strip() for part in order.split(",")]
        return _check_permutation([int(part) if part.isdecimal() else part for part in parts], num_classes)
    raise unknown_order(order, ", or a list such as 2,0,1")


def unknown_order(name: str, also: str = "") -> SettingError:
    """The error for a name that no class order has; `also` says what else the caller would take."""
    near = difflib.get_close_matches(name, ORDERS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known orders: {', '.join(ORDERS)}{also}"
    return SettingError(f"unknown class order {name!r}; {hint}")


def _check_permutation(listed: Sequence[object], num_classes: int) -> list[int]:
    expected = f"expected each of 0..{num_classes - 1} once"
    order = []
    for entry in listed:
        if isinstance(entry, bool) or not isinstance(entry, (int, np.integer)):
            raise SettingError(f"the class order holds {entry!r}; {expected}")
        order.append(int(entry))
    if len(order) != num_classes:
        raise SettingError(f"the class order lists {len(order)} classes; {expected}")
    missing = sorted(set(range(num_classes)) - set(order))
    if missing:
        surplus = next(c for i, c in enumerate(order) if not 0 <= c < num_classes or c in order[:i])
        raise SettingError(f"the class order holds {surplus} where it lacks {missing[0]}; {expected}")
    return order


def order_hash(order: Sequence[int]) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of "68,56,78,...", to identify an order."""
    return hashlib.sha256(",".join(map(str, order)).encode()).hexdigest()[:12]


def imagenet_subset(class_names: Sequence[str]) -> list[str]:
    """LUCIR's ImageNet-Subset: 100 of ImageNet's 1000 class folders, drawn with seed 1993, in alphabetical order.

    LUCIR copies these classes to a new folder, where they are numbered alphabetically; its class order (`lucir1993`)
    uses these numbers. GFR-IL, PODNet, BiC and FOSTER each use another set of 100 classes.
    """
    names = list(class_names)
    if len(set(names)) != IMAGENET_CLASSES:
        raise SettingError(
            f"ImageNet-Subset is drawn from {IMAGENET_CLASSES} class names; found {len(set(names))}. "
            f"If this is the subset already, use it as it is"
        )
    if names != sorted(names):
        raise SettingError("ImageNet-Subset is drawn from sorted class names, and these are not; sort them first")
    return sorted(np.random.RandomState(SEED).choice(names, SUBSET_CLASSES, replace=False).tolist())


SUBSETS = {"lucir1993": imagenet_subset}


def subset(which: str | int | Sequence[str]) -> Callable[[Sequence[str]], list[str]]:
    """Select some classes of a folder of images: `krnet.data.load(FOLDER, choose=krnet.protocol.subset(...))`.

    "lucir1993"  ImageNet-Subset as in LUCIR (Hou et al. 2019): 100 of ImageNet's 1,000 classes
    100 or "100"  the first 100 classes by name
    ["n01440764", ...] or "n01440764,..."  the listed classes, numbered in this order

    Returns a function: sorted names of all classes -> names of the selected ones.

    >>> import krnet
    >>> krnet.protocol.subset(2)(["bird", "cat", "dog"])
    ['bird', 'cat']
    >>> krnet.protocol.subset("dog,bird")(["bird", "cat", "dog"])
    ['dog', 'bird']
    """
    if isinstance(which, str) and which in SUBSETS:
        return SUBSETS[which]
    if isinstance(which, str):
        which = int(which) if which.strip().isdecimal() else [name.strip() for name in which.split(",")]
    selection = which

    def choose(class_names: Sequence[str]) -> list[str]:
        if isinstance(selection, int):
            check_int("subset", selection, 1, len(class_names))
            return list(class_names[:selection])
        for name in selection:
            if name not in class_names:
                near = difflib.get_close_matches(name, [*class_names, *SUBSETS], n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(SUBSETS)}, a number, or classes"
                raise SettingError(f"subset: no class {name!r} among the {len(class_names)}; {hint}")
        if len(set(selection)) < len(selection):
            raise SettingError("subset names a class twice; name each once")
        return list(selection)

    return choose


def task_name(task: int) -> str:
    """What messages call a task: the base task, task 1, task 2, ..."""
    return f"task {task}" if task else "the base task"


@dataclass(frozen=True)
class TaskSplit:
    """The classes of each task, for `krnet.learn`; `krnet.protocol.split` makes one. A class is given by its label.

    The examples of its methods use this one:

    >>> import krnet, torch
    >>> split = krnet.protocol.split("3,1,0,2", num_classes=4, sizes=[2, 1, 1])
    >>> split.tasks
    ((3, 1), (0,), (2,))
    """

    order_name: str
    """Name of the class order; "custom" for one of your own."""
    order: tuple[int, ...]
    """All classes in the order in which they are learned."""
    tasks: tuple[tuple[int, ...], ...]
    """Classes of each task; the base task is the first."""

    @property
    def hash(self) -> str:
        """Twelve letters and digits that identify the class order, to print beside results.

        >>> split.hash == krnet.protocol.split([3, 1, 0, 2], num_classes=4).hash
        True
        """
        return order_hash(self.order)

    @property
    def num_tasks(self) -> int:
        """Number of tasks, including the base task.

        >>> split.num_tasks
        3
        """
        return len(self.tasks)

    @property
    def position(self) -> Tensor:
        """(num_classes,): position of each label in the order. Output k of a classifier is the k-th class learned.

        >>> split.position.tolist()
        [2, 1, 3, 0]
        """
        return torch.tensor(self.order).argsort()

    def classes_seen(self, task: int) -> list[int]:
        """All classes up to and including this task, in the order in which they are learned. Task 0 is the base task.

        >>> split.classes_seen(1)
        [3, 1, 0]
        """
        self._check(task)
        return [label for classes in self.tasks[: task + 1] for label in classes]

    def samples(self, labels: Tensor, task: int) -> Tensor:
        """Sample IDs, ascending, of this task's classes; `labels` (N,) are the labels of the data set.

        >>> split.samples(torch.tensor([0, 1, 2, 3, 3, 1]), task=0)
        tensor([1, 3, 4, 5])
        """
        self._check(task)
        return torch.isin(labels, torch.tensor(self.tasks[task], device=labels.device)).nonzero().squeeze(1)

    def _check(self, task: int) -> None:
        check_int("task", task, 0, self.num_tasks - 1)


def split(
    order: AnyOrder,
    *,
    num_classes: int,
    base_classes: int | None = None,
    tasks: int | None = None,
    sizes: Sequence[int] | None = None,
) -> TaskSplit:
    """Split the classes into tasks, which are learned one after the other: a base task, then later ones of equal size.

    order         the class order: a name or a list, see `krnet.protocol.class_order`
    num_classes   number of classes of the data set
    base_classes  classes of the base task; by default half of all
    tasks         tasks after the base task; by default 10, or one per class if fewer classes are left
    sizes         number of classes of every task, the base task first; replaces base_classes and tasks

    If the classes do not divide evenly, the first later tasks get one class more.

    >>> import krnet
    >>> krnet.protocol.split("natural", num_classes=10, base_classes=4, tasks=3).tasks
    ((0, 1, 2, 3), (4, 5), (6, 7), (8, 9))
    """
    is_named = isinstance(order, str) and order in ORDERS
    listed = class_order(order, num_classes)
    if sizes is None:
        sizes = _equal_sizes(num_classes, base_classes, tasks)
    elif base_classes is not None and [base_classes] != list(sizes[:1]):
        raise SettingError(f"base_classes is {base_classes} and sizes are {list(sizes)}; give one of them")
    for size in sizes:
        check_int("sizes", size, 1)
    if sum(sizes) != num_classes:
        raise SettingError(f"sizes add up to {sum(sizes)} classes; expected all {num_classes}, the base task included")
    ends = list(itertools.accumulate(sizes))
    classes = tuple(tuple(listed[end - size : end]) for size, end in zip(sizes, ends))
    return TaskSplit(str(order) if is_named else CUSTOM_ORDER_NAME, tuple(listed), classes)


def _equal_sizes(num_classes: int, base_classes: int | None, tasks: int | None) -> list[int]:
    base = (num_classes + 1) // 2 if base_classes is None else base_classes
    check_int("base_classes", base, 1, num_classes)
    rest = num_classes - base
    tasks = max(1, min(DEFAULT_TASKS, rest)) if tasks is None else tasks
    check_int("tasks", tasks, 0)
    if not min(rest, 1) <= tasks <= rest:
        raise SettingError(
            f"tasks is {tasks}; the base task leaves {rest} of {num_classes} classes, enough for "
            f"{f'1 to {rest} tasks' if rest else 'none'}. Change --tasks or --base-classes "
            f"(in Python, tasks or base_classes)"
        )
    return [base] + [rest // tasks + (i < rest % tasks) for i in range(tasks)]
