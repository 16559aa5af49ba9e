"""Devices, precision and CUDA graphs; nobody else asks.

pick_device(None)   -> cuda where there is one, else cpu
exact_math()        -> fp32 products are fp32: what replay promises by default
fast_math(device)   -> bf16 on a GPU; on a CPU the same as exact
Graphed(run, inputs) -> a step of many small kernels as one CUDA graph: the device no longer waits for Python
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

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
def exact_math() -> Iterator[None]:
    """Full fp32. cuDNN's default, tf32, is off by 1e-3: replays would change with the batch they come in."""
    with tf32(False):
        yield


@contextmanager
def fast_math(device: torch.device) -> Iterator[None]:
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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


WARM_UPS = 3  # cuDNN chooses, kernels are compiled, optimizers make their state


@contextmanager
def tuned(wanted: bool) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class Graphed:
    def __init__(self, run: Callable[..., Tensor], inputs: Sequence[Tensor], *, tune: bool = False):
        """`tune` lets cuDNN try its algorithms: the quickest may be less exact, and another next time."""
        self.inputs = [value.clone() for value in inputs]
        device = self.inputs[0].device
        self.graph = torch.cuda.CUDAGraph()
        self.done = torch.cuda.Event()
        with torch.cuda.device(device), tuned(tune):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run(*self.inputs)
            torch.cuda.current_stream(device).wait_stream(side)
            # Other threads (a reader, a progress bar) may go on talking to the device.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.output = run(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """On whatever stream it is called from; the output is the caller's to keep."""
        stream = torch.cuda.current_stream(self.output.device)
        stream.wait_event(self.done)  # a call from another stream may still use the same memory
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        self.graph.replay()
        output = self.output.clone()
        self.done.record(stream)
        return output
