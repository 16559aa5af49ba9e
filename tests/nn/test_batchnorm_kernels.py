"""Fused BatchNorm, skip and ReLU against the plain layers; see test_kernels.py for how kernels run without a GPU."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from emulator import Emulator, first_quick
from krnet.device import exact_math, fast_math
from krnet.nn import backbones, heads, layers
from krnet.nn.backbones import BatchNorm
from krnet.nn.cuda import batchnorm, kernels

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = [(True, True), (False, True), (False, False), (True, False)]  # skip, ReLU


@pytest.fixture(scope="module")
def emulators(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernels with")
    folder = tmp_path_factory.mktemp("batchnorm")
    return {dtype: Emulator(folder, dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.fixture
def emulate(emulators, monkeypatch):
    """emulate(dtype): from now on maps of this precision on the CPU are the kernels'."""

    def start(dtype=torch.float32, cores=4):
        monkeypatch.setattr(kernels, "DTYPE", dtype)
        monkeypatch.setattr(kernels, "limits", lambda device: kernels.Limits(cores, 64 << 10))
        monkeypatch.setattr(kernels, "launch", emulators[dtype])
        emulators[dtype].names.clear()
        return emulators[dtype]

    torch.use_deterministic_algorithms(True)  # new tensors start as NaN: what is not written is seen
    yield start
    torch.use_deterministic_algorithms(False)


def make_norm(channels, training=True, device=CPU):
    norm = BatchNorm(channels).train(training)
    with torch.no_grad():
        norm.weight.add_(0.3 * torch.randn(channels))
        norm.bias.add_(0.3 * torch.randn(channels))
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return norm.to(device)


def make_maps(shape, dtype=torch.float32, device=CPU, mean=0.0, std=1.0):
    values = (mean + std * torch.randn(shape, device=device)).to(dtype)
    return values.contiguous(memory_format=torch.channels_last).requires_grad_()


def run(norm, x, skip, relu, direction, dtype, way):
    """All that a norm gives: output, gradients, statistics. `dtype` is that of everything, None leaves all as it is."""
    norm, inputs = copy.deepcopy(norm), [None if value is None else value.detach().clone() for value in (x, skip)]
    if dtype is not None:
        norm, inputs = norm.to(dtype), [None if value is None else value.to(dtype) for value in inputs]
    inputs = [None if value is None else value.requires_grad_() for value in inputs]
    with way:
        y = layers.batch_norm_act(inputs[0], norm, inputs[1], relu)
    y.backward(direction.to(y.dtype))
    found = {"y": y, "dx": inputs[0].grad, "dweight": norm.weight.grad, "dbias": norm.bias.grad}
    found |= {"running_mean": norm.running_mean, "running_var": norm.running_var, "seen": norm.num_batches_tracked}
    return found | ({} if skip is None else {"dskip": inputs[1].grad})


def errors(norm, x, skip=None, relu=True):
    """Relative, of what the kernels give against the plain way in float64."""
    direction = torch.randn_like(x).detach()
    fused = run(norm, x, skip, relu, direction, None, nullcontext())
    plain = run(norm, x, skip, relu, direction, torch.float64, layers.plain())
    assert fused["y"].dtype == fused["dx"].dtype == x.dtype
    distance = lambda one, other: ((one.double() - other).norm() / (other.double().norm() + 1e-9)).item()  # noqa: E731
    return {key: distance(fused[key], plain[key]) for key in plain}


