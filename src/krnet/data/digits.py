"""Images with lasting sample IDs.

    digits, cifar100, a folder of images -> load ---+-> DataSet: train and test Split, class names, mean and std
    the user's own arrays -> from_arrays -----------+   Split: images (N, C, H, W) uint8, labels (N,) int64

The sample ID of an image is its row: its place in the publisher's file, in the arrays, or among the sorted file names.
Data folder: `data_dir`, else KRNET_DATA, else the user's cache folder; CIFAR-100 lies there in cifar-100-python/.
"""

from __future__ import annotations

import numpy as np

from krnet.data.dataset import DataSet, from_arrays


def _load_digits() -> DataSet:
    """scikit-learn's 1,797 digits (Alpaydin and Kaynak 1998), 8x8, grey; every fifth of each class is for testing."""
    from sklearn.datasets import load_digits  # a second to import

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = digits.target
    test = np.zeros(len(labels), bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[4::5]] = True
    return from_arrays(images[~test], labels[~test], images[test], labels[test], name="digits", pad=1)
