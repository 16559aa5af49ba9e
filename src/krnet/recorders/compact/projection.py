"""Replays of a compact KRNet, and the codes of feature maps that it was not fitted to.

    ids -> stored codes -> network -> features
    features -> nearest point along the axes -> code, moved a few times -> rounded -> symbols, and whether to refine
    symbols  -> network -> features

Codes move down their own error, as in every fit (codes.py). Each map takes the best of the codes that it had on the
way, so the result does not depend on the other maps of the batch. A network that was fitted to few samples may spoil
others: where it does, the map is left unrefined. The last symbol of a sample says which: 1 refined, 0 not.

Without axes (components=0) codes move as well, although growth.py leaves those of appended samples as they are: the
network was fitted to codes that had moved, and knows no others.
"""

from __future__ import annotations

import copy
import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from krnet.coding.entropy import FREQUENCY_BITS, MAX_SYMBOL, Tables
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
SPOILT_SHARE = 1 / 64  # expected share of maps that the network spoils: nearly free where it spoils none
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
        self.coded_at_once = max(1, PART_BYTES // (4 * max_map_values))

    @cached_property
    def tables(self) -> Tables:
        """Those of the codes, and one for the last symbol."""
        tables = self.reader.blocks.tables
        spoilt = round(SPOILT_SHARE * 2**FREQUENCY_BITS)
        return Tables(
            np.append(tables.column.astype(np.int16), len(tables.sizes)),
            np.append(tables.first, np.int16(0)),
            np.append(tables.sizes, np.uint16(2)),
            np.append(tables.weights, np.array([spoilt - 1, 2**FREQUENCY_BITS - spoilt - 1], np.uint16)),
        )

    def code(self, features: Tensor, *, moves: int | None = None) -> Tensor:
        num_moves = NUM_MOVES if moves is None else moves
        with exact_math(), torch.inference_mode(False), torch.no_grad():
            parts = features.split(self.coded_at_once)
            return torch.cat([self._code(part.clone(), num_moves) for part in parts])

    def show(self, symbols: Tensor) -> Tensor:
        with exact_math(), torch.inference_mode(False), torch.no_grad():
            return torch.cat([self._show(part.clone()) for part in symbols.split(self.coded_at_once)])

    def _show(self, symbols: Tensor) -> Tensor:
        maps = self._net(self._numbers_of(symbols[:, :-1]), symbols[:, -1:, None, None].float())
        maps = maps.reshape(len(maps), *(self.shape or (1,)))
        return denormalise(maps, self.low, self.high).reshape(len(maps), *self.shape)

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

    def _quantize(self, codes: Tensor) -> Tensor:
        """Codes (n, P k) -> their symbols."""
        codes = self.config.apply_dead_zone(codes)
        if self.config.has_centroids:
            return self.reader.quantize(codes)
        return (codes / self.config.step).round().int().clamp_(-MAX_SYMBOL, MAX_SYMBOL)

    def _numbers_of(self, symbols: Tensor) -> Tensor:
        """Symbols (n, P k) -> the codes that a file would give back."""
        return self.reader.numbers_of(symbols) if self.config.has_centroids else symbols * self.config.step

    def _code(self, features: Tensor, num_moves: int) -> Tensor:
        """Symbols (n, P k + 1) of some features; codes move where all samples of the recording are refined."""
        target = normalise(features.reshape(len(features), *(self.shape or (1,))), self.low, self.high)
        target = target.reshape(-1, *self._net.shape)
        codes = self._codes(target.flatten(1))
        symbols = self._quantize(codes)
        refined = symbols.new_zeros(len(symbols), 1)
        if self.config.refined is None:
            unrefined = self._net(self._numbers_of(symbols), codes.new_zeros(len(codes), 1, 1, 1))
            errors = (unrefined - target).square().sum((1, 2, 3))
            symbols, refined = self._move(codes, symbols, target, errors, num_moves)
        return torch.cat([symbols, refined], dim=1)

    def _move(
        self, codes: Tensor, best: Tensor, target: Tensor, errors: Tensor, num_moves: int
    ) -> tuple[Tensor, Tensor]:
        """Move the codes down the network's error -> the best symbols, and whether the network did better with them.

        best, errors  the symbols of the codes, and the squared errors (n,) of what they are without the network
        """
        refined = best.new_zeros(len(best), 1)
        for move in range(num_moves + 1):
            symbols = self._quantize(codes)
            quantized = self._numbers_of(symbols).float()
            with torch.enable_grad():
                output = self._net(quantized.requires_grad_())
                loss = (output - target).square().sum()
            found_errors = (output.detach().clamp(0, 1) - target).square().sum((1, 2, 3))
            better = (found_errors < errors)[:, None]
            best, refined = torch.where(better, symbols, best), refined | better.int()
            errors = errors.minimum(found_errors)
            if move == num_moves:
                break
            # As in CodesFit.after_step: the gradient was taken at the quantised code, not at the code itself.
            gradient = torch.autograd.grad(loss, quantized)[0] + 2 * (codes - quantized.detach())
            lr = MOVE_LR * (1 - move / num_moves)
            codes = codes - (0.5 * lr * gradient).clamp(-self.config.step, self.config.step)
        return best, refined
