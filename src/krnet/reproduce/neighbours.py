"""Nearest neighbours and t-SNE of features: whether classes lie among replays as they do among real features.

queries, candidates (N, D) of the same samples -> neighbour_accuracy -> share of right majority votes
features (N, D)                                -> embed              -> points (N, 2)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from krnet.config import require

PCA_DIMENSIONS = 50  # before t-SNE, as its authors advise (van der Maaten and Hinton 2008)
PERPLEXITY = 30.0
CHUNK = 1024  # queries whose distances are in memory at once


def neighbour_accuracy(queries: Tensor, candidates: Tensor, labels: Tensor, k: int) -> float:
    """The share of queries whose k nearest candidates are, by majority, of the query's class.

    Row i of both is sample i, and sample i is no candidate for query i (leave one out). Of classes with equally many
    votes, that of the nearest candidate wins.
    """
    num, num_classes = len(labels), int(labels.max()) + 1
    num_right = 0
    for ids in torch.arange(num).split(CHUNK):
        distances = torch.cdist(queries[ids], candidates)  # (B, N)
        distances[torch.arange(len(ids)), ids] = torch.inf
        classes = labels[distances.topk(k, largest=False).indices]  # (B, k), the nearest first
        votes = torch.zeros(len(ids), num_classes).scatter_add_(1, classes, torch.ones(classes.shape))
        first = torch.full((len(ids), num_classes), float(k))
        for rank in reversed(range(k)):
            first.scatter_(1, classes[:, rank : rank + 1], float(rank))
        num_right += int(((votes - first / (k + 1)).argmax(1) == labels[ids]).sum())
    return num_right / num


def own_nearest(queries: Tensor, candidates: Tensor) -> float:
    """The share of queries whose nearest candidate is the same sample."""
    found = [torch.cdist(queries[ids], candidates).argmin(1) == ids for ids in torch.arange(len(queries)).split(CHUNK)]
    return torch.cat(found).float().mean().item()


def embed(features: Tensor, seed: int) -> np.ndarray:
    """t-SNE of features (N, D), after principal components. The same features and seed give the same points."""
    decomposition, manifold = require("sklearn.decomposition", "learn"), require("sklearn.manifold", "learn")
    values = features.numpy()
    dimensions = min(PCA_DIMENSIONS, *values.shape)
    reduced = decomposition.PCA(dimensions, svd_solver="randomized", random_state=seed).fit_transform(values)
    perplexity = min(PERPLEXITY, (len(values) - 1) / 3)
    points: np.ndarray = manifold.TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(reduced)
    return points
