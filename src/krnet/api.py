"""The calls a user makes: record, open, verify.

features, labels -> record -> OUT.krn -> open -> Recording
                                      -> verify -> report, or the error that says what is wrong
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from krnet.coding.search import smallest_reaching
from krnet.config import check_choice, check_int, check_range, from_dict, parse_size, say_size
from krnet.device import pick_device
from krnet.errors import BudgetError, FeatureError, FidelityError, InputError, NonFiniteLossError, ProbeError
from krnet.features.metrics import fidelity
from krnet.features.samples import Samples
from krnet.features.source import check_labels, open_features
from krnet.features.stats import normalise, scan
from krnet.finished import check_finished
from krnet.io import archive
from krnet.io.atomic import refuse_overwriting
from krnet.nn.paper_config import PAPER_FITS
from krnet.recorders.base import FIT_NAMES, PROBE_SAMPLES, PROBE_VALUES, Content, Job, Recorder, check_names, choose
from krnet.recording import PRECISIONS, Recording
from krnet.train.config import FitConfig
from krnet.train.loop import Status

AnyPath = str | os.PathLike[str]
FIT_NOISE = 0.01  # share by which errors of networks differ whose sizes hardly do
PROBE_TOLERANCE = 1e-4  # of the largest value; devices and thread counts differ by about 1e-6


def record(
    features: Any,
    labels: Any = None,
    *,
    recorder: str = "krnet",
    preset: str | None = None,
    iterations: int | None = None,
    target_r2: float | None = None,
    time_budget: float | None = None,
    budget: int | str | None = None,
    room: int | None = None,
    resume: bool = False,
    out: AnyPath | None = None,
    seed: int = 0,
    device: str | None = None,
    head: nn.Module | None = None,
    start: AnyPath | Recording | None = None,
    key: str | None = None,
    watch: Callable[[Status, float], None] | None = None,
    over_budget: bool = False,
    **settings: Any,
) -> Recording:
    """Record features so that any sample can be replayed by its ID.

    features   tensor, array, memmap, path (.npy .npz .safetensors .h5 .zarr) or anything with len() and [i]
    labels     one integer a sample; samples of a class then share their group vectors
    budget     most bytes of the file, as 12_000_000 or "12MB" (MB = 10^6): the best recording of at most that size
    room       samples that the file is to hold when it has grown (see start): the budget is for all of them
    target_r2  the smallest file that reaches it, found by a few whole fits (each of `iterations` or `time_budget`);
               of krnet with a size given (preset, start, network="paper", d0, c0, ...): where the fit of it stops
    out        file to write; by default a temporary one that lives as long as the Recording
    resume     go on from a checkpoint beside `out`; a finished file is returned at once. A search for target_r2 keeps
               no checkpoint and starts anew
    head       a frozen module to see the features through (L_kr2, weight `gamma`)
    start      an earlier recording to start from, whose samples come first: they need not be learnt anew. A recorder
               that grows (compact krnet, pca, quantized, transform, pq) leaves them as they are; images encodes anew
               only what a budget wants smaller
    key        which array of a file that holds several
    watch      called with (Status, R2 of the latest batches) while fitting; the Status of a search says which fit
    over_budget  where the budget cannot be kept, write the smallest file instead of refusing

    Other settings are those of the recorder (d0, c0, ...) and, where that fits a network (krnet, autoencoder), of
    FitConfig (batch_size, schedule, lr, ...).
    """
    chosen = choose(recorder)
    stops = {"iterations": iterations, "target_r2": target_r2, "time_budget": time_budget}
    given = {name: value for name, value in settings.items() if name in FIT_NAMES}
    given |= {name: value for name, value in stops.items() if value is not None}
    check_names(chosen, [*settings, *given])
    paper = PAPER_FITS.get(preset or "", {}) if given.get("schedule") == "paper" else {}
    limit = None if budget is None else parse_size(budget)
    own = {name: value for name, value in settings.items() if name not in FIT_NAMES}
    target = None if chosen.stops_at_target(preset, start, own) else given.pop("target_r2", None)
    fit = from_dict(FitConfig, {**paper, "seed": seed, "device": device, **given})
    if target is not None:
        check_range("target_r2", target, -inf, 1)
        if limit is not None:
            raise InputError(
                f"budget and target_r2 are given, and recorder {chosen.name} takes one of them: the best file of a "
                f"size, or the smallest that is good enough. Leave one out"
            )

    if room is not None:
        check_int("room", room, 1)
        if limit is None or not chosen.grows:
            raise InputError(
                f"room is {room}, which says what a budget is for where a recording is to grow; "
                + (f"recorder {chosen.name} does not" if limit is not None else "there is no budget")
                + ". Leave room out"
            )
    keep, path = _destination(out)
    inputs = [item for item in (features, labels, settings.get("images")) if isinstance(item, str | os.PathLike)]
    refuse_overwriting([path], inputs)
    source = open_features(features, key=key)
    samples = Samples(len(source), source.shape, check_labels(labels, len(source)))
    if room is not None and room < len(source):
        raise InputError(
            f"room is {room}, fewer than the {len(source)} samples there are; expected as many as the file is to hold "
            f"when it has grown. Raise room, or leave it out"
        )
    if resume and path.exists():
        # Features in memory may have been made anew, and a GPU rounds as it likes; those of a file are what they were.
        digest = scan(source).digest if isinstance(features, str | os.PathLike) else None
        check_finished(path, samples, chosen, own, digest, None if over_budget else limit)
        return open(path, pick_device(fit.device), trunk=settings.get("trunk"))
    stats = scan(source)
    job = Job(
        source=source,
        samples=samples,
        stats=stats,
        fit=fit,
        device=pick_device(fit.device),
        preset=preset,
        settings=own,
        head=head,
        start=open(start) if isinstance(start, str | os.PathLike) else start,
        room=room,
        checkpoint=None if out is None else _checkpoint_path(path),
        resume=resume,
        watch=watch,
    )
    if target is not None:
        tensors, metadata = _smallest_reaching(job, chosen, target)
        metadata["fit"]["target_r2"] = target
    else:
        if limit is not None:
            job = replace(job, settings={**chosen.for_budget(job, limit), **job.settings})
        tensors, metadata = describe(job, chosen, chosen.fit(job))
        if limit is not None:
            metadata["fit"]["budget"] = limit
        if limit is not None and not over_budget:
            _check_size(path, chosen, metadata, archive.file_bytes(tensors, metadata), limit)
    archive.write(path, tensors, metadata)
    _checkpoint_path(path).unlink(missing_ok=True)
    return Recording(archive.open_archive(path), job.device, keep=keep, trunk=job.settings.get("trunk"))


def _smallest_reaching(job: Job, recorder: Recorder, target: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What to write: the smallest file that reaches an R2, or the best where none does."""
    made: dict[str, tuple[int, float, Any]] = {}  # the latest, by its settings: a budget may change nothing
    results: list[str] = []

    def make(budget: int) -> tuple[int, float, Any]:
        settings = {**recorder.for_budget(job, budget), **job.settings}
        name = repr(sorted(settings.items()))
        if name not in made:
            made.clear()
            label = " after ".join([f"fit {len(results) + 1}: {say_size(budget)}", *results[-1:]])
            watch = _labelled(job.watch, label) if job.watch else None
            own = replace(job, settings=settings, checkpoint=None, resume=False, watch=watch)
            tensors, metadata = describe(own, recorder, recorder.fit(own))
            num_bytes, r2 = archive.file_bytes(tensors, metadata), metadata["metrics"]["r2"]
            results.append(f"R2 {r2:.4f} in {say_size(num_bytes)}")
            made[name] = num_bytes, r2, (tensors, metadata)
        return made[name]

    return smallest_reaching(
        target,
        make,
        feature_bytes=4 * job.stats.count,
        guess=recorder.likely_bytes(job, target),
        noise=FIT_NOISE if recorder.takes_head else 0.0,
    )


