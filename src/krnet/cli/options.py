"""Options that several commands share, and --set: their help comes from the settings' own descriptions.

What a user types, as values: shapes, class counts, durations, settings and sample IDs.

"256,14,14" -> (256, 14, 14)    "500x50" -> 50 counts of 500    "10m" -> 600.0    "c0=64" -> ("c0", 64)
"5,3,7:9" -> [5, 3, slice(7, 9)]    "drops=0.5,0.75" -> ("drops", (0.5, 0.75))    "0.95,0.98" -> (0.95, 0.98)

A ValueError says what is wrong; the command line makes exit code 2 of it (option). Nothing here needs torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from krnet.config import describe, parse_setting, unknown_setting
from krnet.errors import SettingError
from krnet.nn.paper_config import PRESETS, NetworkConfig
from krnet.train.config import FitConfig

T = TypeVar("T")
GEOMETRY = {"channels", "height", "width", "vector"}  # follow from the features
HAS_OPTION = {"iterations", "target_r2", "time_budget", "schedule", "seed", "device"}


def option(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The parser of an option: of a ValueError some versions of typer show too much, others only the value."""

    @wraps(parse)
    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed


def merge(given: list[tuple[str, Any]], known: set[str], **options: Any) -> dict[str, Any]:
    """Settings from --set and from options of their own; None means not given."""
    merged = {name: value for name, value in options.items() if value is not None}
    for name, value in given:
        if name not in known:
            raise unknown_setting(name, known)
        if name in merged:
            raise SettingError(f"{name} is given twice: {merged[name]!r} and {value!r}; give it once")
        merged[name] = value
    return merged


def fit_option(name: str, default: str, **more: Any) -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", help=describe(FitConfig)[name], show_default=default, **more)


def list_settings(*configs: type) -> str:
    """What --set knows, for the end of a help page: name, default and description of each."""
    lines = []
    for field in (field for config in configs for field in fields(config)):
        if field.name in GEOMETRY | HAS_OPTION:
            continue
        default = "by preset" if field.name in PRESETS["cifar100"] else str(field.default)
        text = f"{describe(FitConfig).get(field.name) or describe(NetworkConfig)[field.name]} [default: {default}]"
        lines += textwrap.wrap(text, 78, initial_indent=f"  {field.name:<14}", subsequent_indent=" " * 16)
    title = "Settings for --set. Without a preset, sizes are solved from the features:"
    # \b keeps the lines as they are.
    return "\b\n" + "\n".join([title, *lines])


def explain_settings(config: type, but: type | None = None) -> str:
    """Name, default and description of each setting of a config, leaving out what `but` has with the same default."""
    same = {} if but is None else {field.name: field.default for field in fields(but)}
    lines = []
    for field in fields(config):
        if field.name in same and same[field.name] == field.default:
            continue
        text = f"{describe(config)[field.name]} [default: {field.default}]"
        lines += textwrap.wrap(text, 100, initial_indent=f"  {field.name:<20}", subsequent_indent=" " * 22)
    return "\n".join(lines)


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
