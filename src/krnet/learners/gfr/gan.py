"""A conditional Wasserstein GAN with gradient penalty, for feature vectors.

    latents (B, latent), labels (B,) -> Generator -> features (B, feature_dim), not negative
    features, labels                 -> Critic    -> scores (B,), high for real features

    Adversarial: a Descent in which each step is several updates of the critic and one of the generator

Gulrajani et al., "Improved Training of Wasserstein GANs" (2017). The networks are those of GFR's code (Liu et al.
2020). The critic is conditioned by projection (Miyato and Koyama, "cGANs with Projection Discriminator", 2018).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.device import fast_math
from krnet.train.classifier import Batches, Descent, Group, ImageBatches, Schedule, step_rng

ADAM_BETAS = (0.5, 0.999)  # for both networks
LEAKY_SLOPE = 0.2


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Module):
    """Makes features of a class. It has an input for every class of all tasks; those of unseen classes stay 0 and do
    not learn."""

    def __init__(self, feature_dim: int, num_classes: int, *, latent: int = 200, hidden: int = 512):
        super().__init__()
        self.latent, self.num_classes = latent, num_classes
        self.layers = nn.Sequential(
            nn.Linear(latent + num_classes, hidden),
            nn.LeakyReLU(LEAKY_SLOPE),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(LEAKY_SLOPE),
            nn.Linear(hidden, feature_dim),
            nn.ReLU(),
        )
        self.apply(init_weights)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(latents.device.type, enabled=False):
            return self.layers(torch.cat([latents, F.one_hot(labels, self.num_classes).to(latents.dtype)], 1))


class Critic(nn.Module):
    """Scores features of a class: high for real ones, low for generated ones."""

    def __init__(self, feature_dim: int, num_classes: int, *, hidden: int = 512):
        super().__init__()
        self.num_classes = num_classes
        self.layers = nn.Sequential(
            nn.Linear(feature_dim, hidden),
            nn.LeakyReLU(LEAKY_SLOPE),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(LEAKY_SLOPE),
        )
        self.valid = nn.Linear(hidden, 1)
        self.apply(init_weights)
        self.projection = nn.Linear(num_classes, hidden, bias=False)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        hidden = self.layers(features)
        class_row = self.projection(F.one_hot(labels, self.num_classes).to(features.dtype))
        return (class_row * hidden).sum(1) + self.valid(hidden).squeeze(1)  # (B,)


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, labels: Tensor, mix: Tensor) -> Tensor:
    """Mean over samples of (length of the critic's gradient - 1)^2 at mix * real + (1 - mix) * fake; mix is (B, 1)."""
    between = (mix * real + (1 - mix) * fake).detach().requires_grad_(True)
    (gradients,) = torch.autograd.grad(critic(between, labels).sum(), between, create_graph=True)
    return (gradients.norm(dim=1) - 1).square().mean()


class GanBatches:
    """The data of one step: features and labels of `critic_steps` batches of the source, and random draws."""

    def __init__(
        self,
        source: Batches | ImageBatches,
        features: Callable[[Tensor], Tensor],
        *,
        critic_steps: int,
        latent: int,
        num_old: int,
        seed: int,
        device: torch.device,
    ):
        """features: maps a batch of the source, such as images, to features. num_old: old labels are 0..num_old - 1."""
        self.source, self.features, self.critic_steps, self.latent = source, features, critic_steps, latent
        self.num_old, self.seed, self.device = num_old, seed, device
        self.batch_size, self.num_samples = critic_steps * source.batch_size, source.num_samples

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        first = self.critic_steps * iteration
        parts = [self.source.inputs(first + step) for step in range(self.critic_steps)]
        generator = step_rng(self.seed, iteration, self.device)
        shape = self.critic_steps, self.source.batch_size  # (S, B)
        latents = torch.randn(*shape, self.latent, generator=generator, device=self.device)  # (S, B, latent)
        mixes = torch.rand(*shape, 1, generator=generator, device=self.device)  # (S, B, 1)
        old_labels = torch.randint(max(self.num_old, 1), shape[1:], generator=generator, device=self.device)  # (B,)
        return latents, mixes, old_labels, *(torch.cat(values) for values in zip(*parts))

    def tensors(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        latents, mixes, old_labels, *source_inputs = inputs
        samples, labels = self.source.tensors(*source_inputs)
        with torch.no_grad():
            features = self.features(samples).float()
        shape = latents.shape[:2]
        return features.unflatten(0, shape), labels.unflatten(0, shape), latents, mixes, old_labels


class Adversarial(Descent):
    """A Work: each step updates the critic once per batch, then the generator with the latents of the last batch."""

    def __init__(
        self,
        name: str,
        generator: Generator,
        critic: Critic,
        batches: GanBatches,
        schedule: Schedule,
        device: torch.device,
        *,
        penalty: float = 10.0,
        old_generator: Generator | None = None,
        alignment: float = 0.0,
    ):
        """alignment: weight of the summed squared distance to the old generator's features of old classes."""
        self.generator, self.critic, self.old_generator = generator, critic, old_generator
        self.penalty, self.alignment = penalty, alignment
        self.network_params = [list(critic.parameters()), list(generator.parameters())]
        networks = nn.ModuleDict({"critic": critic, "generator": generator})
        groups = [Group(params) for params in self.network_params]
        super().__init__(name, networks, batches, self.generator_loss, schedule, device, groups=groups)

    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = super()._optimizer()
        for group in optimizer.param_groups:
            group["betas"] = ADAM_BETAS
        return optimizer

    def critic_loss(self, real: Tensor, fake: Tensor, labels: Tensor, mix: Tensor) -> Tensor:
        mean_scores = self.critic(torch.cat([real, fake]), labels.repeat(2)).unflatten(0, (2, -1)).mean(1)
        return mean_scores[1] - mean_scores[0] + self.penalty * gradient_penalty(self.critic, real, fake, labels, mix)

    def generator_loss(self, labels: Tensor, latents: Tensor, old_labels: Tensor) -> Tensor:
        loss = -self.critic(self.generator(latents, labels), labels).mean()
        if self.old_generator is not None:
            with torch.no_grad():
                target = self.old_generator(latents, old_labels)
            loss = loss + self.alignment * (self.generator(latents, old_labels) - target).square().sum()
        return loss

    def _update(self, *inputs: Tensor) -> Tensor:
        with fast_math(self.device):
            real, labels, latents, mixes, old_labels = self.batches.tensors(*inputs)
        # Full precision from here: the penalty needs second derivatives, and the networks are small.
        with torch.no_grad():  # the generator does not change while the critic is updated
            fake = self.generator(latents.flatten(0, 1), labels.flatten()).unflatten(0, labels.shape)
        for batch in zip(real, fake, labels, mixes):
            critic_loss = self._update_network(0, self.critic_loss(*batch))
        self._update_network(1, self.generator_loss(labels[-1], latents[-1], old_labels))
        return critic_loss

    def _update_network(self, network: int, loss: Tensor) -> Tensor:
        """Update one network; the optimizer skips the other, whose parameters have no gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward(inputs=self.network_params[network])
        self.optimizer.step()
        return loss.detach()
