"""Muon: steps along the nearest orthogonal matrix of the momentum, for every matrix of a network.

    momentum (r, c) -> orthogonalise -> step of the size that Adam would take

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); the step size is matched to Adam's
as in Liu et al., "Muon is scalable for LLM training" (2025). Not torch.optim.Muon, which takes no convolutions and
multiplies in bfloat16 on every device: some CPUs advertise that and crash on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the quintic of the reference implementation
STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """U V^T of each matrix U S V^T of a batch (k, r, c), singular values brought to about 0.7 .. 1.2.

    Iterating on the small Gram matrix alone would save three quarters of the products, and fails: rounding (tf32)
    makes its smallest eigenvalues negative, and each step multiplies those by twelve.
    """
    return _orthogonalise_cuda(matrices) if matrices.is_cuda else _orthogonalise(matrices)


def _orthogonalise(matrices: Tensor) -> Tensor:
    x = matrices / (torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True) + 1e-12)
    tall = x.shape[1] >= x.shape[2]
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        # On the side where the Gram matrix is small; transposing the large one instead would cost a copy.
        gram = x.mT @ x if tall else x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factor, beta=a) if tall else torch.baddbmm(x, factor, x, beta=a)
    return x


def _orthogonalise_cuda(matrices: Tensor) -> Tensor:
    """The same in bf16, with all that is not a product done on the small matrices: the large one is only multiplied."""
    x = matrices.to(torch.bfloat16)
    scale = 1 / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32) + 1e-12)
    tall = x.shape[1] >= x.shape[2]
    a, b, c = COEFFICIENTS
    for step in range(STEPS):
        gram = x.mT @ x if tall else x @ x.mT
        if step == 0:
            gram = (gram * scale**2).to(torch.bfloat16)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        if step == 0:
            factor = (factor * scale).to(torch.bfloat16)
        x = x @ factor if tall else factor @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalise; `lr` (a number or a tensor) means what it means for Adam. Kernels count as
    output x rest."""

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # Matrices of one shape go together: a network has few shapes, and each product is a launch.
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.flatten(1).shape, []).append(p)
            for (rows, columns), params in by_shape.items():
                momenta = [self._momentum(p, group["momentum"]).flatten(1) for p in params]
                updates = orthogonalise(momenta[0][None] if len(momenta) == 1 else torch.stack(momenta))
                # An orthogonal matrix has entries of about max(rows, columns) ** -0.5; Adam's steps are about 0.2 lr.
                step_size = group["lr"] * (0.2 * max(rows, columns) ** 0.5)
                for p, update in zip(params, updates, strict=True):
                    if isinstance(step_size, Tensor):  # a graph reads the learning rate from memory
                        p.addcmul_(update.view_as(p), step_size, value=-1)
                    else:
                        p.add_(update.view_as(p), alpha=-step_size)

    def _momentum(self, p: Tensor, decay: float) -> Tensor:
        """The gradient, blended with its running mean (Nesterov's way)."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        average = state["momentum"].lerp_(p.grad, 1 - decay)
        return p.grad.lerp(average, decay)
