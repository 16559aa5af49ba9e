"""A step of many small kernels as one CUDA graph: the device no longer waits for Python.

    run(*inputs) -> output   recorded once, then replayed on inputs copied to where the recording found them

What `run` reads and writes beside its inputs (weights, optimizer state) must stay in place, and it may neither wait for
the device nor let shapes depend on values. The warm-up before the recording really runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

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
