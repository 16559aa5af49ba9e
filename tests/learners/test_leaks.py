"""Nothing that a learner learns depends on test images, or on images of classes that are still to come.

    clean run, run with some images replaced by noise -> everything that is kept after each task -> equal, bit for bit

Each check is also shown to fail, on learners and a task loop that cheat. Data sets here have fixed mean and std: those
that `from_arrays` computes depend on the training images of all classes, as its docstring says. The number of training
images of a later class is known beforehand: KRIL plans its budget by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from krnet import data, protocol
from krnet import task_loop as learning
from krnet.io import archive
from krnet.learners import base
from krnet.learners.finetune import FineTune
from krnet.learners.joint import Joint
from krnet.progress import Progress
from krnet.run import Run
from learning_tools import small_digits

QUICK: dict[str, Any] = {"backbone": "resnet8", "base_epochs": 4, "epochs": 2, "batch_size": 16, "base_lr": 0.05}
RECORDER = {"head": "trained", "recorder_iterations": 12, "fixed_layers": 3, "recorder_settings": "d0=16,c0=8,c1=8"}
HEAD = {"fixed_layers": 3, "head_width": 32, "head_epochs": 3}
OWN: dict[str, dict[str, Any]] = {
    "gfr": {"gan_epochs": 1, "hidden": 16, "latent": 4},
    "pass": {"base_lr": 5e-3, "lr": 2e-3},
    "kril": HEAD,
    "acil": {"random_features": 64},
    "dsal": {"random_features": 64},
    "icarl": {"exemplars_per_class": 3},
    "lucir": {"exemplars_per_class": 3},
}
# Every registered learner, and KRIL in its other ways: name of the case -> method, settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, OWN.get(name, {})) for name in base.learner_names()}
CASES["kril, paper"] = "kril", {**RECORDER, "base": "paper"}
CASES["kril, maps"] = "kril", {**HEAD, "recorder_iterations": 12, "budget": 60_000, "plastic": True}
CASES["kril, images"] = "kril", {**HEAD, "recorder": "images"}
CASES["icarl, budget"] = "icarl", {"budget": 2_000}
LONG = ("kril, maps", "kril, images")
every_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in LONG else []) for case in CASES]
)
TASKS = protocol.split([3, 1, 0, 2, 4, 5], num_classes=6, sizes=[2, 2, 2])
LAST = TASKS.num_tasks - 1


@pytest.fixture(scope="module")
def digits() -> data.DataSet:
    return small_digits(10, 6, num_classes=6)


@dataclass(frozen=True)
class Kept:
    """Everything that a run holds after one task."""

    tensors: dict[str, Tensor]
    """Of state.krn and of every recording, by file and name."""
    correct: dict[str, Any]
    """Right answers on the test images of each task so far."""


@dataclass(frozen=True)
class Learned:
    run: Run | None
    """None if it was stopped before its last task."""
    after: list[Kept]


class Stopped(Exception):
    pass


def read_kept(folder: Path, task: int) -> Kept:
    tensors = {}
    for path in sorted(folder.glob("*.krn")):
        saved = archive.open_archive(path)
        tensors |= {f"{path.name} {name}": saved.tensor(name) for name in saved.names}
    correct = archive.open_archive(folder / "state.krn").metadata["correct"]
    assert all(len(rows) == task + 1 for rows in correct.values())
    return Kept(tensors, correct)


def learn(method: str, digits: data.DataSet, out: Path, last: int = LAST, **settings: Any) -> Learned:
    """Learn up to and including a task, and read what is kept after each."""
    after: list[Kept] = []

    def watch(progress: Progress) -> None:
        task = len(after) + 1
        name = f"{method}, task {task} of {LAST}"
        # The first work of a task begins, or a task without any work ends: the state of the task before is written.
        if (progress.share is None and progress.name.startswith(f"{name}:")) or progress.name == f"{name} done":
            after.append(read_kept(out, task - 1))
            if task > last:
                raise Stopped

    try:
        run = learning.learn(
            method, digits, TASKS, out=out, settings={**QUICK, **settings}, device="cpu", seed=1, watch=watch
        )
    except Stopped:
        return Learned(None, after)
    return Learned(run, [*after, read_kept(out, LAST)])


def noise_like(images: Tensor) -> Tensor:
    return torch.randint(0, 256, images.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def poison_test(digits: data.DataSet) -> data.DataSet:
    """All test images replaced by noise, with the same labels."""
    return replace(digits, test=replace(digits.test, images=noise_like(digits.test.images)))


def poison_classes(digits: data.DataSet, labels: Sequence[int]) -> data.DataSet:
    """All training images of these classes, and their test images, replaced by noise."""
    parts = []
    for split in (digits.train, digits.test):
        # Written into a copy, which keeps the strides: with others, convolutions round differently.
        images, is_poisoned = split.images.clone(), torch.isin(split.labels, torch.tensor(labels))
        images[is_poisoned] = noise_like(images[is_poisoned])
        parts.append(replace(split, images=images))
    return replace(digits, train=parts[0], test=parts[1])


# ------------------------------------------------------------------ the checks


def check_same(found: Kept, expected: Kept, source: str) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        assert torch.equal(found.tensors[name], value), f"{name} depends on {source}"


def check_test_images(method: str, digits: data.DataSet, clean: Learned, out: Path, **settings: Any) -> Learned:
    """Learn with other test images: nothing that is kept may change."""
    found = learn(method, poison_test(digits), out, **settings)
    for one, other in zip(found.after, clean.after, strict=True):
        check_same(one, other, "test images")
    return found


def check_later_classes(
    method: str, digits: data.DataSet, clean: Learned, out: Path, task: int, **settings: Any
) -> None:
    """Learn up to a task with other images of all later classes: nothing that is kept by then may change."""
    later = [label for classes in TASKS.tasks[task + 1 :] for label in classes]
    found = learn(method, poison_classes(digits, later), out, last=task, **settings)
    assert len(found.after) == task + 1
    for one, other in zip(found.after, clean.after):
        check_same(one, other, "images of later classes")
        assert one.correct == other.correct, "answers depend on images of later classes"


def check_judged(learned: Learned, judged: data.DataSet) -> None:
    """The reported accuracy is that of the network in the file, on the test images of this data set."""
    assert learned.run is not None
    is_right = learned.run.predict(judged.test.images) == judged.test.labels
    expected = [float(is_right[TASKS.samples(judged.test.labels, task)].double().mean()) for task in range(LAST + 1)]
    assert learned.run["accuracy_matrix"][-1] == pytest.approx(expected), "judged on other images"


# ------------------------------------------------------------------ every learner


@pytest.fixture(scope="module")
def clean(digits: data.DataSet, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each case once, with all images as they are."""
    runs: dict[str, Learned] = {}

    def run(case: str) -> Learned:
        if case not in runs:
            method, settings = CASES[case]
            runs[case] = learn(method, digits, tmp_path_factory.mktemp("clean") / "run", **settings)
        return runs[case]

    return run


