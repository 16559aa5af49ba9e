"""A fit of open length: rounds, each twice as long as the one before, until another does not pay.

    round 1 | round 2        | round 3                        | ...    in each the learning rate rises, and falls to 0
            e1               e2                               e3       mean loss at the end of a round

At the end of a round the fit is as good as one that was planned for so long (notes/choices.md), so the errors of two
rounds tell what time buys. As a share of the error, a doubling of the iterations t left

    share_left = (e_k / e_(k-1)) ** (1 / log2(t_k / t_(k-1)))

and the next one is expected to leave as much. The fit goes on while share_left <= PAYS_SHARE. The rule counts
iterations, not seconds, so the same fit ends at the same place. A time limit cuts the last round short: there the
learning rate falls with the clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

PAYS_SHARE = 0.97  # a fit goes on while twice the iterations would leave at most this share of the error
END_SHARE = 0.2  # the loss at the end of a round is the mean over this last share of it
CLOCK_SHARE = 0.1  # the clock counts from here on: a slow first step must not change the learning rate
LEAST_ROUND = 0.5  # a round is begun if the time left is at least this share of the time of the last one


@dataclass
class OpenEnd:
    """The rounds of a fit, and what their ends say about how long it should be."""

    first_round: int
    """Iterations of the first round."""
    limit_s: float
    """Seconds that all rounds may take."""
    ends: list[tuple[int, float]] = field(default_factory=list)
    """(iterations so far, mean loss) at the end of each finished round."""
    start: int = 0
    """The iteration at which the round began,"""
    start_s: float = 0.0
    """and the seconds."""
    losses: list[float] = field(default_factory=list)
    """Of the looks at the end of this round."""
    reason: str = ""
    """Why the fit has ended; empty while it goes on."""

    @property
    def round_iterations(self) -> int:
        return self.first_round << len(self.ends)

    def progress(self, iteration: int, seconds: float) -> float:
        """The share of this round that is done: by its iterations, or by the clock if the time left is too short."""
        by_iterations = (iteration - self.start) / self.round_iterations
        by_clock = (seconds - self.start_s) / max(self.limit_s - self.start_s, 1e-9)
        return min(1.0, by_iterations if by_clock < CLOCK_SHARE else max(by_iterations, by_clock))

    def look(self, iteration: int, seconds: float, loss: float) -> None:
        """Take up the mean loss since the last look, and end the round or the fit where it is time to."""
        progress = self.progress(iteration, seconds)
        if progress > 1 - END_SHARE:
            self.losses.append(loss)
        if progress < 1:
            return
        self.ends.append((iteration, sum(self.losses) / len(self.losses)))
        self.losses = []
        share, taken_s = self.share_left, seconds - self.start_s
        if share is not None and share > PAYS_SHARE:
            self.reason = "no_gain"
        elif self.limit_s - seconds < LEAST_ROUND * taken_s:
            self.reason = "time_limit"
        self.start, self.start_s = iteration, seconds

    @property
    def share_left(self) -> float | None:
        """The share of the error that the last doubling of the iterations left; None before two rounds are finished."""
        if len(self.ends) < 2:
            return None
        (before, error_before), (now, error) = self.ends[-2:]
        return float((error / max(error_before, 1e-30)) ** (1 / math.log2(now / before)))

    def to_metadata(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "ends": [list(end) for end in self.ends], "start": self.start, "start_s": self.start_s,
            "losses": self.losses, "reason": self.reason,
        }  # fmt: skip

    def load_metadata(self, saved: dict[str, Any]) -> None:
        self.ends = [(int(iteration), float(loss)) for iteration, loss in saved["ends"]]
        self.start, self.start_s = int(saved["start"]), float(saved["start_s"])
        self.losses, self.reason = list(saved["losses"]), str(saved["reason"])
