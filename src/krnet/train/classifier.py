"""Train classifiers by SGD or Adam: what train/loop.py runs for all networks except those of recorders.

    iteration -> Batches.inputs -> few small tensors -> Batches.tensors -> loss -> SGD or Adam -> new weights
                                                       '------- one CUDA graph, on a GPU -------'

Methods differ in the batches and the loss that they pass in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from krnet.data import augment, trivial_augment
from krnet.data.dataset import DataSet
from krnet.device import Graphed, fast_math
from krnet.features.sampler import BatchOrder
from krnet.progress import Watch
from krnet.train.loop import Checkpoint, train

ITERATIONS_PER_DRAW = 256  # iterations whose crops and flips are drawn together


@dataclass(frozen=True)
class Saving:
    """Where to save unfinished work, how often, and whether to resume from what is there."""

    path: Path
    resume: bool = False
    every_s: float = 60.0


class Batches(Protocol):
    batch_size: int
    num_samples: int

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        """Sample IDs and random numbers of a step: tensors of fixed shapes that depend on the iteration alone."""

    def tensors(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The batch, computed on the device by gathers and arithmetic, so that a CUDA graph can contain it."""


class Draws:
    """Random crops and flips (B, 3) of every iteration; with `trivial` also those of TrivialAugment, (B, 6) in all.

    They are drawn for many iterations at a time: one by one would take too long.
    """

    def __init__(
        self, batch_size: int, shift: int, flip: bool, seed: int, device: torch.device, *, trivial: bool = False
    ):
        self.batch_size, self.shift, self.flip, self.seed, self.device = batch_size, shift, flip, seed, device
        self.trivial = trivial
        self._block = lru_cache(maxsize=2)(self._draw)

    def _draw(self, block: int) -> Tensor:
        count = ITERATIONS_PER_DRAW * self.batch_size
        drawn = augment.draw(count, self.shift, self.flip, self.seed, block)
        if self.trivial:
            drawn = torch.cat([drawn, trivial_augment.draw(count, self.seed, block)], dim=1)
        return drawn.view(ITERATIONS_PER_DRAW, self.batch_size, -1).to(self.device)

    def __call__(self, iteration: int) -> Tensor:
        block, index = divmod(iteration, ITERATIONS_PER_DRAW)
        return self._block(block)[index]


