"""Several outputs per class and an image transform, declared by a third-party learner, are honoured or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import krnet
from krnet import protocol
from krnet.data.dataset import DataSet
from krnet.errors import SettingError
from krnet.learners import base
from krnet.learners.acil import Acil
from krnet.learners.base import Context, Learner, Work
from krnet.learners.dsal import Dsal
from krnet.learners.ewc import Ewc
from krnet.learners.exemplars import class_means
from krnet.learners.finetune import FineTune
from krnet.learners.gfr.learner import GFR
from krnet.learners.icarl import Icarl
from krnet.learners.joint import Joint
from krnet.learners.kril.learner import Kril
from krnet.learners.lucir import Lucir
from krnet.learners.mas import Mas
from krnet.learners.rehearsal import Rehearsal, RehearsalConfig
from learning_tools import SMALL, small_digits, small_tasks

NUM_TURNS = 4
EPOCHS = {"base_epochs": 12, "epochs": 12}  # four times the outputs need more than SMALL has


class Replay(Rehearsal):
    """Cross entropy on new images and exemplars, and nothing else."""

    name = "replay"
    config_class = RehearsalConfig

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        loss = lambda images, labels: self.classification_loss(self.model(images), labels)  # noqa: E731
        yield self.base_work() if task == 0 else self.descent("classifier", self.rehearsal_batches(), loss)
        self.update_exemplars()


def turn(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Every image in four rotations by a right angle, each with an output of its own, as in PASS (Zhu et al. 2021)."""
    turned = torch.cat([torch.rot90(images, k, (2, 3)) for k in range(NUM_TURNS)])
    return turned, torch.cat([NUM_TURNS * labels + k for k in range(NUM_TURNS)])


