"""`krnet extract`: the features that a network makes of images.

IMAGES or --data, --trunk -> krnet.extract -> OUT.safetensors, or DIR/ of shards; its size on stdout
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import DataDir, Device, Json, Key, Quiet, option
from krnet.cli.output import Rows, megabytes, say, shape_text
from krnet.config import parse_channels, parse_first_id, parse_share
from krnet.errors import RankError
from krnet.io.places import Place, is_url, place
from krnet.ranks import Rank, this_rank, wait

PARTS = ("train", "test")
SHARD_SIZE = "256MB"  # as in krnet.extract, which imports torch


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
        str,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.safetensors|DIR/",
            help="File to write; an existing one is replaced when the new one is complete. Or a folder of shards: a "
            "path or a URL.",
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
    data_dir: DataDir = None,
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
            help="Go on where a stopped command left off: OUT.safetensors.partial, or the shards that are in DIR/; "
            "without it, start anew.",
        ),
    ] = False,
    shard_size: Annotated[
        str, typer.Option(metavar="256MB|BYTES", help="With DIR/: size of a shard, at most (MB = 10^6 bytes).")
    ] = SHARD_SIZE,
    first_id: Annotated[
        Any,
        typer.Option(
            parser=option(parse_first_id),
            metavar="ID|end",
            help="With DIR/: sample ID of the first image; end: the one after the last that is there.",
        ),
    ] = "0",
    share: Annotated[
        Any,
        typer.Option(
            parser=option(parse_share),
            metavar="K/N",
            help="With DIR/: write only share K of N of the shards, counted from 0. N commands write all; torchrun "
            "gives each process its share.",
        ),
    ] = "0/1",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT.safetensors or DIR/, features of all images in their order, with labels; prints the size on stdout.

    The images of --data are normalised by the mean and std of the data set. IMAGES are not normalised, unless --mean
    and --std are given; only uint8 images are divided by 255. The output says which.

    The file holds the arrays features (N, ...) and, if there are labels, labels (N,); `krnet record` reads both. Memory
    does not grow with the number of images. Until the file is complete, it is called OUT.safetensors.partial.

    DIR/ holds the same as shards, files of at most --shard-size, and index.json. It is for features that are too many
    for one file or one machine: several commands may write at once, each its --share, and samples can be added later.

    \b
    Example:
      krnet extract images.npy --labels labels.npy --trunk trunk.pt2 --mean 0.5 --std 0.25 -o features.safetensors
      krnet extract --data cifar100 --trunk runs/kril -o features.safetensors
      krnet record features.safetensors -o features.krn --budget 12MB
      torchrun --nproc-per-node 8 -m krnet extract images.npy --trunk trunk.pt2 -o features/ --dtype bfloat16 --resume
      krnet extract more.npy --trunk trunk.pt2 -o features/ --dtype bfloat16 --first-id end
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
    from krnet.features.extract import is_folder
    from krnet.features.feature_file import partial_path
    from krnet.io.overlap import refuse_overlap
    from krnet.nn.loaded import read_trunk
    from krnet.progress import announcing

    rank = this_rank()
    _check_shared(rank, out, first_id)
    folders = [] if data is None else folders_of(data, data_dir)
    if not is_url(out):
        kind = "extract shards" if is_folder(out) else "extract"
        refuse_overlap(kind, [out], [images, labels, trunk, *folders])
    try:
        with Display(quiet or not rank.is_first) as display:
            display.phase("reading the images")
            source: Any = images
            if data is not None:
                found = load(data, data_dir, say=(lambda text: None) if quiet else say)
                chosen: Split = getattr(found, part)
                source = Split(centre(chosen.images, found.crop), chosen.labels)
                mean, std = mean or found.mean, std or found.std
            torch_device = pick_device(rank.device(device))
            run(
                read_trunk(trunk, torch_device), source, labels, out=out, batch_size=batch_size, dtype=dtype, mean=mean,
                std=std, device=torch_device, resume=resume or rank.restarts > 0, key=key, shard_size=shard_size,
                first_id=first_id, share=rank.share_of(share), watch=display,
            )  # fmt: skip
            if rank.leads:
                wait(partial(_missing, place(out)), out, announcing(display))
    except KeyboardInterrupt:
        if is_folder(out):
            say(f"stopped; the shards that are finished are kept in {out}. {_to_go_on(first_id)}")
        elif partial_path(Path(out)).exists():
            kept = partial_path(Path(out))
            say(f"stopped; what is done is kept in {kept}. To go on, give the same command with --resume")
        else:
            say("stopped before there was anything to keep")
        raise typer.Exit(130) from None
    if not rank.is_first:
        return  # rank 0 prints the result
    written = _folder(place(out)) if is_folder(out) else _file(Path(out))
    result = {"path": str(place(out)) if is_url(out) else out, "dtype": dtype, "device": str(torch_device), **written}
    output.show(result, extract_rows(result), as_json)


def _check_shared(rank: Rank, out: str, first_id: int | str) -> None:
    """Refuse what several processes cannot do together."""
    from krnet.features.extract import is_folder

    if rank.count > 1 and not is_folder(out):
        raise RankError(
            f"{out}: is one file, and torchrun has started {rank.count} processes; expected a folder, of which each "
            f"writes its own shards. Give -o {Path(out).stem}/, or start this command without torchrun"
        )
    if rank.count > 1 and first_id == "end":
        raise RankError(
            "--first-id is end, which moves while several processes write; expected a number. Give the number of "
            "samples that are there, which `krnet extract` has printed"
        )


def _missing(folder: Place) -> tuple[str, int]:
    """Which samples are missing in the index, in words, and how many files there are."""
    from krnet.features.shards.index import INDEX_NAME
    from krnet.features.shards.ranges import text
    from krnet.features.shards.source import read_index
    from krnet.io.folders import list_folder

    files = list_folder(folder)
    if INDEX_NAME not in files:
        return "all samples", len(files)
    missing = read_index(folder).missing
    return f"samples {text(missing)}" if missing else "", len(files)


def _to_go_on(first_id: int | str) -> str:
    """What to do after a stop."""
    if first_id != "end":
        return "To go on, give the same command with --resume"
    return "To go on, give the same command with --resume, and with the first ID of these samples for --first-id"


def _file(out: Path) -> dict[str, Any]:
    from krnet.features.feature_file import read_work
    from krnet.features.labels import has_labels
    from krnet.features.source import open_features

    written, work = open_features(out, key="features"), read_work(out)
    return {
        "num_samples": len(written), "shape": list(written.shape), "has_labels": has_labels(out),
        **{name: work[name] for name in ("image_dtype", "mean", "std")}, "bytes": out.stat().st_size,
    }  # fmt: skip


def _folder(out: Place) -> dict[str, Any]:
    """What the folder holds by now: other commands may still be at work."""
    from krnet.features.shards.ranges import text
    from krnet.features.shards.source import read_index

    index = read_index(out)
    return {
        "num_samples": sum(shard.num_samples for shard in index.shards), "shape": list(index.origin.shape),
        "has_labels": index.origin.has_labels,
        **{name: index.origin.made_by[name] for name in ("image_dtype", "mean", "std")},
        "bytes": sum(shard.size_bytes for shard in index.shards), "num_shards": len(index.shards),
        "missing": text(index.missing),
    }  # fmt: skip


def extract_rows(written: Mapping[str, Any]) -> Rows:
    samples = f"{written['num_samples']:,} samples of {shape_text(written['shape'])}, {written['dtype']}"
    return [
        ("images", normalisation_text(written)),
        ("features", f"{written['path']}: {samples}"),
        ("labels", "in the same file" + "s" * ("num_shards" in written) if written["has_labels"] else "none"),
        *_written_rows(written),
    ]


def _written_rows(written: Mapping[str, Any]) -> Rows:
    """A file; or shards, and which samples other commands still have to write."""
    if "num_shards" not in written:
        return [("file", megabytes(written["bytes"]))]
    rows = [("shards", f"{written['num_shards']:,}, {megabytes(written['bytes'])}")]
    return [*rows, ("missing", f"samples {written['missing']}")] if written["missing"] else rows


def normalisation_text(written: Mapping[str, Any]) -> str:
    """Say what was done to the images before the trunk."""
    steps = ["divided by 255"] if written["image_dtype"] == "uint8" else []
    for name, verb in (("mean", "minus mean"), ("std", "divided by std")):
        if written[name] is not None:
            steps.append(f"{verb} {', '.join(f'{value:.4g}' for value in written[name])}")
    if written["mean"] is None and written["std"] is None:
        return f"not normalised{', only ' + steps[0] if steps else ''} (--mean and --std would normalise them)"
    return f"normalised: {', then '.join(steps)}"