@every_case
def test_no_learner_sees_a_test_image_and_all_are_judged_on_them(digits, clean, tmp_path, case):
    method, settings = CASES[case]
    poisoned = check_test_images(method, digits, clean(case), tmp_path, **settings)
    check_judged(clean(case), digits)
    check_judged(poisoned, poison_test(digits))
    assert [kept.correct for kept in poisoned.after] != [kept.correct for kept in clean(case).after]


@every_case
@pytest.mark.parametrize("task", range(LAST))
def test_no_learner_sees_an_image_of_a_class_that_is_to_come(digits, clean, tmp_path, case, task):
    method, settings = CASES[case]
    check_later_classes(method, digits, clean(case), tmp_path, task, **settings)


# ------------------------------------------------------------------ the checks can fail


class AddsTestImages(FineTune):
    """Trains on the images of its task, and replaces every third by a test image of the same class."""

    name = "cheat"

    def batches(self, ids: Tensor, *, part: int = 0) -> Any:
        made, context = super().batches(ids, part=part), self.context
        pixels = made.images.pixels.clone()
        for sample in ids[::3].tolist():
            same = (context.test_labels == context.train_labels[sample]).nonzero()[:, 0]
            pixels[sample] = context.test.pixels[same[0]]
        made.images = type(made.images)(context.data, pixels, context.device)
        return made