def _labelled(watch: Callable[[Status, float], None], label: str) -> Callable[[Status, float], None]:
    return lambda status, r2: watch(replace(status, label=label), r2)


def _check_size(path: Path, recorder: Recorder, metadata: Mapping[str, Any], found: int, budget: int) -> None:
    if found > budget:
        settings = ", ".join(f"{name} {value}" for name, value in metadata["settings"].items())
        grown = metadata["fit"]["start"] is not None
        error = BudgetError(
            f"{path}: takes {found} bytes with recorder {recorder.name} ({settings}), the smallest it found for "
            f"these features and settings; the budget is {budget}. Nothing was written. Raise the budget to {found} "
            + (
                "bytes, or record all samples anew; a file that is to grow keeps to a budget if the first recording is "
                "made with room (--room) for as many samples as it will hold"
                if grown
                else "bytes, leave out settings of your own, or take another recorder"
            )
        )
        error.needed = found
        raise error


def open(
    path: AnyPath,
    device: str | torch.device | None = "cpu",
    precision: str = "exact",
    *,
    trunk: nn.Module | None = None,
) -> Recording:
    """Open a recording file; device None takes the GPU where there is one, precision fast its bf16.

    trunk      of a recording of images (recorder images): the module that their features are made with
    """
    check_choice("precision", precision, PRECISIONS)
    return Recording(archive.open_archive(path), pick_device(device), precision, trunk=trunk)