def step_rng(seed: int, iteration: int, device: torch.device) -> torch.Generator:
    """Random numbers for one iteration. They are drawn on the device, as they are too many to copy each step."""
    # The third entry makes the draws differ from those of the crops, which use (seed, iteration).
    mixed_seed = int(np.random.SeedSequence((seed, iteration, 1)).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(mixed_seed)


class ImageBatches:
    """Images of the given sample IDs, cropped and mirrored at random, with their labels."""

    def __init__(
        self,
        images: Images,
        labels: Tensor,
        ids: Tensor,
        batch_size: int,
        seed: int,
        *,
        augmented: bool = True,
        trivial: bool = False,
        transform: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ):
        """trivial: change the augmented images by TrivialAugment, too.

        transform(images, labels) is applied to each batch last; it is in the CUDA graph, so shapes must be fixed.
        """
        self.images, self.seed, self.transform = images, seed, transform
        self.labels, self.ids = labels.to(images.device), ids.to(images.device)
        self.order = BatchOrder(len(ids), batch_size, seed, device=images.device)
        self.batch_size, self.num_samples = self.order.batch_size, len(ids)
        data = images.data
        self.draws = None
        if augmented:
            self.draws = Draws(self.batch_size, data.shift, data.flip, seed, images.device, trivial=trivial)

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        chosen = self.ids[self.order.ids(iteration)]
        return (chosen,) if self.draws is None else (chosen, self.draws(iteration))

    def tensors(self, ids: Tensor, draws: Tensor | None = None) -> tuple[Tensor, ...]:
        images, labels = self.images.take(ids, draws), self.labels[ids]
        return (images, labels) if self.transform is None else self.transform(images, labels)


class Images:
    """The pixels of a data split, on the device as bytes; `take` crops and normalises a batch of them."""

    def __init__(self, data: DataSet, pixels: Tensor, device: torch.device):
        self.data, self.device = data, device
        self.pixels = pixels.to(device)
        self.mean, self.std = (torch.tensor(values, device=device) for values in (data.mean, data.std))

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, ids: Tensor, draws: Tensor | None = None) -> Tensor:
        """Normalised images (B, *input_shape) float32, channels last on a GPU. Without draws the crop is central."""
        data, pixels = self.data, self.pixels[ids]
        if draws is not None and (data.shift or data.flip):
            pixels = augment.crop_flip(pixels, draws[:, :3], data.pad, data.crop)
        else:
            pixels = augment.centre(pixels, data.crop)
        if draws is not None and draws.shape[1] > 3:
            pixels = trivial_augment.apply(pixels, draws[:, 3:])
        images = augment.standardise(pixels, self.mean, self.std)
        return images.contiguous(memory_format=torch.channels_last) if self.device.type == "cuda" else images


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Optimizer, epochs and learning rate.

    The learning rate is multiplied by `decay` at each of `drops` (shares of the run); with the shape "cosine" it falls
    to 0 as a cosine instead. Before, in the first share `warm_up` of the run, it rises linearly.
    """

    epochs: int
    lr: float
    shape: str = "steps"
    warm_up: float = 0.0
    drops: tuple[float, ...] = (0.5, 0.75)
    decay: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    optimizer: str = "sgd"

    def share(self, progress: float) -> float:
        """Factor of the learning rate at this progress, 0 to 1."""
        if progress < self.warm_up:
            return progress / self.warm_up
        if self.shape == "cosine":
            return (1 + math.cos(math.pi * (progress - self.warm_up) / (1 - self.warm_up))) / 2
        return self.decay ** sum(progress >= drop for drop in self.drops)


@dataclass(frozen=True)
class Group:
    """Parameters with the learning rate lr * lr_scale; weight_decay None takes the schedule's."""

    params: Sequence[nn.Parameter]
    lr_scale: float = 1.0
    weight_decay: float | None = None


