"""Moves codes of samples that a network was not fitted to, towards the least error of what it makes of them.

    codes (n, P k) on the way to be stored or shown, maps (n, c, h, w) -> move_codes -> codes
    tables of the recording -> bit_prices -> (P k,) what the bits of a code count against its error

Each code moves down the error of its own sample. Along axes, which are nearly orthonormal, the squared error of what
the axes make of a code has the second derivative 2: a move is a whole Newton step. Gradients are taken at the code
itself; at the rounded one, as in a fit, ten times as many moves are needed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from krnet.coding.entropy import FREQUENCY_BITS, Tables
from krnet.recorders.compact.codes import BIT_PRICE, laplace_bits
from krnet.recorders.compact.network import CompactNet

# Measured on unseen CIFAR maps at 0.25 bit a value, R2 with its bits a sample: 0.735 (850) without moves, 0.783 (901)
# with one, 0.791 (905) with two, 0.796 (918) with four, 0.799 (927) with eight; with four and no price 0.815 (1077).
FEW_MOVES, MANY_MOVES = 2, 4
# Without axes neighbours share an error, and whole steps overshoot: moves are this share of a step, which shrinks to 0
# as learning rates do in a fit. With 0.5 in place of 0.3, R2 after 10 moves is 0.57, not 0.68.
VALUES_MOVES, VALUES_LR = 20, 0.3
LEAST_SIZE = 1e-6  # of a symbol on average: keeps the price of an axis finite whose symbols are all 0


def move_codes(
    net: CompactNet, codes: Tensor, target: Tensor, num_moves: int, step: float, prices: Tensor | None = None
) -> Tensor:
    """Move the codes down the network's error; with prices, down the sum of error and price of their bits."""
    for move in range(num_moves):
        lr = VALUES_LR * (1 - move / num_moves) if net.axes is None else 1.0
        with torch.enable_grad():
            codes = codes.detach().requires_grad_()
            error = (net(codes) - target).square().sum()
        (gradient,) = torch.autograd.grad(error, codes)
        codes = codes.detach()
        gradient = gradient if prices is None else gradient + prices * codes.sign()
        codes = codes - (0.5 * lr * gradient).clamp(-step, step)
    return codes


def bit_prices(tables: Tables, step: float) -> Tensor:
    """(P k,): the squared error that a code's bits are worth, for each unit of its size (CodesFit._losses)."""
    symbols = np.concatenate([np.arange(low, low + size) for low, size in zip(tables.first, tables.sizes.tolist())])
    sizes = np.add.reduceat((tables.weights + 1.0) / 2**FREQUENCY_BITS * np.abs(symbols), tables.starts)  # (T,)
    # Of a Laplace variable x rounded to whole numbers n, E|n| = u / (1 - u^2) with u = exp(-1 / (2 E|x|)).
    sizes = np.maximum(sizes, LEAST_SIZE)
    means = -0.5 / np.log((np.sqrt(1 + 4 * sizes**2) - 1) / (2 * sizes))
    with torch.enable_grad():
        mean_size = torch.from_numpy(means[tables.column]).float().requires_grad_()
        bits = laplace_bits(mean_size).sum()
    (slope,) = torch.autograd.grad(bits, mean_size)
    return BIT_PRICE * step * slope
