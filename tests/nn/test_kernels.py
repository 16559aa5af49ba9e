"""Fused kernels against the plain layers.

Without a GPU the very source of the kernels runs, compiled by g++ with tests/cuda_shim.h in place of CUDA: with values
in fp32, where it must agree with the plain layers to rounding, and in bf16. With a GPU the kernels themselves run, too.
g++ takes its time: all but one shape of a norm and of a block are marked slow.
"""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from emulator import Emulator, first_quick
from krnet.device import exact_math, fast_math
from krnet.nn import layers
from krnet.nn.cuda import kernels
from krnet.nn.paper_config import NetworkConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
# Groups of 4, 3, 5 and 40 channels (16-byte copies or not, whole warps or not), planes that are no squares, no planes.
SHAPES = [(5, 8, 8, 8), (3, 6, 7, 7), (4, 10, 5, 3), (3, 80, 2, 3), (3, 16, 1, 1), (4, 130, 1, 1)]


@pytest.fixture(scope="module")
def emulators(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernels with")
    folder = tmp_path_factory.mktemp("kernels")
    return {dtype: Emulator(folder, dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.fixture
def emulate(emulators, monkeypatch):
    """emulate(dtype): from now on maps of this precision on the CPU are the kernels'."""

    def start(dtype=torch.float32, cores=4, shared_bytes=64 << 10):
        monkeypatch.setattr(kernels, "DTYPE", dtype)
        found = kernels.Limits(cores, shared_bytes)
        monkeypatch.setattr(kernels, "limits", lambda device: found if device == CPU else None)
        monkeypatch.setattr(kernels, "launch", emulators[dtype])
        # Few blocks, so that each has several samples.
        monkeypatch.setattr(kernels.Layout, "blocks", lambda layout, limits: 1)
        emulators[dtype].names.clear()
        return emulators[dtype]

    torch.use_deterministic_algorithms(True)  # new tensors start as NaN: what is not written is seen
    yield start
    torch.use_deterministic_algorithms(False)


def away_from_one(norm, device=CPU):
    with torch.no_grad():
        norm.weight.add_(0.1 * torch.randn_like(norm.weight))
        norm.bias.add_(0.1 * torch.randn_like(norm.bias))
    return norm.to(device)


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
        with exact_math(), nullcontext() if fused else layers.plain():
            y = run(*copies) if fused else (layers_plain or run)(*copies)
            direction = torch.randn_like(y) if direction is None else direction
            y.backward(direction.to(y.dtype))
        grads = [p.grad for leaf in copies for p in (leaf.parameters() if isinstance(leaf, nn.Module) else [leaf])]
        results.append([y.detach(), *grads])
    return [((a.double() - b).norm() / (b.norm() + 1e-12)).item() for a, b in zip(*results, strict=True)]


def maps(shape, device=CPU, dtype=torch.float32):
    """Leaves in fp32 with values that `dtype` can hold."""
    values = torch.randn(shape, device=device).to(dtype).float()
    return values.contiguous(memory_format=torch.channels_last).requires_grad_()


def depthwise(shape, device=CPU):
    channels = shape[1]
    convs = [nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False).to(device) for _ in range(2)]
    norms = [away_from_one(nn.GroupNorm(2, channels), device) for _ in range(2)]
    return [convs[0], norms[0], convs[1], norms[1]]


def norm_act(norm, x, skip=None):
    cast = (lambda t: t.to(kernels.DTYPE)) if layers._fused.get() else (lambda t: t)
    return layers.norm_act(cast(x), norm, skip=None if skip is None else cast(skip))


def depthwise_block(conv1, norm1, conv2, norm2, x):
    return layers.depthwise_block(x.to(kernels.DTYPE) if layers._fused.get() else x, conv1, norm1, conv2, norm2)


@pytest.mark.parametrize(("shape", "with_skip"), first_quick([*zip(SHAPES, [True, False] * 3), (SHAPES[0], False)]))
def test_norm_and_activation_match_the_plain_layers(emulate, shape, with_skip):
    used = emulate()
    inputs = [maps(shape) for _ in range(1 + with_skip)]
    assert max(both_ways(norm_act, [away_from_one(nn.GroupNorm(2, shape[1])), *inputs])) < 1e-5
    assert used.names == {"norm_forward", "norm_backward", "column_sums"}


@pytest.mark.slow
def test_vectors_match_the_plain_layers(emulate):
    used = emulate()
    x = torch.randn(5, 24, requires_grad=True)
    assert max(both_ways(norm_act, [away_from_one(nn.GroupNorm(2, 24)), x])) < 1e-5
    assert "norm_backward" in used.names


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[1:4])
def test_an_fc_layer_becomes_a_map_as_by_the_plain_layers(emulate, shape):
    used = emulate()
    (batch, *shape), size = shape, shape[1] * shape[2] * shape[3]
    leaves = [nn.Linear(16, size, bias=False), away_from_one(nn.GroupNorm(2, size)), torch.randn(batch, 16)]
    leaves[2].requires_grad_()
    errors = both_ways(lambda linear, norm, x: layers.fc_to_map(x, linear, norm, tuple(shape)), leaves)
    assert max(errors) < 1e-5
    assert used.names == {"move_rows", "norm_forward", "norm_backward", "column_sums"}


@pytest.mark.parametrize("shape", first_quick([(shape,) for shape in (SHAPES[0], *SHAPES[2:4])]))
def test_a_depthwise_block_matches_the_plain_one(emulate, shape):
    used = emulate()
    assert max(both_ways(depthwise_block, [*depthwise(shape), maps(shape)])) < 1e-5
    assert used.names == {"unit_forward", "unit_backward", "column_sums"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"stride": 2, "conv_after": "depthwise"}, {"vector": True}, {"last_norm": True}]
)
def test_a_whole_network_gives_the_plain_loss_and_gradients(emulate, settings):
    from krnet.nn.paper_net import KRNet

    used = emulate()
    height = 1 if settings.get("vector") else 6
    config = NetworkConfig(channels=6, height=height, width=height, group_size=8, d0=16, c0=8, c1=6, **settings)
    net = KRNet(config, 3).to(memory_format=torch.channels_last)
    group, slot = torch.randint(3, (5,)), torch.randint(8, (5,))
    assert max(both_ways(lambda net: net(group, slot), [net])) < 1e-4
    always = {"norm_forward", "norm_backward", "column_sums"}
    assert used.names == always if height == 1 else {*always, "move_rows", "unit_forward", "unit_backward"}


