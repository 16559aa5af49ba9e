"""KRIL: old classes live on in replayed feature maps, and in nothing else."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from krnet import api
from krnet import task_loop as learning
from krnet.errors import BudgetError, SettingError
from krnet.learners import base
from krnet.learners.kril import learner as kril
from krnet.learners.kril import recordings as _kril_recordings
from krnet.train.classifier import Saving
from krnet.train.config import FitConfig
from learning_tools import settings_for, small_tasks

CPU = torch.device("cpu")
SIZES = "d0=64,c0=32,c1=16"
SHORT = {"base_epochs": 1, "epochs": 1, "recorder_iterations": 10}  # where nothing need be learned well


def make(digits, folder, **settings):
    config = base.make_config(kril.Kril, {**settings_for("kril"), **settings})
    context = base.Context(digits, small_tasks(), CPU, 1, folder)
    torch.manual_seed(0)
    return kril.Kril(context, config)


def run_task(learner, task, folder):
    works = []
    for number, work in enumerate(learner.learn(task)):
        work.run(Saving(folder / f"{task}-{number}"), None)
        works.append(work)
    return works


def old_accuracy(run):
    """On the classes of the base task and the first after it, when all is learned."""
    row = run["accuracy_matrix"][-1]
    return sum(row[:-1]) / len(row[:-1])


def learn(digits, out, **settings):
    own = {**settings_for("kril"), "base_epochs": 12, "recorder_iterations": 60, "recorder_settings": SIZES, **settings}
    return learning.learn("kril", digits, small_tasks(), out=out, settings=own, device="cpu", seed=1)


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    return learn(digits, tmp_path_factory.mktemp("kril") / "run")


@pytest.mark.slow
def test_old_classes_are_kept_by_replays_and_lost_with_noise_in_their_place(digits, whole, tmp_path, monkeypatch):
    right = _kril_recordings.Recordings.replay

    def noise(self, task, first=0):
        features, labels = right(self, task, first)
        return torch.rand_like(features) * features.max(), labels

    monkeypatch.setattr(_kril_recordings.Recordings, "replay", noise)
    shuffled = learn(digits, tmp_path / "noise")
    assert old_accuracy(whole) > 0.75
    assert old_accuracy(shuffled) < old_accuracy(whole) - 0.3


def test_replays_are_nearly_as_good_as_real_features(digits, whole, tmp_path):
    real = learn(digits, tmp_path / "raw", recorder="raw", recorder_settings="")
    feature_bytes = 8 * 24 * 16 * 8 * 8 * 4  # classes, images of each, maps of 16 x 8 x 8, float32
    assert real["storage_bytes"]["total"] == pytest.approx(feature_bytes, rel=0.02)
    assert abs(real["last"] - whole["last"]) < 0.15


@dataclass
class Seen:
    """What was there after a task of one learner, and what happened during it."""

    files: list[Path]
    labels: torch.Tensor
    file_bytes: int
    stored: dict[str, int]
    base_content: bytes
    trunk: dict[str, torch.Tensor]
    tail: dict[str, torch.Tensor]
    taken: set[int]
    recorded: list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module", params=[False, True], ids=["two files", "single"])
def seen(request, digits, tmp_path_factory):
    """A learner that went through all its tasks, its folder, and what was seen of each task."""
    folder = tmp_path_factory.mktemp("seen")
    learner = make(digits, folder, single=request.param)
    images, taken, recorded, tasks = learner.context.train, [], [], []
    take, record = images.take, api.record

    def note_images(ids, draws=None):
        taken.append(ids.clone())
        return take(ids, draws)

    def note_features(features, labels, **options):
        recorded.append((features.clone(), labels.clone()))
        return record(features, labels, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "take", note_images)
        patch.setattr(api, "record", note_features)
        for task in range(3):
            run_task(learner, task, folder)
            files = learner.recordings.files(task)
            tasks.append(
                Seen(
                    files, torch.cat([api.open(path).labels for path in files]),
                    sum(path.stat().st_size for path in files), learner.storage_bytes(), files[0].read_bytes(),
                    *(copy.deepcopy(part.state_dict()) for part in (learner.trunk, learner.tail)),
                    set(torch.cat(taken).tolist()), list(recorded),
                )
            )  # fmt: skip
            taken.clear()
            recorded.clear()
    return learner, folder, tasks


def test_after_the_base_task_no_old_image_is_looked_at(seen):
    learner, _, tasks = seen
    for task in (1, 2):
        assert tasks[task].taken == set(learner.context.task_ids(task).tolist())


def test_f1_stays_as_the_base_task_left_it(seen):
    _, _, (before, *later) = seen
    for after in later:
        assert all(torch.equal(value, before.trunk[name]) for name, value in after.trunk.items())
        assert not all(torch.equal(value, before.tail[name]) for name, value in after.tail.items())


def test_recordings_hold_every_sample_of_all_tasks_and_their_bytes_are_those_on_disk(seen):
    learner, folder, tasks = seen
    single = learner.config.single
    for task, found in enumerate(tasks):
        expected = torch.cat([learner.context.train_labels[learner.context.task_ids(t)] for t in range(task + 1)])
        assert found.labels.sort().values.tolist() == expected.sort().values.tolist()
        assert len(found.files) == (1 if single or task == 0 else 2)
        assert sum(found.stored.values()) == found.file_bytes
    # Two generations at most: what the last task needed, and what the next one will.
    assert len(list(folder.glob("*.krn"))) == (2 if single else 3)


def test_the_base_recording_is_never_written_again_unless_one_recording_holds_all_tasks(seen):
    learner, _, tasks = seen
    assert len({found.base_content for found in tasks}) == (3 if learner.config.single else 1)


def test_later_recorders_teach_themselves_from_the_replays_of_the_one_before(seen):
    learner, _, tasks = seen
    ((features, labels),) = tasks[2].recorded
    before = api.open(tasks[1].files[-1])
    assert torch.equal(features[: len(before)], before.replay(torch.arange(len(before))))
    assert torch.equal(labels[: len(before)], before.labels)
    ids = learner.context.task_ids(2)
    ids = ids[learner.context.train_labels[ids].argsort(stable=True)]  # class by class
    assert torch.equal(features[len(before) :], learner.apply(learner.trunk, learner.context.train, ids))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("recorder", "budget"), [pytest.param("krnet", 60_000, marks=pytest.mark.slow), ("quantized", 60_000)]
)
def test_all_recordings_together_keep_the_budget_and_use_most_of_it(digits, tmp_path, recorder, budget, single):
    learner = make(digits, tmp_path, recorder=recorder, budget=budget, single=single, **SHORT)
    for task in range(learner.context.split.num_tasks):
        run_task(learner, task, tmp_path)
        assert sum(learner.storage_bytes().values()) <= budget
    assert sum(learner.storage_bytes().values()) > 0.7 * budget


def advised(error: pytest.ExceptionInfo[BudgetError]) -> int:
    return int(re.search(r"--budget (\d+)", str(error.value))[1])


@pytest.mark.parametrize("single", [False, True])
def test_a_budget_below_the_size_of_raw_features_is_refused_before_any_training(digits, tmp_path, single):
    with pytest.raises(
        BudgetError, match=r"the budget is 90000 bytes for all 192 samples, of which a recording of"
    ) as e:
        make(digits, tmp_path, recorder="raw", budget=90_000, single=single)
    settings = {**SHORT, "single": single, "recorder": "raw", "budget": advised(e)}
    learner = make(digits, tmp_path, **settings)
    for task in range(3):
        run_task(learner, task, tmp_path)


@pytest.mark.parametrize("recorder", ["krnet", "pca", "quantized", "transform", "pq", "raw", "images", "paper"])
def test_a_budget_of_a_byte_is_refused_before_the_base_task_is_trained(digits, tmp_path, recorder):
    with pytest.raises(BudgetError, match=r"the budget is 1 bytes .*--budget \d+"):
        make(digits, tmp_path, recorder=recorder, budget=1)


def test_a_budget_that_a_recorder_turns_out_to_miss_is_refused_in_terms_of_the_whole(digits, tmp_path):
    settings = {**SHORT, "recorder": "quantized"}
    with pytest.raises(BudgetError, match=r"the budget is 4600 bytes for all 192 .*another folder \(--out\)") as error:
        run_task(make(digits, tmp_path, budget=4600, **settings), 0, tmp_path)
    learner = make(digits, tmp_path, budget=advised(error), **settings)
    for task in range(3):
        run_task(learner, task, tmp_path)


@pytest.mark.parametrize(("recorder", "budget"), [("krnet", 60_000), ("pca", 60_000), ("quantized", None)])
def test_a_recording_that_grows_is_one_file_whose_old_samples_stay_as_they_are(digits, tmp_path, recorder, budget):
    learner = make(digits, tmp_path, recorder=recorder, budget=budget, **SHORT)
    run_task(learner, 0, tmp_path)
    before = learner.recordings.replay(0)
    for task in (1, 2):
        run_task(learner, task, tmp_path)
    after = learner.recordings.replay(2)
    assert len(learner.recordings.files(2)) == 1 and len(after[1]) == sum(learner.recordings.counts)
    for old, new in zip(before, after):
        assert torch.equal(old, new[: len(old)])


def test_the_loss_is_cross_entropy_plus_the_change_of_f2s_features_on_replays_alone(digits, tmp_path):
    learner = make(digits, tmp_path, aux=3.0, recorder="raw", **SHORT)
    run_task(learner, 0, tmp_path)
    last = copy.deepcopy(learner.tail).eval()
    works = learner.learn(1)
    descent = next(works)
    with torch.no_grad():
        for p in learner.tail.parameters():
            p.add_(0.01 * torch.randn_like(p))
    learner.f2.eval()
    features, labels, wanted = descent.batches.tensors(*descent.batches.inputs(0))
    number = descent.batches.num_old
    assert 0 < number < len(labels) and bool((labels[:number] < 4).all()) and bool((labels[number:] >= 4).all())
    aux = sum((learner.tail(f[None]) - last(f[None])).square().sum() for f in features[:number]) / len(labels)
    expected = F.cross_entropy(learner.f2(features), labels) + 3 * aux
    torch.testing.assert_close(descent.loss(features, labels, wanted), expected)


def test_old_and_new_samples_come_in_proportion_to_their_numbers(digits, tmp_path):
    learner = make(digits, tmp_path, batch_size=30, recorder="raw", **SHORT)
    run_task(learner, 0, tmp_path)
    batches = next(learner.learn(1)).batches
    # 4 classes of 24 old samples and 2 of 24 new ones.
    assert (batches.num_old, batches.batch_size, batches.num_samples) == (20, 30, 144)


@pytest.mark.parametrize(("scaled", "iterations"), [(True, [40, 20, 40]), (False, [40, 40, 40])])
def test_iterations_follow_the_number_of_samples_unless_fixed(digits, tmp_path, monkeypatch, scaled, iterations):
    learner = make(digits, tmp_path, scaled=scaled, **SHORT | {"recorder_iterations": 40})
    found = []
    right = api.record

    def note(features, labels, **options):
        found.append(options["iterations"])
        return right(features, labels, **{**options, "iterations": 3})

    monkeypatch.setattr(api, "record", note)
    for task in range(3):
        run_task(learner, task, tmp_path)
    assert found == iterations


@pytest.mark.parametrize("kr2", [True, False])
def test_l_kr2_looks_through_f2_without_its_classifier(digits, tmp_path, monkeypatch, kr2):
    learner = make(digits, tmp_path, kr2=kr2, **SHORT)
    seen = []
    monkeypatch.setattr(api, "record", lambda *a, **options: seen.append(options["head"]))
    run_task(learner, 0, tmp_path)
    assert seen == [learner.tail if kr2 else None]


@pytest.mark.parametrize("kind", ["plain", "flip", "crop"])
def test_new_features_are_f1s_of_the_images_as_they_are_mirrored_or_cropped(digits, tmp_path, kind):
    flipping = replace(digits, flip=True)
    learner = make(flipping, tmp_path, new_features=kind)
    learner.model.eval()
    ids = learner.context.task_ids(1)
    new = kril.NewFeatures(learner.trunk, learner.context.train, ids, learner.context.train_labels[ids], kind, learner)
    assert new.shift == (digits.shift if kind == "crop" else 0)
    draws = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 2, 1]])
    places = torch.tensor([5, 5, 7])
    images = learner.context.train
    plain = images.take(ids[places])
    expected = {
        "plain": plain,
        "flip": torch.stack([plain[0], plain[1].flip(-1), plain[2].flip(-1)]),
        "crop": images.take(ids[places], draws),
    }[kind]
    with torch.no_grad():
        torch.testing.assert_close(new.take(places, draws), learner.trunk(expected))


@pytest.mark.parametrize(
    "settings",
    [
        {"recorder": "pca", "budget": 60_000},  # by default
        {"recorder": "quantized", "new_features": "replayed"},
        {"recorder_iterations": 2, "new_features": "replayed"},
    ],
)
def test_new_features_may_be_as_coarse_as_replays_of_old_ones(digits, tmp_path, settings):
    learner = make(digits, tmp_path, **SHORT | settings)
    assert learner.config.new_features == "replayed"
    run_task(learner, 0, tmp_path)
    works = learner.learn(1)
    recording = next(works)
    recording.run(None, None)
    batches = next(works).batches
    assert next(works, None) is None
    replays, labels = learner.recordings.replay(1)
    old, new, draws = batches.inputs(0)
    features, seen = batches.tensors(old, new, draws)[:2]
    mine = (labels >= 4).nonzero()[:, 0]
    assert torch.equal(features[len(old) :], replays[mine[new]]) and torch.equal(seen[len(old) :], labels[mine[new]])
    assert len(batches.new.labels) == len(mine) == len(learner.context.task_ids(1))


@pytest.mark.parametrize("settings", [{"new_features": "crop"}, {"augment": False}])
def test_new_images_are_mirrored_no_more_than_those_of_the_base_task(digits, tmp_path, settings):
    data = replace(digits, flip="augment" in settings)
    learner = make(data, tmp_path, recorder="raw", **SHORT, **settings)
    run_task(learner, 0, tmp_path)
    batches = next(learner.learn(1)).batches
    for iteration in range(3):
        old, new, draws = batches.inputs(iteration)
        features = batches.tensors(old, new, draws)[0][len(old) :]
        draws = draws[len(old) :].clone()
        draws[:, 2] = 0
        ids = batches.new.ids[new]
        images = learner.context.train.take(ids, draws) if learner.config.augment else learner.context.train.take(ids)
        with torch.no_grad():
            torch.testing.assert_close(features, learner.trunk(images))


def test_a_fit_of_the_autoencoder_is_set_and_seen_through_f2_like_krnets(digits, tmp_path, monkeypatch):
    learner = make(digits, tmp_path, recorder="autoencoder", recorder_settings="code_width=8", recorder_iterations=7)
    seen = []
    monkeypatch.setattr(api, "record", lambda *a, **options: seen.append(options))
    run_task(learner, 0, tmp_path)
    assert seen[0]["head"] is learner.tail and seen[0]["iterations"] == 7 and seen[0]["gamma"] == FitConfig.gamma


def test_the_papers_schedule_brings_what_it_gives_for_imagenet(digits, tmp_path, monkeypatch):
    learner = make(digits, tmp_path, recorder_schedule="paper", recorder_iterations=None, recorder_settings="")
    labels = torch.zeros(learner.recordings.counts[0], dtype=torch.int64)
    for shape, iterations, gamma in (((64, 8, 8), 40_000, 1e-3), ((256, 14, 14), 50_000, 5e-4)):
        options = learner.recordings.fit(0, torch.zeros(len(labels), *shape), labels).options
        assert (options["iterations"], options["gamma"]) == (iterations, gamma)


def test_mirrored_replays_are_the_maps_mirrored(digits, tmp_path):
    learner = make(replace(digits, flip=True), tmp_path, flip_replays=True, recorder="raw", **SHORT)
    run_task(learner, 0, tmp_path)
    batches = next(learner.learn(1)).batches
    old, new, draws = batches.inputs(3)
    features, _, wanted = batches.tensors(old, new, draws)
    kept = batches.replays.plain.permute(0, 3, 1, 2)
    for place, (which, draw) in enumerate(zip(old, draws, strict=False)):
        expected = kept[which].flip(-1) if draw[2] else kept[which]
        assert torch.equal(features[place], expected)
        with torch.no_grad():
            torch.testing.assert_close(wanted[place], learner.tail(expected[None])[0])
    assert 0 < draws[: len(old), 2].sum() < len(old)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fixed_layers": 4}, "cannot cut after 4"),
        ({"recorder": "krnot"}, "krnet"),
        ({"recorder_settings": "c0"}, "c0"),
        ({"new_features": "zoom"}, "new_features"),
        ({"flip_replays": True}, "digits8 is not to be mirrored"),
        ({"recorder_settings": 5}, "recorder_settings is 5; expected settings by name"),
        ({"recorder_settings": "gamma=7"}, "recorder_settings has gamma, which is a setting of KRIL"),
        ({"recorder_settings": "device=cpu"}, "device, which is the run's"),
        ({"recorder_settings": "stop_at_r2=2"}, "stop_at_r2"),
        ({"recorder_settings": "batch_size=9", "recorder": "raw"}, "batch_size is given, .* recorder raw fits none"),
        ({"batch_size": 1}, "batch_size is 1"),
        ({"ce": "new"}, "ce is 'new'; expected seen"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_learned(digits, tmp_path, settings, message):
    with pytest.raises(SettingError, match=message):
        make(digits, tmp_path, **settings)


# ------------------------------------------------------------------ the training of F2


def f2_works(digits, folder, **settings):
    """A learner after its base task, and the training of F2 in the next one, not yet begun."""
    learner = make(digits, folder, **SHORT, **settings)
    run_task(learner, 0, folder)
    for work in learner.learn(1):
        if work.name == "F2":
            return learner, work
        work.run(Saving(folder / work.name), None)
    raise AssertionError("the task trains no F2")


def convolutions(module):
    return {name: value.clone() for name, value in module.named_parameters() if value.dim() == 4}


@pytest.mark.parametrize("tail_lr", [0.0, 0.01, 1.0])
def test_the_tail_of_f2_learns_at_its_share_of_the_learning_rate(digits, tmp_path, tail_lr):
    learner, work = f2_works(digits, tmp_path, tail_lr=tail_lr, weight_decay=0.0, momentum=0.0)
    before, head = convolutions(learner.tail), learner.model.head.linears[0].weight.clone()
    inputs = work.batches.tensors(*work.batches.inputs(0))
    learner.f2.train()
    work.loss(*inputs).backward()
    slopes = {name: value.grad.clone() for name, value in learner.tail.named_parameters() if value.dim() == 4}
    rate = work.optimizer.param_groups[0]["lr"]  # of the head
    work.optimizer.step()
    for name, value in convolutions(learner.tail).items():
        assert torch.allclose(value, before[name] - rate * tail_lr * slopes[name], atol=1e-7)
    assert not torch.equal(learner.model.head.linears[0].weight, head)


@pytest.mark.parametrize("divisor", ["batch", "replayed"])
def test_the_auxiliary_loss_is_that_of_the_formula(digits, tmp_path, divisor):
    """lambda / B * sum of |F2_old(f) - F2(f)|^2 over replayed samples; B: the batch, or its replayed samples."""
    learner, work = f2_works(digits, tmp_path, aux=2.0, aux_divisor=divisor, bn="frozen")
    maps, labels, targets = work.batches.tensors(*work.batches.inputs(0))
    num_old = work.batches.num_old
    assert 0 < num_old < len(maps)
    learner.f2.eval()
    with torch.no_grad():
        for value in learner.tail.parameters():
            value.mul_(1.1)  # otherwise the last F2 and this one agree
        features = learner.tail(maps)
        expected = F.cross_entropy(learner.model.head(features), labels)
        apart = sum((features[i] - targets[i]).square().sum() for i in range(num_old))
        expected += 2.0 * apart / (len(maps) if divisor == "batch" else num_old)
        assert work.loss(maps, labels, targets).item() == pytest.approx(expected.item(), rel=1e-5)
    assert apart > 0
