"""krnet.invert: measure how much of the images can be reconstructed from a recording.

    recording -> replays ------.
    features, or trunk(images) -+-> a decoder each, on half of the samples -> SSIM and PSNR of the other half
    labels -> class means ------'                                          -> DIR/inversion.png

That no image is stored does not say that nothing can be seen: this measures it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from krnet import api
from krnet.bench.inversion import ClassMeans, InversionConfig, Pixels, Read, judge, learn_decoder, split_halves
from krnet.bench.picture import FILE, check_picture, draw_rows
from krnet.config import from_dict
from krnet.device import exact_math, pick_device
from krnet.errors import DataError, FeatureError, InputError
from krnet.features.feature_source import FeatureSource
from krnet.features.metrics import r_squared
from krnet.features.source import open_features
from krnet.features.trunk import CHANNEL_COUNTS, TrunkRunner, at_work
from krnet.io.atomic import AnyPath
from krnet.progress import Watch, closing_watch
from krnet.recording import Recording

CHECKED_SAMPLES = 500  # whose real features are compared with their replays before a decoder learns from them
NUM_PICTURES = 8


@closing_watch
def invert(
    recording: AnyPath | Recording,
    images: Any,
    *,
    features: Any = None,
    trunk: nn.Module | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    pictures: AnyPath | None = None,
    device: str | torch.device | None = None,
    key: str | None = None,
    features_key: str | None = None,
    watch: Watch | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Measure how much of the images can be seen in a recording of their features.

    A small network learns to make images of replayed features, on half of the samples of each class, and is judged on
    the other half. It is an attacker who has the recording and half of the images; a stronger one may see more.

    recording  the file, or what `krnet.record` and `krnet.open` return
    images     the image of each sample, uint8 (N, C, H, W) or (N, H, W, C): array, tensor, memmap or path
    features   the real features: a second decoder learns from these, and shows what the recording itself hides
    trunk      the module that the features were made with, instead of `features`; a recording of images needs it
    mean, std  of the images before the trunk, as for `krnet.extract`
    pictures   folder for inversion.png, a few images of the other half: true, from real features, from replays, mean
    device     where to compute; by default the GPU where there is one
    key, features_key  name of the array, for a file of images or of features that holds several
    watch      called with a Progress every few steps; `krnet.show_progress` draws a bar
    settings   samples, iterations, time_budget, batch_size, width, lr and seed. Without a GPU, time_budget=120 and
               width=32 give a first impression

    Returns SSIM (1: equal) and PSNR in dB, means over the other half: `replayed`, `real` (None without real features),
    `class_mean` (the mean image of the right class; None without labels) and `mean` (of all images).

    >>> images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    >>> recording = krnet.record(images.float().flatten(1), recorder="raw")
    >>> found = krnet.invert(recording, images, iterations=2, width=16, device="cpu")
    >>> found["num_test"], found["replayed"]["ssim"] < 1
    (20, True)
    """
    config = from_dict(InversionConfig, settings)
    torch_device = pick_device(device)
    if features is not None and trunk is not None:
        raise InputError("features and a trunk are given, and each gives the real features. Leave one out")
    if trunk is None and (mean is not None or std is not None):
        raise InputError("mean or std is given without a trunk, which they are for. Leave them out, or give a trunk")
    picture = None if pictures is None else Path(pictures) / FILE
    if picture is not None:
        check_picture(picture, [item for item in (recording, images, features) if isinstance(item, str | os.PathLike)])
    with ExitStack() as stack:
        if not isinstance(recording, Recording):
            opened = api.open(recording, torch_device)
            recording = api.open(recording, torch_device, trunk=trunk) if trunk is not None and opened.lacks else opened
        if recording.lacks:
            raise InputError(f"{recording.path}: holds images, and its replays need the trunk; give it, too")
        pixels = open_pixels(open_features(images, key=key), len(recording))
        real = None if features is None else _stored(open_features(features, key=features_key), recording)
        if trunk is not None:
            real = _made(stack.enter_context(at_work(trunk, torch_device)), trunk, pixels, mean, std)
        labels = recording.labels
        halves = split_halves(labels, len(recording), config.samples, config.seed)
        if real is not None:
            _check_alike(real, recording, halves.test[:CHECKED_SAMPLES])
        means = ClassMeans(pixels, halves, labels, torch_device)
        readers: dict[str, Read] = {} if real is None else {"real": real}
        readers["replayed"] = recording.replay
        report: dict[str, Any] = {
            "path": str(recording.path), "num_train": len(halves.train), "num_test": len(halves.test), "real": None,
            "settings": asdict(config),
        }  # fmt: skip
        shown = few_of(halves.test)
        rows: dict[str, Tensor] = {"image": pixels.floats(shown, torch_device)}
        for name, read in readers.items():
            learned = learn_decoder(
                read, recording.shape, pixels, halves.train, means.overall, config, torch_device,
                name=f"{name} features", watch=watch,
            )  # fmt: skip
            guess = guesser(learned.guess, read, torch_device)
            found = asdict(judge(guess, pixels, halves.test, torch_device))
            report[name] = {**found, "iterations": learned.iterations, "seconds": learned.seconds}
            rows[f"from {name} features"] = guess(shown)
        report |= judge_means(means, pixels, halves.test, torch_device)
        rows["mean of the class" if labels is not None else "mean"] = means.images(shown)
    report["picture"] = None if picture is None else str(draw_rows(picture, rows))
    return report


