"""Sets of feature maps that recipes name. Each is made once, in the folder that all runs share.

    name -> images and network of a base task -> trunk F1 -> shared/features-NAME.safetensors -> FeatureSet
                                              -> head F2 (the other layers and the classifier): replay accuracy

    cifar100-base         25,000 maps of 64x8x8: the 50 base classes through results/cifar100-base.safetensors
    cifar100-strong-SEED  the same images through the network of results/base/cifar100-lucir1993-strong-SEED.krn
    tiny-imagenet         25,000 maps of 256x16x16, 6.6 GB: the 50 base classes of the folder tiny-imagenet-100 through
                          a ResNet-18 for small images, cut after 13 layers, which is trained first (100 epochs)
    digits                1,442 maps of 32x4x4: all ten digits through a ResNet-8, trained in seconds; for --quick

The sets of zoo.py are files that must be there; they have neither images nor head.

Maps are written and read in parts: memory stays bounded however many there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor, nn

from krnet import task_loop
from krnet.config import unknown_setting
from krnet.data import augment, protocol, registry
from krnet.data.dataset import DataSet
from krnet.device import pick_device
from krnet.errors import InputError
from krnet.features.extract import extract
from krnet.features.feature_source import FeatureSource
from krnet.features.source import open_features
from krnet.io import ledger
from krnet.io.lock import making
from krnet.nn import backbones
from krnet.nn.heads import Classifier, LinearHead
from krnet.reproduce.zoo import EXAMPLE, ZooSet, is_zoo, open_zoo, zoo_shape

if TYPE_CHECKING:  # works import this module
    from krnet.reproduce.works.base import Place

RESULTS = "results"
BASE_NETWORK = "cifar100-base.safetensors"
STRONG_NETWORK = "base/cifar100-lucir1993-strong-{seed}.krn"


@dataclass(frozen=True, eq=False)
class FeatureSet:
    """Feature maps, what they were made from, and the head that reads them."""

    name: str
    path: Path
    """The file of the maps, as `krnet.extract` writes it."""
    images: Tensor
    """(N, C, H, W) uint8, cropped to what the trunk sees."""
    labels: Tensor
    """(N,): the output of the head that belongs to each sample's class."""
    trunk: nn.Module
    """Normalised images -> maps."""
    head: nn.Module
    """Maps -> logits."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    """In the order of the labels."""
    class_order: str

    def source(self) -> FeatureSource:
        return open_features(self.path, key="features")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the maps of a set come from."""

    data: str
    image_size: int | None = None
    """Of a folder of images: pixels at the shorter side."""
    order: str = protocol.DEFAULT_ORDER
    sizes: tuple[int, ...] | None = None
    """Classes of each task; the maps are those of the base task. None: half of all classes, then ten tasks."""
    layers: int
    """Layers of the trunk, counted as in the paper."""
    shape: tuple[int, int, int]
    """Of a map."""
    network: Callable[[DataSet, protocol.TaskSplit, Place], Classifier]


def open_set(name: str, place: Place) -> FeatureSet:
    """The feature maps of this name; they are made first if the shared folder does not hold them.

    Of several processes that need them, one makes them and the others wait.
    """
    origin = origin_of(name)
    path = place.shared / f"features-{name}.safetensors"
    with making(path):
        data = registry.load(origin.data, place.data_dir, image_size=origin.image_size)
        split = protocol.split(origin.order, num_classes=data.num_classes, sizes=origin.sizes)
        model = origin.network(data, split, place).eval().requires_grad_(False)
        trunk, tail = backbones.cut(model.backbone, origin.layers)
        ids = split.samples(data.train.labels, 0)
        images = augment.centre(data.train.images[ids], data.crop)
        labels = split.position[data.train.labels[ids]]
        extract(
            trunk, images, labels, out=path, mean=data.mean, std=data.std, device=pick_device(place.device),
            resume=True, watch=place.watch,
        )  # fmt: skip
    return FeatureSet(
        name=name,
        path=path,
        images=images,
        labels=labels,
        trunk=trunk,
        head=Classifier(tail, model.head).eval().requires_grad_(False),
        mean=data.mean,
        std=data.std,
        class_names=tuple(data.class_names[label] for label in split.tasks[0]),
        class_order=f"{split.order_name} ({split.hash})",
    )


def open_any(name: str, place: Place) -> FeatureSet | ZooSet:
    """The features of this name, also those of the zoo."""
    return open_zoo(name, place.data_dir) if is_zoo(name) else open_set(name, place)


def shape_of(name: str) -> tuple[int, ...]:
    """The shape of a sample of this set; a name that is none is refused."""
    return zoo_shape(name) if is_zoo(name) else origin_of(name).shape


def origin_of(name: str) -> Origin:
    """Where a set comes from; a name that is none is refused."""
    if found := re.fullmatch(r"cifar100-strong-(\d+)", name):
        return strong(int(found[1]))
    if name not in SETS:
        raise unknown_setting(name, [*SETS, "cifar100-strong-0", EXAMPLE], "feature set")
    return SETS[name]


# ------------------------------------------------------------------ networks


def stored_network(data: DataSet, split: protocol.TaskSplit, place: Place) -> Classifier:
    """ResNet-32 with the weights that benchmarks/cifar100_base.py wrote, whose layers have numbers for names."""
    model = Classifier(backbones.build("resnet32", shortcut="B"), LinearHead(64, len(split.tasks[0])))
    trunk, tail = backbones.cut(model.backbone, SETS["cifar100-base"].layers)
    numbered = nn.Sequential(
        trunk, nn.Sequential(*tail.children(), *model.head.linears)
    )  # shares the modules of the model
    numbered.load_state_dict(load_file(results_file(BASE_NETWORK)))
    return model.to(pick_device(place.device))


def trained(**learning: Any) -> Callable[[DataSet, protocol.TaskSplit, Place], Classifier]:
    """A network that the learners' base task makes; in the shared folder, runs of `learn` find it, too."""

    def make(data: DataSet, split: protocol.TaskSplit, place: Place) -> Classifier:
        return task_loop.learn_base(
            data, split, out=place.shared / f"base-of-{data.name}", shared=place.shared, device=place.device,
            watch=place.watch, **learning,
        )  # fmt: skip

    return make


def strong(seed: int) -> Origin:
    def make(data: DataSet, split: protocol.TaskSplit, place: Place) -> Classifier:
        path = results_file(STRONG_NETWORK.format(seed=seed))
        folder = place.shared / f"base-strong-{seed}"
        return task_loop.learn_base(data, split, out=folder, settings={"base": str(path)}, device=place.device)

    return Origin(data="cifar100", layers=23, shape=(64, 8, 8), network=make)


def results_file(name: str) -> Path:
    """A network that comes with the source: in the clone that the current folder lies in, or this package."""
    candidates = [root / RESULTS / name for root in (ledger.project_folder(), Path(__file__).resolve().parents[3])]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise InputError(
            f"{candidates[0]}: no such file; expected the network of a base task, which comes with the source. Run the "
            f"command inside a clone of the repository"
        )
    return found


SETS: Mapping[str, Origin] = {
    "cifar100-base": Origin(data="cifar100", layers=23, shape=(64, 8, 8), network=stored_network),
    "tiny-imagenet": Origin(data="tiny-imagenet-100", layers=13, shape=(256, 16, 16), network=trained(preset="paper")),
    "digits": Origin(
        data="digits",
        order="natural",
        sizes=(10,),
        layers=5,
        shape=(32, 4, 4),
        network=trained(preset="paper", settings={"base_epochs": 4}),
    ),
}
