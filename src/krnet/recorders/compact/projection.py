"""Replays of a compact KRNet, and the codes of feature maps that it was not fitted to.

    ids -> stored codes -> network -> features
    features -> nearest point along the axes -> code, moved a few times -> rounded -> symbols, and whether to refine
    symbols  -> network -> features

Codes move down their own error (moves.py), so the result does not depend on the other maps of the batch. Where they
are stored, the price of their bits counts as well.

A network that was fitted to few samples may spoil others: where it does, the map is left unrefined. The last symbol of
a sample says which: 1 refined, 0 not.

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
from krnet.recorders.base import Coded
from krnet.recorders.compact.moves import FEW_MOVES, MANY_MOVES, VALUES_MOVES, bit_prices, move_codes
from krnet.recorders.compact.network import CompactConfig, CompactNet, GatedNet
from krnet.recorders.network_replayer import NetworkReplayer

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

        if device.type == "cpu":  # twice as fast there; on a GPU the network turns its maps itself
            net.refine.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

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

    def code(self, features: Tensor, *, moves: int | None = None, stored: bool = False) -> Coded:
        with exact_math(), torch.inference_mode(False), torch.no_grad():
            parts = [self._code(part.clone(), moves, stored) for part in features.split(self.coded_at_once)]
            return Coded(*map(torch.cat, zip(*parts)))

    def show(self, symbols: Tensor) -> Tensor:
        with exact_math(), torch.inference_mode(False), torch.no_grad():
            return torch.cat([self._show(part.clone()) for part in symbols.split(self.coded_at_once)])

    def _show(self, symbols: Tensor) -> Tensor:
        return self._features(self._net(self._numbers_of(symbols[:, :-1]), symbols[:, -1:, None, None].float()))

    def _features(self, maps: Tensor) -> Tensor:
        """Maps (n, c, h, w) in [0, 1] -> features in the original scale."""
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

    @cached_property
    def _prices(self) -> Tensor:
        return bit_prices(self.reader.blocks.tables, self.config.step).to(self.reader.device)

    def _code(self, features: Tensor, moves: int | None, stored: bool) -> Coded:
        """Symbols (n, P k + 1) of some features; codes move where all samples of the recording are refined."""
        target = normalise(features.reshape(len(features), *(self.shape or (1,))), self.low, self.high)
        target = target.reshape(-1, *self._net.shape)
        codes = self._codes(target.flatten(1))
        symbols = self._quantize(codes)
        numbers = self._numbers_of(symbols).float()
        maps, refined = self._net.unrefined(numbers).clamp(0, 1), torch.zeros_like(symbols[:, :1], dtype=torch.bool)
        if self.config.refined is None:
            # Without axes bits have no price, as in the fit (values_fit.py).
            prices = self._prices if stored and self.config.components else torch.zeros_like(self._prices)
            num_moves = self._num_moves(stored) if moves is None else moves
            moved = self._quantize(move_codes(self._net, codes, target, num_moves, self.config.step, prices))
            moved_numbers = self._numbers_of(moved).float()
            moved_maps = self._net(moved_numbers)
            costs = (
                (found - target).square().sum((1, 2, 3)) + codes.abs() @ prices
                for found, codes in ((moved_maps, moved_numbers), (maps, numbers))
            )  # (n,) each: squared error, and the price of the bits
            refined = torch.lt(*costs)[:, None]
            symbols, maps = (
                torch.where(refined, moved, symbols),
                torch.where(refined[:, :, None, None], moved_maps, maps),
            )
        return Coded(torch.cat([symbols, refined.int()], dim=1), self._features(maps))

    def _num_moves(self, stored: bool) -> int:
        return (FEW_MOVES if stored else MANY_MOVES) if self.config.components else VALUES_MOVES
