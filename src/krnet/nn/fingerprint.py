"""Whether two networks are the same: a hash of their weights, and what they make of a few images.

network                         -> fingerprint -> a hash, equal for equal weights
network as a function of images -> behaviour   -> a few numbers, equal but for rounding for equal computations

Weights alone do not tell a Sigmoid from a ReLU. Code would tell a module from its own TorchScript; results do not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

NUM_IMAGES, NUM_RESULTS = 2, 12
# Devices and versions of torch round differently, by some 1e-5 in full fp32. A slope of 0.01 in place of a ReLU gives
# 5e-3 and more.
TOLERANCE = 1e-3


def fingerprint(network: nn.Module) -> str:
    """A hash of weights and buffers; names, device and kind of module do not matter."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in [*network.parameters(), *network.buffers()]:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def behaviour(run: Callable[[Tensor], Tensor], image_shape: Sequence[int]) -> list[float]:
    """Sums of the outputs (n, ...) for fixed images (n, *image_shape) uint8, each sum with other random signs.

    Every output is in every sum, so a change anywhere shows. They are rounded to six digits for a file's header.
    """
    random = np.random.RandomState(0)  # its numbers are the same in all versions of numpy
    images = torch.from_numpy(random.randint(0, 256, (NUM_IMAGES, *image_shape), np.uint8))
    outputs = run(images).detach().double().cpu().flatten()  # (values,)
    found = []
    for _ in range(NUM_RESULTS):
        signs = torch.from_numpy(random.randint(0, 2, len(outputs), np.int8)).double() * 2 - 1
        found.append(float(f"{(outputs @ signs).item() / math.sqrt(max(1, len(outputs))):.6g}"))
    return found


def is_behaviour(values: object) -> bool:
    """Whether a file's header holds what `behaviour` returns."""
    return isinstance(values, list) and len(values) == NUM_RESULTS and all(type(v) in (int, float) for v in values)


def same_behaviour(one: Sequence[float], other: Sequence[float]) -> bool:
    largest = max(map(abs, (*one, *other)))
    return all(abs(a - b) <= TOLERANCE * largest for a, b in zip(one, other, strict=True))
