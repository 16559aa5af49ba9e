"""Ends a fit of open length where it no longer pays.

    loss of each look -> OpenEnd -> the share of the loss that the last doubling of the iterations left
                                 -> as much as the next one would leave -> pays, or not

While the learning rate is constant, the loss of a fit falls about as a power of its iterations: each doubling leaves
the same share of it. So what the last doubling left is what the next one would leave:

    share_left(n) = mean loss of iterations n/2 .. n / mean loss of iterations n/4 .. n/2

The fit pays while share_left(n) <= PAYS_SHARE. Where it no longer does, the learning rate starts to fall at once: the
fit ends after n / constant_share iterations, as one whose length was known. The rule counts iterations, not seconds, so
a resumed fit ends at the same place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

PAYS_SHARE = 0.97  # a fit goes on while twice the iterations would leave at most this share of the error
MIN_LOOKS = 12  # looks at the loss before which nothing is judged: the first show how the fit finds its step


@dataclass
class OpenEnd:
    """What the looks at the loss say about how long a fit should be."""

    constant_share: float
    """Share of a fit during which its learning rate is constant."""
    losses: list[float] = field(default_factory=list)
    """Of each look during that time."""
    end: int | None = None
    """The iteration at which the fit is to end, once it is known."""

    def look(self, iteration: int, progress: float, loss: float) -> None:
        """Take up the mean loss since the last look; set `end` if the fit no longer pays."""
        if self.end is not None or progress > self.constant_share:
            return
        self.losses.append(loss)
        share = self.share_left
        if share is not None and len(self.losses) >= MIN_LOOKS and share > PAYS_SHARE:
            self.end = math.ceil(iteration / self.constant_share)

    @property
    def share_left(self) -> float | None:
        """The share of the loss that the last doubling of the iterations left; None if there are too few looks."""
        count = len(self.losses)
        if count < 4:
            return None
        before, after = self.losses[count // 4 : count // 2], self.losses[count // 2 :]
        return sum(after) / len(after) / max(sum(before) / len(before), 1e-30)

    def to_metadata(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"losses": self.losses, "end": self.end}

    def load_metadata(self, saved: dict[str, Any]) -> None:
        self.losses, self.end = list(saved["losses"]), saved["end"]