class ChoosesByTestImages(FineTune):
    """Sets one number, the scale of its logits, by its accuracy on the test images."""

    name = "cheat"

    def learn(self, task: int) -> Iterator[base.Work]:
        yield from super().learn(task)
        self.model.eval()
        ids = torch.arange(len(self.context.test))
        is_right = self.apply(self.model, self.context.test, ids).argmax(1) == self.context.test_labels
        with torch.no_grad():
            for rows in self.model.head.parameters():
                rows.mul_(float(is_right.double().mean()))


class AdaptsToTestImages(FineTune):
    """Updates its BatchNorm statistics when it is judged."""

    name = "cheat"

    def predict(self, images: Tensor) -> dict[str, Tensor]:
        self.model.train()
        return super().predict(images)


class WarmsUpOnLaterClasses(FineTune):
    """Has BatchNorm see the next task's images, without their labels."""

    name = "cheat"

    def learn(self, task: int) -> Iterator[base.Work]:
        yield from super().learn(task)
        if task < self.context.split.num_tasks - 1:
            self.model.train()
            self.apply(self.model, self.context.train, self.context.task_ids(task + 1))
            self.model.eval()


class LearnsAllAtOnce(Joint):
    """Trains task 1 on the images of all tasks."""

    name = "cheat"

    def learn(self, task: int) -> Iterator[base.Work]:
        if task != 1:
            yield from super().learn(task)
            return
        self.expand(task)
        num_seen = self.context.num_seen(task)
        loss = lambda images, labels: F.cross_entropy(self.model(images), labels % num_seen)  # noqa: E731
        yield self.descent("classifier", self.batches(torch.arange(len(self.context.train))), loss)


@pytest.fixture
def cheat(monkeypatch, digits, tmp_path) -> Any:
    """Registers a learner under the name cheat, and learns with it."""

    def learn_with(learner: type[base.Learner]) -> Learned:
        monkeypatch.setitem(base._REGISTRY, "cheat", learner)
        return learn("cheat", digits, tmp_path / "clean")

    return learn_with


@pytest.mark.parametrize("learner", [AddsTestImages, ChoosesByTestImages, AdaptsToTestImages])
def test_a_learner_that_uses_test_images_is_caught(digits, cheat, tmp_path, learner):
    clean = cheat(learner)
    with pytest.raises(AssertionError, match="depends on test images"):
        check_test_images("cheat", digits, clean, tmp_path / "poisoned")


@pytest.mark.parametrize(("learner", "task"), [(WarmsUpOnLaterClasses, 0), (LearnsAllAtOnce, 1)])
def test_a_learner_that_uses_later_classes_is_caught(digits, cheat, tmp_path, learner, task):
    clean = cheat(learner)
    with pytest.raises(AssertionError, match="depends on images of later classes"):
        check_later_classes("cheat", digits, clean, tmp_path / "poisoned", task)


def test_judging_on_training_images_is_caught(digits, tmp_path, monkeypatch):
    count = learning.count_correct
    trained = replace(digits, test=digits.train)

    def count_on_training_images(learner: base.Learner, task: int) -> Any:
        own = learner.context
        learner.context = base.Context(trained, own.split, own.device, own.seed, own.folder)
        try:
            return count(learner, task)
        finally:
            learner.context = own

    monkeypatch.setattr(learning, "count_correct", count_on_training_images)
    with pytest.raises(AssertionError, match="judged on other images"):
        check_judged(learn("finetune", digits, tmp_path), digits)
