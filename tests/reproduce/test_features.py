"""Named feature sets are what they say, are made once, and come from the networks that the benchmarks use."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from krnet.data import protocol, registry
from krnet.data.dataset import Split
from krnet.errors import SettingError
from krnet.nn import backbones
from krnet.nn.fingerprint import fingerprint
from krnet.reproduce.features import SETS, open_set, origin_of, stored_network
from krnet.reproduce.works.base import Place
from krnet.train.classifier import Descent

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark():
    """benchmarks/cifar100_base.py, and its network with the stored weights."""
    spec = importlib.util.spec_from_file_location("cifar100_base", ROOT / "benchmarks" / "cifar100_base.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trunk, head = module.resnet32(50)
    network = torch.nn.Sequential(trunk, head)
    network.load_state_dict(load_file(ROOT / "results" / "cifar100-base.safetensors"))
    network.eval()
    return module, trunk, head


def test_the_stored_weights_make_the_benchmarks_maps_and_logits(benchmark, place):
    module, trunk, head = benchmark
    split = protocol.split("lucir1993", num_classes=100)
    model = stored_network(None, split, place).eval()
    own_trunk, _ = backbones.cut(model.backbone, SETS["cifar100-base"].layers)
    images = module.standardise(torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8))
    with torch.no_grad():
        torch.testing.assert_close(own_trunk(images), trunk(images), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(images), head(trunk(images)), rtol=1e-4, atol=1e-4)


def few_of_each(data, num):
    def part(split):
        ids = torch.cat([(split.labels == label).nonzero()[:num, 0] for label in range(100)]).sort().values
        return Split(split.images[ids], split.labels[ids])

    return replace(data, train=part(data.train), test=part(data.test))


def test_cifar100_base_holds_the_benchmarks_maps_labels_and_order(benchmark, cifar100_dir, tmp_path, monkeypatch):
    module, trunk, _ = benchmark
    few = few_of_each(registry.load("cifar100", cifar100_dir.parent), 4)
    monkeypatch.setattr(registry, "load", lambda *given, **options: few)
    place = Place(folder=tmp_path, shared=tmp_path, data_dir=None, device="cpu", watch=None)
    found = open_set("cifar100-base", place)
    images, labels = module.load_split(cifar100_dir.parent, "train", list(protocol.class_order("lucir1993")[:50]))
    ids = torch.cat([(labels == label).nonzero()[:4, 0] for label in range(50)]).sort().values
    assert torch.equal(found.images, images[ids]) and torch.equal(found.labels, labels[ids])
    with torch.no_grad():
        expected = trunk(module.standardise(images[ids]))
    maps = found.source().read(torch.arange(200))
    assert maps.shape == (200, *SETS["cifar100-base"].shape)
    torch.testing.assert_close(maps, expected, rtol=1e-5, atol=1e-5)
    assert (found.head(maps).argmax(1) == found.labels).double().mean() > 0.98


def test_the_strong_network_of_each_seed_tells_its_test_images_apart(cifar100_dir, tmp_path):
    data = registry.load("cifar100", cifar100_dir.parent)
    split = protocol.split("lucir1993", num_classes=100)
    place = Place(folder=tmp_path, shared=tmp_path, data_dir=None, device="cpu", watch=None)
    model = origin_of("cifar100-strong-1").network(data, split, place)
    ids = split.samples(data.test.labels, 0)[:200]
    mean, std = (torch.tensor(values)[:, None, None] for values in (data.mean, data.std))
    with torch.no_grad():
        logits = model((data.test.images[ids] / 255 - mean) / std)
    assert (logits.argmax(1) == split.position[data.test.labels[ids]]).double().mean() > 0.7


def test_a_set_names_its_classes_in_the_order_of_its_labels(digits):
    maps = digits.source().read(torch.arange(len(digits.labels)))
    assert maps.shape[1:] == SETS["digits"].shape
    assert len(maps) == len(digits.images) == len(digits.labels)
    assert digits.class_names == tuple("0123456789")
    # The head was trained a little, and on these labels.
    assert (digits.head(maps).argmax(1) == digits.labels).double().mean() > 0.3


def test_maps_are_what_the_trunk_makes_of_the_images(digits):
    ids = torch.tensor([3, 77, 199])
    mean, std = (torch.tensor(values)[:, None, None] for values in (digits.mean, digits.std))
    with torch.no_grad():
        expected = digits.trunk((digits.images[ids] / 255 - mean) / std)
    torch.testing.assert_close(digits.source().read(ids), expected, rtol=1e-5, atol=1e-5)


def test_a_set_and_its_network_are_made_once(digits, place, monkeypatch):
    monkeypatch.setattr(Descent, "run", None)  # nothing may train
    before = digits.path.stat().st_mtime_ns
    again = open_set("digits", place)
    assert fingerprint(again.head) == fingerprint(digits.head)
    assert again.path == digits.path and again.path.stat().st_mtime_ns == before


@pytest.mark.parametrize("name, near", [("cifar100-bose", "cifar100-base"), ("tiny-imagnet", "tiny-imagenet")])
def test_an_unknown_set_is_refused_with_the_nearest_name(name, near):
    with pytest.raises(SettingError, match=f"unknown feature set '{name}'; did you mean '{near}'"):
        origin_of(name)
