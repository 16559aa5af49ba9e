"""Measure file size against quality for every recorder: `krnet bench rate`.

    features, budgets, recorders -> record -> DIR/points/NAME.krn -> open -> R2, replay accuracy, size in bytes
                                           -> DIR/points/NAME.json (one point) -> DIR/rate.json (all points)

A point is one recorder at one budget. It is scored by opening its file again, and its size is what the file system
reports. A second run makes only the points that are missing. A recorder that fails leaves its error in rate.json, and
the other recorders go on.

Replay accuracy is the share of replayed samples that a given head (feature maps -> logits) classifies correctly: it
tells whether replays are still good enough to train a classifier on.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from krnet import api
from krnet.config import format_size, parse_settings, parse_size, series_name, unknown_setting
from krnet.device import pick_device, synchronize
from krnet.errors import InputError, RecordingError, ResumeError, SettingError
from krnet.features.feature_source import FeatureSource
from krnet.features.labels import check_labels
from krnet.features.metrics import fidelity
from krnet.features.source import open_features
from krnet.features.stats import FeatureStats, scan
from krnet.io import archive, ledger
from krnet.io.atomic import AnyPath, read_json, write_json
from krnet.io.header import digest
from krnet.io.overlap import CHECKPOINT_ENDING, refuse_overlap
from krnet.nn.fingerprint import fingerprint
from krnet.nn.loaded import HEAD_BATCH, LoadedHead, LoadedTrunk, read_head, read_trunk
from krnet.progress import Watch, announcing
from krnet.recorders import base
from krnet.recorders.checks import check_names, check_package, missing_input
from krnet.train.loop import remove_checkpoint

BUDGETS = (3_000_000, 6_500_000, 12_000_000, 24_000_000)  # bytes; the help of `krnet bench rate` names them too
POINTS_FOLDER, RATE_FILE, PICTURE_FILE, FEATURES_FILE = "points", "rate.json", "rate.png", "features.json"
WARM_UP_SAMPLES = 8  # replayed before the clock starts


@dataclass(frozen=True)
class Series:
    """A recorder, with settings that stay the same at every budget."""

    recorder: str
    settings: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Series:
        """Read `pca` or `pca:components=64:dead_zone=0.5`."""
        name, _, settings = text.partition(":")
        return cls.of(name.strip(), parse_settings(settings))

    @classmethod
    def of(cls, recorder: str, settings: Mapping[str, Any]) -> Series:
        """Build a series; a setting that the recorder does not have is refused."""
        check_names(base.get_recorder(recorder), settings)
        return cls(recorder, dict(settings))

    @property
    def name(self) -> str:
        return series_name(self.recorder, self.settings)


@dataclass(frozen=True, eq=False)
class Bench:
    """The inputs that all points share."""

    folder: Path
    source: FeatureSource
    labels: Tensor | None
    stats: FeatureStats
    head: LoadedHead | None
    device: torch.device
    options: dict[str, Any]
    """Options of every fit: iterations, time_budget, seed, and the preset and schedule if there are."""
    settings: Mapping[str, Any]
    """Settings for every recorder that has a setting of that name."""
    image_inputs: ImageInputs | None

    def path(self, series: Series, budget: int | None) -> Path:
        """The recording of a point."""
        stem = series.name if budget is None else f"{series.name}-{budget}"
        return self.folder / POINTS_FOLDER / f"{stem.replace('/', '_').replace(':', '_')}.krn"

    def point(self, series: Series, budget: int | None, watch: Watch | None) -> tuple[dict[str, Any], bool]:
        """Return the point, and True if it was scored now. Without a budget, the settings decide the size.

        A point that an earlier run made with the same settings is read from its JSON file.
        """
        path = self.path(series, budget)
        json_path = path.with_suffix(".json")
        recorder = base.get_recorder(series.recorder)
        # A recorder that takes a head is fitted with it (L_kr2), as for a classifier that learns from the replays.
        head = self.head if "head" in recorder.inputs else None
        fitted_with = {"recorder": series.recorder, "given": series.settings, "budget": budget, **self.options}
        if head is not None and head.trainable is not None:
            fitted_with["head"] = head.digest
        extra = {name: value for name, value in self.settings.items() if name in recorder.setting_names}
        if extra:
            fitted_with["settings"] = json.loads(json.dumps(extra))  # compared below with what a JSON file holds
        if recorder.required and self.image_inputs is not None:
            fitted_with |= self.image_inputs.digests
            extra |= self.image_inputs.options
        saved = _read_json(json_path)
        if saved.get("fitted_with") != fitted_with:
            remove_checkpoint(path.with_name(path.name + CHECKPOINT_ENDING))
            for old_path in (path, json_path):
                old_path.unlink(missing_ok=True)
            saved = {"fitted_with": fitted_with}
            write_json(json_path, saved)  # before the fit: a later run can tell which settings a checkpoint is for
        scored_with = {"head": None if self.head is None else self.head.digest}
        if "checksum" in saved and saved["checksum"] != _checksum(path):  # missing, damaged, or another file
            path.unlink(missing_ok=True)
            saved = {"fitted_with": fitted_with}
        if "checksum" not in saved:
            started = time.perf_counter()
            options = self.options if recorder.trains else {"seed": self.options["seed"]}
            recording = api.record(
                self.source, self.labels, recorder=series.recorder, budget=budget, over_budget=True, out=path,
                resume=True, device=str(self.device), watch=watch, head=None if head is None else head.trainable,
                **options | extra | series.settings,
            )  # fmt: skip
            seconds = time.perf_counter() - started
            saved = {"fitted_with": fitted_with, "checksum": recording.fingerprint, "seconds": seconds}
        is_new = saved.get("scored_with") != scored_with
        if is_new:
            saved |= {"scored_with": scored_with, "point": self.score(series, budget, path, saved["seconds"])}
            write_json(json_path, saved)
        return saved["point"], is_new

    def score(self, series: Series, budget: int | None, path: Path, seconds: float) -> dict[str, Any]:
        """Open a recording and measure its size, its error, its replay accuracy and its replay speed."""
        inputs = self.image_inputs if base.get_recorder(series.recorder).replay_inputs else None
        recording = api.open(path, self.device, trunk=None if inputs is None else inputs.trunk)
        recording.replay(torch.arange(min(WARM_UP_SAMPLES, len(recording))))  # reads the weights, builds the kernels
        replay_s, num_right = 0.0, 0

        def replay(ids: Tensor) -> Tensor:
            nonlocal replay_s, num_right
            synchronize(self.device)
            started = time.perf_counter()
            batch = recording.replay(ids)  # (B, *shape)
            synchronize(self.device)
            replay_s += time.perf_counter() - started
            if self.head is not None and self.labels is not None:
                num_right += self.head.num_right(batch, self.labels[ids])
            return batch

        measured = fidelity(replay, self.source, self.stats)
        size_bytes, num_samples, info = os.stat(path).st_size, len(self.source), recording.info()
        return {
            "recorder": series.recorder,
            "given": series.settings,
            "settings": recording.settings,
            "budget": budget,
            "over_budget": budget is not None and size_bytes > budget,
            "bytes": size_bytes,
            "bytes_per_sample": size_bytes / num_samples,
            "bits_per_value": 8 * size_bytes / self.stats.count,
            "mse": measured.mse,
            "r2": measured.r2,
            "replay_accuracy": None if self.head is None else num_right / num_samples,
            "iterations": info["iterations"],
            "fit_seconds": info["fit_seconds"],
            "seconds": seconds,
            "replay_per_second": num_samples / max(replay_s, 1e-9),
            "device": ledger.device_name() if self.device.type == "cuda" else "cpu",
            "versions": ledger.versions(),
            "file": f"{POINTS_FOLDER}/{path.name}",
        }

    def real_accuracy(self) -> float | None:
        """Return the share of the real features that the head classifies correctly."""
        if self.head is None or self.labels is None:
            return None
        num_right = 0
        for ids in torch.arange(len(self.source)).split(HEAD_BATCH):
            num_right += self.head.num_right(self.source.read(ids).to(self.device).float(), self.labels[ids])
        return num_right / len(self.source)


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """The inputs of a recorder that stores images and replays their features through a trunk."""

    images: FeatureSource
    trunk: LoadedTrunk

    @property
    def options(self) -> dict[str, Any]:
        return {"images": self.images, "trunk": self.trunk}

    @cached_property
    def digests(self) -> dict[str, str]:
        return {"images": scan(self.images).digest, "trunk": fingerprint(self.trunk)}


def bench(
    features: Any,
    labels: Any = None,
    *,
    out: AnyPath,
    head: AnyPath | None = None,
    budgets: Sequence[int | str] = BUDGETS,
    recorders: Sequence[str] | None = None,
    iterations: int | None = None,
    time_budget: float | None = None,
    seed: int = 0,
    device: str | None = None,
    key: str | None = None,
    images: Any = None,
    trunk: AnyPath | None = None,
    settings: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    made: Callable[[dict[str, Any]], None] = lambda point: None,
) -> dict[str, Any]:
    """Make and score every recorder at every budget; write DIR/points and DIR/rate.json, and return the latter.

    head       feature maps -> logits, for replay accuracy; needs labels with the head's class numbers
    recorders  names, or name:setting=value:...; by default all that need only features, and images if given
    images, trunk  for recorder images: the images of these samples, and the module that computes features from them
    settings   for every recorder that has a setting of that name, such as mean and std
    iterations, time_budget  of each fit, for recorders that train a network
    made       called with each newly scored point, to which num_samples and real_accuracy are added
    """
    image_inputs = {"images": images, "trunk": trunk}
    default_inputs = image_inputs if any(value is not None for value in image_inputs.values()) else ()
    torch_device, folder = pick_device(device), Path(out)
    refuse_overlap("bench rate", [folder], [features, labels, head, images, trunk])
    source = open_features(features, key=key)
    num_values = len(source) * math.prod(source.shape)
    named = None if recorders is None else [Series.parse(text) for text in recorders]
    all_series = default_series(default_inputs, num_values) if named is None else named
    _check_inputs(all_series, image_inputs, settings or {})
    budgets_bytes = sorted({parse_size(size) for size in budgets})
    if not all_series or not budgets_bytes:
        raise SettingError("no recorder or no budget; expected at least one of each")
    label_tensor = check_labels(labels, len(source))
    if head is not None and label_tensor is None:
        raise InputError("a head is given and no labels; replay accuracy needs both. Give labels, too")
    say = announcing(watch)
    for name, reason in left_out(num_values).items() if named is None else ():
        say(f"{name} is left out: {reason}")
    say("reading the features")
    stats = scan(source, watch=watch)
    loaded_head = None if head is None else read_head(head, torch_device)
    loaded_images = None if trunk is None else ImageInputs(open_features(images), read_trunk(trunk, torch_device))
    options = {"iterations": iterations, "time_budget": time_budget, "seed": seed}
    shared = Bench(
        folder, source, label_tensor, stats, loaded_head, torch_device, options, settings or {}, loaded_images
    )
    real_accuracy = shared.real_accuracy()  # refuses a head that does not fit, before anything is written
    _claim_folder(folder, source, label_tensor, stats)
    result: dict[str, Any] = {
        "features": Path(source.name).name,
        "num_samples": len(source),
        "shape": list(source.shape),
        "feature_bytes": source.nbytes,
        "digest": stats.digest,
        "head": None if loaded_head is None else loaded_head.name,
        "real_accuracy": real_accuracy,
        "budgets": budgets_bytes,
        "recorders": [series.name for series in all_series],
        **options,
        "points": [],
        "errors": [],
    }
    for series_index, series in enumerate(all_series):
        points, smallest = [], None
        for budget_index, budget in enumerate(reversed(budgets_bytes)):
            number = series_index * len(budgets_bytes) + budget_index + 1
            count = f"[{number}/{len(all_series) * len(budgets_bytes)}]"
            say(f"{count} {series.name} at {format_size(budget)}")
            if smallest is not None:  # its smallest file exceeds a larger budget, so it exceeds this one too
                points.append({**smallest, "budget": budget})
                continue
            try:
                point, is_new = shared.point(series, budget, watch)
            except Exception as error:  # any error: the other recorders go on
                text = f"{type(error).__name__}: {error}"
                result["errors"].append({"recorder": series.name, "budget": budget, "error": text})
                say(f"{count} {series.name} failed: {text}")
                continue
            points.append(point)
            if is_new:
                made({**point, "num_samples": len(source), "real_accuracy": real_accuracy})
            # A trained network is fitted again: the fit to a smaller budget may keep it.
            smallest = point if point["over_budget"] and not base.get_recorder(series.recorder).trains else None
        result["points"] += reversed(points)
        write_json(folder / RATE_FILE, result)
    return result


def _check_inputs(all_series: Sequence[Series], given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse a missing input, and an input or setting that no recorder uses, before anything is fitted."""
    chosen = [base.get_recorder(series.recorder) for series in all_series]
    for recorder in chosen:
        check_package(recorder)
    for name, value in given.items():
        users = [recorder for recorder in chosen if name in recorder.required]
        if value is None and users:
            raise missing_input(users[0], name)
        if value is not None and not users:
            takers = [other for other in base.recorder_names() if name in base.get_recorder(other).required]
            raise InputError(
                f"{name} is given, and none of {', '.join(series.name for series in all_series)} needs it. Leave it "
                f"out, or add {' or '.join(takers)} to the recorders"
            )
    known = frozenset[str]().union(*(recorder.setting_names for recorder in chosen))
    for name in settings:
        if name not in known:
            raise unknown_setting(name, known)