# Rows: a single round of a block, an odd number, several parts with a short last one, several turns of a thread.
@pytest.mark.parametrize(
    ("shape", "skip", "relu"),
    first_quick(
        (shape, *way)
        for shape in [(7, 16, 31, 29), (2, 16, 3, 3), (5, 32, 9, 11), (3, 64, 7, 9), (3, 512, 2, 2), (200, 16, 11, 9)]
        for way in WAYS
    ),
)
def test_training_gives_what_the_plain_layers_give(emulate, shape, skip, relu):
    used = emulate()
    x, other = make_maps(shape), make_maps(shape) if skip else None
    found = errors(make_norm(shape[1]), x, other, relu)
    assert max(found.values()) < 1e-5, found
    assert used.names == {"batch_moments", "batch_norm_forward", "batch_sums", "batch_norm_backward"}


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "channels"), [(1, 16), (132, 16), (132, 24)])  # 24: slabs of eight
def test_training_is_the_same_however_rows_are_shared_out(emulate, cores, channels):
    emulate(cores=cores)
    x = make_maps((7, channels, 31, 29))
    assert (batchnorm.Tiling(x).parts > 32) == (cores == 132 and channels == 16)
    found = errors(make_norm(channels), x)
    assert max(found.values()) < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize(("skip", "relu"), WAYS)
def test_fixed_statistics_are_used_and_left_alone(emulate, skip, relu):
    used = emulate()
    x, other = make_maps((5, 32, 9, 11)), make_maps((5, 32, 9, 11)) if skip else None
    norm = make_norm(32, training=False)
    found = errors(norm, x, other, relu)
    assert max(found.values()) < 1e-5 and found["running_mean"] == found["running_var"] == found["seen"] == 0, found
    assert "batch_moments" not in used.names


@pytest.mark.slow
def test_a_frozen_norm_keeps_its_statistics_and_trains_its_scale(emulate):
    used = emulate()
    net = nn.Sequential(make_norm(16))
    backbones.freeze_batchnorm(net)
    net.train()
    before = copy.deepcopy(net.state_dict())
    layers.batch_norm_act(make_maps((3, 16, 4, 4)), net[0]).sum().backward()
    assert used.names and all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert net[0].weight.grad.abs().min() > 0


@pytest.mark.slow
def test_without_gradients_one_kernel_is_all(emulate):
    used = emulate()
    norm, x = make_norm(16, training=False), make_maps((3, 16, 4, 4))
    with torch.no_grad():
        y = layers.batch_norm_act(x, norm)
        with layers.plain():
            torch.testing.assert_close(y, layers.batch_norm_act(x, norm))
    assert used.names == {"batch_norm_forward"} and not y.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("mean", [100.0, -3000.0])
def test_a_large_mean_does_not_drown_a_small_variance(emulate, mean):
    emulate()
    norm, x = make_norm(16), make_maps((9, 16, 17, 13), mean=mean, std=0.5)
    found = errors(norm, x, relu=False)
    # Around so large a value, fp32 itself has steps of `mean / 2^23`.
    assert max(found.values()) < 4 * abs(mean) / 0.5 * 2**-23 + 1e-5, found
    assert found["running_var"] < 1e-5, found


@pytest.mark.slow
def test_a_first_row_far_from_the_others_does_not_spoil_the_variance(emulate):
    emulate()
    x = make_maps((9, 16, 17, 13)).detach()
    x[0, :, 0, 0] = 1000
    assert max(errors(make_norm(16), x.requires_grad_(), relu=False).values()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "skip"), [((5, 32, 9, 11), True), ((7, 16, 31, 29), False)])
@pytest.mark.parametrize("training", [True, False])
def test_in_bf16_results_are_off_by_rounding_alone(emulate, shape, skip, training):
    emulate(torch.bfloat16)
    x, other = make_maps(shape, torch.bfloat16), make_maps(shape, torch.bfloat16) if skip else None
    found = errors(make_norm(shape[1], training), x, other)
    # Where y rounds to 0 or not, a gradient passes or not: rare, and worth a few parts in a thousand.
    assert max(found.values()) < 2**-7, found
    assert max(found["running_mean"], found["running_var"]) < 1e-5, found


@pytest.mark.slow
def test_a_skip_in_fp32_is_rounded_so_that_what_follows_stays_in_bf16(emulate):
    used = emulate(torch.bfloat16)
    norm, shape = make_norm(16, training=False), (3, 16, 4, 4)
    x, skip = make_maps(shape, torch.bfloat16), make_maps(shape).detach().requires_grad_()
    y = layers.batch_norm_act(x, norm, skip)
    assert y.dtype == torch.bfloat16 and "batch_norm_forward" in used.names
    assert torch.equal(y, layers.batch_norm_act(x, norm, skip.to(torch.bfloat16)))
    y.float().sum().backward()
    assert skip.grad is not None and skip.grad.dtype == torch.float32


