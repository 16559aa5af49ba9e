"""Small inputs that the golden files and tools/compare_run.py are made from, the same on every call.

    maps, vectors, pictures -> features and labels to record
    make_trunk              -> the network that recorder images needs
    digits, tasks           -> a few digits, and two tasks after the base task
    recorder_options        -> how this version of krnet names the compact and the paper's network

Only the public names of krnet are used: a move of its modules leaves this file as it is.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import krnet
from maps import relu_maps

SHAPE = (8, 5, 4)  # height and width differ, so that an exchange of the two is noticed
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
IMAGES: dict[str, Any] = {"recorder": "images", "mean": MEAN, "std": STD}
TRUNK = Path(__file__).with_name("trunk.safetensors")


def maps(num_samples: int, shape: tuple[int, int, int] = SHAPE) -> tuple[Tensor, Tensor]:
    """Feature maps (N, *shape) of four classes, class by class, and labels (N,)."""
    features, labels = relu_maps(num_samples, shape, num_classes=4)
    by_class = labels.argsort(stable=True)
    return features[by_class], labels[by_class]


def mixed(num_samples: int) -> tuple[Tensor, Tensor]:
    """Feature maps of four classes in turn; labels are neither small nor positive nor in order."""
    features, classes = relu_maps(num_samples, SHAPE, num_classes=4)
    return features, torch.tensor([30, -2, 2**40, 7])[classes]


def vectors(num_samples: int, size: int = 24) -> tuple[Tensor, Tensor]:
    """Feature vectors (N, size) of four classes, class by class, and labels (N,)."""
    features, labels = maps(num_samples, (size, 3, 3))
    return features.mean((2, 3)), labels


def pictures(num_samples: int, size: int = 12) -> Tensor:
    """Smooth images with some noise, (N, 3, size, size) uint8."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(num_samples, 3, 4, 4, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
    return ((smooth + 0.02 * torch.randn(smooth.shape, generator=generator)).clamp(0, 1) * 255).to(torch.uint8)


def make_trunk() -> nn.Module:
    """The trunk of the golden images: (B, 3, 12, 12) -> (B, 8, 3, 3). Its weights lie beside this file."""
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.AvgPool2d(2)).eval()
    trunk.load_state_dict(load_file(TRUNK))
    return trunk


@torch.no_grad()
def picture_features(images: Tensor, trunk: nn.Module) -> Tensor:
    """What a trunk makes of images, normalised as IMAGES says."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return trunk((images.float() / 255 - mean) / std)


def digits(per_class: int, test_per_class: int) -> Any:
    """The first images of the digits 0..7."""
    whole = krnet.data.load("digits")
    parts = []
    for split, number in ((whole.train, per_class), (whole.test, test_per_class)):
        ids = torch.cat([(split.labels == label).nonzero()[:number, 0] for label in range(8)]).sort().values
        parts += [split.images[ids], split.labels[ids]]
    return krnet.data.from_arrays(*parts, name="digits8", mean=whole.mean, std=whole.std, pad=1, layout="NCHW")


def tasks() -> Any:
    """A base task of four classes and two tasks of two, in an order that is not the natural one."""
    return krnet.protocol.split([3, 1, 0, 2, 7, 5, 6, 4], num_classes=8, base_classes=4, tasks=2)


@cache
def has_paper_recorder() -> bool:
    """Whether the paper's network is a recorder of its own; before, it was a setting of recorder krnet."""
    try:
        krnet.record(torch.zeros(4, 2), recorder="paper", no_such_setting=1)
    except krnet.KrnetError as error:
        return "no_such_setting" in str(error)  # else the recorder's name is what is refused
    raise AssertionError("a setting that no recorder has was accepted")


def recorder_options(kind: str) -> dict[str, Any]:
    """Keyword arguments of krnet.record for a `compact` or a `paper` network, as this version of krnet has them."""
    assert kind in ("compact", "paper"), kind
    if has_paper_recorder():
        return {"recorder": {"compact": "krnet", "paper": "paper"}[kind]}
    return {"recorder": "krnet", "network": kind}
