"""Every setting, one frozen dataclass per stage; each is described once, under its field.

    NetworkConfig   what the network looks like: a preset, or solved from the features (sizing.py)
    FitConfig       how it is fitted

Help texts, checks and the record in the file all come from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from krnet.config import check_choice, check_int, check_range

SCHEDULES = {"fast": 6000, "paper": 40000}
"""Learning-rate schedules and their iterations."""
MIN_HEAD_SAMPLES = 32  # samples of a batch


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How a recorder is fitted."""

    iterations: int | None = None
    """Updates at most; by default the schedule's own number, or no limit where time_budget is given."""
    target_r2: float | None = None
    """The smallest file whose R2 over all features reaches this, found by a few whole fits; a krnet whose size is given
    (a preset, a start, network=paper, d0=...) stops there instead."""
    time_budget: float | None = None
    """Stop after so many seconds of fitting (compilation aside); the learning rate falls in step with them."""
    batch_size: int = 1000
    """Samples per update (all devices together); small data sets use a third of their samples."""
    schedule: str = "fast"
    """fast: Muon on the matrices, Adam elsewhere, warm-up, linear decay. paper: Adam, constant, then linear decay."""
    lr: float = 3e-3
    """Peak learning rate of Adam."""
    muon_lr: float = 1e-2
    """Peak learning rate of Muon (schedule fast), in Adam's units."""
    gamma: float = 1e-3
    """Weight of L_kr2, the error seen through a given head."""
    head_share: float = 1.0
    """Share of a batch that the head is shown, at least 32 samples: a quarter costs less time, and suits long fits."""
    seed: int = 0
    """Seeds the initial weights and the order of samples."""
    device: str | None = None
    """cpu, cuda or cuda:N; by default the GPU where there is one."""
    compile: bool = True
    """Fused kernels and one CUDA graph a step on a GPU; a CPU always runs the plain version."""
    checkpoint_s: float = 60.0
    """Seconds between checkpoints beside the output file."""

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("compile", self.compile, (True, False))
        if self.iterations is not None:
            check_int("iterations", self.iterations, 1)
        check_int("batch_size", self.batch_size, 1)
        check_int("seed", self.seed, 0, 2**63 - 1)
        if self.target_r2 is not None:
            check_range("target_r2", self.target_r2, -math.inf, 1)
        if self.time_budget is not None:
            check_range("time_budget", self.time_budget, 1e-3)
        for name in ("lr", "muon_lr", "gamma", "checkpoint_s"):
            check_range(name, getattr(self, name), 0)
        check_range("head_share", self.head_share, 0, 1)

    def num_head_samples(self, batch_size: int) -> int:
        """Samples of a batch that the head is shown."""
        return min(batch_size, max(MIN_HEAD_SAMPLES, round(self.head_share * batch_size)))

    @property
    def max_iterations(self) -> int | None:
        if self.iterations is None and self.time_budget is None:
            return SCHEDULES[self.schedule]
        return self.iterations
