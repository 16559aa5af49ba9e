"""Fused kernels against the plain layers. Without a GPU they run in Triton's interpreter, slowly and exactly."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from krnet import layers, parallel
from krnet.config import NetworkConfig

kernels = pytest.importorskip("krnet.kernels", reason="triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [(4, 8, 8, 8), (3, 6, 7, 7), (2, 10, 5, 3), (3, 16, 1, 1)]


@pytest.fixture
def force_fused(monkeypatch):
    """The interpreter takes CPU tensors of any precision."""
    monkeypatch.setattr(layers, "fused_for", lambda x, norm, area: kernels if layers._fused.get() else None)


def away_from_one(norm):
    with torch.no_grad():
        norm.weight.add_(0.1 * torch.randn_like(norm.weight))
        norm.bias.add_(0.1 * torch.randn_like(norm.bias))
    return norm.to(DEVICE)


def both_ways(run, leaves, layers_plain=None):
    """Output and gradients of `run`, as it is and plain in float64: relative errors."""
    results = []
    torch.manual_seed(1)
    direction = None
    for fused in (True, False):
        copies = copy.deepcopy(leaves)
        if not fused:
            copies = [
                leaf.double() if isinstance(leaf, nn.Module) else leaf.detach().double().requires_grad_()
                for leaf in copies
            ]
        with parallel.exact(), nullcontext() if fused else layers.plain():
            y = run(*copies) if fused else (layers_plain or run)(*copies)
            direction = torch.randn_like(y) if direction is None else direction
            y.backward(direction.to(y.dtype))
        grads = [p.grad for leaf in copies for p in (leaf.parameters() if isinstance(leaf, nn.Module) else [leaf])]
        results.append([y.detach(), *grads])
    return [((a.double() - b).norm() / (b.norm() + 1e-12)).item() for a, b in zip(*results, strict=True)]


def maps(shape):
    return torch.randn(shape, device=DEVICE).contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_skip", [False, True])
def test_norm_and_activation_match_the_plain_layers(force_fused, shape, with_skip):
    torch.manual_seed(0)
    norm = away_from_one(nn.GroupNorm(2, shape[1]))
    inputs = [maps(shape), maps(shape)] if with_skip else [maps(shape)]
    errors = both_ways(lambda norm, x, skip=None: layers.norm_act(x, norm, skip=skip), [norm, *inputs])
    assert max(errors) < 1e-5


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_a_vector_becomes_a_map_as_by_the_plain_layers(force_fused, shape):
    torch.manual_seed(0)
    batch, channels, height, width = shape
    norm = away_from_one(nn.GroupNorm(2, channels * height * width))
    x = torch.randn(batch, channels * height * width, device=DEVICE, requires_grad=True)
    errors = both_ways(lambda norm, x: layers.norm_act(x, norm, shape=(channels, height, width)), [norm, x])
    assert max(errors) < 1e-5


@pytest.mark.parametrize(
    "settings", [{}, {"stride": 2, "conv_after": "depthwise"}, {"vector": True}, {"last_norm": True}]
)
def test_a_whole_network_gives_the_plain_loss_and_gradients(force_fused, settings):
    from krnet.recorders.krnet import KRNet

    torch.manual_seed(0)
    height = 1 if settings.get("vector") else 6
    config = NetworkConfig(channels=6, height=height, width=height, group_size=8, d0=16, c0=8, c1=6, **settings)
    net = KRNet(config, 3).to(DEVICE, memory_format=torch.channels_last)
    group, slot = torch.randint(3, (5,), device=DEVICE), torch.randint(8, (5,), device=DEVICE)
    assert max(both_ways(lambda net: net(group, slot), [net])) < 1e-4


def depthwise(shape):
    channels = shape[1]
    convs = [nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False).to(DEVICE) for _ in range(2)]
    norms = [away_from_one(nn.GroupNorm(2, channels)) for _ in range(2)]
    return [convs[0], norms[0], convs[1], norms[1]]


class Rounded(torch.autograd.Function):
    """bf16 where the fused kernels have it: between layers, both ways."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().to(gradient.dtype)


