"""The command `krnet append`.

RECORDING, FEATURES -> append -> OUT.krn, which holds the samples of both; a folder of krnet encode grows in its place
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from krnet.cli import output
from krnet.cli.options import Device, FeaturesFile, Json, Key, Lengths, MaxBytes, Quiet, Set, fit_option, merge, option
from krnet.cli.output import say
from krnet.cli.recording_rows import info_rows
from krnet.config import parse_duration, parse_size
from krnet.errors import SettingError

LOST_R2 = 0.1  # R2 of all samples that new ones may cost without a warning


def append(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.krn", help="Recording to add samples to; or a folder of krnet encode.", show_default=False
        ),
    ],
    features: FeaturesFile,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.krn",
            help="File to write, which may be FILE.krn; an existing one is replaced. Required, except for a folder, "
            "which grows in its place.",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="L.npy", help="Class of each new sample; required if FILE.krn has labels.", show_default="none"
        ),
    ] = None,
    lengths: Lengths = None,
    key: Key = None,
    budget: Annotated[
        Any,
        typer.Option(
            parser=option(parse_size),
            metavar="12MB|800kB|BYTES",
            help="Largest size of OUT.krn (MB = 10^6 bytes).",
            show_default="as many bytes a sample as FILE.krn, or as planned with --room",
        ),
    ] = None,
    iterations: Annotated[int | None, fit_option("iterations", "nothing is trained")] = None,
    time_budget: Annotated[
        Any, fit_option("time_budget", "nothing is trained", parser=option(parse_duration), metavar="SECONDS|10m|1h30m")
    ] = None,
    part_samples: Annotated[
        int | None,
        typer.Option(
            metavar="SAMPLES",
            help="For a folder: samples in a part, rounded up to a multiple of 256.",
            show_default="as many as take 32 MB, at most 65536",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="For a folder: go on where a stopped command left off."),
    ] = False,
    max_bytes: MaxBytes = None,
    device: Device = None,
    settings: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT.krn: the samples of FILE.krn, unchanged, and after them those of FEATURES; prints size and error.

    The features that FILE.krn was recorded from are not needed. Recorders that can do this: krnet, pca, quantized,
    transform and pq. A folder of krnet encode gets new parts, coded with its model; until all are there, it opens as
    before.

    \b
    Example:
      krnet append features.krn more.npy --labels more_labels.npy -o features.krn
      krnet append folder more.npy
    """
    from krnet import api
    from krnet.cli.progress import Display

    of_folder = {"part_samples": part_samples, "resume": resume or None}
    given = merge(settings or [], iterations=iterations, time_budget=time_budget, **of_folder)
    is_folder = path.is_dir()
    if out is None and not is_folder:
        raise SettingError(f"out is missing; expected the file that is to hold all samples. Give it, as in -o {path}")
    recording = api.open(path, device, max_bytes=max_bytes)
    try:
        with Display(quiet) as display:
            grown = recording.append(
                features, labels, lengths=lengths, out=out, budget=budget, key=key, watch=display, **given
            )
    except KeyboardInterrupt:
        kept = "finished parts are kept. To go on, give the same command with --resume"
        say(f"stopped; {kept if is_folder else 'nothing was written'}")
        raise typer.Exit(130) from None
    info = {"path": str(path if out is None else out), **grown.info()}
    output.show(info, info_rows(info), as_json)
    if grown.r2 < recording.r2 - LOST_R2:
        say(
            f"warning: R2 was {recording.r2:.3f} and is {grown.r2:.3f} with the new samples: what was learned from the "
            f"old ones does not fit them. Are they made by the same trunk, and scaled alike? If so, record all anew"
        )
