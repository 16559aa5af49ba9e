"""The whole of it on real data, in about a minute and without a download: handwritten digits.

    1,797 images 8x8 -> trunk -> feature maps 32x8x8 -> record -> digits.krn -> replay -+-> head -> accuracy
                                 real ones -------------------------------------------+
                                                                                      +-> demo.png

Data: scikit-learn's digits (UCI, Alpaydin and Kaynak 1998), shipped with the package.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from krnet import api
from krnet.files import atomic_write
from krnet.progress import Display

NUM_TRAINED = 1347  # three quarters; accuracy is counted on the others
EPOCHS = 40
BATCH = 64
ITERATIONS = 300
# Small on purpose, and trained with small batches: many quick updates suit a minute on two cores.
SETTINGS: dict[str, Any] = dict(group_size=64, d0=96, c0=48, c1=32, stride=2, batch_size=300)
DRAWN_CHANNELS = 8


def run(
    out: Path, display: Display, *, iterations: int = ITERATIONS, epochs: int = EPOCHS, seed: int = 0
) -> dict[str, Any]:
    """Train, record, replay, compare; writes digits.krn and demo.png in `out` and returns the figures."""
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    display.phase("training a classifier of digits")
    images, labels = load_images()
    torch.manual_seed(seed)
    unseen = torch.randperm(len(images))[NUM_TRAINED:]
    seen = torch.ones(len(images), dtype=torch.bool).index_fill_(0, unseen, False)
    trunk, head = train_classifier(images[seen], labels[seen], epochs)
    with torch.inference_mode():
        features = trunk(images).clone()  # (1797, 32, 8, 8)
    path, picture = out / "digits.krn", out / "demo.png"
    recording = api.record(
        features, labels, out=path, iterations=iterations, seed=seed, device="cpu", watch=display.fit, **SETTINGS
    )
    display.phase("replaying")
    replayed = recording[:]
    with torch.inference_mode():
        said_real, said_replayed = head(features).argmax(1), head(replayed).argmax(1)
    info = recording.info()
    figures = {
        "path": str(path),
        "picture": str(picture),
        **{name: info[name] for name in ("num_samples", "shape", "feature_bytes", "bytes", "compression_ratio", "r2")},
        "num_unseen": len(unseen),
        "accuracy_real": _share((said_real == labels)[unseen]),
        "accuracy_replayed": _share((said_replayed == labels)[unseen]),
        "agreement": _share(said_real == said_replayed),
        "iterations": info["iterations"],
        "fit_seconds": info["fit_seconds"],
    }
    display.phase("drawing")
    # The first of the unseen images of three different digits.
    samples = [int(unseen[labels[unseen] == digit][0]) for digit in (3, 5, 8)]
    draw(picture, samples, images, features, replayed, figures)
    return {**figures, "seconds": time.perf_counter() - started}


def _share(right: Tensor) -> float:
    return right.double().mean().item()


def load_images() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) in 0..1 and labels (1797,)."""
    from sklearn.datasets import load_digits  # a second to import

    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)


def train_classifier(images: Tensor, labels: Tensor, epochs: int) -> tuple[nn.Module, nn.Module]:
    """A small convolutional network, cut in the middle: trunk to feature maps, head to ten answers."""
    trunk = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
    head = nn.Sequential(
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    net = nn.Sequential(trunk, head)
    optimizer = torch.optim.Adam(net.parameters())
    num_steps = epochs * len(images) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=num_steps)
    for _ in range(num_steps):
        ids = torch.randint(len(images), (BATCH,))
        loss = nn.functional.cross_entropy(net(images[ids]), labels[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    net.eval().requires_grad_(False)
    return trunk, head


def draw(
    path: Path, samples: list[int], images: Tensor, features: Tensor, replayed: Tensor, figures: dict[str, Any]
) -> None:
    """Three rows a sample: original, replayed and their difference, on one colour scale, for the liveliest channels."""
    from matplotlib.figure import Figure  # half a second to import

    channels = features.std((0, 2, 3)).topk(DRAWN_CHANNELS).indices.sort().values.tolist()
    top = features[samples][:, channels].max().item()
    figure = Figure(figsize=(11, 10.2), dpi=130)
    figure.suptitle(
        f"Feature maps of handwritten digits, replayed from a file {figures['compression_ratio']:.0f} times smaller",
        fontsize=15,
        y=0.975,
    )
    figure.text(
        0.5,
        0.935,
        f"{figures['num_samples']:,} maps of {'×'.join(map(str, figures['shape']))}: "
        f"{figures['feature_bytes'] / 1e6:.1f} MB as float32, {figures['bytes'] / 1e6:.2f} MB recorded.   "
        f"R² {figures['r2']:.3f}.   Same answer of the classifier for {100 * figures['agreement']:.1f} %.",
        ha="center",
        fontsize=10.5,
        color="0.3",
    )
    blocks = figure.add_gridspec(len(samples), 1, left=0.02, right=0.91, top=0.885, bottom=0.03, hspace=0.10)
    shown = None
    for number, sample in enumerate(samples):
        # The image, a gap for the names of the rows, then a column per channel.
        grid = blocks[number].subgridspec(
            3, DRAWN_CHANNELS + 2, width_ratios=[2.2, 1.15, *[1] * DRAWN_CHANNELS], wspace=0.06
        )
        axes = figure.add_subplot(grid[:, 0])
        axes.imshow(images[sample, 0].numpy(), cmap="gray_r")
        axes.set_title(f"sample {sample}", fontsize=10)
        axes.set_axis_off()
        maps = (features[sample], replayed[sample], (features[sample] - replayed[sample]).abs())
        for row, (name, values) in enumerate(zip(("original", "replayed", "|difference|"), maps, strict=True)):
            for column, channel in enumerate(channels):
                axes = figure.add_subplot(grid[row, column + 2])
                shown = axes.imshow(values[channel].numpy(), cmap="magma", vmin=0, vmax=top)
                axes.set_xticks([])
                axes.set_yticks([])
                if row == number == 0:
                    axes.set_title(f"channel {channel}", fontsize=9)
                if column == 0:
                    axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=10, labelpad=6)
    assert shown is not None, "no samples to draw"
    bar = figure.colorbar(shown, cax=figure.add_axes((0.93, 0.2, 0.014, 0.5)))
    bar.set_label("feature value", fontsize=10)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
