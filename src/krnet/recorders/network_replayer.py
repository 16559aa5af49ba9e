"""Replays by a network, shared by the recorders that have one.

ids -> inputs -> network -> original scale -> features     on a GPU small batches are CUDA graphs
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.coding.weights import matrices
from krnet.device import Graphed, exact_math, fast_math
from krnet.features.samples import Samples
from krnet.features.stats import denormalise
from krnet.recorders.base import Replayer

CPU_PART_BYTES = 16 << 20  # of the largest map in a batch on a CPU: more would not stay in its cache
GRAPH_BATCH_SIZES = (1, 16, 256)  # small batches are padded to one of these, each of which has its CUDA graph


class NetworkReplayer(Replayer):
    """Replays by calling a network: ids -> inputs -> net -> original scale."""

    def __init__(
        self,
        net: nn.Module,
        inputs: Callable[[Tensor], Tensor],
        max_map_values: int,
        samples: Samples,
        low: Tensor,
        high: Tensor,
        device: torch.device,
    ):
        """inputs: IDs on the CPU -> the network's inputs on the device; max_map_values: size of its largest map."""
        self.net, self.inputs = net.to(device), inputs
        self.shape, self.device = samples.shape, device
        self.low, self.high = low.to(device), high.to(device)
        # On a CPU large batches are replayed in parts whose maps stay in its cache.
        self.part_samples = max(1, CPU_PART_BYTES // (4 * max_map_values)) if device.type == "cpu" else 1 << 30
        self._uses: Counter[tuple[int, bool]] = Counter()
        self._graphs: dict[tuple[int, bool], Graphed] = {}
        self._lock = threading.Lock()

    @cached_property
    def bf16_net(self) -> nn.Module:
        """The network with its matrices in bf16, so that `fast` does not convert them again for every batch."""
        net = copy.deepcopy(self.net)
        for module in matrices(net):
            module.to(torch.bfloat16)
        return net

    @torch.inference_mode()
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        fast = fast and self.device.type == "cuda"
        if self.device.type == "cuda" and len(ids) <= GRAPH_BATCH_SIZES[-1]:
            return self._decode_by_graph(self.inputs(ids), fast)
        parts = [self._decode(self.inputs(part), fast) for part in ids.split(self.part_samples)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, inputs: Tensor, fast: bool) -> Tensor:
        with fast_math(self.device) if fast else exact_math():
            output = (self.bf16_net if fast else self.net)(inputs)
        output = output.float().reshape(len(inputs), *(self.shape or (1,)))
        return denormalise(output, self.low, self.high).reshape(len(inputs), *self.shape)

    def _decode_by_graph(self, inputs: Tensor, fast: bool) -> Tensor:
        """Replay a small batch by a CUDA graph, since Python takes longer to launch its kernels than they run.

        Capturing takes time, too: the first two batches of each size are decoded without a graph.
        """
        size = next(size for size in GRAPH_BATCH_SIZES if len(inputs) <= size)
        key = size, fast
        with self._lock:
            self._uses[key] += 1
            if self._uses[key] < 3:
                return self._decode(inputs, fast)
            padding = [0, 0] * (inputs.dim() - 1) + [0, size - len(inputs)]
            padded = F.pad(inputs, padding)
            if key not in self._graphs:
                self._graphs[key] = Graphed(partial(self._decode, fast=fast), [padded])
            return self._graphs[key](padded)[: len(inputs)]
