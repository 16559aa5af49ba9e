"""The processes that fit one network together: each learns from its share of every batch, and gradients are added.

    with joined(this_rank(), device): krnet.record(...)  ->  team() is used by the fit: Team(number, count)
    batch -> team.own(batch) -> gradients of these samples -> team.add -> those of the whole batch, in every process

All processes hold the same network, codes and optimizers, and make the same step: none of these is ever sent. Sums of
gradients are rounded in another order than in one process. Without `joined`, the team is one process, and adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from krnet.errors import RankError, SettingError
from krnet.ranks import PATIENCE_S, Rank


@dataclass(frozen=True)
class Team:
    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.number == 0

    def own(self) -> slice:
        """The samples of a batch that are this process's: each n-th one, since the first ones may cost more."""
        return slice(self.number, None, self.count)

    def num_own(self, num_samples: int) -> int:
        return len(range(self.number, num_samples, self.count))

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, to the same bits in each."""
        if self.count > 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            with _one_reason():
                dist.all_reduce(flat)
            for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors if self.count > 1 else ():
            with _one_reason():
                dist.broadcast(tensor, src=0)

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over all processes: clocks, and what some of them want, are agreed upon so."""
        if self.count == 1:
            return list(values)
        found = torch.tensor(values, dtype=torch.float64)
        with _one_reason():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def wait(self) -> None:
        """Return when all processes have come here."""
        self.largest(0.0)


_team = Team()


def team() -> Team:
    """The processes that work with this one."""
    return _team


@contextmanager
def joined(rank: Rank, device: torch.device) -> Iterator[Team]:
    """Join the processes that torchrun has started: within the block, fits are shared with them."""
    global _team
    if rank.count == 1:
        yield _team
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with _one_reason():
        dist.init_process_group(backend, rank=rank.number, world_size=rank.count, timeout=timedelta(seconds=PATIENCE_S))
    _team = Team(rank.number, rank.count)
    try:
        yield _team
    finally:
        _team = Team()
        dist.destroy_process_group()


def refuse_in_team(what: str) -> None:
    """Refuse what one process can do alone."""
    if _team.count > 1:
        raise SettingError(
            f"{what} by {_team.count} processes; expected one: it is not shared. Give the command without torchrun"
        )


@contextmanager
def _one_reason() -> Iterator[None]:
    """Errors of the connection are named: most often another process has ended, and has said why."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RankError(
            f"lost the other processes of this fit ({reason:.200}); one of them has ended or hangs. See what it said, "
            f"and give the command again with --resume, with any number of processes"
        ) from error