def verify(
    path: AnyPath,
    against: Any = None,
    *,
    device: str | None = "cpu",
    key: str | None = None,
    trunk: nn.Module | None = None,
) -> dict[str, Any]:
    """Check structure, every checksum and the stored probe; given the features, the error as well.

    Images without the trunk that makes features of them are checked as far as that goes: `probe_error` is then None.
    """
    recording = open(path, device, trunk=trunk)
    kept = archive.open_archive(path)
    kept.verify()
    ids = kept.tensor("probe.ids", dtype=torch.int64)
    if ids.dim() != 1 or not len(ids):
        raise ProbeError(f"{path}: probe samples of shape {tuple(ids.shape)}; expected a few. Record again")
    if choose(recording.recorder).takes_trunk and trunk is None:
        recording.replay(ids[:0])  # settings and tensors are looked at, and nothing is decoded
        difference = None
    else:
        difference = _probe_error(path, recording, kept, ids)
    report: dict[str, Any] = {
        "path": str(path), "ok": True, "bytes": kept.nbytes, "tensors": len(kept.names),
        "probe_error": difference, "mse": None, "r2": None, "same_features": None,
    }  # fmt: skip
    if against is None:
        return report
    source = open_features(against, key=key)
    if (len(source), source.shape) != (len(recording), recording.shape):
        raise FeatureError(
            f"{source.name}: {len(source)} samples of {source.shape}; {path} holds {len(recording)} of "
            f"{recording.shape}. Give the features it was recorded from"
        )
    stats = scan(source)
    measured = fidelity(recording.replay, source, stats)
    same = stats.digest == kept.metadata["features"]
    stored = kept.metadata["metrics"]["mse"]
    if same and abs(measured.mse - stored) > 0.01 * stored + 1e-9:
        raise FidelityError(
            f"{path}: MSE {measured.mse:.3g} on the features it was recorded from; expected {stored:.3g}, as it "
            f"was when recorded. Record again"
        )
    return {**report, "mse": measured.mse, "r2": measured.r2, "same_features": same}


