"""Devices and precision; nobody else asks.

pick_device(None) -> cuda where there is one, else cpu
exact()           -> fp32 products are fp32: what replay promises by default
fast(device)      -> bf16 on a GPU; on a CPU the same as exact
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from krnet.errors import SettingError


def pick_device(name: str | torch.device | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise SettingError(f"device {name!r} is not known; expected cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingError(f"device {name!r} is not supported; expected cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"device {name!r} asked for, and this machine has no usable GPU; use device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError(f"device {name!r} asked for, and there are {torch.cuda.device_count()} GPUs")
    # "cuda" and "cuda:0" name the same device and do not compare equal.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether a GPU may round fp32 factors to 10 bits: four times as fast."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def exact() -> Iterator[None]:
    """Full fp32. cuDNN's default, tf32, is off by 1e-3: replays would change with the batch they come in."""
    with tf32(False):
        yield


@contextmanager
def fast(device: torch.device) -> Iterator[None]:
    """bf16 products on a GPU. On a CPU full fp32: some CPUs advertise bf16 products and crash on them."""
    with (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),  # kernels of our own start there
        tf32(device.type == "cuda"),
        torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False),
    ):
        yield


def free_bytes(device: torch.device) -> int:
    """Device memory that a new allocation may take; 0 for a CPU, where the caller's own arrays serve."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
