"""Features of any kind that a caller may give, as a FeatureSource.

tensor, array, memmap, .npy .npz .safetensors .h5 .zarr, folder of shards, URL, Dataset, list
    -> open_features -> FeatureSource, whose samples are read by ID
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from krnet.errors import FeatureError
from krnet.features.arrays import from_array, from_items, from_slices, from_tensor
from krnet.features.feature_source import FeatureSource
from krnet.features.files import OPENERS, names_in, open_path
from krnet.features.keys import pick_array, refuse_key
from krnet.features.remote_arrays import open_remote, remote_names
from krnet.io.places import Url, place


def open_features(features: Any, *, key: str | None = None) -> FeatureSource:
    """Open features of any supported kind. `key` names the array in a file or mapping that holds several."""
    if isinstance(features, (str, os.PathLike, Url)):
        where = place(features)
        return open_remote(where, key) if isinstance(where, Url) else open_path(where, key)
    name = features.name if isinstance(features, FeatureSource) else type(features).__name__
    if hasattr(features, "keys"):
        return open_features(features[pick_array(features.keys(), key, name)])
    refuse_key(key, name)
    if isinstance(features, FeatureSource):
        return features
    if isinstance(features, torch.Tensor):
        return from_tensor(features, name)
    if isinstance(features, np.ndarray):
        return from_array(features, name)
    if all(hasattr(features, attribute) for attribute in ("shape", "dtype", "__getitem__")):
        return from_slices(features, name)
    if hasattr(features, "__len__") and hasattr(features, "__getitem__"):
        return from_items(features, name)
    raise FeatureError(
        f"Features of type {name} cannot be read; expected a tensor, an array, a path ending in "
        f"{', '.join(OPENERS)}, or something with __len__ and __getitem__. Stack the samples first."
    )


def array_names(features: Any) -> set[str]:
    """Names of the arrays in a file or mapping that may hold several."""
    if isinstance(features, (str, os.PathLike, Url)):
        where = place(features)
        return set(remote_names(where) if isinstance(where, Url) else names_in(where))
    return set(features.keys()) if hasattr(features, "keys") else set()
