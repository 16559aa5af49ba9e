"""Settings of a recorder's fit: how long, with which optimizer and learning rates, on which device.

    keyword arguments or command-line options -> FitConfig -> recorders/fit.py

The docstring under each field is its help text. Nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from krnet.config import check_choice, check_int, check_range, check_rate

SCHEDULES = {"fast": 6000, "paper": 40000}
"""Learning-rate schedules and their default number of iterations."""
BATCH_SAMPLES = 1000  # samples of a batch where the caller names no number
MIN_HEAD_SAMPLES = 32  # samples per batch that head_share cannot go below


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How a recorder is fitted."""

    iterations: int | None = None
    """Largest number of updates. By default the schedule's number, or no limit if time_budget is given; without both,
    recorder krnet ends on a CPU where it no longer pays, after five minutes at the latest."""
    stop_at_r2: float | None = None
    """End the fit once the R2 over all features reaches this, looked at every 50 updates; saves time, not bytes."""
    time_budget: float | None = None
    """Seconds of fitting, without compilation, after which to stop; the learning rate falls over this time."""
    batch_size: int | None = None
    """Samples per update, over all devices; at most a third of all samples, or 32 if that is more. By default 1,000;
    recorder krnet takes fewer of large samples, so that a batch has at most a million values on a CPU, and 64 million
    on a GPU."""
    schedule: str = "fast"
    """Optimizer, and how the learning rate changes. fast: Muon for weight matrices, Adam for the rest; the rate is
    constant for 30 % of the fit, then falls to 0. paper: Adam; the rate is constant for one half, then falls; it takes
    several times as many updates for the same R2."""
    lr: float = 3e-3
    """Peak learning rate of Adam."""
    muon_lr: float = 1e-2
    """Peak learning rate of Muon (schedule fast), in Adam's units."""
    gamma: float = 1e-3
    """Weight of L_kr2, the error of the outputs of a given head."""
    head_share: float = 1.0
    """Share of a batch, at least 32 samples, that passes through the head. A quarter saves time and suits long fits."""
    seed: int = 0
    """Seeds the initial weights and the order of samples."""
    device: str | None = None
    """cpu, cuda or cuda:N. By default the GPU where there is one."""
    compile: bool = True
    """Fused kernels, and one CUDA graph per step, on a GPU; a CPU always runs the plain version."""
    checkpoint_s: float = 60.0
    """Seconds between checkpoints beside the output file."""

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("compile", self.compile, (True, False))
        if self.iterations is not None:
            check_int("iterations", self.iterations, 1)
        if self.batch_size is not None:
            check_int("batch_size", self.batch_size, 1)
        check_int("seed", self.seed, 0, 2**63 - 1)
        if self.stop_at_r2 is not None:
            check_range("stop_at_r2", self.stop_at_r2, -math.inf, 1)
        if self.time_budget is not None:
            check_range("time_budget", self.time_budget, 1e-3)
        for name in ("lr", "muon_lr"):
            check_rate(name, getattr(self, name))
        for name in ("gamma", "checkpoint_s"):
            check_range(name, getattr(self, name), 0)
        check_range("head_share", self.head_share, 0, 1)

    def num_head_samples(self, batch_size: int) -> int:
        """Samples of a batch that pass through the head."""
        return min(batch_size, max(MIN_HEAD_SAMPLES, round(self.head_share * batch_size)))

    @property
    def max_iterations(self) -> int | None:
        if self.iterations is None and self.time_budget is None:
            return SCHEDULES[self.schedule]
        return self.iterations
