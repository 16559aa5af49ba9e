"""scikit-learn's handwritten digits, which come with the package: no download."""

from __future__ import annotations

import numpy as np

from krnet.config import require
from krnet.data.dataset import DataSet, from_arrays


def load_digits() -> DataSet:
    """scikit-learn's 1,797 digits (Alpaydin and Kaynak 1998), 8x8, grey; every fifth of each class is for testing."""
    digits = require("sklearn.datasets", "learn").load_digits()  # a second to import
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = digits.target
    test = np.zeros(len(labels), bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[4::5]] = True
    return from_arrays(images[~test], labels[~test], images[test], labels[test], name="digits", pad=1)
