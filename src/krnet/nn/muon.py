"""Muon: an optimizer that updates each matrix by the orthogonal matrix nearest to its momentum.

    momentum (r, c) -> orthogonalise -> update (r, c) of the size of an Adam step

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); the step size is matched to Adam's
as in Liu et al., "Muon is scalable for LLM training" (2025). We do not use torch.optim.Muon: it refuses convolutions
and multiplies in bfloat16 on every device, which crashes on some CPUs that advertise it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Newton-Schulz iteration of the reference implementation: x -> a x + b (x x^T) x + c (x x^T)^2 x, (a, b, c) as here.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Approximate U V^T for each matrix U S V^T of a batch (k, r, c); the singular values end at about 0.7 to 1.2.

    Iterating on the small Gram matrix alone would save three quarters of the products, but it diverges: tf32 rounding
    makes its smallest eigenvalues negative, and each step multiplies those by twelve.
    """
    return _orthogonalise_cuda(matrices) if matrices.is_cuda else _orthogonalise(matrices)


def _orthogonalise(matrices: Tensor) -> Tensor:
    x = matrices / (torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True) + 1e-12)
    tall = x.shape[1] >= x.shape[2]
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        # Take the smaller of the two Gram matrices; transposing x instead would cost a copy.
        gram = x.mT @ x if tall else x @ x.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, factor, beta=a) if tall else torch.baddbmm(x, factor, x, beta=a)
    return x


def _orthogonalise_cuda(matrices: Tensor) -> Tensor:
    """The same in bf16. Scaling and adding happen on the small Gram matrices, so the large x is only multiplied."""
    x = matrices.to(torch.bfloat16)
    scale = 1 / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32) + 1e-12)
    tall = x.shape[1] >= x.shape[2]
    a, b, c = COEFFICIENTS
    for step in range(NUM_STEPS):
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
    """Update each parameter by its orthogonalised momentum. `lr`, a number or a tensor, has the same scale as Adam's.

    A convolution kernel counts as a matrix of (output channels, all other axes).
    """

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # Matrices of one shape share a batched product: each product is one kernel launch.
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.flatten(1).shape, []).append(p)
            for (rows, columns), params in by_shape.items():
                momenta = [self._momentum(p, group["momentum"]).flatten(1) for p in params]
                updates = orthogonalise(momenta[0][None] if len(momenta) == 1 else torch.stack(momenta))
                # Entries of an orthogonal matrix are about max(rows, columns) ** -0.5; Adam's steps are about 0.2 lr.
                step_size = group["lr"] * (0.2 * max(rows, columns) ** 0.5)
                for p, update in zip(params, updates, strict=True):
                    if isinstance(step_size, Tensor):  # a CUDA graph reads the learning rate from memory
                        p.addcmul_(update.view_as(p), step_size, value=-1)
                    else:
                        p.add_(update.view_as(p), alpha=-step_size)

    def _momentum(self, p: Tensor, decay: float) -> Tensor:
        """Nesterov momentum: the gradient, blended with its running mean."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        average = state["momentum"].lerp_(p.grad, 1 - decay)
        return p.grad.lerp(average, decay)
