"""`krnet extract`: the features that a network makes of images.

IMAGES or --data, --trunk -> krnet.extract -> OUT.safetensors, its size on stdout
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import Device, Json, Key, Quiet, option
from krnet.cli.output import say
from krnet.config import parse_channels

PARTS = ("train", "test")


def channels_option(help: str) -> Any:
    return typer.Option(
        parser=option(parse_channels),
        metavar="X|X,X,X",
        help=help,
        show_default="none; with --data, that of the data set",
    )


def extract(
    trunk: Annotated[
        Path,
        typer.Option(
            metavar="TRUNK.pt2",
            help="Module that computes features from images: a file of torch.export or TorchScript, or the folder of a "
            "kril run.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.safetensors",
            help="File to write; an existing one is replaced when the new one is complete.",
            show_default=False,
        ),
    ],
    images: Annotated[
        Path | None,
        typer.Argument(
            metavar="IMAGES",
            help="Images as .npy .npz .safetensors .h5 .zarr, float or uint8, (N, C, H, W); uint8 also (N, H, W, C). "
            "Give these or --data.",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="L.npy",
            help="Class of each image, an integer; the file keeps them.",
            show_default="none; with --data, that of the data set",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FOLDER",
            help="Data set whose images to take: cifar100, digits, or a folder of images.",
            show_default="none",
        ),
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="|".join(PARTS), help="With --data: the images for training or for testing.")
    ] = "train",
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the data sets.", show_default="$KRNET_DATA, or the user's cache"),
    ] = None,
    key: Key = None,
    mean: Annotated[
        Any,
        channels_option(
            "Subtracted from the images before the trunk, per channel, once uint8 images are divided by 255."
        ),
    ] = None,
    std: Annotated[Any, channels_option("What the images are divided by before the trunk, per channel.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images that pass through the trunk at once.")] = 256,
    dtype: Annotated[
        str, typer.Option(metavar="float32|float16|bfloat16", help="Type of the stored values.")
    ] = "float32",
    device: Device = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on where a stopped command left off: OUT.safetensors.partial; without it, start anew.",
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT.safetensors, the features of all images in their order, with labels; prints its size on stdout.

    The images of --data are normalised by the mean and std of the data set. IMAGES are not normalised, unless --mean
    and --std are given; only uint8 images are divided by 255. The output says which.

    The file holds the arrays features (N, ...) and, if there are labels, labels (N,); `krnet record` reads both. Memory
    stays bounded however many images there are. Until the file is complete, it is called OUT.safetensors.partial.

    \b
    Example:
      krnet extract images.npy --labels labels.npy --trunk trunk.pt2 --mean 0.5 --std 0.25 -o features.safetensors
      krnet extract --data cifar100 --trunk runs/kril -o features.safetensors
      krnet record features.safetensors -o features.krn --budget 12MB
    """
    if (images is None) == (data is None):
        raise typer.BadParameter("give either IMAGES or --data", param_hint="'IMAGES'")
    if part not in PARTS:
        raise typer.BadParameter(f"{part!r}; expected {' or '.join(PARTS)}", param_hint="'--part'")
    from krnet.cli.progress import Display
    from krnet.data import load
    from krnet.data.augment import centre
    from krnet.data.dataset import Split
    from krnet.data.registry import folders_of
    from krnet.device import pick_device
    from krnet.features.extract import extract as run
    from krnet.features.feature_file import partial_path, read_work
    from krnet.features.source import has_labels, open_features
    from krnet.io.overlap import refuse_overlap
    from krnet.nn.loaded import read_trunk

    folders = [] if data is None else folders_of(data, data_dir)
    refuse_overlap("extract", [out], [images, labels, trunk, *folders])
    try:
        with Display(quiet) as display:
            display.phase("reading the images")
            source: Any = images
            if data is not None:
                found = load(data, data_dir, say=(lambda text: None) if quiet else say)
                chosen: Split = getattr(found, part)
                source = Split(centre(chosen.images, found.crop), chosen.labels)
                mean, std = mean or found.mean, std or found.std
            torch_device = pick_device(device)
            run(
                read_trunk(trunk, torch_device), source, labels, out=out, batch_size=batch_size, dtype=dtype, mean=mean,
                std=std, device=torch_device, resume=resume, key=key, watch=display,
            )  # fmt: skip
    except KeyboardInterrupt:
        if partial_path(out).exists():
            say(f"stopped; what is done is kept in {partial_path(out)}. To go on, give the same command with --resume")
        else:
            say("stopped before there was anything to keep")
        raise typer.Exit(130) from None
    written, work = open_features(out, key="features"), read_work(out)
    result = {
        "path": str(out),
        "num_samples": len(written),
        "shape": list(written.shape),
        "dtype": dtype,
        "has_labels": has_labels(out),
        "image_dtype": work["image_dtype"],
        "mean": work["mean"],
        "std": work["std"],
        "bytes": out.stat().st_size,
        "device": str(torch_device),
    }
    output.show(result, output.extract_rows(result), as_json)
