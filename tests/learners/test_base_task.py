"""The strong base task: one recipe for all methods, whose trained network is shared and can be read from a file."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import krnet
from krnet import task_loop as learning
from krnet.data import from_arrays
from krnet.errors import RecordingError, ResumeError, SettingError
from krnet.io import archive
from krnet.learners import base, base_task
from krnet.learners.base_task import BaseRecipe, turn
from krnet.learners.settings import settings_of
from krnet.nn.heads import CosineHead
from krnet.train.classifier import Schedule
from learning_tools import settings_for, small_digits, small_tasks


@pytest.fixture(scope="module")
def images():
    """Digits that may be mirrored, so that the recipe turns them: 8 classes."""
    digits = small_digits(per_class=16)
    parts = (digits.train.images, digits.train.labels, digits.test.images, digits.test.labels)
    return from_arrays(*parts, name="turning", mean=digits.mean, std=digits.std, pad=1, flip=True, layout="NCHW")


def learn(method, data, folder, **settings):
    short = {"base_epochs": 2, "epochs": 1, "base_lr": 0.05, "base": "strong"}
    given = {**settings_for(method), **short, **settings}
    if method == "kril":
        given |= {"recorder": "raw"}
    shared = folder / "shared"
    return learning.learn(method, data, small_tasks(), out=folder / method, settings=given, shared=shared)


def test_methods_share_one_trained_base_task_and_a_file_gives_the_same(images, tmp_path):
    runs = [learn(method, images, tmp_path) for method in ("finetune", "kril", "ewc")]
    (shared,) = (tmp_path / "shared").iterdir()
    assert len({run.accuracy[0] for run in runs}) == 1
    from_file = learn("finetune", images, tmp_path / "file", base=str(shared))
    assert from_file["accuracy_matrix"] == runs[0]["accuracy_matrix"]
    saved = archive.open_archive(shared)
    assert saved.tensor("modules.head.parts.0.weight").shape[0] == 4 * len(small_tasks().tasks[0])
    # A run can be loaded where the file is no longer.
    shared.unlink()
    loaded = krnet.load_run(tmp_path / "file" / "finetune")
    assert torch.equal(loaded.predict(images.test.images), from_file.predict(images.test.images))


@pytest.mark.parametrize("method", [m for m in base.learner_names() if m not in ("finetune", "kril", "ewc")])
def test_every_method_starts_from_the_strong_base_task(images, tmp_path, method):
    run = learn(method, images, tmp_path)
    assert len(run.accuracy) == 3 and run["settings"]["base"] == "strong"
    (shared,) = (tmp_path / "shared").iterdir()
    trained = archive.open_archive(shared).metadata["settings"]
    assert trained["recipe"]["rotations"] and trained["recipe"]["trivial"]


def make(method, images, folder, **settings):
    given = settings_of([method], {**settings_for(method), "base": "strong", **settings}, images)[method]
    torch.manual_seed(0)
    learner = base.get_learner(method)
    return learner(
        base.Context(images, small_tasks(), torch.device("cpu"), 0, folder), base.make_config(learner, given)
    )


def test_lucir_trains_its_own_network_by_the_recipe_and_shares_it_with_no_other(images, tmp_path):
    learner = make("lucir", images, tmp_path)
    assert not learner.config.last_relu and learner.config.shortcut == "B"
    work, linear = next(learner.learn(0)), next(make("finetune", images, tmp_path).learn(0))
    assert isinstance(work.modules.head, CosineHead) and work.modules.backbone is learner.model.backbone
    assert work.modules.head.num_classes == 4 * learner.model.head.num_classes == 4 * 4
    assert (work.schedule, work.batches.batch_size) == (linear.schedule, linear.batches.batch_size)
    assert work.shared["recipe"] == linear.shared["recipe"] and work.shared["head"] == "CosineHead"
    assert "head" not in linear.shared  # the names of earlier files depend on it
    with_relu = next(make("lucir", images, tmp_path, last_relu=True).learn(0))
    assert with_relu.shared == linear.shared | {"head": "CosineHead"}
    before = work.modules.head.weight.clone()
    work.run(None, None)
    trained = work.modules.head
    assert not torch.equal(trained.weight, before)
    assert torch.equal(learner.model.head.weight, trained.weight[::4])
    assert torch.equal(learner.model.head.sigma, trained.sigma) and trained.sigma.item() != 1


def test_a_file_fits_linear_heads_alone_and_is_refused_before_any_training(images, tmp_path):
    for method in ("finetune", "lucir"):
        learn(method, images, tmp_path / method)
    linear, cosine = (next((tmp_path / method / "shared").iterdir()) for method in ("finetune", "lucir"))
    given = {**settings_for("lucir"), "base": str(linear), "base_epochs": 1, "epochs": 1}
    with pytest.raises(SettingError, match=r"head of lucir is a CosineHead\. Give paper or strong"):
        learning.learn_all(["finetune", "lucir"], images, small_tasks(), out=tmp_path / "both", settings=given)
    assert not (tmp_path / "both" / "finetune" / "run.json").exists()
    for method in ("finetune", "joint"):
        with pytest.raises(SettingError, match="holds a network with a CosineHead"):
            learn(method, images, tmp_path / "other", base=str(cosine))


@pytest.mark.parametrize("from_file", [False, True])
def test_joint_trains_every_task_by_the_recipe(images, tmp_path, from_file):
    first = learn("joint", images, tmp_path, epochs=2)
    (shared,) = (tmp_path / "shared").iterdir()
    name = str(shared) if from_file else "strong"
    learner = make("joint", images, tmp_path, base=name)
    list(learner.learn(0))
    base_work = next(make("joint", images, tmp_path).learn(0))
    start = [part.weight.clone() for part in learner.model.head.linears]
    (work,) = learner.learn(1)
    assert not torch.equal(learner.model.head.linears[0].weight, start[0])  # a new network
    assert work.shared is None and work.schedule.shape == "cosine"
    more = work.batches.batch_size / base_work.batches.batch_size  # the step grows with the batch
    assert replace(work.schedule, epochs=5, lr=more * 0.0125) == replace(base_work.schedule, lr=more * 0.0125)
    assert base_work.schedule.lr == pytest.approx(0.05 * base_work.batches.batch_size / 256)
    assert work.batches.draws.trivial and work.batches.transform is turn
    assert work.batches.num_samples == 6 * 16 and work.modules.head.num_classes == 4 * 6
    assert torch.equal(work.modules.head.weight[::4], learner.model.head.weight)
    trained = {name: torch.randn_like(v) for name, v in work.result().items() if v.is_floating_point()}
    work.take(work.result() | trained)
    assert [part.out_features for part in learner.model.head.linears] == [4, 2]
    assert torch.equal(learner.model.head.weight, trained["modules.head.parts.0.weight"][::4])
    bias = torch.cat([part.bias for part in learner.model.head.linears])
    assert torch.equal(bias, trained["modules.head.parts.0.bias"][::4])
    if from_file:
        again = learn("joint", images, tmp_path / "file", base=name, epochs=2)
        assert again["accuracy_matrix"] == first["accuracy_matrix"]


def test_joint_with_a_warm_start_goes_on_from_the_rows_it_has(images, tmp_path):
    learner = make("joint", images, tmp_path, warm_start=True)
    list(learner.learn(0))
    rows = learner.model.head.weight.clone()
    (work,) = learner.learn(1)
    assert torch.equal(work.modules.head.weight[::4][:4], rows)


def test_joint_of_its_own_base_task_trains_as_before(images, tmp_path):
    learner = make("joint", images, tmp_path, base="paper", base_epochs=1)
    list(learner.learn(0))
    (work,) = learner.learn(1)
    assert work.modules is learner.model and work.schedule.shape == "steps" and not work.batches.draws.trivial


def test_the_head_has_the_upright_row_of_each_class(images, tmp_path):
    config = base.make_config(base.get_learner("finetune"), {**settings_for("finetune"), "base": "strong"})
    context = base.Context(images, small_tasks(), torch.device("cpu"), 0, tmp_path)
    learner = base.get_learner("finetune")(context, config)
    work = next(learner.learn(0))
    trained = {name: torch.randn_like(value) for name, value in work.result().items() if value.is_floating_point()}
    work.take(work.result() | trained)
    assert torch.equal(learner.model.head.weight, trained["modules.head.parts.0.weight"][::4])
    assert torch.equal(learner.model.head.linears[0].bias, trained["modules.head.parts.0.bias"][::4])


@pytest.mark.parametrize("change", ["order", "data", "base_classes", "shortcut"])
def test_a_file_of_other_images_classes_or_networks_is_refused(images, tmp_path, change):
    learn("finetune", images, tmp_path)
    (shared,) = (tmp_path / "shared").iterdir()
    split, settings = small_tasks(), {**settings_for("finetune"), "base": str(shared)}
    if change == "order":
        split = krnet.protocol.split(list(range(8)), num_classes=8, sizes=[len(t) for t in split.tasks])
    if change == "base_classes":
        split = krnet.protocol.split(list(split.order), num_classes=8, sizes=[3, 5])
    if change == "shortcut":
        settings["shortcut"] = "A"
    data = images.with_validation(2) if change == "data" else images
    with pytest.raises(ResumeError, match=f"trained with another {change}"):
        learning.learn("finetune", data, split, out=tmp_path / "other", settings=settings)


def test_what_is_no_base_task_is_refused_by_name(images, tmp_path):
    with pytest.raises(SettingError, match="expected paper, strong, or the file"):
        learn("finetune", images, tmp_path, base="stong")
    archive.write(tmp_path / "x.krn", {"a": torch.zeros(1)}, {"kind": "work", "settings": {}})
    with pytest.raises(SettingError, match="holds no base task"):
        learn("finetune", images, tmp_path, base=str(tmp_path / "x.krn"))
    (tmp_path / "y.krn").write_bytes(b"nothing")
    with pytest.raises(RecordingError, match="--base strong"):
        learn("finetune", images, tmp_path / "y", base=str(tmp_path / "y.krn"))


def test_turn_adds_each_image_turned_by_one_of_three_angles():
    images, labels = torch.rand(7, 3, 4, 4), torch.arange(7)
    rows, classes = turn(images, labels)
    assert torch.equal(rows[:7], images) and torch.equal(classes[:7], 4 * labels)
    for image, row, label, found in zip(images, rows[7:], labels, classes[7:], strict=True):
        turns = int(found) - 4 * int(label)
        assert turns in (1, 2, 3) and torch.equal(row, image.rot90(turns, (1, 2)))
    assert (classes[7:] % 4).bincount()[1:].tolist() == [3, 2, 2]


def test_images_that_may_not_be_mirrored_are_not_turned():
    recipe = base_task.RECIPES["strong"]
    assert recipe.rotations and recipe.trivial
    plain = recipe.for_data(small_digits())
    assert plain == BaseRecipe(epochs=300, lr=0.5, batch_size=256, warm_up=1 / 30, trivial=False, rotations=False)


def test_settings_of_the_recipe_are_defaults_which_the_caller_overrides(images):
    big = from_arrays(*[torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.arange(2)] * 2, layout="NCHW")
    strong = settings_of(["finetune"], {"base": "strong"}, big)["finetune"]
    assert (strong["base_epochs"], strong["base_lr"]) == (300, 0.5)
    assert settings_of(["finetune"], {"base": "strong", "base_epochs": 7}, big)["finetune"]["base_epochs"] == 7
    assert settings_of(["finetune"], {}, big)["finetune"] == strong  # the default
    paper = settings_of(["finetune", "joint"], {}, big, "paper")
    assert paper["finetune"] == {"base": "paper"}
    assert not strong.keys() & {"epochs", "lr"} and strong["last_relu"] is True
    joint, lucir = (settings_of([m], {"base": "strong"}, big)[m] for m in ("joint", "lucir"))
    assert (joint["epochs"], joint["lr"]) == (300, 0.5) and "last_relu" not in lucir
    assert paper["joint"] == {"base": "paper"}


def test_the_settings_of_a_file_are_those_of_all_trainings_of_joint(images, tmp_path):
    learn("finetune", images, tmp_path, base_epochs=3, base_lr=0.04)
    (shared,) = (tmp_path / "shared").iterdir()
    found = settings_of(["joint", "finetune"], {"base": str(shared)}, images)
    assert "lr" not in found["finetune"] and found["joint"]["lr"] == 0.04


def test_the_learning_rate_rises_and_falls_as_a_cosine():
    schedule = Schedule(epochs=10, lr=1.0, shape="cosine", warm_up=0.1)
    assert [schedule.share(p) for p in (0.0, 0.05, 0.1)] == [0.0, 0.5, 1.0]
    assert schedule.share(0.55) == pytest.approx(0.5) and schedule.share(1.0) == pytest.approx(0.0)
