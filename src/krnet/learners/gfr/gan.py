"""A conditional Wasserstein GAN with gradient penalty, for feature vectors.

    latents (B, latent), labels (B,) -> Generator -> features (B, feature_dim), not negative
    features, labels                 -> Critic    -> one number each, high for real ones

    Adversarial: a Descent whose step is several updates of the critic and one of the generator

Gulrajani et al., "Improved Training of Wasserstein GANs" (2017); the networks are those of GFR's code (Liu et al.
2020), the critic conditioned by projection (Miyato and Koyama, "cGANs with Projection Discriminator", 2018).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.device import fast_math
from krnet.train.classifier import Batches, Descent, Group, ImageBatches, Schedule

BETAS = (0.5, 0.999)  # of Adam, for both networks
SLOPE = 0.2


def seeded(seed: int, iteration: int, device: torch.device) -> torch.Generator:
    """Random numbers that follow from seed and iteration, drawn on the device: latents are many."""
    # The last entry keeps them apart from the crops, which are drawn from (seed, iteration).
    mixed = int(np.random.SeedSequence((seed, iteration, 1)).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(mixed)


def start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Module):
    """Has an input for every class there will be; that of a class not yet seen neither acts nor learns."""

    def __init__(self, feature_dim: int, num_classes: int, *, latent: int = 200, hidden: int = 512):
        super().__init__()
        self.latent, self.num_classes = latent, num_classes
        self.layers = nn.Sequential(
            nn.Linear(latent + num_classes, hidden),
            nn.LeakyReLU(SLOPE),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(SLOPE),
            nn.Linear(hidden, feature_dim),
            nn.ReLU(),
        )
        self.apply(start)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(latents.device.type, enabled=False):
            return self.layers(torch.cat([latents, F.one_hot(labels, self.num_classes).to(latents.dtype)], 1))


class Critic(nn.Module):
    def __init__(self, feature_dim: int, num_classes: int, *, hidden: int = 512):
        super().__init__()
        self.num_classes = num_classes
        self.layers = nn.Sequential(
            nn.Linear(feature_dim, hidden), nn.LeakyReLU(SLOPE), nn.Linear(hidden, hidden), nn.LeakyReLU(SLOPE)
        )
        self.valid = nn.Linear(hidden, 1)
        self.apply(start)
        self.projection = nn.Linear(num_classes, hidden, bias=False)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        hidden = self.layers(features)
        wanted = self.projection(F.one_hot(labels, self.num_classes).to(features.dtype))
        return (wanted * hidden).sum(1) + self.valid(hidden).squeeze(1)  # (B,)


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, labels: Tensor, mix: Tensor) -> Tensor:
    """Mean over samples of (length of the critic's gradient - 1)^2, at mix (B, 1) of real and the rest of fake."""
    between = (mix * real + (1 - mix) * fake).detach().requires_grad_(True)
    (slopes,) = torch.autograd.grad(critic(between, labels).sum(), between, create_graph=True)
    return (slopes.norm(dim=1) - 1).square().mean()


class GanBatches:
    """Features and labels of `critic_steps` batches of a source, with all that is drawn for one step."""

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
        """features: of a batch of the source, such as its images; num_old: classes of which old labels are drawn."""
        self.source, self.features, self.critic_steps, self.latent = source, features, critic_steps, latent
        self.num_old, self.seed, self.device = num_old, seed, device
        self.batch_size, self.num_samples = critic_steps * source.batch_size, source.num_samples

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        first = self.critic_steps * iteration
        parts = [self.source.inputs(first + step) for step in range(self.critic_steps)]
        generator = seeded(self.seed, iteration, self.device)
        shape = self.critic_steps, self.source.batch_size
        latents = torch.randn(*shape, self.latent, generator=generator, device=self.device)
        mixes = torch.rand(*shape, 1, generator=generator, device=self.device)
        old = torch.randint(max(self.num_old, 1), shape[1:], generator=generator, device=self.device)
        return latents, mixes, old, *(torch.cat(values) for values in zip(*parts))

    def tensors(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        latents, mixes, old, *chosen = inputs
        samples, labels = self.source.tensors(*chosen)
        with torch.no_grad():
            features = self.features(samples).float()
        shape = latents.shape[:2]
        return features.unflatten(0, shape), labels.unflatten(0, shape), latents, mixes, old


class Adversarial(Descent):
    """A Work: each step updates the critic on every batch in turn, then the generator on the last one's latents."""

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
        """alignment: weight of the squared distance, summed, to what the old generator makes of old classes."""
        self.generator, self.critic, self.old_generator = generator, critic, old_generator
        self.penalty, self.alignment = penalty, alignment
        self.players = [list(critic.parameters()), list(generator.parameters())]
        both = nn.ModuleDict({"critic": critic, "generator": generator})
        groups = [Group(params) for params in self.players]
        super().__init__(name, both, batches, self.generator_loss, schedule, device, groups=groups)

    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = super()._optimizer()
        for group in optimizer.param_groups:
            group["betas"] = BETAS
        return optimizer

    def critic_loss(self, real: Tensor, fake: Tensor, labels: Tensor, mix: Tensor) -> Tensor:
        judged = self.critic(torch.cat([real, fake]), labels.repeat(2)).unflatten(0, (2, -1)).mean(1)
        return judged[1] - judged[0] + self.penalty * gradient_penalty(self.critic, real, fake, labels, mix)

    def generator_loss(self, labels: Tensor, latents: Tensor, old: Tensor) -> Tensor:
        loss = -self.critic(self.generator(latents, labels), labels).mean()
        if self.old_generator is not None:
            with torch.no_grad():
                wanted = self.old_generator(latents, old)
            loss = loss + self.alignment * (self.generator(latents, old) - wanted).square().sum()
        return loss

    def _update(self, *inputs: Tensor) -> Tensor:
        with fast_math(self.device):
            real, labels, latents, mixes, old = self.batches.tensors(*inputs)
        # In full precision: the penalty's gradient is one of a gradient, and the networks are small.
        with torch.no_grad():  # the generator stands still while the critic moves
            fake = self.generator(latents.flatten(0, 1), labels.flatten()).unflatten(0, labels.shape)
        for batch in zip(real, fake, labels, mixes):
            shown = self._move(0, self.critic_loss(*batch))
        self._move(1, self.generator_loss(labels[-1], latents[-1], old))
        return shown

    def _move(self, player: int, loss: Tensor) -> Tensor:
        """One update of one network: the optimizer passes over parameters without a gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward(inputs=self.players[player])
        self.optimizer.step()
        return loss.detach()
