"""The commands of a recording: `krnet plan`, `record`, `info`, `verify` and `replay`.

options -> plan   -> size of a recording, on stdout; of FEATURES also the R2 to expect
FEATURES -> record -> OUT.krn -> info, verify -> table or JSON on stdout
                              -> replay       -> X.npy, Y.npy
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from krnet.cli.options import (
    NO_TIME_LIMIT,
    Budget,
    Device,
    Images,
    Json,
    Key,
    Lengths,
    ListSettings,
    MaxBytes,
    Preset,
    Quiet,
    RecorderName,
    RecordingFile,
    Set,
    Trunk,
    fit_option,
    merge,
    option,
)
from krnet.cli.output import say
from krnet.config import parse_counts, parse_duration, parse_ids, parse_shape, parse_sizes, unknown_setting
from krnet.io.places import parse_place, place
from krnet.ranks import this_rank
from krnet.train.config import SCHEDULES, FitConfig


def plan(
    features: Annotated[
        Any,
        typer.Argument(
            parser=parse_place,
            metavar="[FEATURES]",
            help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr, or a folder of shards; a path or a URL. A "
            "sample of them is recorded, to predict R2. Give this or --shape.",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        Any,
        typer.Option(parser=option(parse_shape), metavar="C,H,W", help="Shape of one feature map.", show_default=False),
    ] = None,
    class_counts: Annotated[
        Any,
        typer.Option(
            parser=option(parse_counts),
            metavar="N,N,...",
            help="With --shape: number of samples of each class; 500x50 means 50 classes of 500. Give this or "
            "--num-samples.",
            show_default=False,
        ),
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(
            help="With --shape: number of samples, for features without classes. Give this or --class-counts.",
            show_default=False,
        ),
    ] = None,
    preset: Preset = None,
    recorder: RecorderName = None,
    budget: Budget = None,
    budgets: Annotated[
        Any,
        typer.Option(
            parser=option(parse_sizes),
            metavar="SIZE,SIZE,...",
            help="With FEATURES: sizes of the file (MB = 10^6 bytes).",
            show_default="1/4, 1 and 4 bits a value",
        ),
    ] = None,
    recorders: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="With FEATURES: ways to store them; pca:components=64 fixes a setting.",
            show_default="all that learn from a sample",
        ),
    ] = None,
    time_budget: Annotated[
        Any,
        typer.Option(
            parser=option(parse_duration),
            metavar="SECONDS|10m",
            help="With FEATURES: time for each fit of a network to the sample.",
            show_default="5 s",
        ),
    ] = None,
    key: Key = None,
    settings: Set = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes nothing; prints on stdout what to expect of a recording before it is made.

    With FEATURES: the R2 that each recorder would reach in files of three sizes, the time that it would take on this
    machine, and which recorder to take. All follow from a sample of FEATURES, in about a minute.

    With --shape: the size in bytes of the file that `krnet record` would write with the same options, and that of the
    features. For recorder paper, which --preset selects, it is printed beside the size of the paper's autoencoder.

    \b
    Example:
      krnet plan features.npy
      krnet plan features.npy --budgets 2MB,8MB --recorders krnet,pca,transform
      krnet plan --shape 64,8,8 --class-counts 500x50
      krnet plan --shape 256,14,14 --class-counts 1296x50 --preset imagenet-published
    """
    given = merge(settings or [])
    of_shape = {"class_counts": class_counts, "num_samples": num_samples, "preset": preset, "recorder": recorder}
    of_shape |= {"budget": budget, "set": given or None}
    of_features = {"budgets": budgets, "recorders": recorders, "time_budget": time_budget, "key": key, "device": device}
    if (features is None) == (shape is None):
        raise typer.BadParameter("give either FEATURES or --shape")
    _refuse_others(of_features if features is None else of_shape, "FEATURES" if features is None else "--shape")
    if features is not None:
        _predict(features, of_features, as_json, quiet)
        return
    if (num_samples is None) == (class_counts is None):
        raise typer.BadParameter("give either --class-counts or --num-samples")
    from krnet.bench.plan import plan as make_plan

    _check_setting_names(given)
    table = make_plan(
        shape, num_samples, class_counts=class_counts, preset=preset, recorder=recorder, budget=budget, **given
    )
    output.show(table, output.plan_rows(table), as_json)


