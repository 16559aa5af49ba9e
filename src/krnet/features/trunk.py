"""Run a trunk over batches of images: the way from the images to rows of a file of features.

    images (B, C, H, W) -> TrunkRunner.rows: scale -> trunk -> check -> Rows: features (B, *shape) on the CPU

On a GPU the copy to the CPU has its own stream: the trunk goes on with the next batch meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from krnet.config import check_range
from krnet.device import dtype_name, pick_device
from krnet.errors import DataError, FeatureError, InputError, SettingError
from krnet.nn.fingerprint import fingerprint

# uint8 images are (H, W, C) if their last axis has one of these sizes, and their first has not.
CHANNEL_COUNTS = (1, 3, 4)


@contextmanager
def at_work(trunk: nn.Module, name: str | torch.device | None) -> Iterator[torch.device]:
    """The trunk in evaluation mode and on the device; afterwards in the mode and on the device that it had."""
    tensors = {**dict(trunk.named_parameters()), **dict(trunk.named_buffers())}
    unshaped = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if unshaped:
        raise InputError(
            f"the trunk's {unshaped[0]} has no values yet, as its shape follows from the first images that a lazy "
            f"module sees. Run a few images through the trunk, with trunk(images), and load its weights, then call this"
        )
    homes = {tensor.device for tensor in tensors.values()}
    if len(homes) > 1:
        found = ", ".join(sorted(map(str, homes)))
        raise InputError(f"the trunk's weights are on several devices ({found}); move it to one: trunk.to(device)")
    home = next(iter(homes), None)
    device = pick_device(home if name is None and home is not None and home.type == "cuda" else name)
    modes = [(module, module.training) for module in trunk.modules()]
    try:
        if home not in (None, device):
            trunk.to(device)
        _evaluate(trunk)
        yield device
    finally:
        for module, training in modes:
            module.training = training
        if home not in (None, device):
            trunk.to(home)


def _evaluate(trunk: nn.Module) -> None:
    try:
        trunk.eval()
    except NotImplementedError:  # a torch.export program has the one mode that it was exported in
        for module in trunk.modules():
            module.training = False


@dataclass(frozen=True)
class Rows:
    """Features of a batch on their way to the CPU."""

    first: int
    """Sample ID of the first."""
    values: Tensor
    """(B, *shape) on the CPU; complete when `copied` is."""
    finite: Tensor
    """Whether all values are numbers; complete when `copied` is."""
    labels: Tensor | None
    work: dict[str, Any]
    """What a later call must have in common to go on."""
    copied: torch.cuda.Event | None

    @property
    def stop(self) -> int:
        return self.first + len(self.values)

    def wait(self) -> None:
        """Wait until the values are here; refuse NaN and infinity."""
        if self.copied is not None:
            self.copied.synchronize()
        if not self.finite:
            wrong = self.values.reshape(len(self.values), -1).isfinite().logical_not().any(1)
            raise FeatureError(
                f"the features of sample {self.first + int(wrong.nonzero()[0])} are NaN or infinite as "
                f"{self.work['dtype']}; expected numbers. Check this image and the trunk's weights"
                + ("" if self.work["dtype"] == "float32" else ", or store float32")
            )


class TrunkRunner:
    """The trunk with what comes before it (scaling) and after it (checks, the copy to the CPU)."""

    def __init__(self, trunk: nn.Module, device: torch.device, dtype: str, mean: Any, std: Any):
        self.trunk, self.device, self.dtype = trunk, device, dtype
        self.mean, self.std = _per_channel("mean", mean, -1e6), _per_channel("std", std, 1e-6)
        self.weights = fingerprint(trunk)
        self.image: tuple[tuple[int, ...], torch.dtype] | None = None
        self.shape: tuple[int, ...] | None = None
        weight = next((tensor for tensor in trunk.parameters() if tensor.is_floating_point()), None)
        self.input_dtype = torch.float32 if weight is None else weight.dtype
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def rows(self, first: int, images: Tensor, labels: Tensor | None) -> Rows:
        """Start to compute the features of a batch; on a GPU this returns before they are there."""
        self._check_images(first, images)
        made = self.trunk(self._scale(images.to(self.device, non_blocking=True)))
        self._check_features(first, len(images), made)
        values = made.to(getattr(torch, self.dtype)).contiguous()
        finite = values.isfinite().all()
        work = {
            "trunk": self.weights,
            "image_shape": list(images.shape[1:]),
            "image_dtype": dtype_name(images.dtype),
            "mean": self.mean,
            "std": self.std,
            "shape": list(values.shape[1:]),
            "dtype": self.dtype,
            "labels": labels is not None,
        }
        if self.copies is None:
            # Copied, because a trunk may return its input, and a loader may reuse that buffer for the next batch.
            return Rows(first, values.clone(), finite, labels, work, None)
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self.copies):
            on_cpu = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in (values, finite)]
            for target, tensor in zip(on_cpu, (values, finite), strict=True):
                target.copy_(tensor, non_blocking=True)
                tensor.record_stream(self.copies)
            copied.record()
        return Rows(first, on_cpu[0], on_cpu[1], labels, work, copied)

    def _scale(self, images: Tensor) -> Tensor:
        """Images as the trunk takes them: (B, C, H, W), scaled, in the type of its weights."""
        if images.dtype == torch.uint8:
            if images.dim() == 4 and images.shape[1] not in CHANNEL_COUNTS and images.shape[3] in CHANNEL_COUNTS:
                images = images.permute(0, 3, 1, 2)
            images = images.float() / 255
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is None:
                continue
            if len(values) not in (1, images.shape[1]):
                raise SettingError(f"{name} is {values}; the images have {images.shape[1]} channels")
            each = torch.tensor(values, device=images.device).reshape(-1, *[1] * (images.dim() - 2))
            images = images.float()
            images = images - each if name == "mean" else images / each
        return images.to(self.input_dtype)

    def _check_images(self, first: int, images: Tensor) -> None:
        shape = tuple(images.shape[1:])
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise DataError(f"images are {images.dtype}; expected uint8 or float. Convert them first")
        if images.dim() in (1, 3):
            raise DataError(
                f"images have shape {tuple(images.shape)} in a batch; expected (B, C, H, W). Give grey images an axis "
                f"for their channel (images[:, None]), and a single image one for the batch (images[None])"
            )
        if self.image is None:
            self.image = shape, images.dtype
        if self.image != (shape, images.dtype):
            raise DataError(
                f"images from sample {first} on have shape {shape} and type {images.dtype}; expected {self.image[0]} "
                f"and {self.image[1]} like those before. All images must be alike"
            )

    def _check_features(self, first: int, num_images: int, made: Any) -> None:
        if not isinstance(made, Tensor):
            raise FeatureError(
                f"the trunk returns a {type(made).__name__}; expected one tensor of features. Wrap it in a module that "
                f"returns the one to keep"
            )
        shape = tuple(made.shape[1:])
        if made.dim() == 0 or len(made) != num_images or 0 in shape or made.is_complex():
            raise FeatureError(
                f"the trunk gives {made.dtype} {tuple(made.shape)} for {num_images} images; expected numbers of shape "
                f"({num_images}, ...), a row per image"
            )
        self.shape = shape if self.shape is None else self.shape
        if shape != self.shape:
            raise FeatureError(
                f"the trunk gives features of {shape} from sample {first} on, and of {self.shape} before; expected one "
                f"shape"
            )


def _per_channel(name: str, given: Any, lowest: float) -> list[float] | None:
    if given is None:
        return None
    values = given.tolist() if hasattr(given, "tolist") else given
    values = list(values) if isinstance(values, list | tuple) else [values]
    for value in values:
        check_range(name, value, lowest)
    return [float(value) for value in values]
