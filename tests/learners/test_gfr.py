"""GFR: the conditional GAN by itself, the losses as the paper has them, and what generated replay is good for."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
import torch.nn.functional as F

from krnet import task_loop as learning
from krnet.errors import SettingError
from krnet.learners import base
from krnet.learners.gfr.gan import Adversarial, Critic, GanBatches, Generator, gradient_penalty
from krnet.learners.gfr.learner import GFR, frozen_copy
from krnet.train.classifier import Saving, Schedule
from learning_tools import settings_for, small_digits, small_tasks

CPU = torch.device("cpu")
DIM = 4


def means(num_classes):
    return 3 * torch.eye(DIM)[:num_classes] + 1


class Clouds:
    """A Gaussian cloud for each class, around a point of its own; features by themselves, no images."""

    batch_size, num_samples = 32, 320

    def __init__(self, classes, device=CPU):
        self.classes, self.device = torch.tensor(classes), device

    def inputs(self, iteration):
        generator = torch.Generator().manual_seed(iteration)
        labels = self.classes[torch.randint(len(self.classes), (self.batch_size,), generator=generator)]
        features = means(3)[labels] + 0.3 * torch.randn(self.batch_size, DIM, generator=generator)
        return features.to(self.device), labels.to(self.device)

    def tensors(self, features, labels):
        return features, labels


def make_gan(*, epochs, classes=(0, 1, 2), generator=None, device=CPU, num_old=0, **options):
    torch.manual_seed(3)
    if generator is None:
        generator = Generator(DIM, 3, latent=5, hidden=64).to(device)
        torch.nn.init.ones_(generator.layers[-2].bias)  # with so few outputs, one dead at the start may stay so
    critic = Critic(DIM, 3, hidden=64).to(device)
    batches = GanBatches(
        Clouds(classes, device), lambda x: x, critic_steps=5, latent=5, num_old=num_old, seed=1, device=device
    )
    schedule = Schedule(epochs=epochs, lr=3e-3, drops=(0.6,), decay=0.3, weight_decay=0.0, optimizer="adam")
    return Adversarial("generator", generator, critic, batches, schedule, device, **options)


def class_means(generator, classes=(0, 1, 2)):
    latents = torch.randn(500, generator.latent, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return torch.stack([generator(latents, torch.full((500,), label)).mean(0) for label in classes])


@pytest.fixture(scope="module")
def trained():
    gan = make_gan(epochs=100)
    gan.run(None, None)
    return gan.generator


# ---------------------------------------------------------------------- the GAN


def test_the_penalty_is_that_of_one_sample_at_a_time():
    torch.manual_seed(0)
    critic = Critic(DIM, 3, hidden=8)
    real, fake, mix = torch.rand(6, DIM), torch.rand(6, DIM), torch.rand(6, 1)
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    slow = []
    for sample in range(6):
        point = (mix[sample] * real[sample] + (1 - mix[sample]) * fake[sample]).requires_grad_(True)
        value = critic(point[None], labels[sample : sample + 1])[0]
        (slope,) = torch.autograd.grad(value, point, create_graph=True)
        slow.append(((slope * slope).sum().sqrt() - 1) ** 2)
    expected = sum(slow) / 6
    found = gradient_penalty(critic, real, fake, labels, mix)
    torch.testing.assert_close(found, expected)
    weights = [p for name, p in critic.named_parameters() if name.endswith("weight")]
    gradients = torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights)
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)
    assert all(gradient.abs().sum() > 0 for gradient in gradients[0])


def test_the_penalty_of_a_plane_depends_on_its_slope_alone():
    plane = torch.nn.Linear(DIM, 1)
    values = torch.rand(4, 5, DIM)
    found = gradient_penalty(lambda x, labels: plane(x)[:, 0], values[0], values[1], torch.zeros(5), values[2, :, :1])
    torch.testing.assert_close(found, (plane.weight.norm() - 1) ** 2)


def test_a_trained_generator_makes_what_each_class_looks_like(trained):
    before = class_means(make_gan(epochs=1).generator)
    found = class_means(trained)
    # The classes lie 4.2 apart.
    assert torch.cdist(before, means(3)).diag().min() > 2.5
    assert torch.cdist(found, means(3)).diag().max() < 1.5


def test_alignment_keeps_what_was_generated_of_old_classes(trained):
    drift = {}
    for weight in (0.0, 0.1):
        young = make_gan(
            epochs=30, classes=(2,), generator=copy.deepcopy(trained), num_old=2,
            old_generator=frozen_copy(trained), alignment=weight,
        )  # fmt: skip
        young.run(None, None)
        drift[weight] = (class_means(young.generator, (0, 1)) - class_means(trained, (0, 1))).norm()
    assert drift[0.1] < drift[0.0] / 3


def test_the_critic_loss_is_fake_minus_real_and_the_penalty():
    gan = make_gan(epochs=1, penalty=7.0)
    real, fake, mix, labels = torch.rand(3, DIM), torch.rand(3, DIM), torch.rand(3, 1), torch.tensor([2, 0, 1])
    expected = (gan.critic(fake, labels) - gan.critic(real, labels)).mean()
    expected = expected + 7 * gradient_penalty(gan.critic, real, fake, labels, mix)
    torch.testing.assert_close(gan.critic_loss(real, fake, labels, mix), expected)


def test_the_alignment_loss_is_a_sum_of_squares_over_batch_and_features(trained):
    gan = make_gan(epochs=1, old_generator=frozen_copy(trained), alignment=0.01)
    latents, labels, old = torch.randn(6, 5), torch.tensor([2] * 6), torch.tensor([0, 1, 0, 1, 0, 1])
    expected = -sum(gan.critic(gan.generator(latents, labels), labels)) / 6
    for made, kept in zip(gan.generator(latents, old), trained(latents, old)):
        expected = expected + 0.01 * sum((a - b) ** 2 for a, b in zip(made, kept))
    torch.testing.assert_close(gan.generator_loss(labels, latents, old), expected)


def test_the_critic_moves_five_times_for_each_move_of_the_generator():
    gan = make_gan(epochs=1)
    for iteration in range(2):
        gan.step(iteration, 0.0)
    moves = [
        {int(gan.optimizer.state[param]["step"]) for param in module.parameters()}
        for module in (gan.critic, gan.generator)
    ]
    assert moves == [{10}, {2}]
    assert all(group["betas"] == (0.5, 0.999) for group in gan.optimizer.param_groups)


def test_a_gan_stopped_in_the_middle_ends_in_the_same_weights(tmp_path):
    whole = make_gan(epochs=12)
    whole.run(None, None)
    assert whole.iterations == 24  # 10 batches an epoch, 5 a step
    with pytest.raises(KeyboardInterrupt):
        make_gan(epochs=12).run(Saving(tmp_path / "partial"), lambda status: os.kill(os.getpid(), signal.SIGINT))
    resumed = make_gan(epochs=12)
    resumed.run(Saving(tmp_path / "partial", resume=True), None)
    for name, value in whole.state().items():
        assert torch.equal(resumed.state()[name], value), name


@pytest.mark.gpu
def test_steps_in_a_graph_are_the_plain_steps():
    device = torch.device("cuda", 0)
    old = Generator(DIM, 3, latent=5, hidden=64).to(device)
    graphed, plain = (make_gan(epochs=4, device=device, num_old=2, old_generator=old, alignment=0.01) for _ in "ab")
    for iteration in range(8):
        graphed.step(iteration, 0.0)
        plain._update(*plain.batches.inputs(iteration))
    assert graphed.graph is not None
    for name, value in plain.state().items():
        torch.testing.assert_close(graphed.state()[name], value, atol=1e-4, rtol=1e-3)


def test_the_networks_have_the_sizes_of_the_reference():
    sizes = [sum(p.numel() for p in network.parameters()) for network in (Generator(512, 100), Critic(512, 100))]
    unused_classifier = 512 * 100 + 100
    assert sizes == [679_424, 628_325 - unused_classifier]


# ---------------------------------------------------------------------- the learner


def make_learner(tmp_path, **settings):
    config = base.make_config(GFR, {**settings_for("gfr"), **settings})
    torch.manual_seed(0)
    return GFR(base.Context(small_digits(), small_tasks(), CPU, 1, tmp_path), config)


def test_the_loss_weighs_new_and_old_by_their_classes_and_adds_the_distance_of_features(tmp_path):
    learner = make_learner(tmp_path, distillation=0.7)
    learner.expand(0)
    learner.expand(1)
    work = learner.classifier_work()
    images, labels, generated, old = work.batches.tensors(*work.batches.inputs(3))
    before = copy.deepcopy(learner.model.backbone).eval()
    assert labels.min() >= 4 and old.max() < 4 and len(generated) == len(images) == 32
    with torch.no_grad():  # the old network's features are those from before this
        for param in learner.model.backbone.parameters():
            param.mul_(1.1)
    features = learner.model.features(images)
    distance = (features - before(images)).square().sum().sqrt()
    new_loss = F.cross_entropy(learner.model.head(features), labels)
    old_loss = F.cross_entropy(learner.model.head(generated), old)
    # 4 old classes, 2 new ones.
    expected = (2 * new_loss + 4 * old_loss) / 6 + 0.7 * 2 * distance
    torch.testing.assert_close(work.loss(images, labels, generated, old), expected)


def test_the_first_step_of_a_task_is_finite_though_the_distance_is_zero(tmp_path):
    learner = make_learner(tmp_path)
    learner.expand(0)
    learner.expand(1)
    work = learner.classifier_work()
    assert work.step(0, 0.0).isfinite()
    assert all(p.isfinite().all() for p in learner.model.parameters())


def test_what_is_generated_follows_from_the_iteration_alone(tmp_path):
    learner = make_learner(tmp_path)
    learner.expand(0)
    gan = learner.generator_work().batches
    learner.expand(1)
    for batches in (gan, learner.classifier_work().batches):
        once, again, other = (batches.inputs(iteration) for iteration in (4, 4, 5))
        assert all(torch.equal(a, b) for a, b in zip(once, again))
        assert not torch.equal(once[0], other[0])


def test_a_task_is_classifier_then_generator_and_the_last_has_no_generator(tmp_path):
    learner = make_learner(tmp_path)
    assert [[work.name for work in learner.learn(task)] for task in range(3)] == [
        ["classifier", "generator"],
        ["classifier", "generator"],
        ["classifier"],
    ]


def test_every_stored_byte_of_the_gan_is_counted(tmp_path):
    generator = 4 * ((8 + 8) * 32 + 32 + 32 * 32 + 32 + 32 * 64 + 64)
    critic = 4 * (64 * 32 + 32 + 32 * 32 + 32 + 32 + 1 + 8 * 32)
    assert make_learner(tmp_path).storage_bytes() == {"generator": generator, "critic": critic}
    assert make_learner(tmp_path, keep_critic=False).storage_bytes() == {"generator": generator}
    assert make_learner(tmp_path, replay=False).storage_bytes() == {}


def test_a_critic_that_is_not_kept_starts_anew(tmp_path):
    for keep in (True, False):
        learner = make_learner(tmp_path, keep_critic=keep)
        learner.expand(0)
        first = learner.generator_work().critic
        learner.expand(1)
        assert (learner.generator_work().critic is first) == keep


def test_the_presets_differ_in_backbone_and_base_task_alone():
    matched, own = (base.make_config(GFR, GFR.presets[name]) for name in ("matched", "own"))
    assert (matched.backbone, own.backbone) == ("resnet32", "resnet18-small")
    assert matched.schedule(0) == base.LearnerConfig().schedule(0)
    assert matched.schedule(1) == own.schedule(1) == own.schedule(0)
    plan = own.schedule(0)
    assert (plan.optimizer, plan.lr, plan.epochs, plan.weight_decay) == ("adam", 1e-3, 201, 2e-4)
    assert [plan.share(epoch / 201) for epoch in (0, 199, 200)] == [1.0, 1.0, 0.1]
    assert [round(own.gan_schedule().share(epoch / 501), 9) for epoch in (199, 201, 399, 401)] == [1, 0.3, 0.3, 0.09]


def test_features_that_may_be_negative_are_refused():
    with pytest.raises(SettingError, match="ReLU"):
        base.make_config(GFR, {"last_relu": False})


@pytest.mark.slow
def test_without_generated_features_old_classes_are_forgotten(tmp_path):
    settings = settings_for("gfr") | {
        "base_epochs": 20, "epochs": 60, "lr": 1e-3, "distillation": 0.3, "gan_epochs": 100, "gan_lr": 1e-3,
        "hidden": 64,
    }  # fmt: skip
    base_accuracy, last = {}, {}
    for replay in (True, False):
        run = learning.learn(
            "gfr", small_digits(), small_tasks(), out=tmp_path / str(replay), settings=settings | {"replay": replay},
            device="cpu", seed=1,
        )  # fmt: skip
        base_accuracy[replay], last[replay] = run["accuracy_matrix"][-1][0], run["last"]
    assert base_accuracy[True] > base_accuracy[False] + 0.4
    assert last[True] > last[False] + 0.15
