"""Networks have the sizes of the reference code, cut networks compute what whole ones do, heads grow without loss."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from krnet.errors import SettingError
from krnet.nn.backbones import BACKBONES, BatchNorm, PadShortcut, ResNet, build, cut, freeze_batchnorm
from krnet.nn.heads import Classifier, CosineHead, LinearHead

HEADS = [LinearHead, CosineHead]


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def seasoned(net: ResNet) -> ResNet:
    """With statistics, scales and shifts that are not those of a fresh network."""
    for layer in net.modules():
        if isinstance(layer, BatchNorm):
            for values in (layer.weight.data, layer.running_var):
                values.uniform_(0.5, 1.5)
            for values in (layer.bias.data, layer.running_mean):
                values.normal_(0, 0.1)
    return net


def step(module: nn.Module, loss: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    "name, shortcut, head, expected",
    [
        ("resnet32", "A", None, 463_504),
        ("resnet32", "B", None, 466_256),
        ("resnet32", "A", LinearHead, 470_004),
        ("resnet32", "B", LinearHead, 472_756),
        ("resnet32", "B", CosineHead, 472_657),
        ("resnet18-small", "B", LinearHead, 11_220_132),
        ("resnet18", "B", LinearHead, 11_227_812),  # the 11,689,512 of torchvision's 1000 classes, less 900 rows
    ],
)
def test_networks_have_as_many_parameters_as_the_reference_code(name, shortcut, head, expected):
    with torch.device("meta"):
        net: nn.Module = build(name, shortcut=shortcut)
        if head:
            net = Classifier(net, head(net.feature_dim, 100))
    assert num_parameters(net) == expected


@pytest.mark.parametrize(
    "name, layers, image_size, expected",
    [
        ("resnet32", 1, 32, (16, 32, 32)),
        ("resnet32", 11, 32, (16, 32, 32)),
        ("resnet32", 13, 32, (32, 16, 16)),
        ("resnet32", 21, 32, (32, 16, 16)),
        ("resnet32", 23, 32, (64, 8, 8)),
        ("resnet32", 29, 32, (64, 8, 8)),
        ("resnet18", 1, 224, (64, 56, 56)),
        ("resnet18", 13, 224, (256, 14, 14)),
        ("resnet18-small", 13, 32, (256, 8, 8)),
        ("resnet18-small", 17, 64, (512, 8, 8)),
        ("resnet8", 5, 8, (32, 4, 4)),
    ],
)
def test_feature_maps_have_the_shapes_of_the_paper_and_the_protocols(name, layers, image_size, expected):
    with torch.device("meta"):
        trunk, _ = cut(build(name).eval(), layers)
        assert trunk(torch.empty(1, 3, image_size, image_size)).shape[1:] == expected


@pytest.mark.parametrize("name, layers, left", [("resnet32", 23, 9), ("resnet32", 29, 3), ("resnet18", 13, 5)])
def test_layers_are_counted_as_in_the_paper(name, layers, left):
    parts = cut(build(name, shortcut="A"), layers)
    trunk_layers, tail_layers = (sum(isinstance(m, nn.Conv2d) for m in part.modules()) for part in parts)
    assert (trunk_layers, tail_layers + 1) == (layers, left)  # the classifier is the last of them


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shortcut", ["A", "B"])
@pytest.mark.parametrize("name", BACKBONES)
def test_trunk_and_tail_give_the_features_of_the_whole_bit_for_bit(name, shortcut, training):
    whole = seasoned(build(name, shortcut=shortcut)).train(training)
    images = torch.randn(3, 3, 32, 32)
    for layers in whole.cuts if name == "resnet8" else (1, 13, whole.cuts[-1]):
        other = copy.deepcopy(whole)
        trunk, tail = cut(other, layers)
        assert trunk.training == tail.training == training
        assert torch.equal(tail(trunk(images)), whole(images))
        for key, value in whole.state_dict().items():
            assert torch.equal(other.state_dict()[key], value), key


@pytest.mark.parametrize("layers", [23, 25, 27, 29])
def test_f2_on_the_trunks_maps_gives_the_logits_of_the_whole_classifier(layers):
    whole = Classifier(seasoned(build("resnet32")), LinearHead(64, 10)).eval()
    images = torch.randn(4, 3, 32, 32)
    trunk, tail = cut(whole.backbone, layers)
    f2 = Classifier(tail, whole.head)
    assert trunk(images).shape == (4, 64, 8, 8)
    assert torch.equal(f2(trunk(images)), whole(images))


def test_features_are_the_mean_of_the_maps():
    net = build("resnet8").eval()
    images = torch.randn(2, 3, 8, 8)
    assert net.maps(images).shape == (2, net.feature_dim, 2, 2)
    torch.testing.assert_close(net(images), net.maps(images).mean((2, 3)))


def test_a_cut_shares_the_parameters_and_buffers_of_the_backbone():
    net = build("resnet32")
    trunk, tail = cut(net, 23)
    for tensors in (lambda m: m.parameters(), lambda m: m.buffers()):
        assert [id(t) for part in (trunk, tail) for t in tensors(part)] == [id(t) for t in tensors(net)]


def test_copies_of_a_tail_train_apart_on_one_frozen_trunk():
    net = seasoned(build("resnet8"))
    trunk, tail = cut(net, 5)
    trunk.requires_grad_(False).eval()
    before = copy.deepcopy(net.state_dict())
    maps = trunk(torch.randn(8, 3, 8, 8))
    first, second = copy.deepcopy(tail), copy.deepcopy(tail)
    step(first, first(maps).square().sum())
    assert not torch.equal(first[0].conv1.weight, tail[0].conv1.weight)
    assert torch.equal(second[0].conv1.weight, tail[0].conv1.weight)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize("layers", [2, 24, 33, -1, "23", None])
def test_a_cut_inside_a_block_is_refused_with_the_possible_ones(layers):
    with pytest.raises(SettingError, match=r"possible: 0, 1, 3, 5, .*, 29, 31$"):
        cut(build("resnet32"), layers)


@pytest.mark.parametrize(
    "name, hint", [("resnet23", "did you mean 'resnet32'"), ("resnet18_small", "'resnet18-small'"), ("vgg", "resnet8$")]
)
def test_an_unknown_backbone_is_refused_with_the_nearest(name, hint):
    with pytest.raises(SettingError, match=hint):
        build(name)


@pytest.mark.parametrize("setting", [{"shortcut": "C"}, {"last_relu": 2}, {"in_channels": 0}])
def test_other_settings_are_refused_by_name(setting):
    with pytest.raises(SettingError, match=next(iter(setting))):
        build("resnet8", **setting)


@pytest.mark.parametrize("name", ["resnet8", "resnet32"])
def test_features_are_signed_only_without_the_last_relu(name):
    images = torch.randn(8, 3, 32, 32)
    kept, dropped = build(name), build(name, last_relu=False)
    nn.init.constant_(kept.blocks[-1].bn2.bias, -3)  # a fresh network's shortcuts alone leave its means positive
    dropped.load_state_dict(kept.state_dict())
    assert (kept(images) >= 0).all() and (dropped(images) < 0).any()
    assert torch.equal(kept.maps(images), dropped.maps(images).relu())


@pytest.mark.parametrize("size", [8, 7])
def test_shortcut_a_takes_every_second_value_and_pads_with_zeros(size):
    x = torch.randn(2, 3, size, size)
    slow = F.avg_pool2d(x, kernel_size=1, stride=2)
    assert torch.equal(PadShortcut(3, 6, 2)(x), torch.cat([slow, torch.zeros_like(slow)], 1))


def test_shortcut_a_keeps_channels_last():
    net = build("resnet8", shortcut="A").to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert PadShortcut(3, 6, 2)(x).is_contiguous(memory_format=torch.channels_last)
    assert net.maps(x).is_contiguous(memory_format=torch.channels_last)


def test_convolutions_start_with_the_variance_of_their_outputs():
    net = build("resnet18-small")
    conv, norm = net.blocks[-1].conv2, net.blocks[-1].bn2
    assert conv.weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert (norm.weight == 1).all() and (norm.bias == 0).all()


@pytest.mark.parametrize("head_class", HEADS)
@pytest.mark.parametrize("batch", [1, 5, 128])
def test_growing_keeps_old_rows_bit_for_bit_and_old_logits_to_rounding(head_class, batch):
    head, x = head_class(64, 50), torch.randn(batch, 64)
    before, logits = copy.deepcopy(head.state_dict()), head(x)
    for num_classes in range(60, 101, 10):
        head.grow(10)
        assert head.num_classes == num_classes and head(x).shape == (batch, num_classes)
        assert all(torch.equal(head.state_dict()[key], value) for key, value in before.items())
        # A product of another shape may add up in another order: for a single sample it does.
        torch.testing.assert_close(head(x)[:, :50], logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_class", HEADS)
def test_new_rows_start_as_those_of_a_linear_layer(head_class):
    head = head_class(16, 4)
    torch.manual_seed(7)
    head.grow(3)
    torch.manual_seed(7)
    slow = nn.Linear(16, 3, bias=head_class is LinearHead)
    assert torch.equal(head.weight[4:], slow.weight)
    if head_class is LinearHead:
        x = torch.randn(2, 16)
        torch.testing.assert_close(head(x)[:, 4:], slow(x))


@pytest.mark.parametrize("head_class", HEADS)
def test_grown_rows_have_the_type_of_the_old_ones(head_class):
    head = head_class(8, 2).double()
    head.grow(2)
    assert head(torch.randn(3, 8, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("num_new", [0, -1, 2.0])
def test_growing_by_no_whole_number_of_classes_is_refused(num_new):
    with pytest.raises(SettingError, match="num_new"):
        LinearHead(8, 2).grow(num_new)


@pytest.mark.parametrize("head_class", HEADS)
@pytest.mark.parametrize("frozen", [True, False])
def test_old_rows_stay_through_training_only_if_frozen(head_class, frozen):
    head = head_class(8, 4)
    for num_new in (3, 2):
        head.grow(num_new)
        if frozen:
            head.freeze_old()
    before = head.weight.detach().clone()
    step(head, F.cross_entropy(head(torch.randn(16, 8)), torch.randint(9, (16,))))
    same = (head.weight == before).all(1)
    assert not same[7:].any()
    assert same[:7].all() if frozen else not same[:7].any()


def test_parts_of_a_head_keep_their_names_and_shapes_as_it_grows():
    head = LinearHead(8, 4)
    before = {name: value.shape for name, value in head.named_parameters()}
    head.grow(3)
    assert before.items() < {name: value.shape for name, value in head.named_parameters()}.items()


def test_the_cosine_head_gives_scaled_cosines_whatever_the_length_of_features_and_rows():
    head, x = CosineHead(16, 5), torch.randn(4, 16)
    with torch.no_grad():
        head.sigma.fill_(7)
    slow = torch.stack([F.cosine_similarity(x, row[None], dim=1) for row in head.weight], 1)
    torch.testing.assert_close(head.cosine(x), slow)
    torch.testing.assert_close(head(x), 7 * slow)
    torch.testing.assert_close(head(100 * x), head(x))
    head(x).sum().backward()
    assert head.sigma.grad is not None and head.sigma.grad.abs() > 0


def test_cosines_keep_their_precision_under_bf16_autocast():
    head, x = CosineHead(64, 50), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        under = head(x)
    assert under.dtype == torch.float32 and torch.equal(under, head(x))


def test_imprinted_rows_point_where_told_with_the_mean_length_of_the_old():
    head, directions = CosineHead(16, 5), torch.randn(3, 16)
    head.grow(3)
    old = head.weight[:5].detach().clone()
    head.imprint(directions)
    assert torch.equal(head.weight[:5], old)
    torch.testing.assert_close(head.cosine(directions)[:, 5:].diagonal(), torch.ones(3))
    torch.testing.assert_close(head.weight[5:].norm(dim=1), old.norm(dim=1).mean().expand(3))
    with pytest.raises(SettingError, match=r"\(2, 16\); expected \(3, 16\)"):
        head.imprint(directions[:2])


def statistics(net: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in net.buffers()]


def test_frozen_batchnorm_keeps_its_statistics_under_train_and_its_scale_still_trains():
    net = seasoned(build("resnet8"))
    freeze_batchnorm(net)
    images, before = torch.randn(8, 3, 8, 8), statistics(net)
    for copied in (net.train(), copy.deepcopy(net).eval().train()):
        assert torch.equal(copied(images), copy.deepcopy(copied).eval()(images))
        assert all(torch.equal(a, b) for a, b in zip(statistics(copied), before))
    scale = net.blocks[0].bn1.weight.detach().clone()
    step(net, net(images).square().sum())
    assert not torch.equal(net.blocks[0].bn1.weight, scale)


def test_batchnorm_that_would_not_stay_frozen_is_refused():
    with pytest.raises(SettingError, match="BatchNorm2d"):
        freeze_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))


@pytest.mark.parametrize("head_class", HEADS)
@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_a_state_dict_restores_the_same_logits(head_class, shortcut):
    def make() -> Classifier:
        head = head_class(64, 4)
        head.grow(3)
        return Classifier(build("resnet32", shortcut=shortcut), head)

    net, other, images = make(), make().eval(), torch.randn(4, 3, 32, 32)
    seasoned(net.backbone).eval()
    assert not torch.equal(other(images), net(images))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(images), net(images))


def test_resnet8_learns_digits_in_seconds():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    net = Classifier(build("resnet8", in_channels=1), LinearHead(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for ids in torch.arange(1400).repeat(4)[torch.randperm(5600)].split(100):
        optimizer.zero_grad()
        F.cross_entropy(net(images[ids]), labels[ids]).backward()
        optimizer.step()
    with torch.no_grad():
        assert (net.eval()(images[1400:]).argmax(1) == labels[1400:]).float().mean() > 0.85


@pytest.mark.gpu
@pytest.mark.parametrize("head_class", HEADS)
@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_a_training_step_fits_in_a_cuda_graph_with_bf16_and_channels_last(head_class, shortcut):
    net = Classifier(build("resnet32", shortcut=shortcut), head_class(64, 50)).cuda()
    net.to(memory_format=torch.channels_last)
    net.head.grow(10)
    net.head.freeze_old()
    images = torch.randn(128, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(60, (128,), device="cuda")
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1, momentum=0.9)

    def train() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(net(images).float(), labels)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train()
    graph.replay()
    first, seen = loss.item(), int(net.backbone.stem[1].num_batches_tracked)
    for _ in range(50):
        graph.replay()
    assert loss.item() < first and int(net.backbone.stem[1].num_batches_tracked) == seen + 50
