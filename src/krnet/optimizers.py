"""Muon: steps along the nearest orthogonal matrix of the momentum, for the FC matrices.

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


def orthogonalise(matrix: Tensor) -> Tensor:
    """U V^T of a matrix U S V^T, singular values brought to about 0.7 .. 1.2.

    Iterating on the small Gram matrix alone would save three quarters of the products, and fails: rounding (tf32)
    makes its smallest eigenvalues negative, and each step multiplies those by twelve.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    x = x / (torch.linalg.vector_norm(x) + 1e-12)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result = x if wide is matrix else x.T
    return result.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalise; `lr` means what it means for Adam."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                average = state["momentum"]
                average.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(average, group["momentum"]).flatten(1)).view_as(p)
                # An orthogonal r x c matrix has entries of size max(r, c) ** -0.5; Adam's steps are about 0.2 lr.
                rows, columns = p.flatten(1).shape
                p.add_(update, alpha=-group["lr"] * 0.2 * max(rows, columns) ** 0.5)
