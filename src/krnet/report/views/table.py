"""The storage table: bytes of the features, of the autoencoder's codes and of KRNet, for a number of classes.

rows of work `plan` (metrics: num_classes, feature_bytes, autoencoder_*_bytes, krnet_bytes) -> table
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from krnet.report.figure import Axis, Entry, Figure, PaperNumber, Point
from krnet.report.views.base import figure, number, paper_megabytes, paper_points, point, read_points, register

TEXT = "What a number of classes takes: as features, as codes of an autoencoder with its decoder, and as KRNet with its codes."
FEATURES, AUTOENCODER, KRNET = "features", "autoencoder", "KRNet"


@register("table", "Storage by number of classes")
def table(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """Of several presets, each has its three series."""
    presets = {_preset(entry) for entry in entries}

    def read(entry: Entry) -> Iterator[Point]:
        metrics = entry.row["metrics"]
        head = f"{_preset(entry)}: " if len(presets) > 1 else ""
        num_classes = number(metrics["num_classes"], 1)
        sizes = {
            FEATURES: number(metrics["feature_bytes"], 1),
            AUTOENCODER: number(metrics["autoencoder_code_bytes"], 1) + number(metrics["autoencoder_network_bytes"], 0),
            KRNET: number(metrics["krnet_bytes"], 1),
        }
        for series, size in sizes.items():
            yield point(entry, num_classes, size / 1e6, series=head + series)

    points, num_unusable = read_points(entries, read)
    points += paper_points(paper, lambda found: float(found.x), paper_megabytes)
    y = Axis(label="stored", unit="MB", scale="log")
    return figure(name, title, TEXT, "line", Axis(label="classes"), y, points, num_unusable)


def _preset(entry: Entry) -> str:
    for found in (entry.row.get("metrics"), entry.row.get("settings")):
        if isinstance(found, dict) and isinstance(found.get("preset"), str):
            return found["preset"]
    return "no preset"
