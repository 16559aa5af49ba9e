"""The options of `krnet verify --invert`: how much of the images can be seen in a recording.

IMAGES, features or trunk -> krnet.invert -> lines of the table of `krnet verify`, DIR/inversion.png
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli.options import option, set_option
from krnet.cli.output import Rows, say
from krnet.config import parse_channels
from krnet.errors import InputError

InvertImages = Annotated[
    Path | None,
    typer.Option(
        "--invert",
        metavar="IMAGES.npy",
        help="Images of the samples, uint8: train a small network to make images of replays, on half of the samples, "
        "and measure how much of the other half comes back. With --against or --trunk also from the real features.",
        show_default="none",
    ),
]
Pictures = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="With --invert: folder for inversion.png, a few images side by side.", show_default="none"
    ),
]
TrunkMean = Annotated[
    Any,
    typer.Option(
        parser=option(parse_channels),
        metavar="X|X,X,X",
        help="With --invert and --trunk: subtracted from the images before the trunk, as for `krnet extract`.",
        show_default="none",
    ),
]
TrunkStd = Annotated[
    Any,
    typer.Option(
        parser=option(parse_channels),
        metavar="X|X,X,X",
        help="With --invert and --trunk: what the images are divided by before the trunk.",
        show_default="none",
    ),
]
InversionSet = Annotated[
    list[Any] | None,
    set_option("With --invert: a setting of the attack, such as samples, iterations, width or seed"),
]
LABELS = {
    "replayed": "from replays",
    "real": "from real features",
    "class_mean": "mean of the class",
    "mean": "mean of all",
}


def run_inversion(path: Path, images: Path, given: list[Any] | None, **options: Any) -> dict[str, Any]:
    """Measure; progress is shown on stderr."""
    from krnet.bench.invert import invert
    from krnet.cli.options import merge
    from krnet.cli.progress import Display

    try:
        with Display(False) as display:
            return invert(path, images, watch=display, **options, **merge(given or []))
    except KeyboardInterrupt:
        say("stopped; nothing was written")
        raise typer.Exit(130) from None


def refuse_without_images(**options: Any) -> None:
    """Refuse options that only the inversion has, where it was not asked for."""
    for name, value in options.items():
        if value:
            raise InputError(f"--{name} is for --invert; give the images with --invert IMAGES.npy, or leave it out")


def inversion_rows(found: Mapping[str, Any]) -> Rows:
    """A line each: what is seen in replays, in real features, and what is known without either."""
    rows = [("images", f"half of {found['num_train'] + found['num_test']:,} seen; of the other half comes back")]
    for name, label in LABELS.items():
        if found[name] is not None:
            rows.append((f"  {label}", f"SSIM {found[name]['ssim']:.3f}, PSNR {found[name]['psnr']:.2f} dB"))
    if found["picture"] is not None:
        rows.append(("pictures", found["picture"]))
    return rows
