"""GFR: old classes are replayed as feature vectors that a conditional GAN makes, and features are distilled.

Liu et al., "Generative Feature Replay For Class-Incremental Learning" (2020). Each task has two parts:

    classifier  images -> features -> head:  cross entropy on the new classes
                latents, old labels -> generator -> head:  cross entropy on the old ones
                features held to those of the network before this task; batch statistics frozen
    generator   a conditional WGAN-GP (_gan.py) on features of this task's images, held to the generator before on old
                classes; left out in the last task, after which nothing is replayed

With r = old classes / new classes, a task after the base trains by

    (CE_new + r CE_old) / (1 + r) + distillation * r * |f - f_old|       the norm over the whole batch, not squared

and its generator by  -critic + alignment * r * |g - g_old|^2            summed over the batch.

Two references, as the network matters more than the method (protocol notes, finding 5). Defaults: the backbone and the
base task are those of the other learners ("matched"), later tasks train as GFR's code does. GFR.presets["own"] is GFR's
code throughout: ResNet-18, Adam 1e-3 for 201 epochs, weight decay 2e-4, x0.1 for the last epoch.

Deviations from the authors' code:
- The head grows; there all classes of the data set compete from the start, in training and in testing.
- A step is five updates of the critic, then one of the generator; there the generator moves after the 1st, 6th, 11th,
  ... batch of each epoch. Batches are full across epochs; there the rest of an epoch is dropped.
- The critic has no classifier of its own: theirs computes that loss and does not use it.
- Images are normalised by the data set's statistics; there CIFAR-10's. As there, the generator learns from features of
  cropped and mirrored images, computed anew for each batch.
- r is a fraction where tasks are unequal; there tasks are equal and it is a whole number.
- Convolutions start as in the other learners; on a GPU the classifier computes in bf16, the GAN in fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_choice, check_int, check_range
from krnet.errors import SettingError
from krnet.learners.base import Context, Learner, LearnerConfig, Work, num_bytes, register
from krnet.learners.gfr.gan import Adversarial, Critic, GanBatches, Generator, seeded
from krnet.train.classifier import Descent, ImageBatches, Schedule

M = TypeVar("M", bound=nn.Module)
GAN_PART = 1  # its batches come in another order than the classifier's


@dataclass(frozen=True, kw_only=True)
class GFRConfig(LearnerConfig):
    later = LearnerConfig.later | {
        "later_optimizer",
        "later_drops",
        "later_weight_decay",
        "distillation",
        "replay",
        "gan_epochs",
        "gan_lr",
        "gan_drops",
        "gan_decay",
        "latent",
        "hidden",
        "critic_steps",
        "penalty",
        "alignment",
        "keep_critic",
    }
    epochs: int = 201
    """Epochs of every later task."""
    lr: float = 1e-3
    """Learning rate of every later task."""
    later_optimizer: str = "adam"
    """sgd or adam, after the base task: the distillation's gradient is far too long for the base task's SGD."""
    later_drops: tuple[float, ...] = (0.995,)
    """Shares of a later task after which the learning rate falls: 200 of 201 epochs."""
    later_weight_decay: float = 2e-4
    """Weight decay after the base task."""
    bn: str = "frozen"
    """Batch statistics after the base task: train (they go on) or frozen."""
    distillation: float = 1.0
    """Weight of the distance to the old network's features."""
    replay: bool = True
    """Replay generated features of old classes; without, there is no generator and only the distillation is left."""
    gan_epochs: int = 501
    """Epochs of the generator's part of a task, counted in the critic's batches."""
    gan_lr: float = 1e-4
    """Learning rate of generator and critic."""
    gan_drops: tuple[float, ...] = (0.4, 0.8)
    """Shares of the generator's part after which its learning rate falls: 200 and 400 of 501 epochs."""
    gan_decay: float = 0.3
    """Factor by which it falls."""
    latent: int = 200
    """Random numbers from which the generator makes a feature vector."""
    hidden: int = 512
    """Width of generator and critic."""
    critic_steps: int = 5
    """Updates of the critic for each of the generator."""
    penalty: float = 10.0
    """Weight of the gradient penalty."""
    alignment: float = 1e-3
    """Weight of the distance to what the old generator makes of old classes."""
    keep_critic: bool = True
    """Carry the critic from task to task, as stored bytes; else each task starts a new one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("later_optimizer", self.later_optimizer, ("sgd", "adam"))
        for name in ("replay", "keep_critic"):
            check_choice(name, getattr(self, name), (True, False))
        for name in ("gan_epochs", "latent", "hidden", "critic_steps"):
            check_int(name, getattr(self, name), 1)
        for name in ("later_weight_decay", "distillation", "gan_lr", "gan_decay", "penalty", "alignment"):
            check_range(name, getattr(self, name), 0)
        if self.replay and not self.last_relu:
            raise SettingError("last_relu is False; the generator ends in a ReLU and cannot make negative features")

    def schedule(self, task: int) -> Schedule:
        plan = super().schedule(task)
        if task == 0:
            return plan
        weight_decay = self.later_weight_decay
        return replace(plan, optimizer=self.later_optimizer, drops=self.later_drops, weight_decay=weight_decay)

    def gan_schedule(self) -> Schedule:
        return Schedule(
            epochs=self.gan_epochs,
            lr=self.gan_lr,
            drops=self.gan_drops,
            decay=self.gan_decay,
            weight_decay=0.0,
            optimizer="adam",
        )


GFR_OWN: dict[str, Any] = {
    "backbone": "resnet18-small",
    "optimizer": "adam",
    "base_epochs": 201,
    "base_lr": 1e-3,
    "drops": (0.995,),
    "weight_decay": 2e-4,
}


def frozen_copy(module: M) -> M:
    return copy.deepcopy(module).eval().requires_grad_(False)


class ReplayBatches:
    """New images and their labels, and as many generated features of old classes, drawn alike, with theirs."""

    def __init__(self, images: ImageBatches, generator: Generator, num_old: int, seed: int, device: torch.device):
        self.images, self.generator, self.num_old = images, generator, num_old
        self.seed, self.device = seed, device
        self.batch_size, self.num_samples = images.batch_size, images.num_samples

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        drawn = seeded(self.seed, iteration, self.device)
        latents = torch.randn(self.batch_size, self.generator.latent, generator=drawn, device=self.device)
        old = torch.randint(self.num_old, (self.batch_size,), generator=drawn, device=self.device)
        return latents, old, *self.images.inputs(iteration)

    def tensors(self, latents: Tensor, old: Tensor, *chosen: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            generated = self.generator(latents, old)
        return *self.images.tensors(*chosen), generated, old


@register
class GFR(Learner):
    name = "gfr"
    config_class = GFRConfig
    config: GFRConfig
    large_images: ClassVar[Mapping[str, Any]] = {
        "epochs": 101,
        "later_drops": (0.99,),
        "gan_epochs": 201,
        "gan_drops": (0.995,),
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"matched": {}, "own": GFR_OWN}

    def __init__(self, context: Context, config: GFRConfig):
        super().__init__(context, config)
        self.feature_dim, self.num_classes = self.model.head.feature_dim, len(context.split.order)
        generator = Generator(self.feature_dim, self.num_classes, latent=config.latent, hidden=config.hidden)
        self.generator: Generator = self.to_device(generator)
        self.critic = self._new_critic()

    def _new_critic(self) -> Critic:
        critic: Critic = self.to_device(Critic(self.feature_dim, self.num_classes, hidden=self.config.hidden))
        return critic

    @property
    def num_old(self) -> int:
        return self.context.new_classes(self.task).start

    @property
    def old_share(self) -> float:
        """Old classes for each new one."""
        return self.num_old / len(self.context.new_classes(self.task))

    # ------------------------------------------------------------------ learning

    def learn(self, task: int) -> Iterator[Work]:
        self.expand(task)
        yield self.base_work() if task == 0 else self.classifier_work()
        if self.config.replay and task < self.context.split.num_tasks - 1:
            yield self.generator_work()

    def classifier_work(self) -> Descent:
        images = self.batches(self.context.task_ids(self.task))
        old_backbone = frozen_copy(self.model.backbone)
        share = self.old_share

        def distance(images: Tensor, features: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = old_backbone(images).float()
            return self.config.distillation * share * torch.dist(features, wanted)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            features = self.model.features(images).float()
            return self.classification(self.model.head(features), labels) + distance(images, features)

        def replay_loss(images: Tensor, labels: Tensor, generated: Tensor, old: Tensor) -> Tensor:
            features = self.model.features(images).float()
            logits = self.model.head(torch.cat([features, generated])).float()
            new_loss = self.classification(logits[: len(labels)], labels)
            old_loss = F.cross_entropy(logits[len(labels) :], old)
            return (new_loss + share * old_loss) / (1 + share) + distance(images, features)

        if not self.config.replay:
            return self.descent("classifier", images, loss)
        seed = self.context.seed_for(self.task)
        batches = ReplayBatches(images, self.generator, self.num_old, seed, self.device)
        return self.descent("classifier", batches, replay_loss)

    def generator_work(self) -> Adversarial:
        c = self.config
        if not c.keep_critic and self.task > 0:
            self.critic = self._new_critic()
        images = self.batches(self.context.task_ids(self.task), part=GAN_PART)
        batches = GanBatches(
            images,
            self.model.features,
            critic_steps=c.critic_steps,
            latent=c.latent,
            num_old=self.num_old,
            seed=self.context.seed_for(self.task, GAN_PART),
            device=self.device,
        )
        return Adversarial(
            "generator",
            self.generator,
            self.critic,
            batches,
            c.gan_schedule(),
            self.device,
            penalty=c.penalty,
            old_generator=frozen_copy(self.generator) if self.task > 0 else None,
            alignment=c.alignment * self.old_share,
        )

    # ------------------------------------------------------------------ keeping

    def modules(self) -> dict[str, nn.Module]:
        kept: dict[str, nn.Module] = {"model": self.model}
        if self.config.replay:
            kept["generator"] = self.generator
            if self.config.keep_critic:
                kept["critic"] = self.critic
        return kept

    def storage_bytes(self) -> dict[str, int]:
        return {name: num_bytes(module.state_dict()) for name, module in self.modules().items() if name != "model"}