def judge_means(means: ClassMeans, pixels: Pixels, ids: Tensor, device: torch.device) -> dict[str, Any]:
    """What is known without any feature: the mean image of the class, and that of all."""
    overall = judge(lambda block: means.overall.expand(len(block), *pixels.shape), pixels, ids, device)
    of_class = None if means.of_class is None else asdict(judge(means.images, pixels, ids, device))
    return {"class_mean": of_class, "mean": asdict(overall)}


def open_pixels(source: FeatureSource, num_samples: int) -> Pixels:
    """Images of the samples, uint8; (N, H, W, C) is brought to (N, C, H, W)."""
    if source.dtype != torch.uint8:
        raise DataError(f"{source.name}: images are {source.dtype}; expected uint8, 0 to 255. Convert them first")
    if len(source) != num_samples:
        raise DataError(
            f"{source.name}: {len(source)} images; the recording holds {num_samples} samples. Expected the image of "
            f"each, in the order of the sample IDs"
        )
    shape = source.shape
    if len(shape) != 3 or min(shape) < 1 or not {shape[0], shape[2]} & set(CHANNEL_COUNTS):
        raise DataError(
            f"{source.name}: images of shape {shape}; expected (C, H, W) or (H, W, C) with 1, 3 or 4 channels. Give "
            f"grey images an axis for their channel: images[:, None]"
        )
    if shape[0] in CHANNEL_COUNTS:
        return Pixels(source.read, shape)
    return Pixels(lambda ids: source.read(ids).permute(0, 3, 1, 2), (shape[2], *shape[:2]))


def _stored(source: FeatureSource, recording: Recording) -> Read:
    if (len(source), source.shape) != (len(recording), recording.shape):
        raise FeatureError(
            f"{source.name}: {len(source)} samples of {source.shape}; {recording.path} holds {len(recording)} of "
            f"{recording.shape}. Give the features it was recorded from"
        )
    return lambda ids: source.read(ids).float()


def _made(device: torch.device, trunk: nn.Module, pixels: Pixels, mean: Any, std: Any) -> Read:
    """Features as `krnet.extract` makes them."""
    runner = TrunkRunner(trunk, device, "float32", mean, std)

    def read(ids: Tensor) -> Tensor:
        with exact_math(), torch.no_grad():
            rows = runner.rows(int(ids[0]), pixels.read(ids), None)
            rows.wait()
        return rows.values

    return read


def _check_alike(real: Read, recording: Recording, ids: Tensor) -> None:
    """Refuse features that the replays have nothing to do with: a decoder would learn from something else."""
    found = real(ids).float().cpu()
    if found.shape[1:] != recording.shape:
        raise FeatureError(
            f"the trunk gives features of {tuple(found.shape[1:])}; {recording.path} holds {recording.shape}. Give the "
            f"trunk that made the recorded features"
        )
    error = (found - recording.replay(ids).cpu()).square().mean().item()
    r2 = r_squared(error, found.var(0, unbiased=False).mean().item())
    if recording.r2 - r2 > 0.5:  # no sample of a recording is so much worse than all of them
        raise FeatureError(
            f"the replays have R2 {r2:.2f} against the real features; {recording.path} says {recording.r2:.2f}. Give "
            f"the features it was recorded from; with a trunk, also mean and std of the images (--mean, --std)"
        )


def guesser(guess: Callable[[Tensor], Tensor], read: Read, device: torch.device) -> Read:
    return lambda ids: guess(read(ids).to(device).float())


def few_of(ids: Tensor) -> Tensor:
    """A few IDs, evenly spaced: of different classes where samples are sorted by class."""
    return ids[torch.linspace(0, len(ids) - 1, min(NUM_PICTURES, len(ids))).round().long()]
