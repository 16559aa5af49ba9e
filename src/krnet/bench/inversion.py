"""The attack: a decoder learns to make images of features on half of the samples, and is judged on the other half.

    labels, seed            -> split_halves -> train IDs, test IDs
    features, images of train IDs -> learn_decoder -> ImageDecoder      L1 + 1 - SSIM, AdamW, cosine
    features, images of test IDs  -> judge         -> SSIM and PSNR
    labels, images of train IDs   -> ClassMeans    -> images, judged likewise: what is known without any feature

Features and images come from readers, IDs to values; what fits in memory is read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from krnet.config import check_int, check_range
from krnet.errors import InputError
from krnet.features.image_quality import psnr, ssim
from krnet.features.sampler import BatchOrder
from krnet.nn.image_decoder import GROUPS, ImageDecoder
from krnet.progress import Progress, Watch
from krnet.train.classifier import Descent, Schedule
from krnet.train.loop import Checkpoint, train

Read = Callable[[Tensor], Tensor]  # sample IDs (B,) on the CPU -> values (B, *shape) on any device
HELD_BYTES = 2 << 30  # of the features or images of the training half that are kept in memory
BLOCK_SAMPLES = 256  # that are judged at once
SCALE_SAMPLES = 2000  # that mean and standard deviation of the features are taken from
WARM_UP_SHARE, WEIGHT_DECAY = 0.02, 0.01


@dataclass(frozen=True, kw_only=True)
class InversionConfig:
    """How hard the attack tries."""

    samples: int | None = None
    """Samples that are looked at, equally many of each class; half of them train the decoder. By default all."""
    iterations: int = 8000
    """Updates of the decoder."""
    time_budget: float | None = None
    """Seconds of training after which to stop, if the updates are not done by then; by default no limit."""
    batch_size: int = 64
    """Samples per update."""
    width: int = 64
    """Channels of the decoder at the size of the features; each doubling of the size halves them."""
    lr: float = 2e-3
    """Peak learning rate."""
    seed: int = 0
    """Seeds the halves, the decoder and the order of samples."""

    def __post_init__(self) -> None:
        if self.samples is not None:
            check_int("samples", self.samples, 2)
        check_int("iterations", self.iterations, 1)
        if self.time_budget is not None:
            check_range("time_budget", self.time_budget, 1e-3)
        check_int("batch_size", self.batch_size, 1)
        check_int("width", self.width, GROUPS, 4096)
        check_range("lr", self.lr, 0)
        check_int("seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True)
class Quality:
    """Means over the judged images."""

    ssim: float
    psnr: float


@dataclass(frozen=True)
class Pixels:
    """Images as uint8 (N, C, H, W), read by ID."""

    read: Read
    shape: tuple[int, ...]

    def floats(self, ids: Tensor, device: torch.device) -> Tensor:
        """(B, C, H, W), 0 to 1."""
        return self.read(ids).to(device).float() / 255


@dataclass(frozen=True)
class Halves:
    train: Tensor
    test: Tensor


def split_halves(labels: Tensor | None, num_samples: int, samples: int | None, seed: int) -> Halves:
    """Halve each class at random; without labels, all samples. An odd one trains. IDs are ascending."""
    random = np.random.default_rng(seed)
    groups = [np.arange(num_samples)]
    if labels is not None:
        groups = [(labels == label).nonzero()[:, 0].numpy() for label in labels.unique()]
    each = None if samples is None else max(2, samples // len(groups))
    halves: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    for group in groups:
        chosen = random.permutation(group)[:each]
        middle = -(-len(chosen) // 2)
        halves[0].append(chosen[:middle])
        halves[1].append(chosen[middle:])
    train_ids, test_ids = (torch.from_numpy(np.sort(np.concatenate(half))) for half in halves)
    if not len(test_ids):
        raise InputError(
            f"{num_samples} samples of {len(groups)} classes leave none to judge the decoder on; expected a class with "
            f"at least two"
        )
    return Halves(train_ids, test_ids)


class ClassMeans:
    """The mean training image of each class: the best guess, in squared error, of who knows only the class."""

    def __init__(self, pixels: Pixels, halves: Halves, labels: Tensor | None, device: torch.device):
        self.labels = torch.zeros(0, dtype=torch.int64)
        if labels is not None:
            _, self.labels = labels.unique(return_inverse=True)
        num_classes = int(self.labels.max()) + 1 if labels is not None else 0
        sums = torch.zeros(num_classes, *pixels.shape, dtype=torch.float64, device=device)
        counts = torch.zeros(num_classes, 1, 1, 1, dtype=torch.float64, device=device)
        total = torch.zeros(pixels.shape, dtype=torch.float64, device=device)
        for ids in halves.train.split(BLOCK_SAMPLES):
            images = pixels.floats(ids, device).double()
            total += images.sum(0)
            if labels is not None:
                of = self.labels[ids].to(device)
                sums.index_add_(0, of, images)
                counts.index_add_(0, of, torch.ones(len(ids), 1, 1, 1, dtype=torch.float64, device=device))
        self.overall = (total / len(halves.train)).float()
        self.of_class = (sums / counts.clamp(min=1)).float() if labels is not None else None

    def images(self, ids: Tensor) -> Tensor:
        """Of the class of each sample; without labels, the mean of all training images."""
        if self.of_class is None:
            return self.overall.expand(len(ids), *self.overall.shape)
        return self.of_class[self.labels[ids].to(self.of_class.device)]


def judge(guess: Read, pixels: Pixels, ids: Tensor, device: torch.device) -> Quality:
    """Compare guessed images with the true ones. Values outside 0 to 1 are clamped, as no pixel has them."""
    found = []
    for block in ids.split(BLOCK_SAMPLES):
        guessed, images = guess(block).to(device).clamp(0, 1), pixels.floats(block, device)
        found.append(torch.stack([ssim(guessed, images), psnr(guessed, images)]).double().cpu())
    means = torch.cat(found, 1).mean(1)
    return Quality(*means.tolist())


@dataclass(frozen=True)
class Learned:
    decoder: ImageDecoder
    iterations: int
    seconds: float

    def guess(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            return self.decoder(features)


def learn_decoder(
    read: Read,
    shape: Sequence[int],
    pixels: Pixels,
    train_ids: Tensor,
    mean_image: Tensor,
    config: InversionConfig,
    device: torch.device,
    *,
    name: str,
    checkpoint: Path | None = None,
    watch: Watch | None = None,
) -> Learned:
    """Train a decoder from features of the training half to its images. `name` says what the features are."""
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.random.default_generator.manual_seed(config.seed)
        decoder = ImageDecoder(shape, pixels.shape, config.width)
    decoder = decoder.to(device)
    batches = Pairs(read, tuple(shape), pixels, train_ids, config, device)
    decoder.learn_scale(batches.some_features())
    decoder.mean_image.copy_(mean_image)

    def loss(features: Tensor, images: Tensor) -> Tensor:
        guessed = decoder(features)
        return (guessed - images).abs().mean() + 1 - ssim(guessed, images).mean()

    schedule = Schedule(
        epochs=1, lr=config.lr, shape="cosine", warm_up=WARM_UP_SHARE, weight_decay=WEIGHT_DECAY, optimizer="adamw"
    )
    descent = Descent(f"inversion of {name}", decoder, batches, loss, schedule, device)
    kept = None
    if checkpoint is not None:
        own = {"iterations": config.iterations, "time_budget": config.time_budget, "seed": config.seed}
        kept = Checkpoint(checkpoint, {**descent.fingerprint(), **own})
    decoder.train()
    outcome = train(
        descent, max_iterations=config.iterations, time_budget_s=config.time_budget, checkpoint=kept, resume=True,
        watch=_renamed(watch, f"learning images from {name}"),
    )  # fmt: skip
    descent.graph = None  # free its memory
    decoder.eval()
    return Learned(decoder, outcome.iterations, outcome.seconds)


class Pairs:
    """Batches of features and images of the training half, the same for all features."""

    def __init__(
        self, read: Read, shape: tuple[int, ...], pixels: Pixels, ids: Tensor, config: InversionConfig,
        device: torch.device,
    ):  # fmt: skip
        self.ids, self.device, self.num_samples = ids, device, len(ids)
        self.read, self.pixels = read, pixels
        self.order = BatchOrder(len(ids), config.batch_size, config.seed)
        self.batch_size = self.order.batch_size
        self.features = self._hold(read, shape, torch.float32)
        self.images = self._hold(pixels.read, pixels.shape, torch.uint8)

    def _hold(self, read: Read, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """All values of the training half on the device, or None where they are too many."""
        if self.num_samples * math.prod(shape) * dtype.itemsize > HELD_BYTES:
            return None
        held = torch.empty(self.num_samples, *shape, dtype=dtype, device=self.device)
        for rows in torch.arange(self.num_samples).split(BLOCK_SAMPLES):
            held[rows[0] : rows[-1] + 1] = read(self.ids[rows]).to(self.device, dtype)
        return held

    def _take(self, rows: Tensor, held: Tensor | None, read: Read) -> Tensor:
        return read(self.ids[rows]).to(self.device) if held is None else held[rows.to(self.device)]

    def some_features(self) -> Tensor:
        rows = torch.linspace(0, self.num_samples - 1, min(SCALE_SAMPLES, self.num_samples)).round().long()
        return self._take(rows, self.features, self.read).float()

    def inputs(self, iteration: int) -> tuple[Tensor, ...]:
        rows = self.order.ids(iteration)
        images = self._take(rows, self.images, self.pixels.read)
        return self._take(rows, self.features, self.read).float(), images.float() / 255

    def tensors(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs


def _renamed(watch: Watch | None, name: str) -> Watch | None:
    def tell(progress: Progress) -> None:
        assert watch is not None
        watch(replace(progress, name=name))

    return None if watch is None else tell
