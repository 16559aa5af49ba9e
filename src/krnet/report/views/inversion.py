"""What a recording gives away: how like the true images those are that a decoder makes of its features.

rows of work `invert` (metrics: ssim, psnr) -> inversion
"""

from __future__ import annotations

from collections.abc import Sequence

from krnet.report.figure import Axis, Entry, Figure, PaperNumber
from krnet.report.views.base import figure, number, point, read_points, register

TEXT = (
    "Structural similarity (SSIM; 1: equal) of images that a decoder makes of features with the true ones, on samples "
    "that it was not trained on. Without any feature, the mean image of the class is the guess."
)


@register("inversion", "Images that come back")
def inversion(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """The paper has no such number."""
    points, num_unusable = read_points(
        entries,
        lambda entry: [
            point(
                entry, entry.series, number(entry.row["metrics"]["ssim"], -1, 1),
                note=f"PSNR {number(entry.row['metrics']['psnr']):.2f} dB",
            )
        ],
    )  # fmt: skip
    x, y = Axis(label="read from", scale="names"), Axis(label="SSIM")
    return figure(name, title, TEXT, "bars", x, y, points, num_unusable)
