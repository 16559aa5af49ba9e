"""The command `krnet encode`.

FEATURES..., a fitted model -> krnet.encode -> OUT/, its size and its error on stdout
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import Device, Json, Key, Lengths, MaxBytes, Quiet, option
from krnet.cli.output import say
from krnet.cli.recording_rows import info_rows
from krnet.config import parse_share
from krnet.io.places import parse_place, place
from krnet.ranks import this_rank


def encode(
    features: Annotated[
        list[Any],
        typer.Argument(
            parser=parse_place,
            metavar="FEATURES...",
            help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr, or folders of shards; paths or URLs. The "
            "samples of several follow each other.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Any,
        typer.Option(
            parser=parse_place,
            metavar="MODEL.krn",
            help="Recording whose network, axes or codebooks code the samples, or a folder of krnet encode; path or "
            "URL.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Any,
        typer.Option(
            "--out",
            "-o",
            parser=parse_place,
            metavar="OUT",
            help="Folder to write, new or empty; a path or a URL.",
            show_default=False,
        ),
    ],
    labels: Annotated[
        Any,
        typer.Option(
            parser=parse_place,
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
            help="For recorder krnet: gradient steps that improve each code; 0 is the fastest.",
            show_default="2; without axes 20",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on where a stopped command left off: finished parts are checked and kept."),
    ] = False,
    share: Annotated[
        Any,
        typer.Option(
            parser=option(parse_share),
            metavar="K/N",
            help="Write only share K of N, counted from 0. N commands, on one machine or many, write all parts; "
            "torchrun gives each process its share.",
        ),
    ] = "0/1",
    max_bytes: MaxBytes = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT/: model.krn, the coded samples in part-*.krn, and last manifest.json; prints size and error on stdout.

    OUT opens as one recording: krnet info, verify and replay take it, and krnet.open in Python. Nothing is trained: the
    axes, codebooks or network of MODEL.krn code the samples, in memory that does not grow with their number. Samples
    that they do not fit are named in a warning. Recorders that can do this: krnet, pca, quantized, transform, pq,
    rotation, fp8 and raw.

    \b
    Example:
      krnet record some.npy --recorder pca --budget 2MB -o model.krn
      krnet encode --model model.krn all.npy -o all
      krnet verify all --against all.npy
      torchrun --nproc-per-node 8 -m krnet encode --model model.krn features/ -o all --resume
    """
    from krnet import encoding
    from krnet.cli.progress import Display
    from krnet.parts.folder import list_parts

    rank = this_rank()
    try:
        with Display(quiet or not rank.is_first) as display:
            recording = encoding.encode_share(
                model, features, labels, lengths=lengths, out=out, share=rank.share_of(share), is_waiting=rank.leads,
                part_samples=part_samples, moves=moves, resume=resume or rank.restarts > 0, device=rank.device(device),
                key=key, max_bytes=max_bytes, watch=display,
            )  # fmt: skip
    except KeyboardInterrupt:
        num_parts = len(list_parts(place(out)))
        if num_parts:
            say(f"stopped; {num_parts} parts are kept in {place(out)}. To go on, give the same command with --resume")
        else:
            say("stopped before there was anything to keep")
        raise typer.Exit(130) from None
    if not rank.is_first:
        return  # rank 0 prints the result
    if recording is None:
        num_parts = len(list_parts(place(out)))
        say(f"share {share[0]}/{share[1]} is done; {num_parts} parts are in {place(out)}, and others are still missing")
        return
    info = {"path": str(place(out)), **recording.info()}
    output.show(info, info_rows(info), as_json)