def turning(parent: type[Learner]) -> type[Learner]:
    """A learner that declares rotations, and leaves all else to its parent."""

    class Turning(parent):  # type: ignore[misc, valid-type]
        outputs_per_class: ClassVar[int] = NUM_TURNS

        def transform(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return turn(images, labels)

    return Turning


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return small_digits()


def make(learner: type[Learner], digits: DataSet, folder: Path, tasks: Any = None, **settings: Any) -> Any:
    torch.manual_seed(1)
    context = Context(digits, tasks or small_tasks(), torch.device("cpu"), 1, folder)
    return learner(context, base.make_config(learner, {**SMALL, **settings}))


def learn(learner: Any, num_tasks: int) -> Any:
    for task in range(num_tasks):
        torch.manual_seed(task)
        for work in learner.learn(task):
            work.run(None, None)
    return learner


@pytest.mark.slow
@pytest.mark.parametrize("parent", [FineTune, Joint, Ewc, Mas, Replay, Icarl, Lucir])
def test_every_output_is_trained_and_predictions_are_class_scores(digits, tmp_path, parent):
    own = {"ce": "seen"} if parent in (Ewc, Mas) else {}
    # LUCIR's features stay near those of the base task, which has to be learned.
    epochs = {"base_epochs": 20, "epochs": 20} if parent is Lucir else {"base_epochs": 2, "epochs": 15}
    learner = learn(make(turning(parent), digits, tmp_path, **epochs, **own), 2)
    images, outputs = turn(*first_images(learner, learner.context.task_ids(1)))
    with torch.no_grad():
        found = learner.model(images)
        # Chance is one in 24; without the turned labels three in four would be wrong.
        assert found.shape[1] == NUM_TURNS * 6 and (found.argmax(1) == outputs).double().mean() > 0.5
        upright = images[: len(images) // NUM_TURNS]
        rows = learner.predict(upright)
    assert {tuple(scores.shape) for scores in rows.values()} == {(len(upright), 6)}
    assert torch.equal(rows["cnn"], found[: len(upright), ::NUM_TURNS])
    labels = outputs[: len(upright)] // NUM_TURNS
    for row, scores in rows.items():
        assert (scores.argmax(1) == labels).double().mean() > 0.7, row


def first_images(learner: Learner, ids: Tensor) -> tuple[Tensor, Tensor]:
    return learner.context.train.take(ids), learner.context.train_labels[ids]


@pytest.mark.slow
@pytest.mark.parametrize("parent", [FineTune, Replay])
def test_the_task_loop_scores_such_a_learner_by_its_classes(digits, tmp_path, monkeypatch, parent):
    monkeypatch.setitem(base._REGISTRY, "turning", turning(parent))
    settings = {**SMALL, **EPOCHS}
    run = krnet.learn("turning", digits, small_tasks(1), out=tmp_path / "run", settings=settings, device="cpu")
    assert run["accuracy"][0] > 0.7 and run["accuracy_matrix"][1][1] > 0.7


def test_exemplars_are_transformed_like_new_images_and_kept_by_class(digits, tmp_path):
    learner = learn(make(turning(Replay), digits, tmp_path, base_epochs=1, exemplars_per_class=3), 1)
    assert learner.exemplars.labels.tolist() == [label for label in range(4) for _ in range(3)]
    learner.expand(1)
    batches = learner.rehearsal_batches()
    images, labels = batches.tensors(*batches.inputs(0))
    assert len(images) == len(labels) == NUM_TURNS * batches.batch_size
    # As many batches as there are images: each image is in batch_size of them.
    of_exemplars = [batches.tensors(*batches.inputs(i))[1] < 4 * NUM_TURNS for i in range(60)]
    assert batches.num_samples == 60 and sum(map(torch.sum, of_exemplars)) == 12 * NUM_TURNS * batches.batch_size


@pytest.mark.parametrize("ce", ["new", "seen"])
def test_the_fisher_is_that_of_the_transformed_images_and_trained_outputs(digits, tmp_path, ce):
    learner = learn(make(turning(Ewc), digits, tmp_path, base_epochs=1, epochs=1, ce=ce, clip=0.0), 2)
    # In float32 an input of a ReLU may round to either side of 0, one by one or in a batch.
    learner.model.double().register_forward_pre_hook(lambda _, inputs: inputs[0].double())
    ids, first = learner.context.task_ids(1)[:5], 4 * NUM_TURNS if ce == "new" else 0
    totals = {name: torch.zeros_like(param) for name, param in learner.model.named_parameters()}
    for image, output in zip(*turn(*first_images(learner, ids))):
        learner.model.zero_grad()
        F.cross_entropy(learner.model(image[None])[:, first:], output[None] - first).backward()
        for name, param in learner.model.named_parameters():
            totals[name] += param.grad.square()
    for name, value in learner.measure(ids).items():
        expected = totals[name] / (NUM_TURNS * len(ids))
        assert torch.allclose(value, expected, rtol=1e-6, atol=1e-9 * expected.max().item()), name


def test_rows_of_new_outputs_are_imprinted_and_a_row_without_images_keeps_its_direction(digits, tmp_path):
    class Upright(turning(Lucir)):  # type: ignore[misc]
        def transform(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return Learner.transform(self, images, labels)

    for kind in (turning(Lucir), Upright):
        learner = learn(make(kind, digits, tmp_path, base_epochs=1), 1)
        learner.expand(1)
        before = learner.model.head.linears[-1].weight.detach().clone()
        learner._imprint()
        images, outputs = learner.transform(*first_images(learner, learner.context.task_ids(1)))
        with torch.no_grad():
            means = class_means(learner.model.features(images), outputs - 4 * NUM_TURNS, 2 * NUM_TURNS)
        used = torch.bincount(outputs - 4 * NUM_TURNS, minlength=2 * NUM_TURNS) > 0
        assert int(used.sum()) == (2 if kind is Upright else 2 * NUM_TURNS)
        expected = torch.where(used[:, None], means, F.normalize(before, dim=1))
        assert torch.allclose(F.normalize(learner.model.head.linears[-1].weight, dim=1), expected, atol=1e-5)


def test_without_a_transform_the_label_is_the_first_output_of_the_class(digits, tmp_path):
    class Wide(FineTune):
        outputs_per_class: ClassVar[int] = 3

    learner = learn(make(Wide, digits, tmp_path), 1)
    images, labels = first_images(learner, learner.context.task_ids(0))
    assert torch.equal(learner.transform(images, labels)[1], 3 * labels)
    with torch.no_grad():
        assert (learner.model(images).argmax(1) == 3 * labels).double().mean() > 0.7


def test_a_task_of_one_class_has_outputs_to_tell_apart(digits, tmp_path):
    single = protocol.split("natural", num_classes=8, sizes=[7, 1])
    with pytest.raises(SettingError, match="one class"):
        make(Ewc, digits, tmp_path, single)
    make(turning(Ewc), digits, tmp_path, single)


@pytest.mark.parametrize(
    ("parent", "names"),
    [
        (GFR, ["outputs_per_class"]),
        (Kril, ["outputs_per_class", "transform"]),
        (Acil, ["outputs_per_class"]),
        (Dsal, ["outputs_per_class"]),
    ],
)
def test_a_learner_that_cannot_honour_a_declaration_refuses_it(digits, tmp_path, parent, names):
    declared = {"outputs_per_class": NUM_TURNS, "transform": lambda self, images, labels: turn(images, labels)}
    own = {"fixed_layers": 3} if parent is Kril else {}
    for name in names:
        child = type("Child", (parent,), {name: declared[name]})
        with pytest.raises(SettingError, match=f"Child declares its own {name}, which method {parent.name} does not"):
            make(child, digits, tmp_path, **own)
        make(type("Child", (parent,), {name: declared[name], "unsupported": {}}), digits, tmp_path, **own)
    make(type("Child", (parent,), {}), digits, tmp_path, **own)
