"""Replays samples of a folder of parts: parts are opened when they are needed, and kept while there is room.

ids -> parts -> blocks of symbols -> the model's replayer -> features
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from krnet.errors import ChecksumError
from krnet.io.cache import ByteCache
from krnet.io.places import Place
from krnet.parts.manifest import MANIFEST, Manifest
from krnet.parts.part import REPAIR, Part, open_part
from krnet.parts.symbols import Coder, SymbolReader
from krnet.recorders.base import Coded, Replayer
from krnet.recording_file import naming

CACHE_BYTES = 512 << 20  # streams of open parts and decoded blocks that are kept


class PartsReplayer(Replayer):
    """Decodes symbols of parts, and shows them with the model."""

    def __init__(self, folder: Place, manifest: Manifest, model: Coder, max_bytes: int | None = None):
        self.folder, self.manifest, self.model, self.max_bytes = folder, manifest, model, max_bytes
        self.firsts = np.array([part.first for part in manifest.parts])
        self.cache = ByteCache(CACHE_BYTES)

    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        return self.model.replayer.show(self.symbols(ids).to(self.model.device))

    def code(self, features: Tensor, *, moves: int | None = None, stored: bool = False) -> Coded:
        return self.model.replayer.code(features, moves=moves, stored=stored)

    def show(self, symbols: Tensor) -> Tensor:
        return self.model.replayer.show(symbols)

    def symbols(self, ids: Tensor) -> Tensor:
        """ids (B,) -> their symbols (B, ...), on the CPU."""
        found = torch.empty((len(ids), *self.model.symbol_shape), dtype=self.model.symbol_dtype)
        rows = ids.numpy()
        numbers = np.searchsorted(self.firsts, rows, side="right") - 1  # (B,) the part of each sample
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            entry = self.manifest.parts[number]
            with naming(self.folder / entry.name):
                reader = self.cache.get(number, lambda number=number: self._open(number))  # type: ignore[misc]
                found[torch.from_numpy(chosen)] = reader.read(rows[chosen] - entry.first, self.cache, number)
        return found

    def _open(self, number: int) -> SymbolReader:
        part = open_listed(self.folder, self.manifest, number, self.max_bytes)
        return SymbolReader(part.kept, part.entry.num_samples, self.model)


def open_listed(folder: Place, manifest: Manifest, number: int, max_bytes: int | None = None) -> Part:
    """Open a part; refuse one that is not what the manifest lists."""
    entry = manifest.parts[number]
    part = open_part(folder, entry.name, max_bytes)
    if (part.entry, part.origin) != (entry, manifest.origin):
        raise ChecksumError(f"{folder / entry.name}: is not the part that {MANIFEST} lists. {REPAIR}")
    return part
