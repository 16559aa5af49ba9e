"""Load data sets by name: digits, cifar100, a folder of images, and those that others register.

    name or path, data folder -> load -> DataSet

The data folder is `data_dir`, else KRNET_DATA, else the user's cache folder. CIFAR-100 is in its cifar-100-python/.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from krnet.data.cifar100 import FOLDER as CIFAR_FOLDER
from krnet.data.cifar100 import load_cifar100
from krnet.data.dataset import DataSet
from krnet.data.digits import load_digits
from krnet.data.folder import load_folder
from krnet.errors import DataError, SettingError
from krnet.io.atomic import AnyPath

FOLDER_PREFIX = "imagefolder:"
Say = Callable[[str], None]
Loader = Callable[[Path | None, bool, Say], DataSet]
"""(data folder or None, whether to download, function that receives messages about slow steps) -> DataSet"""
LOADERS: dict[str, Loader] = {}


def register(name: str) -> Callable[[Loader], Loader]:
    """Decorator that gives a data set of your own a name, for `krnet.data.load` and `krnet learn --data`.

    It stands before a function (folder, download, say) -> DataSet. `folder` is the data folder, or None; `download`
    says whether files may be downloaded to it; `say(text)` announces a slow step.

    >>> import krnet, torch
    >>> @krnet.data.register("blank")
    ... def load_blank(folder, download, say):
    ...     images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    ...     return krnet.data.from_arrays(images, [0, 1], images, [0, 1], layout="NCHW")
    >>> krnet.data.load("blank").num_classes
    2
    """

    def add(loader: Loader) -> Loader:
        assert name not in LOADERS, f"two data sets are called {name}"
        LOADERS[name] = loader
        return loader

    return add


register("digits")(lambda folder, download, say: load_digits())
register("cifar100")(load_cifar100)


def load(
    name: str,
    data_dir: AnyPath | None = None,
    *,
    image_size: int | None = None,
    choose: Callable[[list[str]], Sequence[str]] | None = None,
    download: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> DataSet:
    """Load a data set by its name (digits, cifar100, or a registered one), or a folder of images by its path.

    name        a name, or the PATH of a folder that holds train/CLASS/* and val/CLASS/*; imagefolder:PATH is a folder
                even if a data set has its name
    data_dir    folder of the data sets; by default $KRNET_DATA, else the user's cache folder. The digits need none
    image_size  for folders: side in pixels of the square copies that are kept. By default the shorter side of the first
                image, at most 256. Above 96 pixels networks see a window of seven eighths (`crop`), 224 of 256
    choose      for folders: a function that selects from the sorted class names; `krnet.protocol.subset` makes one
    download    whether CIFAR-100 may be downloaded if it is missing
    say         is called with a message before each slow step

    >>> import krnet
    >>> digits = krnet.data.load("digits")
    >>> digits.num_classes, digits.train.images.shape, digits.test.labels[:4].tolist()
    (10, torch.Size([1442, 1, 8, 8]), [5, 0, 9, 8])
    """
    data_folder = data_dir or os.environ.get("KRNET_DATA") or None
    if download and data_folder is not None and not Path(data_folder).is_dir():
        # Only the default folder, the user's cache, is made: a mistyped name would hide in a new folder.
        given = "data_dir (--data-dir)" if data_dir else "KRNET_DATA"
        raise DataError(
            f"{data_folder}: no such folder, given as {given}; make it, or give the folder of the data sets"
        )
    folder = None if name in LOADERS else _find_folder(name, data_folder)
    if folder is not None:
        return load_folder(folder, image_size, choose, say)
    if image_size is not None or choose is not None:
        raise SettingError(
            f"image_size and choose (--image-size, --subset) are for folders of images; leave them out for {name}"
        )
    return LOADERS[name](Path(data_folder) if data_folder else None, download, say)


def folders_of(name: str, data_dir: AnyPath | None = None) -> list[Path]:
    """The folders that `load` reads this data set from, as far as they are there."""
    data_folder = data_dir or os.environ.get("KRNET_DATA") or None
    if name not in LOADERS:
        return [_find_folder(name, data_folder)]
    if data_folder is None:
        return []
    found = Path(data_folder)
    return [found / CIFAR_FOLDER] if name == "cifar100" else [found]


def _find_folder(name: str, data_folder: AnyPath | None) -> Path:
    """Find the folder of this name, relative to the current folder or to the data folder."""
    path = Path(name.removeprefix(FOLDER_PREFIX)).expanduser()
    candidates = [path, Path(data_folder, path)] if data_folder else [path]
    found = [candidate for candidate in candidates if candidate.is_dir()]
    if found:
        return found[0]
    if name.startswith(FOLDER_PREFIX) or os.sep in name:
        raise DataError(f"{path}: no such folder; expected one with train and val in it, each with a folder per class")
    near = difflib.get_close_matches(name, LOADERS, n=1)
    if near:
        raise SettingError(f"unknown data set {name!r}; did you mean {near[0]!r}?")
    where = " or ".join(str(candidate.parent.absolute()) for candidate in candidates)
    raise SettingError(
        f"unknown data set {name!r}, and no such folder in {where}; expected {', '.join(LOADERS)}, or the path of a "
        f"folder of images, such as pictures with pictures/train/CLASS/* and pictures/val/CLASS/* in it"
    )