@pytest.mark.slow
@pytest.mark.parametrize(("places", "lanes"), [(2, 2), (2, 3), (5, 3), (15, 1)])
def test_a_norm_with_a_scale_for_each_value_is_the_same_however_its_places_are_shared_out(
    emulate, monkeypatch, places, lanes
):
    """Among the threads of a channel, and, where a thread cannot keep all its gradients, among blocks."""
    emulate()
    x, gamma, beta = maps((5, 8, 5, 3)), 1 + 0.1 * torch.randn(15, 8), 0.1 * torch.randn(15, 8)
    gradient = torch.randn_like(x)

    def gradients():
        y, moments = kernels.norm_forward(x, gamma, beta, None, 2, 1e-5, 0.3)
        return kernels.norm_backward(x, gamma, y, moments, gradient, False, 0.3)[:3]

    expected = gradients()
    layout = kernels.norm_layout

    def shared_out(shape, groups, element, backward, limits):
        parts = -(-15 // (lanes * places)) if backward else 1
        known = layout(shape, groups, element, backward, limits)
        return kernels.Layout(shape, groups, 1024, known.tiles, 0, lanes, element, parts, known.depth)

    monkeypatch.setattr(kernels, "norm_layout", shared_out)
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_sample_fetched_ahead_changes_nothing(emulate):
    """Where shared memory is too small for that, samples come one by one."""
    x, gamma, beta = maps((7, 8, 8, 8)), 1 + 0.1 * torch.randn(8), 0.1 * torch.randn(8)
    gradient, found = torch.randn_like(x), []
    for shared_bytes, depth in ((64 << 10, 2), (6 << 10, 1)):
        emulate(shared_bytes=shared_bytes)
        assert kernels.norm_layout((8, 8, 8), 2, False, True, kernels.limits(CPU)).depth == depth
        y, moments = kernels.norm_forward(x, gamma, beta, None, 2, 1e-5, 0.3)
        found.append(kernels.norm_backward(x, gamma, y, moments, gradient, True, 0.3))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_sums_of_columns_are_right_and_the_same_each_time(emulate):
    emulate()
    for rows, columns in ((1, 5), (132, 70), (40, 32)):
        parts = torch.randn(rows, columns)
        found = kernels.column_sums(parts)
        torch.testing.assert_close(found, parts.double().sum(0).float())
        assert torch.equal(found, kernels.column_sums(parts))


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 5])
def test_rows_change_places_and_precision_as_by_torch(emulate, length):
    emulate(torch.bfloat16)
    rows = torch.randn(6, 5, length)
    half = kernels.swap_rows(rows, torch.bfloat16)
    assert torch.equal(half, rows.transpose(0, 1).bfloat16())
    assert torch.equal(kernels.swap_rows(half, torch.float32), half.transpose(0, 1).float())
    assert torch.equal(kernels.swap_rows(half, torch.bfloat16), half.transpose(0, 1))


