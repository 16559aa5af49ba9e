"""The handwritten digits that come with scikit-learn: no download."""

from __future__ import annotations

import numpy as np

from krnet.config import require
from krnet.data.dataset import DataSet, from_arrays


def load_digits() -> DataSet:
    """scikit-learn's 1,797 digits (Alpaydin and Kaynak 1998): grey, 8x8 pixels. Every fifth image of a class is a test
    image."""
    digits = require("sklearn.datasets", "learn").load_digits()  # imported here, as it takes a second
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = digits.target
    is_test = np.zeros(len(labels), bool)
    for digit in range(10):
        is_test[np.flatnonzero(labels == digit)[4::5]] = True
    return from_arrays(images[~is_test], labels[~is_test], images[is_test], labels[is_test], name="digits", pad=1)
