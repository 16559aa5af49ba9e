"""Labels of samples: given by the caller, or beside the features in their file, as `krnet.extract` writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from krnet.errors import InputError, LabelError
from krnet.features.source import array_names, open_features

NPY_START = b"\x93NUMPY"  # the first bytes of every .npy file


def check_labels(labels: Any, num_samples: int) -> torch.Tensor | None:
    """Labels of any kind (list, array, tensor, path to .npy) as a new int64 tensor (N,); None stays None."""
    if labels is None:
        return None
    expected = f"expected {num_samples} integers, one per sample"
    try:
        if isinstance(labels, (str, os.PathLike)):
            labels = _load_labels(Path(labels), expected)
        # tolist(), since numpy refuses some tensors (bfloat16, CUDA, requires_grad).
        found = np.asarray(labels.tolist() if isinstance(labels, torch.Tensor) else labels)
    except LabelError:
        raise
    except (OSError, EOFError, ValueError) as error:
        raise LabelError(f"Labels cannot be read ({error}); {expected}, in a .npy file or a flat list.") from error
    if found.shape != (num_samples,):
        raise LabelError(f"Labels have shape {found.shape}; {expected}. Do they belong to these features?")
    if found.dtype.kind not in "iu":
        raise LabelError(f"Labels are of type {found.dtype}; {expected}. Convert them with .astype(int).")
    if found.max() > np.iinfo(np.int64).max:
        raise LabelError(f"Label {found.max()} is beyond int64; {expected}. Renumber the classes.")
    return torch.from_numpy(found.astype(np.int64))


def _load_labels(path: Path, expected: str) -> np.ndarray:
    """Read a .npy file, whatever its name is."""
    with path.open("rb") as file:
        if file.read(len(NPY_START)) != NPY_START:
            raise LabelError(
                f"{path}: is no .npy file; {expected}, as numpy.save writes them. Labels that lie in the file of the "
                f"features, as an array 'labels' beside 'features', are found there: leave out --labels (in Python, "
                f"labels=)."
            )
    return np.asarray(np.load(path, allow_pickle=False))


def has_labels(features: Any) -> bool:
    """Whether a file or mapping holds the arrays `features` and `labels`."""
    return {"features", "labels"} <= array_names(features)


def stored_labels(features: Any, key: str | None, num_samples: int) -> torch.Tensor | None:
    """The array `labels` that lies beside `features` in the same file or mapping, as `krnet.extract` writes it.

    None if there is none; and with a key, which asks for one array alone.
    """
    if key is not None or not has_labels(features):
        return None
    try:
        found = open_features(features, key="labels")
        return check_labels(found.read(torch.arange(len(found))), num_samples)
    except InputError as error:
        raise LabelError(
            f"The array 'labels' beside the features cannot be their labels: {error} Give --labels, or --key features "
            f"to leave them out (in Python, labels= or key='features')."
        ) from error