@pytest.mark.slow
def test_no_gradient_passes_where_the_output_is_zero(emulate):
    emulate()
    norm, x = BatchNorm(16).eval(), make_maps((2, 16, 3, 3))
    with torch.no_grad():
        x.copy_(torch.where(torch.rand_like(x) < 0.5, 0, x))
    for skip in (None, torch.zeros_like(x)):
        x.grad = None
        layers.batch_norm_act(x, norm, skip).sum().backward()
        assert (x.grad[x <= 0] == 0).all() and (x.grad[x > 0] > 0).all()


@pytest.mark.slow
def test_a_value_that_is_no_number_stays_one(emulate):
    emulate()
    x = make_maps((2, 16, 3, 3)).detach()
    x[0, 3, 1, 1] = torch.nan
    y = layers.batch_norm_act(x, BatchNorm(16).eval())
    assert y[0, 3, 1, 1].isnan() and y.isnan().sum() == 1


@pytest.mark.slow
def test_the_same_input_gives_the_same_bits(emulate):
    emulate(torch.bfloat16)
    norm, x, skip = make_norm(16), *(make_maps((7, 16, 31, 29), torch.bfloat16) for _ in range(2))
    direction = torch.randn_like(x).detach()
    one, other = (run(norm, x, skip, True, direction, None, nullcontext()) for _ in range(2))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_without_a_relu_the_skips_gradient_is_the_outputs_own(emulate):
    emulate()
    x, direction = make_maps((2, 16, 3, 3)), make_maps((2, 16, 3, 3)).detach()
    _, moments = batchnorm.forward(x, norm := make_norm(16), x, False)
    found = batchnorm.backward(x, None, direction, norm.weight, norm.bias, moments, True, False, True)
    assert found[3] is direction


@pytest.mark.parametrize("cores", [132, 20, 1])
@pytest.mark.parametrize(
    ("rows", "channels"),
    [(131072, 16), (32768, 32), (8192, 64), (512000, 16), (2048, 512), (1, 512), (512000, 64), (77, 24)],
)
def test_rows_are_shared_out_whole_among_few_parts(emulate, cores, rows, channels):
    emulate(cores=cores)
    split = batchnorm.Tiling(torch.empty(1, channels, 1, 1, device="meta").expand(rows, -1, -1, -1))
    assert 1 <= split.parts <= batchnorm.MOST_PARTS
    assert (split.parts - 1) * split.share < rows <= split.parts * split.share
    assert split.slab * split.slabs == channels and 1 <= split.map_blocks * split.slabs <= max(cores, split.slabs)