def test_groups_that_cut_a_channel_and_maps_that_are_too_large_go_the_plain_way(emulate):
    used = emulate()
    assert not kernels.norm_fits((7, 2, 2), 2, True, CPU)  # 28 values in two groups: three channels and a half each
    assert not kernels.norm_fits((4, 200, 200), 2, False, CPU)
    assert not kernels.norm_fits((4096, 1, 1), 2, False, CPU)
    layers.norm_act(maps((2, 4, 200, 200)), nn.GroupNorm(2, 4))
    linear, norm = nn.Linear(3, 28, bias=False), nn.GroupNorm(2, 28)
    x = torch.randn(2, 3)
    expected = F.leaky_relu(norm(linear(x)), layers.NEGATIVE_SLOPE).view(2, 7, 2, 2)
    torch.testing.assert_close(layers.fc_to_map(x, linear, norm, (7, 2, 2)), expected)
    assert "move_rows" not in used.names


def test_a_cpu_has_no_kernels():
    assert kernels.limits(CPU) is None


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


def block_errors(shape, device):
    """Of the fused block, and of a plain one that rounds where the fused one does: a kink may turn either way."""
    leaves = [*depthwise(shape, device), maps(shape, device, torch.bfloat16)]
    return both_ways(depthwise_block, leaves), both_ways(rounded_block, leaves, layers_plain=depthwise_block)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 32, 8, 8), (3, 6, 7, 7)])
def test_a_depthwise_block_in_bf16_is_as_near_to_the_plain_one_as_rounding_lets_it_on_the_cpu(emulate, shape):
    emulate(torch.bfloat16)
    fused, rounded = block_errors(shape, CPU)
    assert all(mine < 2 * theirs + 2**-6 for mine, theirs in zip(fused, rounded, strict=True)), (fused, rounded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "with_skip"),
    [((5, 32, 8, 8), False), ((4, 80, 5, 3), True), ((3, 6, 7, 7), True), ((3, 48, 1, 1), False)],
)
def test_norm_and_activation_in_bf16_are_as_near_to_the_plain_ones_as_rounding_lets_them_on_the_cpu(
    emulate, shape, with_skip
):
    emulate(torch.bfloat16)
    inputs = [maps(shape, dtype=torch.bfloat16) for _ in range(1 + with_skip)]
    assert max(both_ways(norm_act, [away_from_one(nn.GroupNorm(2, shape[1])), *inputs])) < 2**-7


def fc_errors(shape, device):
    (batch, *shape), size = shape, shape[1] * shape[2] * shape[3]
    linear, norm = nn.Linear(64, size, bias=False).to(device), away_from_one(nn.GroupNorm(2, size), device)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.bfloat16())
    x = torch.randn(batch, 64, device=device).bfloat16().float().requires_grad_()

    def run(linear, norm, x):
        return layers.fc_to_map(x.bfloat16() if layers._fused.get() else x, linear, norm, tuple(shape))

    return both_ways(run, [linear, norm, x])


@pytest.mark.slow
def test_an_fc_layer_in_bf16_becomes_a_map_as_near_to_the_plain_one_as_rounding_lets_it_on_the_cpu(emulate):
    emulate(torch.bfloat16)
    assert max(fc_errors((20, 16, 5, 3), CPU)) < 2**-6


@pytest.mark.slow
@pytest.mark.parametrize("batch", [3, 20])  # fewer and more than inputs of the layer
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_an_fc_layer_in_bf16_becomes_a_map_whichever_of_weights_and_product_is_brought_into_order(emulate, batch, kept):
    used = emulate(torch.bfloat16)
    linear, norm = nn.Linear(16, 8 * 15, bias=False).to(kept), away_from_one(nn.GroupNorm(2, 8 * 15))
    x = torch.randn(batch, 16).bfloat16()
    with torch.inference_mode():
        found = layers.fc_to_map(x, linear, norm, (8, 5, 3))
        with layers.plain():
            half = copy.deepcopy(linear).bfloat16().double()
            expected = layers.fc_to_map(x.double(), half, copy.deepcopy(norm).double(), (8, 5, 3))
    assert ((found - expected).norm() / expected.norm()).item() < 2**-7
    assert ("move_rows" in used.names) == (kept == torch.float32 or batch == 20)


