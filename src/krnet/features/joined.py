"""Several sources of features as one: the samples of the first, then those of the second, and so on.

join([a, b, c]) -> FeatureSource whose IDs go on where those of the source before end
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from krnet.device import dtype_name
from krnet.errors import FeatureError
from krnet.features.feature_source import FeatureSource


class JoinedSource(FeatureSource):
    def __init__(self, sources: Sequence[FeatureSource]):
        first = sources[0]
        for source in sources:
            if (source.shape, source.dtype) != (first.shape, first.dtype):
                raise FeatureError(
                    f"{source.name}: samples of {source.shape}, {dtype_name(source.dtype)}; those of {first.name} are "
                    f"{first.shape}, {dtype_name(first.dtype)}. Give features of one shape and type"
                )
        starts = [0, *accumulate(map(len, sources))]

        def fill(out: torch.Tensor, ids: torch.Tensor) -> None:
            for source, start, stop in zip(sources, starts, starts[1:], strict=False):
                chosen = ((ids >= start) & (ids < stop)).nonzero()[:, 0]
                if len(chosen) == len(ids):
                    out.copy_(source.read(ids - start))
                elif len(chosen):
                    out[chosen] = source.read(ids[chosen] - start)

        name = first.name if len(sources) == 1 else f"{first.name} and {len(sources) - 1} more"
        fixed = all(source.is_fixed for source in sources)
        super().__init__(name, (starts[-1], *first.shape), dtype_name(first.dtype), fill, is_fixed=fixed)
        self.sources = tuple(sources)

    @property
    def files(self) -> list[Path]:
        return [path for source in self.sources for path in source.files]


def join(sources: Sequence[FeatureSource]) -> FeatureSource:
    return sources[0] if len(sources) == 1 else JoinedSource(sources)


def members(source: FeatureSource) -> tuple[FeatureSource, ...]:
    """The sources that one is made of; itself if it is none of several."""
    return source.sources if isinstance(source, JoinedSource) else (source,)