def rounded_block(conv1, norm1, conv2, norm2, x):
    middle = Rounded.apply(F.leaky_relu(norm1(conv1(x)), layers.NEGATIVE_SLOPE))
    return Rounded.apply(F.leaky_relu(norm2(conv2(middle)) + x, layers.NEGATIVE_SLOPE))


def fused_block(conv1, norm1, conv2, norm2, x):
    fused = layers._fused.get()
    return layers.depthwise_block(x.bfloat16() if fused else x, conv1, norm1, conv2, norm2)


@needs_gpu
@pytest.mark.parametrize(
    "shape", [(200, 8, 8, 8), (300, 6, 7, 7), (100, 100, 5, 3), (300, 512, 8, 8), (50, 1024, 8, 8)]
)
def test_a_depthwise_block_is_as_near_to_the_plain_one_as_rounding_to_bf16_lets_it(shape):
    torch.manual_seed(0)
    x = maps(shape).detach().bfloat16().float().requires_grad_()
    leaves = [*depthwise(shape), x]
    fused, rounded = both_ways(fused_block, leaves), both_ways(rounded_block, leaves, layers_plain=fused_block)
    assert all(mine < 2 * theirs + 2**-6 for mine, theirs in zip(fused, rounded, strict=True)), (fused, rounded)


@needs_gpu
@pytest.mark.parametrize("shape", [(200, 64, 8, 8), (50, 256, 16, 16), (40, 10, 5, 3), (20, 6, 9, 9)])
@pytest.mark.parametrize("with_skip", [False, True])
def test_norm_and_activation_in_bf16_are_as_near_to_the_plain_ones_as_rounding_lets_them(shape, with_skip):
    torch.manual_seed(0)
    inputs = [maps(shape).detach().bfloat16().float().requires_grad_() for _ in range(1 + with_skip)]

    def fused(norm, x, skip=None):
        cast = (lambda t: t.bfloat16()) if layers._fused.get() else (lambda t: t)
        return layers.norm_act(cast(x), norm, skip=None if skip is None else cast(skip))

    assert max(both_ways(fused, [away_from_one(nn.GroupNorm(2, shape[1])), *inputs])) < 2**-7


@needs_gpu
def test_a_gradient_that_is_wrong_would_be_seen(monkeypatch):
    """The check can fail: without the skip's gradient it does."""
    torch.manual_seed(0)
    right = kernels.unit_backward
    monkeypatch.setattr(
        kernels,
        "unit_backward",
        lambda *a: right(*a[:6], None if a[6] is None else torch.zeros_like(a[6]), *a[7:]),
    )
    x = maps((200, 8, 8, 8)).detach().bfloat16().float().requires_grad_()
    assert max(both_ways(fused_block, [*depthwise(x.shape), x])) > 0.2


@needs_gpu
def test_the_fast_step_agrees_with_the_plain_step_within_bf16_rounding():
    """Loss and gradients of the paper's CIFAR network: as far from float32 as plain bf16 is, or nearer."""
    from krnet.config import PRESETS
    from krnet.recorders.krnet import KRNet

    torch.manual_seed(0)
    config = NetworkConfig(channels=64, height=8, width=8, **PRESETS["cifar100"])
    net = KRNet(config, 4).to(DEVICE)
    group, slot = torch.randint(4, (100,), device=DEVICE), torch.randint(512, (100,), device=DEVICE)
    target = torch.rand(100, 64, 8, 8, device=DEVICE)

    def gradients(precision, way):
        net.zero_grad()
        with precision, way:
            loss = (net(group, slot).float() - target).square().sum() / 100
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in net.parameters()])

    exact_loss, exact = gradients(parallel.exact(), nullcontext())
    plain_loss, plain = gradients(parallel.fast(DEVICE), layers.plain())
    fused_loss, fused = gradients(parallel.fast(DEVICE), nullcontext())
    assert abs(fused_loss - exact_loss) < max(2 * abs(plain_loss - exact_loss), 2**-8 * exact_loss)
    error = lambda gradient: ((gradient - exact).norm() / exact.norm()).item()  # noqa: E731
    assert error(fused) < 1.2 * error(plain) + 2**-8
