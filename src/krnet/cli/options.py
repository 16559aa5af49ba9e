"""Options that several commands share, and --set.

config dataclass -> describe -> help of an option (fit_option)
text of an option -> option(parser) -> value; a ValueError of the parser becomes exit code 2

The parsers are in krnet.config. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from krnet.config import describe, parse_setting, parse_size, unknown_setting
from krnet.errors import SettingError
from krnet.io.places import parse_place
from krnet.nn.paper_config import PRESETS
from krnet.train.config import FitConfig

T = TypeVar("T")


def option(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser so that its ValueError becomes a usage error with the same message.

    Without it, some versions of typer print more than the message, others only the value.
    """

    @wraps(parse)
    def parse_option(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parse_option


def merge(given: list[tuple[str, Any]], **options: Any) -> dict[str, Any]:
    """Join the settings of --set with settings that have their own option; None means that an option is not given."""
    merged = {name: value for name, value in options.items() if value is not None}
    for name, value in given:
        if name in merged:
            raise SettingError(f"{name} is given twice: {merged[name]!r} and {value!r}; give it once")
        merged[name] = value
    return merged


def fit_option(name: str, default: str, **options: Any) -> Any:
    """Make the option of a setting of FitConfig; its help is the text under the field, without its default."""
    text = describe(FitConfig)[name].partition(" By default ")[0]
    return typer.Option(f"--{name.replace('_', '-')}", help=text, show_default=default, **options)


def set_option(help: str) -> Any:
    return typer.Option(
        "--set", parser=option(parse_setting), metavar="NAME=VALUE", show_default=False,
        help=f"{help}; may be given several times.",
    )  # fmt: skip


def check_setting_names(given: Iterable[str]) -> None:
    """Refuse a name that no recorder has: it may be an argument of `api.record`, such as head or out."""
    from krnet.recorders.base import FIT_NAMES, get_recorder, recorder_names

    known = FIT_NAMES.union(*(get_recorder(name).setting_names for name in recorder_names()))
    for name in given:
        if name not in known:
            raise unknown_setting(name, known)


def read_trunk(path: Path | None, device: str | None) -> Any:
    """Read the trunk onto the device; None if no file is given."""
    from krnet.device import pick_device
    from krnet.nn.loaded import read_trunk

    return None if path is None else read_trunk(path, pick_device(device))


Set = Annotated[list[Any] | None, set_option("Any other setting by its name")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress on stderr.")]
Preset = Annotated[
    str | None,
    typer.Option(
        help=f"Named group of settings to start from: {', '.join(PRESETS)} (recorder paper, with network sizes of the "
        f"paper).",
        show_default="none",
    ),
]
# The default of --iterations where a time is given, and where krnet ends by itself.
NO_TIME_LIMIT = "no limit with --time-budget; krnet on a CPU: until it no longer pays, 5 minutes at most"
RecorderName = Annotated[
    str | None,
    typer.Option(
        help="Way to store the features: krnet, paper, autoencoder, pca, transform, quantized, pq, residual, "
        "local-search, rotation, zfp, fp8, images, raw or zstd.",
        show_default="krnet; with --preset, paper; with --start, the recorder of OLD.krn",
    ),
]
Budget = Annotated[
    Any,
    typer.Option(
        parser=option(parse_size),
        metavar="12MB|800kB|BYTES",
        help="Largest size of the file (MB = 10^6 bytes); settings are chosen for the best R2 within it.",
        show_default="krnet: one bit per value; others: none",
    ),
]
ListSettings = Annotated[bool, typer.Option("--list-settings", help="Print the settings that --set takes, and exit.")]
DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the data sets.", show_default="$KRNET_DATA, or the user's cache"),
]
Device = Annotated[str | None, fit_option("device", "cuda if there is one, else cpu")]
Key = Annotated[
    str | None,
    typer.Option(help="Name of the array in a file that holds several.", show_default="the only one, or 'features'"),
]
Lengths = Annotated[
    Any,
    typer.Option(
        parser=parse_place,
        metavar="L.npy",
        help="Lengths of the sequences that the samples form, one after the other; krnet replay --sequences replays "
        "whole ones.",
        show_default="the array lengths in the file of FEATURES, or none",
    ),
]
Images = Annotated[
    Path | None,
    typer.Option(
        metavar="IMAGES.npy",
        help="For recorder images: the images of the samples, uint8 (N, C, H, W) or (N, H, W, C).",
        show_default="none",
    ),
]
Trunk = Annotated[
    Path | None,
    typer.Option(
        metavar="TRUNK.pt2",
        help="For recorder images: the module that computes features from images, a file of torch.export or "
        "TorchScript, or the folder of a kril run.",
        show_default="none",
    ),
]
FeaturesFile = Annotated[
    Any,
    typer.Argument(
        parser=parse_place,
        metavar="FEATURES",
        help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr, or a folder of shards; a path or a URL.",
        show_default=False,
    ),
]
MaxBytes = Annotated[
    Any,
    typer.Option(
        parser=option(partial(parse_size, name="max_bytes")),
        metavar="2GB|BYTES",
        help="Largest memory that the recording may take; one that asks for more is refused before it gets any.",
        show_default="512MB, or 512 times the file if that is more",
    ),
]
RecordingFile = Annotated[
    Any,
    typer.Argument(
        parser=parse_place,
        metavar="FILE.krn",
        help="Recording to read: a path or a URL; or a folder of krnet encode.",
        show_default=False,
    ),
]
