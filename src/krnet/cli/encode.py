"""The command `krnet encode`.

FEATURES..., a fitted model -> krnet.encode -> OUT/, its size and its error on stdout
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from krnet.cli import output
from krnet.cli.options import Device, Json, Key, Lengths, MaxBytes, Quiet
from krnet.cli.output import say


def encode(
    features: Annotated[
        list[Path],
        typer.Argument(
            metavar="FEATURES...",
            help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr; the samples of several follow each other.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Path,
        typer.Option(
            metavar="MODEL.krn",
            help="Recording whose network, axes or codebooks code the samples, or a folder of krnet encode.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="OUT", help="Folder to write; a new or empty one.", show_default=False),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="L.npy",
            help="Class of each sample, an integer; the folder keeps them.",
            show_default="those in the files of FEATURES",
        ),
    ] = None,
    lengths: Lengths = None,
    key: Key = None,
    part_samples: Annotated[
        int | None,
        typer.Option(
            metavar="SAMPLES",
            help="Samples in a part, rounded up to a multiple of 256; a stopped command loses at most one part.",
            show_default="as many as take 32 MB, at most 65536",
        ),
    ] = None,
    moves: Annotated[
        int | None,
        typer.Option(
            help="For recorder krnet: how often a code is moved towards the least error; 0 is the fastest.",
            show_default="few",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on where a stopped command left off: finished parts are checked and kept."),
    ] = False,
    max_bytes: MaxBytes = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT/: model.krn, the coded samples in part-*.krn, and last manifest.json; prints size and error on stdout.

    OUT opens as one recording: krnet info, verify and replay take it, and krnet.open in Python. Nothing is trained: the
    samples are coded with what MODEL.krn was fitted to, in memory that does not grow with their number. Samples that it
    does not fit are named in a warning. Recorders that can do this: krnet, pca, quantized, transform, pq, rotation, fp8
    and raw.

    \b
    Example:
      krnet record some.npy --recorder pca --budget 2MB -o model.krn
      krnet encode --model model.krn all.npy -o all
      krnet verify all --against all.npy
    """
    from krnet import encoding
    from krnet.cli.progress import Display

    try:
        with Display(quiet) as display:
            recording = encoding.encode(
                model, features, labels, lengths=lengths, out=out, part_samples=part_samples, moves=moves,
                resume=resume, device=device, key=key, max_bytes=max_bytes, watch=display,
            )  # fmt: skip
    except KeyboardInterrupt:
        num_parts = len(list(out.glob("part-*.krn")))
        if num_parts:
            say(f"stopped; {num_parts} parts are kept in {out}. To go on, give the same command with --resume")
        else:
            say("stopped before there was anything to keep")
        raise typer.Exit(130) from None
    info = {"path": str(out), **recording.info()}
    output.show(info, output.info_rows(info), as_json)
