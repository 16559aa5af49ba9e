"""Muon's steps: the reference iteration, of the size that Adam's would have."""

import pytest
import torch
from torch import Tensor

from krnet.nn.muon import COEFFICIENTS, NUM_STEPS, Muon, orthogonalise

SHAPES = [(8, 8), (64, 16), (16, 64), (300, 5), (1, 7), (7, 1)]


def orthogonalised(matrix: Tensor) -> Tensor:
    return orthogonalise(matrix[None])[0]


def newton_schulz(matrix: Tensor) -> Tensor:
    """The reference: the quintic iteration on the whole matrix, in float64."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    for _ in range(NUM_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthogonalise_is_newton_schulz_on_the_whole_matrix(shape):
    for scale in (1e-6, 1.0, 1e6):
        matrix = scale * torch.randn(*shape)
        torch.testing.assert_close(orthogonalised(matrix).double(), newton_schulz(matrix), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 4])
def test_orthogonalise_keeps_up_with_newton_schulz_on_matrices_of_low_rank(rank):
    matrix = torch.randn(64, rank) @ torch.randn(rank, 32)
    torch.testing.assert_close(orthogonalised(matrix).double(), newton_schulz(matrix), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (300, 5)], ids=str)
def test_singular_values_come_near_one_and_singular_vectors_stay(shape):
    u, s, vt = torch.linalg.svd(torch.randn(*shape), full_matrices=False)
    turned = u.T @ orthogonalised(u @ torch.diag(s) @ vt) @ vt.T  # diagonal, were the vectors exactly the same
    values = turned.diagonal()
    assert (values > 0.68).all() and (values < 1.21).all()  # the band of this quintic
    assert (turned - torch.diag(values)).abs().max() < 1e-3
    assert (orthogonalised(u @ torch.diag(s) @ vt) - u @ vt).abs().max() < 0.32


@pytest.mark.parametrize("shape", [(64, 16), (16, 64)], ids=str)
def test_matrices_of_a_batch_do_not_see_each_other(shape):
    batch = torch.randn(3, *shape) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    torch.testing.assert_close(orthogonalise(batch), torch.stack([orthogonalised(m) for m in batch]))


def test_a_matrix_of_zeros_stays_zero():
    assert torch.equal(orthogonalised(torch.zeros(6, 4)), torch.zeros(6, 4))


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (6, 4, 3, 3)], ids=str)
def test_a_step_is_the_orthogonalised_nesterov_momentum(shape):
    weight, momentum, expected = torch.nn.Parameter(torch.randn(*shape)), torch.zeros(shape), None
    optimizer = Muon([weight], lr=0.1, momentum=0.9)
    for _ in range(3):
        weight.grad = torch.randn(shape)
        momentum = 0.9 * momentum + 0.1 * weight.grad
        ahead = 0.1 * weight.grad + 0.9 * momentum
        rows, columns = ahead.flatten(1).shape
        direction = newton_schulz(ahead.flatten(1)).float().view(shape)
        expected = weight.detach() - 0.1 * 0.2 * max(rows, columns) ** 0.5 * direction
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-3, atol=1e-4)


def test_steps_have_the_size_of_adams_whatever_the_size_of_the_gradient():
    for shape in ((100, 20), (20, 100)):
        for scale in (1e-4, 1e4):
            weight = torch.nn.Parameter(torch.zeros(shape))
            weight.grad = scale * torch.randn(shape)
            Muon([weight], lr=1.0).step()
            assert 0.1 < weight.detach().square().mean().sqrt() < 0.3  # root mean square of 0.2 lr


def test_weights_without_a_gradient_are_left_alone():
    weight = torch.nn.Parameter(torch.ones(3, 3))
    Muon([weight], lr=1.0).step()
    assert torch.equal(weight, torch.ones(3, 3))
