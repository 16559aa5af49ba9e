"""The command `krnet append`.

RECORDING, FEATURES -> append -> OUT.krn, which holds the samples of both
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

LOST_R2 = 0.1  # R2 of all samples that new ones may cost without a warning


def append(
    path: Annotated[Path, typer.Argument(metavar="FILE.krn", help="Recording to add samples to.", show_default=False)],
    features: FeaturesFile,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.krn",
            help="File to write, which may be FILE.krn; an existing one is replaced.",
            show_default=False,
        ),
    ],
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
    max_bytes: MaxBytes = None,
    device: Device = None,
    settings: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT.krn: the samples of FILE.krn, unchanged, and after them those of FEATURES; prints size and error.

    The features that FILE.krn was recorded from are not needed. Recorders that can do this: krnet, pca, quantized,
    transform and pq.

    \b
    Example:
      krnet append features.krn more.npy --labels more_labels.npy -o features.krn
    """
    from krnet import api
    from krnet.cli.progress import Display

    given = merge(settings or [], iterations=iterations, time_budget=time_budget)
    recording = api.open(path, device, max_bytes=max_bytes)
    try:
        with Display(quiet) as display:
            grown = recording.append(
                features, labels, lengths=lengths, out=out, budget=budget, key=key, watch=display, **given
            )
    except KeyboardInterrupt:
        say("stopped; nothing was written")
        raise typer.Exit(130) from None
    info = {"path": str(out), **grown.info()}
    output.show(info, info_rows(info), as_json)
    if grown.r2 < recording.r2 - LOST_R2:
        say(
            f"warning: R2 was {recording.r2:.3f} and is {grown.r2:.3f} with the new samples: what was learned from the "
            f"old ones does not fit them. Are they made by the same trunk, and scaled alike? If so, record all anew"
        )
