"""Residual quantisation: each codebook quantises what those before it left.

    x -> entry of book 1 -> x - entry -> entry of book 2 -> ...

Chen et al., "Approximate nearest neighbor search by residual vector quantization" (2010); Babenko and Lempitsky,
"Additive quantization" (2014), for the search with several candidates (a beam). For vectors at one to two bits a value
it is the codec to beat. Codebooks and codes are those of faiss (`ResidualQuantizer`); additive.py has the rest.
Deviations: codebooks are trained one after the other with a single candidate. A beam in training took ten times as long
and left more error in what we tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from krnet.config import check_int
from krnet.recorders.additive import AdditiveConfig, AdditiveRecorder, residual_quantiser
from krnet.recorders.base import register


@dataclass(frozen=True, kw_only=True)
class ResidualConfig(AdditiveConfig):
    beam: int = 8
    """Candidates that are kept while a position is coded; more take longer and leave less error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("beam", self.beam, 1, 256)


@register
class ResidualRecorder(AdditiveRecorder):
    name = "residual"
    config_class = ResidualConfig
    bench_values = 50_000_000

    def quantiser(self, num_channels: int, config: ResidualConfig, seed: int) -> Any:
        return residual_quantiser(num_channels, config, seed)

    def prepare(self, quantiser: Any, config: ResidualConfig) -> None:
        quantiser.max_beam_size = config.beam