def default_series(given: Collection[str] = (), num_values: int = 0) -> list[Series]:
    """Return every recorder whose required inputs are given, with its defaults and with each of its variants.

    The defaults give the best R2; a variant gives up some R2 for more replay accuracy. Recorders of `left_out` are not
    among them.
    """
    recorders = (base.get_recorder(name) for name in base.recorder_names() if name not in left_out(num_values))
    usable = [recorder for recorder in recorders if recorder.required <= set(given)]
    return [Series.of(recorder.name, settings) for recorder in usable for settings in ({}, *recorder.variants)]


def left_out(num_values: int) -> dict[str, str]:
    """Recorders that are not measured on so many values unless they are named, each with the reason."""
    found = {}
    for name in base.recorder_names():
        recorder = base.get_recorder(name)
        if not recorder.is_usable:
            found[name] = recorder.needs
        elif recorder.bench_values is not None and num_values > recorder.bench_values:
            found[name] = f"slow above {recorder.bench_values:,} values. Name it among the recorders to measure it"
    return found


def _claim_folder(folder: Path, source: FeatureSource, labels: Tensor | None, stats: FeatureStats) -> None:
    """Note the features and labels in the folder; refuse a folder that holds points of other ones."""
    identity = {
        "features": stats.digest,
        "labels": None if labels is None else digest(labels.numpy().tobytes()),
        "num_samples": len(source),
        "shape": list(source.shape),
    }
    path = folder / FEATURES_FILE
    if path.exists():
        for name, value in _read_json(path).items():
            if identity.get(name) != value:
                raise ResumeError(
                    f"{folder}: holds points of other {name} ({value}; these have {identity.get(name)}). Give another "
                    f"folder, or remove this one"
                )
    (folder / POINTS_FOLDER).mkdir(parents=True, exist_ok=True)
    write_json(path, identity)


def _checksum(path: Path) -> str | None:
    """Read every byte of a recording and return its checksum; None if the file is missing or damaged."""
    try:
        opened = archive.open_archive(path)
        opened.verify()
    except (RecordingError, FileNotFoundError):
        return None
    return opened.checksum


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; return {} if it is missing or incomplete."""
    try:
        return read_json(path)
    except (FileNotFoundError, ValueError):
        return {}
