"""The commands that read a recording: `krnet info`, `verify` and `replay`.

FILE.krn -> info, verify -> table or JSON on stdout
         -> replay       -> X.npy, Y.npy
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.invert import (
    InversionSet,
    InvertImages,
    Pictures,
    TrunkMean,
    TrunkStd,
    inversion_rows,
    refuse_without_images,
    run_inversion,
)
from krnet.cli.options import Device, Json, Key, MaxBytes, Quiet, RecordingFile, Trunk, option, read_trunk
from krnet.cli.recording_rows import info_rows, replay_rows, verify_rows
from krnet.config import parse_ids
from krnet.io.places import parse_place, place


def info(path: RecordingFile, max_bytes: MaxBytes = None, as_json: Json = False) -> None:
    """Writes nothing; prints on stdout what a recording holds, its size and its error.

    Only the header is read; `krnet verify` checks the whole file.

    \b
    Example:
      krnet info features.krn --json
    """
    from krnet import api

    summary = {"path": str(place(path)), **api.open(path, max_bytes=max_bytes).info()}
    output.show(summary, info_rows(summary), as_json)


def verify(
    path: RecordingFile,
    against: Annotated[
        Any,
        typer.Option(
            parser=parse_place,
            metavar="FEATURES",
            help="The recorded features, with those of `krnet append` after them: the error of their replays is "
            "measured too.",
            show_default="none",
        ),
    ] = None,
    key: Key = None,
    trunk: Trunk = None,
    max_bytes: MaxBytes = None,
    images: InvertImages = None,
    pictures: Pictures = None,
    mean: TrunkMean = None,
    std: TrunkStd = None,
    settings: InversionSet = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Writes nothing; checks every byte of a recording, decodes a few samples, and prints the result on stdout.

    With --pictures it writes DIR/inversion.png, which replaces an existing one.

    The file holds the values that these samples had when it was written: they show whether this machine decodes it
    alike. Exit code 1 means that something is wrong with the file.

    \b
    Example:
      krnet verify features.krn --against features.npy
      krnet verify features.krn --against features.npy --invert images.npy --pictures seen
    """
    from krnet import api

    network = read_trunk(trunk, device)
    if images is None:
        refuse_without_images(pictures=pictures, mean=mean, std=std, set=settings)
    needed = images is None or bool(api.open(path, max_bytes=max_bytes).lacks)
    report = api.verify(path, against, device=device, key=key, trunk=network if needed else None, max_bytes=max_bytes)
    report["path"] = str(place(path))
    rows = verify_rows(report)
    if images is not None:
        real = {"trunk": network} if against is None or needed else {"features": against, "features_key": key}
        report["inversion"] = run_inversion(
            path, images, settings, **real, mean=mean, std=std, pictures=pictures, device=device
        )
        rows += inversion_rows(report["inversion"])
    output.show(report, rows, as_json)


def replay(
    path: RecordingFile,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="X.npy",
            help="File for the features; an existing one is replaced.",
            show_default=False,
        ),
    ],
    ids: Annotated[
        Any,
        typer.Option(
            "--ids",
            parser=option(parse_ids),
            metavar="IDS",
            help="Sample IDs: 5, 0:100, ::10, 5,3,7:9 or -1 (the last), or @FILE.npy with integers or a mask.",
            show_default="all",
        ),
    ] = None,
    sequences: Annotated[
        Any,
        typer.Option(
            parser=option(parse_ids),
            metavar="NUMBERS",
            help="Sequences, one after the other, instead of --ids; written as --ids is.",
            show_default="none",
        ),
    ] = None,
    labels_out: Annotated[
        Path | None, typer.Option(metavar="Y.npy", help="File for the labels.", show_default="none")
    ] = None,
    lengths_out: Annotated[
        Path | None,
        typer.Option(metavar="L.npy", help="With --sequences: file for their lengths.", show_default="none"),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="exact|fast", help="exact: fp32. fast: bf16 on a GPU; on a CPU the same as exact.")
    ] = "exact",
    trunk: Trunk = None,
    max_bytes: MaxBytes = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes X.npy, the replayed features as float32 (N, ...) in the order of the IDs; with --labels-out also Y.npy.

    \b
    Example:
      krnet replay features.krn --ids 0:100 -o first.npy
      krnet replay texts.krn --sequences 0:10 -o first.npy --lengths-out lengths.npy
    """
    from krnet import api, export
    from krnet.cli.progress import Display
    from krnet.io.overlap import refuse_overlap

    if ids is not None and sequences is not None:
        raise typer.BadParameter("give either --ids or --sequences")
    if lengths_out is not None and sequences is None:
        raise typer.BadParameter("--lengths-out applies only to --sequences; leave it out")
    chosen = [given for given in (ids, sequences) if isinstance(given, Path)]
    refuse_overlap("replay", [out, labels_out, lengths_out], [path, trunk, *chosen])
    recording = api.open(path, device, precision, trunk=read_trunk(trunk, device), max_bytes=max_bytes)
    lengths = None
    if sequences is None:
        chosen_ids = export.choose_ids(recording, parse_ids(":") if ids is None else ids)
    else:
        numbers = export.choose_ids(recording.sequences, sequences)
        chosen_ids, lengths = recording.sequences.ids(numbers), recording.sequences.lengths[numbers]
    with Display(quiet) as display:
        num_bytes = export.write_replays(
            recording,
            chosen_ids,
            out,
            labels_path=labels_out,
            lengths=lengths,
            lengths_path=lengths_out,
            watch=display,
        )
    written = {
        "path": str(out),
        "labels_path": None if labels_out is None else str(labels_out),
        "num_samples": len(chosen_ids),
        "shape": list(recording.shape),
        "dtype": "float32",
        "bytes": num_bytes,
        "precision": precision,
        "device": str(recording.device),
    }
    output.show(written, replay_rows(written), as_json)
