"""Options that several commands share, and --set: their help comes from the settings' own descriptions.

What a user types, as values: shapes, class counts, durations, settings and sample IDs.

"256,14,14" -> (256, 14, 14)    "500x50" -> 50 counts of 500    "10m" -> 600.0    "c0=64" -> ("c0", 64)
"5,3,7:9" -> [5, 3, slice(7, 9)]    "drops=0.5,0.75" -> ("drops", (0.5, 0.75))    "0.95,0.98" -> (0.95, 0.98)

A ValueError says what is wrong; the command line makes exit code 2 of it (option). Nothing here needs torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from krnet.config import describe, parse_setting, parse_size
from krnet.errors import SettingError
from krnet.nn.paper_config import PRESETS
from krnet.train.config import FitConfig

T = TypeVar("T")


def option(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The parser of an option: of a ValueError some versions of typer show too much, others only the value."""

    @wraps(parse)
    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed


def merge(given: list[tuple[str, Any]], **options: Any) -> dict[str, Any]:
    """Settings from --set and from options of their own; None means not given."""
    merged = {name: value for name, value in options.items() if value is not None}
    for name, value in given:
        if name in merged:
            raise SettingError(f"{name} is given twice: {merged[name]!r} and {value!r}; give it once")
        merged[name] = value
    return merged


def fit_option(name: str, default: str, **more: Any) -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", help=describe(FitConfig)[name], show_default=default, **more)


def explain_settings(config: type, *, without: Collection[str] = ()) -> str:
    """Name, default and description of each setting of a config."""
    lines = []
    for field in fields(config):
        if field.name in without:
            continue
        default = default_text(field)
        text = f"{describe(config)[field.name]} [default: {default}]"
        lines += textwrap.wrap(text, 100, initial_indent=f"  {field.name:<20}", subsequent_indent=" " * 22)
    return "\n".join(lines)


def default_text(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return str(field.default)
    return "none" if field.default_factory is not MISSING else "found for the features"


def same_settings(config: type, other: type) -> set[str]:
    """Settings that both have, with the same default."""
    defaults = {field.name: field.default for field in fields(other)}
    return {f.name for f in fields(config) if f.name in defaults and defaults[f.name] == f.default}


def show_recorder_settings(recorder: Any) -> None:
    """On stdout: what `krnet record --recorder NAME --set` knows."""
    print(f"{recorder.name}\n{explain_settings(recorder.config_class, without=recorder.derived)}")
    if recorder.trains:
        print(f"\nits fit\n{explain_settings(FitConfig)}")


def set_option(help: str) -> Any:
    return typer.Option(
        "--set", parser=option(parse_setting), metavar="NAME=VALUE", show_default=False,
        help=f"{help}; may be given several times.",
    )  # fmt: skip


Set = Annotated[list[Any] | None, set_option("Any other setting by its name")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Preset = Annotated[
    str | None,
    typer.Option(help=f"Sizes of a network from the paper: {', '.join(PRESETS)}.", show_default="solved from the data"),
]
RecorderName = Annotated[
    str | None,
    typer.Option(
        help="Way to store the features: krnet, paper, autoencoder, pca, transform, quantized, pq, images or raw.",
        show_default="krnet; with --preset paper; with --start the one that wrote it",
    ),
]
Budget = Annotated[
    Any,
    typer.Option(
        parser=option(parse_size),
        metavar="12MB|800kB|BYTES",
        help="Most bytes of the file (MB = 10^6): the best recording of at most that size.",
        show_default="krnet: one bit a value; others: none",
    ),
]
ListSettings = Annotated[bool, typer.Option("--list-settings", help="Print what --set knows, and leave.")]
Device = Annotated[str | None, fit_option("device", "cuda if there is one, else cpu")]
Key = Annotated[
    str | None,
    typer.Option(help="Which array of a file that holds several.", show_default="the only one, or 'features'"),
]
Images = Annotated[
    Path | None,
    typer.Option(
        metavar="IMAGES.npy",
        help="Recorder images: what the features were made of, uint8 (N, C, H, W) or (N, H, W, C).",
        show_default="none",
    ),
]
Trunk = Annotated[
    Path | None,
    typer.Option(
        metavar="TRUNK.pt2",
        help="Recorder images: images to features, as torch.export or TorchScript wrote it, or the folder of a kril "
        "run.",
        show_default="none",
    ),
]
FeaturesFile = Annotated[
    Path,
    typer.Argument(
        metavar="FEATURES", help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr.", show_default=False
    ),
]
RecordingFile = Annotated[Path, typer.Argument(metavar="FILE.krn", help="A recording.", show_default=False)]