def _refuse_others(options: Mapping[str, Any], needed: str) -> None:
    """Refuse options that apply only beside `needed`, which is not given."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"--{name.replace('_', '-')} applies only to {needed}; leave it out")


def _predict(features: Any, options: Mapping[str, Any], as_json: bool, quiet: bool) -> None:
    from krnet.bench.predict import predict
    from krnet.cli.progress import Display

    chosen = {name: value for name, value in options.items() if value is not None}
    if "recorders" in chosen:
        chosen["recorders"] = [part for part in chosen["recorders"].split(",") if part]
    with Display(quiet) as display:
        result = predict(features, watch=display, **chosen)
    if as_json:
        output.show_json(result)
    else:
        output.show_prediction(result)


def record(
    features: Annotated[
        Any,
        typer.Argument(
            parser=parse_place,
            metavar="FEATURES",
            help="Feature maps (N, ...) as .npy .npz .safetensors .h5 .zarr, or a folder of shards; a path or a URL; "
            "required.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.krn",
            help="File to write; required. An existing one is replaced when the new one is complete.",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="L.npy", help="Class of each sample, an integer; the file keeps them.", show_default="none"
        ),
    ] = None,
    lengths: Lengths = None,
    key: Key = None,
    preset: Preset = None,
    iterations: Annotated[
        int | None,
        fit_option(
            "iterations",
            ", ".join(f"{number} with --schedule {name}" for name, number in SCHEDULES.items()) + f", {NO_TIME_LIMIT}",
        ),
    ] = None,
    budget: Budget = None,
    room: Annotated[
        int | None,
        typer.Option(
            metavar="SAMPLES",
            help="Number of samples that the file will hold once it has grown (krnet append, --start); the budget, "
            "also the default one, is for all of them.",
            show_default="the samples of FEATURES",
        ),
    ] = None,
    target_r2: Annotated[
        float | None,
        typer.Option(
            help="R2 to reach with the smallest file, instead of --budget; a few whole fits search for it.",
            show_default="none",
        ),
    ] = None,
    stop_at_r2: Annotated[float | None, fit_option("stop_at_r2", "none")] = None,
    time_budget: Annotated[
        Any, fit_option("time_budget", "none", parser=option(parse_duration), metavar="SECONDS|10m|1h30m")
    ] = None,
    schedule: Annotated[str | None, fit_option("schedule", FitConfig.schedule, metavar="|".join(SCHEDULES))] = None,
    seed: Annotated[int | None, fit_option("seed", str(FitConfig.seed))] = None,
    device: Device = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue a stopped run from its checkpoint OUT.krn.ckpt, and leave a finished OUT.krn as it is. A "
            "search for --target-r2 has no checkpoint and starts again.",
        ),
    ] = False,
    start: Annotated[
        Any,
        typer.Option(
            parser=parse_place,
            metavar="OLD.krn",
            help="Start from an earlier recording, which holds the first samples of FEATURES; krnet, pca, quantized, "
            "transform and pq keep their replays unchanged.",
            show_default="none",
        ),
    ] = None,
    recorder: RecorderName = None,
    images: Images = None,
    trunk: Trunk = None,
    settings: Set = None,
    list_all: ListSettings = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes OUT.krn, from which any sample can be replayed by its ID; prints its size and its error on stdout.

    The file also holds the settings it was made with. While a network is fitted, a checkpoint OUT.krn.ckpt lies beside
    it.

    \b
    Example:
      krnet record features.npy --labels labels.npy -o features.krn --budget 12MB
      krnet record --recorder pca --list-settings
      krnet record features.npy -o small.krn --recorder pca --budget 6.5MB
      torchrun --nproc-per-node 8 -m krnet record features.npy -o features.krn --budget 12MB
      krnet record features.npy -o jpeg.krn --recorder images --images images.npy --trunk trunk.pt2 --set mean=0.5
    """
    from krnet import api, catalog
    from krnet.cli.progress import Display
    from krnet.device import pick_device
    from krnet.io.overlap import refuse_overlap
    from krnet.recorders.base import default_recorder, get_recorder
    from krnet.team import joined

    if list_all:
        name = recorder or default_recorder(preset, None if start is None else api.open(start))
        print(catalog.settings(get_recorder(name).name))
        return
    if features is None or out is None:
        raise typer.BadParameter("FEATURES and --out are needed", param_hint="'FEATURES'")
    rank = this_rank()
    resume = resume or rank.restarts > 0
    given = merge(
        settings or [],
        iterations=iterations,
        stop_at_r2=stop_at_r2,
        time_budget=time_budget,
        schedule=schedule,
        seed=seed,
        device=rank.device(device),
    )
    _check_setting_names(given)
    refuse_overlap("record", [out], [features, labels, lengths, images, trunk, start])
    was_finished = resume and out.exists()
    checkpoint = out.with_name(out.name + ".ckpt")
    old_write_time = _write_time_ns(checkpoint)
    try:
        with Display(quiet or not rank.is_first) as display, joined(rank, pick_device(given.get("device"))):
            recording = api.record(
                features, labels, lengths=lengths, recorder=recorder, preset=preset, resume=resume, out=out, key=key,
                start=start, images=images, trunk=_read_trunk(trunk, device), watch=display, budget=budget, room=room,
                target_r2=target_r2, **given,
            )  # fmt: skip
    except KeyboardInterrupt:
        if not rank.is_first:
            pass  # rank 0 says it
        elif _write_time_ns(checkpoint) not in (None, old_write_time):
            say(f"stopped; checkpoint saved in {checkpoint}. To go on, give the same command with --resume")
        elif resume and old_write_time is not None:
            say(f"stopped before the fit went on; {checkpoint} is as it was. Give the same command again")
        else:
            say("stopped before there was anything to save")
        raise typer.Exit(130) from None
    if not rank.is_first:
        return
    if was_finished:
        say(f"{out}: recorded already; nothing to resume")
    info = {"path": str(out), **recording.info()}
    output.show(info, output.info_rows(info), as_json)
    if info["twice_as_long"] and target_r2 is None and not was_finished:
        say(output.outlook_text(info))
    target = stop_at_r2 if target_r2 is None else target_r2
    if target is not None and info["r2"] < target:
        advice = (
            f"Record again with more --iterations (these were {info['iterations']:,}), a longer --time-budget, or a "
            f"larger --budget"
            if target_r2 is None
            else "No larger file was better: leave out settings that hold it back, fit longer where there is a network "
            "(--iterations, --time-budget), or take another recorder"
        )
        r2_text = output.number_below(info["r2"], target)
        say(f"warning: {out} was written, but its R2 of {r2_text} is below the target of {target}. {advice}")


