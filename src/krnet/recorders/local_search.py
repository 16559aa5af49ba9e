"""Local-search quantisation: all codebooks are trained together, and codes are improved by random changes.

Martinez et al., "LSQ++: lower running time and higher recall in multi-codebook quantization" (2018). Codebooks and
codes are those of faiss (`LocalSearchQuantizer`); additive.py has the rest. It is slow: minutes for 100,000 vectors.
Deviations: codebooks are trained on at most 2^14 positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from krnet.config import check_int
from krnet.recorders.additive import AdditiveConfig, AdditiveRecorder
from krnet.recorders.base import register

TRAIN_ROUNDS = 8  # of random changes while codebooks are trained, as in faiss


@dataclass(frozen=True, kw_only=True)
class LocalSearchConfig(AdditiveConfig):
    rounds: int = 16
    """Rounds of random changes, each followed by a local search, while a position is coded; up to 8 in training."""
    train_rounds: int = 25
    """Rounds of training: codes for these codebooks, then the best codebooks for these codes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("rounds", self.rounds, 1, 1000)
        check_int("train_rounds", self.train_rounds, 1, 1000)


@register
class LocalSearchRecorder(AdditiveRecorder):
    name = "local-search"
    config_class = LocalSearchConfig
    bench_values = 2_000_000
    train_positions = 1 << 14
    most_books = 24

    def quantiser(self, num_channels: int, config: LocalSearchConfig, seed: int) -> Any:
        import faiss

        made = faiss.LocalSearchQuantizer(num_channels, config.books, config.bits)
        made.random_seed, made.train_iters = seed + 1, config.train_rounds
        made.encode_ils_iters, made.train_ils_iters = config.rounds, min(TRAIN_ROUNDS, config.rounds)
        return made
