"""The feature sets of the zoo: benchmarks/zoo.py makes them, recipes name them.

    zoo-SCALE-NAME -> DATA/zoo-SCALE/NAME.safetensors -> ZooSet

They have no head and no images: R2 and bytes are measured, not replay accuracy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from krnet.config import unknown_setting
from krnet.data.folder import cache_folder
from krnet.errors import DataError
from krnet.features.feature_source import FeatureSource
from krnet.features.source import open_features

SCALES = ("full", "small")
SHAPES: Mapping[str, tuple[int, ...]] = {
    "resnet32-early": (16, 32, 32),
    "resnet32-middle": (32, 16, 16),
    "resnet32-late": (64, 8, 8),
    "resnet32-late-few": (64, 8, 8),
    "resnet32-late-many": (64, 8, 8),
    "resnet32-late-float16": (64, 8, 8),
    "resnet32-vectors": (64,),
    "resnet18-middle": (256, 16, 16),
    "resnet18-late": (512, 8, 8),
    "resnet18-late-few": (512, 8, 8),
    "resnet18-late-bfloat16": (512, 8, 8),
    "resnet18-vectors": (512,),
    "vit-tokens": (192, 8, 8),
    "lm-tokens": (192, 64),
    "lm-vectors": (192,),
}
EXAMPLE = "zoo-full-lm-vectors"


@dataclass(frozen=True)
class ZooSet:
    name: str
    path: Path

    class_order = None

    def source(self) -> FeatureSource:
        return open_features(self.path, key="features")


def is_zoo(name: str) -> bool:
    return name.startswith("zoo-")


def zoo_shape(name: str) -> tuple[int, ...]:
    """The shape of a sample."""
    return SHAPES[_parts(name)[1]]


def open_zoo(name: str, data_dir: Path | None) -> ZooSet:
    """The set in the folder of the data sets; it must have been made."""
    scale, own = _parts(name)
    folder = Path(data_dir or os.environ.get("KRNET_DATA") or cache_folder())
    path = folder / f"zoo-{scale}" / f"{own}.safetensors"
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; expected the features of set {name}. Make them inside a clone of the repository: "
            f"python benchmarks/zoo.py --scale {scale} --out {folder} --only {own}"
        )
    return ZooSet(name, path)


def _parts(name: str) -> tuple[str, str]:
    found = re.fullmatch(rf"zoo-({'|'.join(SCALES)})-(.+)", name)
    if found is None or found[2] not in SHAPES:
        raise unknown_setting(name, [f"zoo-{scale}-{own}" for scale in SCALES for own in SHAPES], "feature set")
    return found[1], found[2]
