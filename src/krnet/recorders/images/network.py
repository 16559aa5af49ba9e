"""The trunk of a recording of images, which makes features of them: when they are recorded, and at each replay.

images (n, C, H, W) uint8 -> standardised -> trunk -> features (n, *shape)
ids -> image bytes -> decoded -> features
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from krnet.device import exact_math, fast_math
from krnet.errors import InputError
from krnet.nn.fingerprint import behaviour, fingerprint, same_behaviour
from krnet.recorders.base import Replayer
from krnet.recorders.images.codec import ImagesConfig, RecordedImages, chunk_samples

OPEN_WITH = (
    "Open it with krnet.open(path, trunk=MODULE), or --trunk on the command line: the module that its features were "
    "made with"
)


class Network:
    """A copy of the trunk, on the device and in evaluation mode."""

    def __init__(self, trunk: Any, config: ImagesConfig, shape: tuple[int, ...], device: torch.device):
        with torch.no_grad():  # otherwise copied TorchScript parameters carry a gradient history
            self.module = copy.deepcopy(trunk).to(device).eval()
        for weight in self.module.parameters():  # TorchScript has no requires_grad_ of its own
            weight.requires_grad_(False)
        self.config, self.shape, self.device = config, shape, device

    @torch.inference_mode()
    def features(self, images: Tensor, fast: bool = False) -> Tensor:
        """images (n, C, H, W) uint8 -> float32 (n, *shape) on the device"""
        # Made first: small results between the large inputs would leave the memory of these in pieces.
        result = torch.empty(len(images), *self.shape, device=self.device)
        for start, chunk in enumerate_parts(images, chunk_samples(images.shape[1:])):
            with fast_math(self.device) if fast else exact_math():
                made = self.module(self.config.standardise(chunk.to(self.device)))
            if not isinstance(made, Tensor) or made.shape != (len(chunk), *self.shape):
                what = tuple(made.shape[1:]) if isinstance(made, Tensor) else type(made).__name__
                raise InputError(f"the trunk makes features of {what}; the recorded ones are {self.shape}")
            result[start : start + len(chunk)] = made
        return result

    def describe(self, image_shape: Sequence[int]) -> dict[str, Any]:
        """The settings by which a file knows its trunk again."""
        results = behaviour(self.features, image_shape)
        known = {"trunk_results": results} if all(map(math.isfinite, results)) else {}
        return {"trunk": fingerprint(self.module), **known}


def enumerate_parts(values: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """(place of the first, values) of each part of at most `size`."""
    for start in range(0, len(values), size):
        yield start, values[start : start + size]


def check_trunk(trunk: Any) -> nn.Module:
    if not isinstance(trunk, nn.Module):
        raise InputError(
            f"trunk is of type {type(trunk).__name__}; recorder images needs the module that made the features from "
            f"the images: give trunk=MODULE, or --trunk on the command line"
        )
    return trunk


class ImagesReplayer(Replayer):
    def __init__(
        self, encoded: RecordedImages, settings: Mapping[str, Any], shape: tuple[int, ...], device: torch.device
    ):
        self.encoded, self.trunk_fingerprint = encoded, settings["trunk"]
        self.trunk_results: list[float] | None = settings.get("trunk_results")  # older files have none
        self.shape, self.device = shape, device
        self.chunk = chunk_samples(encoded.shape)
        self._network: Network | None = None

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        unique, index = ids.unique(return_inverse=True)
        # As many images at once as their size allows: that of the features says nothing about it. They come before the
        # network, so that images of another size than the header says are noticed first.
        features = torch.empty(len(unique), *self.shape, device=self.device)
        for start, part in enumerate_parts(unique, self.chunk):
            images = self.encoded.images(part)
            features[start : start + len(part)] = self.network().features(images, fast)
        return features[index.to(self.device)]

    def network(self) -> Network:
        """Made at first use, since the trunk is set after the file is opened."""
        if self._network is None:
            if self.trunk is None:
                raise InputError(f"the recording holds images, and no trunk to make features of them. {OPEN_WITH}")
            check_trunk(self.trunk)
            if (found := fingerprint(self.trunk)) != self.trunk_fingerprint:
                raise InputError(
                    f"the trunk has the weights {found}; the images were recorded with {self.trunk_fingerprint}: "
                    f"features of another trunk would be others. {OPEN_WITH}"
                )
            network = Network(self.trunk, self.encoded.config, self.shape, self.device)
            if self.trunk_results is not None:
                found_results = behaviour(network.features, self.encoded.shape)
                if not same_behaviour(found_results, self.trunk_results):
                    raise InputError(
                        f"the trunk has the weights that the images were recorded with, and computes something else: "
                        f"{found_results[0]:g} where it was {self.trunk_results[0]:g}. Another activation, or another "
                        f"order of its layers? {OPEN_WITH}"
                    )
            self._network = network
        return self._network