def test_what_the_kernels_do_not_serve_goes_the_plain_way(emulate):
    used = emulate()
    x = make_maps((3, 16, 4, 4))
    batch = lambda norm, x=x, skip=None: layers.batch_norm_act(x, norm, skip)  # noqa: E731
    batch(BatchNorm(16), x.detach().contiguous())
    batch(BatchNorm(16).double(), x.double())
    batch(BatchNorm(16), skip=torch.ones(3, 16, 1, 1))
    batch(BatchNorm(16, affine=False))
    batch(BatchNorm(16, momentum=None))
    batch(BatchNorm(16, track_running_stats=False))
    batch(BatchNorm(12), make_maps((3, 12, 4, 4)))
    batch(BatchNorm(16), make_maps((0, 16, 4, 4)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        batch(BatchNorm(16), make_maps((1, 16, 1, 1)))
    with layers.plain():
        batch(BatchNorm(16))
    assert not used.names


def resnet_gradients(name, images, precision, way, shortcut="B"):
    torch.manual_seed(0)
    net = backbones.build(name, shortcut=shortcut).to(images.device, memory_format=torch.channels_last).train()
    direction = torch.randn(net.feature_dim, device=images.device)
    with precision, way:
        loss = (net(images).float() @ direction).square().mean()
    loss.backward()
    buffers = [value.float().flatten() for value in net.buffers()]
    return loss.item(), torch.cat([p.grad.flatten() for p in net.parameters()]), torch.cat(buffers)


@pytest.mark.slow
@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_a_whole_network_gives_the_plain_loss_gradients_and_statistics(emulate, shortcut):
    used = emulate()
    images = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    fused = resnet_gradients("resnet8", images, nullcontext(), nullcontext(), shortcut)
    plain = resnet_gradients("resnet8", images, nullcontext(), layers.plain(), shortcut)
    assert used.names == {"batch_moments", "batch_norm_forward", "batch_sums", "batch_norm_backward"}
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_gradients_by_image_are_those_of_the_plain_layers(emulate):
    """They are read by hooks, which a fused layer would pass by."""
    from krnet.learners.importance import sample_gradients

    used = emulate()
    net = heads.Classifier(backbones.build("resnet8"), heads.LinearHead(64, 3)).eval()
    net = net.to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    found = dict(sample_gradients(net, images, lambda logits: logits.square().sum()))
    assert not used.names
    net(images).square().sum().backward()
    assert used.names
    for name, param in net.named_parameters():
        torch.testing.assert_close(found[name].sum(0), param.grad, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("batch_sums", "  __syncthreads();\n  float mean[8]"),
        ("batch_moments", "  __syncthreads();\n  const int lane"),
        ("batch_norm_forward", "  __syncthreads();\n  if (threadIdx.x < SLAB) {\n#pragma"),
        ("batch_norm_backward", "    use(first, second);\n  }\n  __syncthreads();"),
    ],
)
def test_a_barrier_that_is_missing_would_be_seen(emulate, monkeypatch, name, taken):
    used = emulate()
    assert used.source.count(taken) == 1
    monkeypatch.setitem(used.changed, name, used.source.replace(taken, taken.replace("__syncthreads();", "")))
    x = make_maps((5, 16, 9, 11))
    with pytest.raises(AssertionError, match=f"{name}.*order"):
        layers.batch_norm_act(x, make_norm(16)).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("skip", "relu"), WAYS)
@pytest.mark.parametrize(
    "shape", [(128, 16, 32, 32), (128, 64, 8, 8), (500, 32, 16, 16), (33, 512, 3, 5), (9, 24, 7, 7)]
)
def test_on_the_gpu_results_are_off_by_rounding_alone(shape, skip, relu, training):
    x = make_maps(shape, torch.bfloat16, DEVICE, mean=0.5)
    other = make_maps(shape, torch.bfloat16, DEVICE) if skip else None
    found = errors(make_norm(shape[1], training, DEVICE), x, other, relu)
    assert max(found.values()) < 2**-7, found
    assert max(found["running_mean"], found["running_var"]) < 1e-5, found


@pytest.mark.gpu
@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_a_resnet_is_as_near_to_float32_as_the_plain_one_in_bf16(shortcut):
    images = torch.randn(128, 3, 32, 32, device=DEVICE).contiguous(memory_format=torch.channels_last)
    exact_loss, exact, exact_buffers = resnet_gradients("resnet32", images, exact_math(), layers.plain(), shortcut)
    plain_loss, plain, plain_buffers = resnet_gradients("resnet32", images, fast_math(DEVICE), layers.plain(), shortcut)
    fused_loss, fused, fused_buffers = resnet_gradients("resnet32", images, fast_math(DEVICE), nullcontext(), shortcut)
    assert abs(fused_loss - exact_loss) < max(2 * abs(plain_loss - exact_loss), 2**-6 * exact_loss)
    error = lambda found, wanted: ((found - wanted).norm() / wanted.norm()).item()  # noqa: E731
    assert error(fused, exact) < 1.2 * error(plain, exact) + 2**-8
    assert error(fused_buffers, exact_buffers) < 1.2 * error(plain_buffers, exact_buffers) + 2**-8
