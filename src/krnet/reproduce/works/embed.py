"""Work `embed`: t-SNE of real or replayed features of a few classes, and how well neighbours tell their classes.

    settings -> recording (that of work `record`) -> replays of a few samples -> t-SNE -> results/tsne/NAME-SEED.csv
                                                                             -> accuracy of 10 nearest neighbours

Without a recorder, the real features are shown. All runs of a feature set and seed take the same samples, so their
pictures and numbers can be compared.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from krnet.config import check_int
from krnet.errors import SettingError
from krnet.io import ledger
from krnet.io.atomic import atomic_write
from krnet.progress import announcing
from krnet.reproduce.effort import counting
from krnet.reproduce.features import FeatureSet, open_set
from krnet.reproduce.neighbours import embed, neighbour_accuracy, own_nearest
from krnet.reproduce.works.base import Place, register
from krnet.reproduce.works.examined import ExamineSettings, ExamineWork

MOST_POINTS = 2000  # a page with four such figures stays below a megabyte
POINTS_FOLDER = "tsne"  # beside the ledger
REAL = "real"  # names the points of the real features


@dataclass(frozen=True, kw_only=True)
class EmbedSettings(ExamineSettings):
    """Which samples are shown."""

    purpose = "show"
    classes: int = 10
    """Classes, drawn at random."""
    points: int = MOST_POINTS
    """Samples of all these classes together, equally many of each."""
    neighbours: int = 10
    """Nearest neighbours that vote for the class of a sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("classes", self.classes, 2)
        check_int("points", self.points, 2 * self.classes, MOST_POINTS)
        check_int("neighbours", self.neighbours, 1, self.points // self.classes - 1)


@register
class Embed(ExamineWork):
    name = "embed"
    unit = "%"
    settings_class = EmbedSettings

    def perform(self, recipe: str, settings: Mapping[str, Any], seed: int, place: Place) -> Mapping[str, Any]:
        own = EmbedSettings.of(settings)
        say = announcing(place.watch)
        with counting(place.folder) as effort:
            features = open_set(own.features, place)
            ids = choose_samples(features.labels, own.classes, own.points, seed)
            classes, labels = features.labels[ids].unique(return_inverse=True)
            real = features.source().read(ids).float().flatten(1)
            examined = own.open(self.name, features, seed, place)
            shown = examined.read(ids).cpu().flatten(1)
            say("nearest neighbours")
            accuracies = measure(real, shown, labels, own.neighbours)
            say("t-SNE")
            points = embed(shown, seed)
            points_file = f"{POINTS_FOLDER}/{points_name(own, seed)}"
            write_points(ledger.default_path().parent / points_file, points, features, ids)
        return ledger.append(
            recipe,
            settings={**examined.settings, **own.plain, "work": self.name, "num_samples": len(features.labels)},
            metrics={
                **examined.metrics,
                **accuracies,
                "num_points": len(ids),
                "class_names": [features.class_names[label] for label in classes.tolist()],
                "points_file": points_file,
                "commits": effort.commits,
            },
            seconds=effort.seconds,
            seed=seed,
            class_order=features.class_order,
            files=examined.files,
        )

    def value(self, row: Mapping[str, Any], x: str = "", unit: str = "") -> float | None:
        """Percent of features whose nearest neighbours are of their class."""
        found = row["metrics"].get("neighbour_accuracy")
        return None if found is None or unit not in ("", self.unit) else 100 * found


def points_name(own: EmbedSettings, seed: int) -> str:
    """The file of the points, by what tells the pictures of a recipe apart."""
    what = own.name_parts if own.recording else [own.features, REAL]
    return "-".join([*what, str(seed)]) + ".csv"


def choose_samples(labels: Tensor, num_classes: int, num_points: int, seed: int) -> Tensor:
    """IDs, ascending, of samples of a few random classes, equally many of each: the same for all recorders."""
    random = np.random.RandomState(seed)
    known = labels.unique().numpy()
    if num_classes > len(known):
        raise SettingError(f"classes is {num_classes}; the features are of {len(known)} classes. Give at most as many")
    chosen = random.permutation(known)[:num_classes]
    ids = []
    for label in chosen:
        own = (labels == int(label)).nonzero()[:, 0].numpy()
        ids.append(random.permutation(own)[: num_points // num_classes])
    return torch.from_numpy(np.sort(np.concatenate(ids)))


def measure(real: Tensor, shown: Tensor, labels: Tensor, k: int) -> dict[str, float]:
    """Accuracy of the k nearest neighbours among real features, among those shown, and from these to the real ones."""
    return {
        "neighbour_accuracy": neighbour_accuracy(shown, shown, labels, k),
        "real_neighbour_accuracy": neighbour_accuracy(real, real, labels, k),
        "cross_neighbour_accuracy": neighbour_accuracy(shown, real, labels, k),
        "own_nearest": own_nearest(shown, real),
    }


def write_points(path: Path, points: np.ndarray, features: FeatureSet, ids: Tensor) -> None:
    """Write x, y, and the number and the name of the class of each point."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")  # names of classes may hold commas
    writer.writerow(("x", "y", "label", "class"))
    for (x, y), label in zip(points.tolist(), features.labels[ids].tolist(), strict=True):
        writer.writerow((f"{x:.2f}", f"{y:.2f}", label, features.class_names[label]))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(lines.getvalue().encode())
