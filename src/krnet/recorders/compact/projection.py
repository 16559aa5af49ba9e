"""Replays of a compact KRNet, and projection: what the recording would make of feature maps that it does not hold.

    ids -> stored codes -> network -> features
    features -> nearest point along the axes -> code, moved NUM_MOVES times -> rounded -> network -> features

Codes move down their own error, as in every fit (codes.py). Bits have no price here, since nothing is stored. Each map
takes the best of its NUM_MOVES + 1 codes, so the result does not depend on the other maps of the batch.

Without axes (components=0) codes move as well, although growth.py leaves those of appended samples as they are: the
network was fitted to codes that had moved, and knows no others.
"""

from __future__ import annotations

import copy
import math
from functools import cached_property

import torch
from torch import Tensor

from krnet.coding.matrix import MatrixReader
from krnet.device import exact_math
from krnet.features.samples import Samples
from krnet.features.stats import denormalise, normalise
from krnet.recorders.axes import least_squares
from krnet.recorders.compact.network import CompactConfig, CompactNet, GatedNet
from krnet.recorders.fit import NetworkReplayer

# Each move brings unseen maps nearer, and gains less than the one before.
NUM_MOVES = 20
# The first move is this share of a Newton step; later ones shrink to 0, as learning rates do in a fit. All codes of a
# sample move at once, and without axes neighbours share an error: with the 0.5 of a fit they overshoot, and R2 after 10
# moves is 0.57, not 0.68. Along axes both give the same, within 0.001.
MOVE_LR = 0.3
PART_BYTES = 16 << 20  # of the network's largest map: its maps are all kept for the gradient


class CompactReplayer(NetworkReplayer):
    """Replays stored codes through the network, and projects features on what it can replay."""

    def __init__(
        self,
        net: CompactNet,
        config: CompactConfig,
        reader: MatrixReader,
        samples: Samples,
        low: Tensor,
        high: Tensor,
        device: torch.device,
    ):
        num_values, num_refined = math.prod(samples.shape), config.refined
        max_map_values = max(num_values, config.num_columns(samples.shape), config.c1 * net.num_positions)

        def gated_codes(ids: Tensor) -> Tensor:
            assert num_refined is not None, "all samples are refined: no gate"
            return torch.cat([reader.read(ids), (ids < num_refined).float()[:, None].to(device)], dim=1)

        if num_refined is None:
            super().__init__(net, reader.read, max_map_values, samples, low, high, device)
        else:
            super().__init__(GatedNet(net), gated_codes, max_map_values, samples, low, high, device)
        self.compact_net, self.config, self.reader = net, config, reader
        self.projected_at_once = max(1, PART_BYTES // (4 * max_map_values))

    def project(self, features: Tensor) -> Tensor:
        with exact_math(), torch.inference_mode(False), torch.no_grad():
            return torch.cat([self._project(part.clone()) for part in features.split(self.projected_at_once)])

    def _project(self, features: Tensor) -> Tensor:
        target = normalise(features.reshape(len(features), *(self.shape or (1,))), self.low, self.high)
        target = target.reshape(-1, *self._net.shape)
        codes = self._codes(target.flatten(1))
        # A network that was fitted to few samples may spoil others: where it does, the map is left unrefined.
        maps = self._net(self._dequantize(codes), codes.new_zeros(len(codes), 1, 1, 1))
        if self.config.refined is None:
            maps = self._refine(codes, target, maps)
        return denormalise(maps.reshape(len(maps), *(self.shape or (1,))), self.low, self.high).reshape(features.shape)

    @cached_property
    def _net(self) -> CompactNet:
        """A copy of the network: the original may have been read in inference mode, where no gradient is possible."""
        return copy.deepcopy(self.compact_net).requires_grad_(False)

    @cached_property
    def _nearest(self) -> Tensor:
        """(values, k): blocks times this matrix are the coordinates of their nearest points along the axes."""
        assert self._net.axes is not None, "no axes: a code is the map itself"
        return least_squares(self._net.axes).T

    def _codes(self, x: Tensor) -> Tensor:
        """x (n, values) -> codes (n, P k), not quantised: those that do best without the network."""
        if self._net.axes is None:
            return x - self._net.mean
        grid = self._net.grid
        return grid.to_codes(grid.cut(x - self._net.mean) @ self._nearest)

    def _dequantize(self, codes: Tensor) -> Tensor:
        """The codes as a file would give them back."""
        codes = self.config.apply_dead_zone(codes)
        if self.config.has_centroids:
            return self.reader.dequantize(codes)
        return (codes / self.config.step).round() * self.config.step

    def _refine(self, codes: Tensor, target: Tensor, maps: Tensor) -> Tensor:
        """Replace each of the maps by the network's, where that is nearer to its target; move the codes meanwhile."""
        errors = (maps - target).square().sum((1, 2, 3))
        for move in range(NUM_MOVES + 1):
            quantized = self._dequantize(codes)
            with torch.enable_grad():
                output = self._net(quantized.requires_grad_())
                loss = (output - target).square().sum()
            found = output.detach().clamp(0, 1)
            found_errors = (found - target).square().sum((1, 2, 3))
            maps = torch.where((found_errors < errors)[:, None, None, None], found, maps)
            errors = errors.minimum(found_errors)
            # As in CodesFit.after_step: the gradient was taken at the quantised code, not at the code itself.
            gradient = torch.autograd.grad(loss, quantized)[0] + 2 * (codes - quantized.detach())
            lr = MOVE_LR * (1 - move / max(1, NUM_MOVES))
            codes = codes - (0.5 * lr * gradient).clamp(-self.config.step, self.config.step)
        return maps