class Descent:
    """Train `modules` to minimise `loss` on `batches`, for the epochs of `schedule`.

    Both a Trainee (train/loop.py) and a Work (learners/base.py).
    """

    def __init__(
        self,
        name: str,
        modules: nn.Module,
        batches: Batches,
        loss: Callable[..., Tensor],
        schedule: Schedule,
        device: torch.device,
        *,
        groups: Sequence[Group] | None = None,
        shared: dict[str, Any] | None = None,
        finished: Callable[[], None] | None = None,
    ):
        """finished: called when the modules are trained or loaded."""
        self.name, self.modules, self.batches, self.loss = name, modules, batches, loss
        self.schedule, self.device, self.shared, self.finished = schedule, device, shared, finished
        self.epochs: int | None = schedule.epochs
        self.iterations = max(1, round(schedule.epochs * batches.num_samples / batches.batch_size))
        groups = groups or [Group([p for p in modules.parameters() if p.requires_grad])]
        self.groups = [group for group in groups if len(group.params)]
        self.optimizer = self._optimizer()
        self._share: float | None = None
        self.graph: Graphed | None = None

    def _optimizer(self) -> torch.optim.Optimizer:
        cuda, schedule = self.device.type == "cuda", self.schedule
        groups = []
        for group in self.groups:
            lr = schedule.lr * group.lr_scale
            decay = schedule.weight_decay if group.weight_decay is None else group.weight_decay
            rate = torch.tensor(lr, device=self.device) if cuda else lr  # a CUDA graph reads it from memory
            groups.append({"params": list(group.params), "lr": rate, "weight_decay": decay})
        if schedule.optimizer == "adam":
            return torch.optim.Adam(groups, fused=cuda, foreach=not cuda, capturable=cuda)
        return torch.optim.SGD(groups, lr=schedule.lr, momentum=schedule.momentum, fused=cuda, foreach=not cuda)

    # ------------------------------------------------------------------ Trainee

    def step(self, iteration: int, progress: float) -> Tensor:
        if self.graph is None and self.device.type == "cuda":
            self.graph = self._capture(iteration)
        self._set_rates(self.schedule.share(progress))
        inputs = self.batches.inputs(iteration)
        return self._update(*inputs) if self.graph is None else self.graph(*inputs)

    def _set_rates(self, share: float) -> None:
        if share == self._share:
            return
        self._share = share
        for group, param_group in zip(self.groups, self.optimizer.param_groups, strict=True):
            rate = self.schedule.lr * group.lr_scale * share
            if isinstance(param_group["lr"], Tensor):
                param_group["lr"].fill_(rate)
            else:
                param_group["lr"] = rate

    def _update(self, *inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with fast_math(self.device):
            loss = self.loss(*self.batches.tensors(*inputs))
        loss.backward()
        self.optimizer.step()
        return loss.detach().float()

    def _capture(self, iteration: int) -> Graphed:
        """Capture a step as a CUDA graph. The warm-up steps change weights, statistics and momenta: put them back."""
        before = {name: value.clone() for name, value in self.state().items()}
        self._set_rates(0.0)
        graph = Graphed(self._update, self.batches.inputs(iteration), tune=True)
        with torch.no_grad():
            for name, value in self.state().items():
                value.copy_(before[name]) if name in before else value.zero_()
        return graph

    def state(self) -> dict[str, Tensor]:
        state = {f"modules.{name}": value for name, value in self.modules.state_dict().items()}
        for number, param in enumerate(p for group in self.groups for p in group.params):
            for name, value in self.optimizer.state[param].items():
                if value is not None:
                    state[f"optimizer.{number}.{name}"] = value
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._load_modules(state)
        params = [p for group in self.groups for p in group.params]
        for name, value in state.items():
            if name.startswith("optimizer."):
                number, key = name.split(".")[1:]
                param = params[int(number)]
                like = param if value.shape == param.shape else value
                loaded = torch.empty_like(like, dtype=value.dtype, device=param.device)
                # Fused optimizers need the memory layout of the weights.
                self.optimizer.state[param][key] = loaded.copy_(value)

    # ------------------------------------------------------------------ Work

    def run(self, saving: Saving | None, watch: Watch | None) -> None:
        self.modules.train()
        checkpoint = None if saving is None else Checkpoint(saving.path, self.fingerprint(), saving.every_s)
        resume = saving is not None and saving.resume
        train(self, max_iterations=self.iterations, checkpoint=checkpoint, resume=resume, watch=watch)
        self.graph = None  # free its memory
        self._finish()

    def fingerprint(self) -> dict[str, Any]:
        sizes = str([tuple(p.shape) for group in self.groups for p in group.params])
        known = {"name": self.name, "iterations": self.iterations, "batch_size": self.batches.batch_size}
        known |= {"schedule": str(self.schedule), "samples": self.batches.num_samples}
        return known | {"parameters": hashlib.sha256(sizes.encode()).hexdigest()[:16]}

    def result(self) -> dict[str, Tensor]:
        """The trained tensors, without the optimizer's."""
        return {name: value for name, value in self.state().items() if name.startswith("modules.")}

    def take(self, result: dict[str, Tensor]) -> None:
        """Load the `result` of an earlier run instead of running."""
        self._load_modules(result)
        self._finish()

    def _finish(self) -> None:
        self.modules.eval()
        if self.finished is not None:
            self.finished()

    def _load_modules(self, state: dict[str, Tensor]) -> None:
        weights = {name.removeprefix("modules."): v for name, v in state.items() if name.startswith("modules.")}
        self.modules.load_state_dict(weights)