def run_all():
    """Every kernel that fetches ahead, with several samples to a block."""
    shape = (7, 8, 8, 8)
    norm, inputs = away_from_one(nn.GroupNorm(2, 8)), [maps(shape), maps(shape)]
    for y in (layers.norm_act(inputs[0], norm, skip=inputs[1]), layers.depthwise_block(inputs[0], *depthwise(shape))):
        y.backward(torch.randn_like(y))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "taken", "put", "said"),
    [
        ("norm_backward", "__syncthreads();  // all are done with the sample before", "", "order"),
        ("norm_backward", "__syncthreads();  // all", "if (threadIdx.x) __syncthreads();  // all", "barriers"),
        ("norm_backward", "arrive<DEPTH - 1>();\n    __syncthreads();", "arrive<DEPTH - 1>();", "order"),
        ("norm_backward", "arrive<DEPTH - 1>();", "", "order"),
        ("norm_backward", "tiles + turn * 3 * TILE)", "tiles + 4 * TILE)", "memory"),
        ("unit_forward", "arrive<SKIP>();", "", "order"),
        ("unit_forward", "if (SKIP) arrive<1>();", "", "order"),
        ("unit_forward", "__syncthreads();  // all have read the skip", "", "order"),
        ("unit_backward", "__syncthreads();  // all are done with the sample before", "", "order"),
        ("unit_backward", "__syncthreads();  // all have read the gradient", "", "order"),
        ("unit_backward", "if (MORE) arrive<0>();", "", "order"),
    ],
)
def test_a_barrier_or_a_wait_that_is_missing_would_be_seen(emulate, monkeypatch, name, taken, put, said):
    used = emulate()
    assert taken in used.source
    monkeypatch.setitem(used.changed, name, used.source.replace(taken, put))
    with pytest.raises(AssertionError, match=f"{name}.*{said}"):
        run_all()


@pytest.mark.slow
def test_with_all_its_barriers_and_waits_nothing_is_seen(emulate):
    emulate()
    run_all()


def without_the_skips_gradient(monkeypatch):
    right = kernels.unit_backward
    monkeypatch.setattr(
        kernels,
        "unit_backward",
        lambda *a: right(*a[:6], None if a[6] is None else torch.zeros_like(a[6]), *a[7:]),
    )


@pytest.mark.slow
def test_a_gradient_that_is_wrong_would_be_seen_on_the_cpu(emulate, monkeypatch):
    emulate()
    without_the_skips_gradient(monkeypatch)
    assert max(both_ways(depthwise_block, [*depthwise((3, 8, 8, 8)), maps((3, 8, 8, 8))])) > 0.2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(200, 8, 8, 8), (300, 6, 7, 7), (100, 100, 5, 3), (300, 512, 8, 8), (50, 1024, 8, 8)]
)
def test_a_depthwise_block_is_as_near_to_the_plain_one_as_rounding_to_bf16_lets_it(shape):
    fused, rounded = block_errors(shape, DEVICE)
    assert all(mine < 2 * theirs + 2**-6 for mine, theirs in zip(fused, rounded, strict=True)), (fused, rounded)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(200, 64, 8, 8), (50, 256, 16, 16), (40, 10, 5, 3), (20, 6, 9, 9), (300, 512, 1, 1), (300, 1536, 1, 1)]
)
@pytest.mark.parametrize("with_skip", [False, True])
def test_norm_and_activation_in_bf16_are_as_near_to_the_plain_ones_as_rounding_lets_them(shape, with_skip):
    inputs = [maps(shape, DEVICE, torch.bfloat16) for _ in range(1 + with_skip)]
    assert max(both_ways(norm_act, [away_from_one(nn.GroupNorm(2, shape[1]), DEVICE), *inputs])) < 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(200, 512, 8, 8), (100, 1024, 8, 8), (40, 10, 5, 3)])
def test_an_fc_layer_in_bf16_becomes_a_map_as_near_to_the_plain_one_as_rounding_lets_it(shape):
    assert max(fc_errors(shape, DEVICE)) < 2**-6


@pytest.mark.gpu
def test_a_gradient_that_is_wrong_would_be_seen(monkeypatch):
    """The check can fail: without the skip's gradient it does."""
    without_the_skips_gradient(monkeypatch)
    assert max(block_errors((200, 8, 8, 8), DEVICE)[0]) > 0.2


@pytest.mark.gpu
def test_the_fast_step_agrees_with_the_plain_step_within_bf16_rounding():
    """Loss and gradients of the paper's CIFAR network: as far from float32 as plain bf16 is, or nearer."""
    from krnet.nn.paper_config import PRESETS
    from krnet.nn.paper_net import KRNet

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

    exact_loss, exact = gradients(exact_math(), nullcontext())
    plain_loss, plain = gradients(fast_math(DEVICE), layers.plain())
    fused_loss, fused = gradients(fast_math(DEVICE), nullcontext())
    assert abs(fused_loss - exact_loss) < max(2 * abs(plain_loss - exact_loss), 2**-8 * exact_loss)
    error = lambda gradient: ((gradient - exact).norm() / exact.norm()).item()  # noqa: E731
    assert error(fused) < 1.2 * error(plain) + 2**-8
