"""GFR: replay old classes as feature vectors from a conditional GAN, and distil the features of the old network.

Liu et al., "Generative Feature Replay For Class-Incremental Learning" (2020). Each task has two parts:

    classifier  images -> features -> head:  cross entropy on the new classes
                latents, old labels -> generator -> head:  cross entropy on the old classes
                distillation to the features of the network before this task; BatchNorm statistics are frozen
    generator   a conditional WGAN-GP (gan.py) on features of this task's images, aligned with the previous generator on
                old classes; skipped in the last task, as nothing is replayed after it

With r = old classes / new classes, the loss of a later task is

    (CE_new + r CE_old) / (1 + r) + distillation * r * |f - f_old|       the norm over the whole batch, not squared

and that of its generator is  -critic + alignment * r * |g - g_old|^2    summed over the batch.

There are two reference settings, since the network matters more than the method. By default the backbone and the base
task are those of the other learners, and later tasks train as in GFR's code; preset paper, also named matched, differs
in the base task alone. GFR.presets["own"] follows
GFR's code throughout: ResNet-18, Adam 1e-3 for 201 epochs, weight decay 2e-4, learning rate x0.1 for the last epoch.

Deviations from the authors' code:
- The head grows. In theirs all classes of the data set compete from the start, in training and in testing.
- A step is five updates of the critic, then one of the generator. In theirs the generator is updated after the 1st,
  6th, 11th, ... batch of each epoch.
- Batches run across epoch boundaries. Theirs drops the incomplete batch of each epoch.
- The critic has no classifier. Theirs has one, but its loss is not used.
- Images are normalised by the data set's statistics; theirs uses those of CIFAR-10. As in theirs, the generator learns
  from features of cropped and mirrored images, computed again for each batch.
- r is a fraction if tasks are unequal. In theirs tasks are equal and r is an integer.
- Convolutions are initialised as in the other learners. On a GPU the classifier computes in bf16, the GAN in fp32.
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
from krnet.learners.base import PAPER_PRESET, Context, Learner, LearnerConfig, Work, num_bytes, register
from krnet.learners.gfr.gan import Adversarial, Critic, GanBatches, Generator
from krnet.train.classifier import Descent, ImageBatches, Schedule, step_rng

M = TypeVar("M", bound=nn.Module)
GAN_SEED_PART = 1  # so that the GAN's batches have another order than the classifier's


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
    """Optimizer after the base task: sgd or adam. The distillation's gradient is far too large for the base SGD."""
    later_drops: tuple[float, ...] = (0.995,)
    """Fractions of a later task after which the learning rate is multiplied by decay: 200 of 201 epochs."""
    later_weight_decay: float = 2e-4
    """Weight decay after the base task."""
    bn: str = "frozen"
    """BatchNorm statistics after the base task: train (updated) or frozen."""
    distillation: float = 1.0
    """Weight of the distance to the old network's features."""
    replay: bool = True
    """Replay generated features of old classes. If off, there is no generator; only the distillation remains."""
    gan_epochs: int = 501
    """Epochs of the GAN in each task, counted in batches of the critic."""
    gan_lr: float = 1e-4
    """Learning rate of generator and critic."""
    gan_drops: tuple[float, ...] = (0.4, 0.8)
    """Fractions of the GAN's training after which its learning rate falls: 200 and 400 of 501 epochs."""
    gan_decay: float = 0.3
    """Factor of the GAN's learning rate at each drop."""
    latent: int = 200
    """Length of the generator's random input."""
    hidden: int = 512
    """Hidden units per layer of generator and critic."""
    critic_steps: int = 5
    """Updates of the critic per update of the generator."""
    penalty: float = 10.0
    """Weight of the gradient penalty."""
    alignment: float = 1e-3
    """Weight of the distance to the old generator's features of old classes."""
    keep_critic: bool = True
    """Keep the critic between tasks (its bytes count as storage); else each task starts with a new one."""

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
        schedule = super().schedule(task)
        if task == 0:
            return schedule
        weight_decay = self.later_weight_decay
        return replace(schedule, optimizer=self.later_optimizer, drops=self.later_drops, weight_decay=weight_decay)

    def gan_schedule(self) -> Schedule:
        return Schedule(
            epochs=self.gan_epochs,
            lr=self.gan_lr,
            drops=self.gan_drops,
            decay=self.gan_decay,
            weight_decay=0.0,
            optimizer="adam",
        )


OWN_PRESET: dict[str, Any] = {
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
    """Batches of new images and as many generated features of old classes, each with labels. Every old class is drawn
    with the same probability."""

    def __init__(self, images: ImageBatches, generator: Generator, num_old: int, seed: int, device: torch.device):
        self.images, self.generator, self.num_old = images, generator, num_old
        self.seed, self.device = seed, device
        self.batch_size, self.num_samples = images.batch_size, images.num_samples

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        rng = step_rng(self.seed, iteration, self.device)
        latents = torch.randn(self.batch_size, self.generator.latent, generator=rng, device=self.device)
        old_labels = torch.randint(self.num_old, (self.batch_size,), generator=rng, device=self.device)
        return latents, old_labels, *self.images.inputs(iteration)

    def tensors(self, latents: Tensor, old_labels: Tensor, *image_inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            generated = self.generator(latents, old_labels)  # (B, feature_dim)
        return *self.images.tensors(*image_inputs), generated, old_labels


@register
class GFR(Learner):
    name = "gfr"
    config_class = GFRConfig
    config: GFRConfig
    unsupported: ClassVar[Mapping[str, str]] = {
        "outputs_per_class": "its generator makes features of classes, not of single outputs"
    }
    large_images: ClassVar[Mapping[str, Any]] = {
        "epochs": 101,
        "later_drops": (0.99,),
        "gan_epochs": 201,
        "gan_drops": (0.995,),
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": PAPER_PRESET,
        "matched": PAPER_PRESET,
        "own": {**PAPER_PRESET, **OWN_PRESET},
    }

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
    def old_to_new(self) -> float:
        """r: number of old classes / number of new classes."""
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
        ratio = self.old_to_new

        def distance(images: Tensor, features: Tensor) -> Tensor:
            with torch.no_grad():
                target = old_backbone(images).float()
            return self.config.distillation * ratio * torch.dist(features, target)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            features = self.model.features(images).float()
            return self.classification_loss(self.model.head(features), labels) + distance(images, features)

        def replay_loss(images: Tensor, labels: Tensor, generated: Tensor, old_labels: Tensor) -> Tensor:
            features = self.model.features(images).float()
            logits = self.model.head(torch.cat([features, generated])).float()
            new_loss = self.classification_loss(logits[: len(labels)], labels)
            old_loss = F.cross_entropy(logits[len(labels) :], old_labels)
            return (new_loss + ratio * old_loss) / (1 + ratio) + distance(images, features)

        if not self.config.replay:
            return self.descent("classifier", images, loss)
        seed = self.context.seed_for(self.task)
        batches = ReplayBatches(images, self.generator, self.num_old, seed, self.device)
        return self.descent("classifier", batches, replay_loss)

    def generator_work(self) -> Adversarial:
        c = self.config
        if not c.keep_critic and self.task > 0:
            self.critic = self._new_critic()
        images = self.batches(self.context.task_ids(self.task), part=GAN_SEED_PART)
        batches = GanBatches(
            images,
            self.model.features,
            critic_steps=c.critic_steps,
            latent=c.latent,
            num_old=self.num_old,
            seed=self.context.seed_for(self.task, GAN_SEED_PART),
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
            alignment=c.alignment * self.old_to_new,
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