def _probe_error(path: AnyPath, recording: Recording, kept: archive.Archive, ids: Tensor) -> float:
    """How far probe samples are from what they were when the file was written; refused where it is too far."""
    found = _probe(recording[ids]).cpu()  # (P, V)
    expected = kept.tensor("probe.values", shape=found.shape, dtype=torch.float32)
    difference = (found - expected).abs().max().item()
    limit = PROBE_TOLERANCE * max(expected.abs().max().item(), torch.finfo(torch.float32).tiny)
    if not difference <= limit:
        raise ProbeError(
            f"{path}: decoded probe samples differ by {difference:.3g} from those decoded when it was written; "
            f"expected at most {limit:.3g}. Try another device or torch version, and record again if that fails too"
        )
    return difference


def describe(job: Job, recorder: Recorder, content: Content) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Measure a fitted recorder as it will be replayed, and say all that the file should."""
    replayer = recorder.replay(job.samples, content.settings, content, job.device)
    replayer.trunk = job.settings.get("trunk")
    measured = fidelity(replayer.decode, job.source, job.stats)
    if not isfinite(measured.mse):
        raise NonFiniteLossError("the fitted recorder decodes to NaN or infinity; nothing was written. Lower lr")
    probe = torch.linspace(0, job.samples.num_samples - 1, PROBE_SAMPLES).round().long().unique()
    metrics = {"mse": measured.mse, "r2": measured.r2, "zero_ratio": job.stats.zero_ratio}
    if job.device.type == "cuda":
        exact, fast = (
            normalise(replayer.decode(probe, fast=f), job.stats.low, job.stats.high, clamp=False) for f in (False, True)
        )
        metrics["fast_extra_mse"] = (exact - fast).square().mean().item()
    sample_metadata, sample_tensors = job.samples.describe()
    tensors = {
        **content.tensors,
        **sample_tensors,
        "probe.ids": probe,
        "probe.values": _probe(replayer.decode(probe)),
    }
    start = None if job.start is None else job.start.fingerprint
    metadata = {
        "kind": "recording",
        "recorder": recorder.name,
        **sample_metadata,
        "features": job.stats.digest,
        "feature_bytes": job.source.nbytes,
        "feature_dtype": str(job.source.dtype).removeprefix("torch."),
        "settings": content.settings,
        "fit": {**asdict(job.fit), "preset": job.preset, "head": job.head is not None, "start": start},
        "metrics": metrics,
        "iterations": content.iterations,
        "stopped_by": content.stopped_by,
        "times": {
            "fit_seconds": content.seconds,
            # So that equal runs give files of equal size.
            "pad": " " * max(0, 24 - len(repr(float(content.seconds)))),
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        "versions": {"krnet": _version(), "torch": torch.__version__},
    }
    return tensors, metadata


def _probe(decoded: Tensor) -> Tensor:
    """A few values of each sample, evenly spaced."""
    flat = decoded.reshape(len(decoded), -1)
    return flat[:, torch.linspace(0, flat.shape[1] - 1, PROBE_VALUES).round().long().unique()].contiguous()


def _destination(out: AnyPath | None) -> tuple[object, Path]:
    """Where the file goes, found wanting before any work is done; and what holds a temporary one."""
    if out is not None:
        path = Path(out)
        if not path.parent.is_dir():
            raise InputError(f"{path}: no folder {path.parent}; create it or choose another place")
        if path.is_dir():
            raise InputError(f"{path}: is a folder; expected the name of a file to write")
        return None, path
    folder = tempfile.mkdtemp(prefix="krnet-")

    class Keeper:
        """Dies with the last Recording that uses the file."""

    keeper = Keeper()
    weakref.finalize(keeper, _remove_folder, folder, os.getpid())
    return keeper, Path(folder) / "recording.krn"


def _remove_folder(folder: str, owner: int) -> None:
    # A forked worker has the keeper, too, and must leave its parent's file alone.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _checkpoint_path(path: Path) -> Path:
    return path.with_name(path.name + ".ckpt")


def _version() -> str:
    try:
        return version("krnet")
    except PackageNotFoundError:
        return "unknown"
