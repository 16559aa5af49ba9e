"""Devices, precision, dtypes and memory shared with numpy, and CUDA graphs.

pick_device(None)     -> the GPU if there is one, or else the CPU
exact_math()          -> products of fp32 in full fp32: the default of replay
fast_math(device)     -> bf16 on a GPU; full fp32 on a CPU
dtype_name(dtype)     -> float32, of torch.float32
share_memory(array)   -> a tensor of the same memory
Graphed(run, inputs)  -> run(*inputs) as one CUDA graph: the GPU does not wait for Python between small kernels
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
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
    # "cuda" and "cuda:0" name the same device, but do not compare equal.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def dtype_name(dtype: object) -> str:
    """Name a dtype of torch or numpy as numpy does: float32."""
    return str(dtype).removeprefix("torch.")


def share_memory(array: np.ndarray) -> Tensor:
    """An array as a tensor of the same memory, which may be read-only: never write to it, or the process ends."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(array)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow a GPU to round the factors of fp32 products to 10 bits, which is four times as fast; or forbid it."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def exact_math() -> Iterator[None]:
    """Compute in full fp32. With tf32, the default of cuDNN, errors of 1e-3 would make a replay depend on its batch."""
    with tf32(False):
        yield


@contextmanager
def fast_math(device: torch.device) -> Iterator[None]:
    """Compute products in bf16 on a GPU, in full fp32 on a CPU: some CPUs advertise bf16 products and crash on them."""
    with (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),  # where our own kernels start
        tf32(device.type == "cuda"),
        torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False),
    ):
        yield


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU; 0 for a CPU, where a copy of the caller's arrays would gain nothing."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


NUM_WARM_UPS = 3  # before a capture, cuDNN must choose algorithms, kernels compile, optimizers make their state


@contextmanager
def cudnn_benchmark(enabled: bool) -> Iterator[None]:
    """Let cuDNN time its algorithms and take the fastest; or not."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class Graphed:
    """A function of tensors, captured as a CUDA graph: a call copies its inputs into place and replays the graph."""

    def __init__(self, run: Callable[..., Tensor], inputs: Sequence[Tensor], *, tune: bool = False):
        """`tune` lets cuDNN take its fastest algorithms: they may be less exact, and differ from run to run."""
        self.inputs = [value.clone() for value in inputs]
        device = self.inputs[0].device
        self.graph = torch.cuda.CUDAGraph()
        self.done = torch.cuda.Event()
        with torch.cuda.device(device), cudnn_benchmark(tune):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(NUM_WARM_UPS):
                    run(*self.inputs)
            torch.cuda.current_stream(device).wait_stream(side)
            # thread_local: other threads (a reader, a progress bar) may use the device during the capture.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.output = run(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run on the current stream. The output is a copy, which the next call does not overwrite."""
        stream = torch.cuda.current_stream(self.output.device)
        stream.wait_event(self.done)  # a call from another stream may still use the same memory
        for static_input, value in zip(self.inputs, inputs, strict=True):
            static_input.copy_(value, non_blocking=True)
        self.graph.replay()
        output = self.output.clone()
        self.done.record(stream)
        return output