def _check_setting_names(given: Iterable[str]) -> None:
    """Refuse a name that no recorder has: it may be an argument of `api.record`, such as head or out."""
    from krnet.recorders.base import FIT_NAMES, get_recorder, recorder_names

    known = FIT_NAMES.union(*(get_recorder(name).setting_names for name in recorder_names()))
    for name in given:
        if name not in known:
            raise unknown_setting(name, known)


def _read_trunk(path: Path | None, device: str | None) -> Any:
    """Read the trunk onto the device; None if no file is given."""
    from krnet.device import pick_device
    from krnet.nn.loaded import read_trunk

    return None if path is None else read_trunk(path, pick_device(device))


def _write_time_ns(path: Path) -> int | None:
    """Return when a file was last written; None if there is no such file."""
    return path.stat().st_mtime_ns if path.exists() else None


def info(path: RecordingFile, max_bytes: MaxBytes = None, as_json: Json = False) -> None:
    """Writes nothing; prints on stdout what a recording holds, its size and its error.

    Only the header is read; `krnet verify` checks the whole file.

    \b
    Example:
      krnet info features.krn --json
    """
    from krnet import api

    summary = {"path": str(place(path)), **api.open(path, max_bytes=max_bytes).info()}
    output.show(summary, output.info_rows(summary), as_json)


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

    network = _read_trunk(trunk, device)
    if images is None:
        refuse_without_images(pictures=pictures, mean=mean, std=std, set=settings)
    needed = images is None or bool(api.open(path, max_bytes=max_bytes).lacks)
    report = api.verify(path, against, device=device, key=key, trunk=network if needed else None, max_bytes=max_bytes)
    report["path"] = str(place(path))
    rows = output.verify_rows(report)
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
    recording = api.open(path, device, precision, trunk=_read_trunk(trunk, device), max_bytes=max_bytes)
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
    output.show(written, output.replay_rows(written), as_json)
