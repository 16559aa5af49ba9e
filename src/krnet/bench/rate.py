"""Bytes against quality, for every way to store features: `krnet bench rate`.

    features, budgets, recorders -> record -> DIR/points/NAME.krn -> open again -> R2, replay accuracy, bytes by stat
                                                  -> DIR/points/NAME.json, one point -> DIR/rate.json, DIR/rate.png

What counts is what comes out of the file: each point is scored after the file has been opened anew, by the bytes that
the file system gives it. A point that is there is not made again; one that fails leaves its error, and the others go
on. A head (feature maps -> logits) tells whether replays are still worth learning from: replay accuracy.
"""

from __future__ import annotations

import json
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
from krnet.features.metrics import fidelity
from krnet.features.source import FeatureSource, check_labels, open_features
from krnet.features.stats import FeatureStats, scan
from krnet.io import archive, ledger
from krnet.io.atomic import AnyPath, read_json, write_json
from krnet.io.header import digest
from krnet.nn.loaded import HEAD_BATCH, LoadedHead, LoadedTrunk, read_head, read_trunk
from krnet.recorders import base
from krnet.recorders.base import check_names
from krnet.recorders.images.recorder import fingerprint
from krnet.train.loop import Status

BUDGETS = (3_000_000, 6_500_000, 12_000_000, 24_000_000)
POINTS, RATE, PICTURE, FEATURES = "points", "rate.json", "rate.png", "features.json"


@dataclass(frozen=True)
class Series:
    """A recorder, and settings of its own that stay the same at every budget."""

    recorder: str
    settings: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Series:
        """pca, or pca:components=64:dead_zone=0.5"""
        name, _, settings = text.partition(":")
        return cls.of(name.strip(), parse_settings(settings))

    @classmethod
    def of(cls, recorder: str, settings: Mapping[str, Any]) -> Series:
        check_names(base.get_recorder(recorder), settings)
        return cls(recorder, dict(settings))

    @property
    def name(self) -> str:
        return series_name(self.recorder, self.settings)


@dataclass(frozen=True, eq=False)
class Bench:
    """What all points have in common."""

    folder: Path
    source: FeatureSource
    labels: Tensor | None
    stats: FeatureStats
    head: LoadedHead | None
    device: torch.device
    options: dict[str, Any]
    """Of every fit: iterations, time_budget, seed."""
    settings: Mapping[str, Any]
    """Of every recorder that has such."""
    pictures: Pictures | None

    def point(
        self, series: Series, budget: int, watch: Callable[[Status, float], None] | None
    ) -> tuple[dict[str, Any], bool]:
        """From its file if that was made before with the same settings, else made now; and which of the two."""
        stem = f"{series.name}-{budget}".replace("/", "_").replace(":", "_")
        path = self.folder / POINTS / f"{stem}.krn"
        kept_at = path.with_suffix(".json")
        recorder = base.get_recorder(series.recorder)
        # Networks are fitted with the head in view, as they would be for a classifier that is to learn from replays.
        head = self.head if "head" in recorder.inputs else None
        fitted = {"recorder": series.recorder, "given": series.settings, "budget": budget, **self.options}
        if head is not None and head.trainable is not None:
            fitted["head"] = head.digest
        own = {name: value for name, value in self.settings.items() if name in recorder.setting_names}
        if own:
            fitted["settings"] = json.loads(json.dumps(own))  # as it is read again
        if recorder.required and self.pictures is not None:
            fitted |= self.pictures.digests
            own |= self.pictures.options
        kept = _read_json(kept_at)
        if kept.get("fitted_with") != fitted:
            for old in (path, path.with_name(path.name + ".ckpt"), kept_at):
                old.unlink(missing_ok=True)
            kept = {"fitted_with": fitted}
            write_json(kept_at, kept)  # what is found half done later is then known to be of these settings
        scored = {"head": None if self.head is None else self.head.digest}
        if "checksum" in kept and kept["checksum"] != _checksum(path):  # gone, or not the file that was scored
            path.unlink(missing_ok=True)
            kept = {"fitted_with": fitted}
        if "checksum" not in kept:
            started = time.perf_counter()
            options = self.options if recorder.trains else {"seed": self.options["seed"]}
            made = api.record(
                self.source, self.labels, recorder=series.recorder, budget=budget, over_budget=True, out=path,
                resume=True, device=str(self.device), watch=watch, head=None if head is None else head.trainable,
                **options | own | series.settings,
            )  # fmt: skip
            kept = {"fitted_with": fitted, "checksum": made.fingerprint, "seconds": time.perf_counter() - started}
        new = kept.get("scored_with") != scored
        if new:
            kept |= {"scored_with": scored, "point": self.score(series, budget, path, kept["seconds"])}
            write_json(kept_at, kept)
        return kept["point"], new

    def score(self, series: Series, budget: int, path: Path, seconds: float) -> dict[str, Any]:
        """What a file gives back, and what it takes."""
        pictures = self.pictures if base.get_recorder(series.recorder).replay_inputs else None
        recording = api.open(path, self.device, trunk=None if pictures is None else pictures.trunk)
        recording.replay(torch.arange(min(8, len(recording))))  # weights are read, kernels are built
        replay_s, right = 0.0, 0

        def replay(ids: Tensor) -> Tensor:
            nonlocal replay_s, right
            synchronize(self.device)
            started = time.perf_counter()
            batch = recording.replay(ids)
            synchronize(self.device)
            replay_s += time.perf_counter() - started
            if self.head is not None and self.labels is not None:
                right += self.head.num_right(batch, self.labels[ids])
            return batch

        measured = fidelity(replay, self.source, self.stats)
        size, num_samples = os.stat(path).st_size, len(self.source)
        return {
            "recorder": series.recorder,
            "given": series.settings,
            "settings": recording.settings,
            "budget": budget,
            "over_budget": size > budget,
            "bytes": size,
            "bytes_per_sample": size / num_samples,
            "bits_per_value": 8 * size / self.stats.count,
            "mse": measured.mse,
            "r2": measured.r2,
            "replay_accuracy": None if self.head is None else right / num_samples,
            "fit_seconds": recording.info()["fit_seconds"],
            "seconds": seconds,
            "replay_per_second": num_samples / max(replay_s, 1e-9),
            "device": ledger.device_name() if self.device.type == "cuda" else "cpu",
            "versions": ledger.versions(),
            "file": f"{POINTS}/{path.name}",
        }

    def real_accuracy(self) -> float | None:
        if self.head is None or self.labels is None:
            return None
        right = 0
        for ids in torch.arange(len(self.source)).split(HEAD_BATCH):
            right += self.head.num_right(self.source.read(ids).to(self.device).float(), self.labels[ids])
        return right / len(self.source)


@dataclass(frozen=True, eq=False)
class Pictures:
    """For recorders that store images and replay them through a trunk."""

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
    say: Callable[[str], None] = lambda text: None,
    watch: Callable[[Status, float], None] | None = None,
    made: Callable[[dict[str, Any]], None] = lambda point: None,
) -> dict[str, Any]:
    """Every recorder at every budget; writes DIR/rate.json, which is returned, DIR/rate.png and DIR/points.

    head       feature maps -> logits, from which replay accuracy follows; needs labels, numbered as the head does
    recorders  names, or name:setting=value:...; by default all that need nothing but features, and images if given
    images, trunk  what the features were made of, and by which module: for recorder images
    settings   of every recorder that has them, such as mean and std
    iterations, time_budget  of each fit, where a recorder has such
    made       called with each point that was not there before, as soon as it is; num_samples and real_accuracy too
    """
    pictured = {"images": images, "trunk": trunk}
    any_given = pictured if any(value is not None for value in pictured.values()) else ()
    all_series = default_series(any_given) if recorders is None else [Series.parse(text) for text in recorders]
    _check_given(all_series, pictured, settings or {})
    sizes = sorted({parse_size(size) for size in budgets})
    if not all_series or not sizes:
        raise SettingError("no recorder or no budget; expected at least one of each")
    where, folder = pick_device(device), Path(out)
    source = open_features(features, key=key)
    checked = check_labels(labels, len(source))
    if head is not None and checked is None:
        raise InputError("a head is given and no labels; replay accuracy needs both. Give labels, too")
    say("reading the features")
    stats = scan(source)
    reader = None if head is None else read_head(head, where)
    pictures = None if trunk is None else Pictures(open_features(images), read_trunk(trunk, where))
    options = {"iterations": iterations, "time_budget": time_budget, "seed": seed}
    common = Bench(folder, source, checked, stats, reader, where, options, settings or {}, pictures)
    real_accuracy = common.real_accuracy()  # also finds a head that does not fit, before anything is written
    _claim(folder, source, checked, stats)
    result: dict[str, Any] = {
        "features": Path(source.name).name,
        "num_samples": len(source),
        "shape": list(source.shape),
        "feature_bytes": source.nbytes,
        "digest": stats.digest,
        "head": None if reader is None else reader.name,
        "real_accuracy": real_accuracy,
        "budgets": sizes,
        "recorders": [series.name for series in all_series],
        **options,
        "points": [],
        "errors": [],
    }
    for number, series in enumerate(all_series):
        found, smallest = [], None
        for done, budget in enumerate(reversed(sizes)):
            count = f"[{number * len(sizes) + done + 1}/{len(all_series) * len(sizes)}]"
            say(f"{count} {series.name} at {format_size(budget)}")
            if smallest is not None:  # it could not keep a larger budget either; a network's fit may
                found.append({**smallest, "budget": budget})
                continue
            try:
                point, new = common.point(series, budget, watch)
            except Exception as error:  # of one recorder: the others go on
                text = f"{type(error).__name__}: {error}"
                result["errors"].append({"recorder": series.name, "budget": budget, "error": text})
                say(f"{count} {series.name} failed: {text}")
                continue
            found.append(point)
            if new:
                made({**point, "num_samples": len(source), "real_accuracy": real_accuracy})
            smallest = point if point["over_budget"] and not base.get_recorder(series.recorder).trains else None
        result["points"] += reversed(found)
        write_json(folder / RATE, result)
    return result


def _check_given(all_series: Sequence[Series], given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse what is missing, and what nobody would use, before anything is fitted."""
    chosen = [base.get_recorder(series.recorder) for series in all_series]
    required = frozenset[str]().union(*(recorder.required for recorder in chosen))
    for name, value in given.items():
        if (value is not None) != (name in required):
            raise InputError(
                f"recorder images needs images and the trunk that makes features of them; {name} is missing. Give "
                f"images= and trunk= (--images, --trunk)"
                if name in required
                else f"{name} is given, and none of {', '.join(series.name for series in all_series)} needs it. Leave "
                f"it out, or add images to the recorders"
            )
    known = frozenset[str]().union(*(recorder.setting_names for recorder in chosen))
    for name in settings:
        if name not in known:
            raise unknown_setting(name, known)


def default_series(given: Collection[str] = ()) -> list[Series]:
    """Every recorder that these inputs serve, at its best R2 and, where that is another setting, for a classifier."""
    every = (base.get_recorder(name) for name in base.recorder_names())
    chosen = [recorder for recorder in every if recorder.required <= set(given)]
    return [Series.of(recorder.name, more) for recorder in chosen for more in ({}, *recorder.variants)]


def _claim(folder: Path, source: FeatureSource, labels: Tensor | None, stats: FeatureStats) -> None:
    """A folder is for one set of features: points of others are never mixed in."""
    own = {
        "features": stats.digest,
        "labels": None if labels is None else digest(labels.numpy().tobytes()),
        "num_samples": len(source),
        "shape": list(source.shape),
    }
    path = folder / FEATURES
    if path.exists():
        for name, value in _read_json(path).items():
            if own.get(name) != value:
                raise ResumeError(
                    f"{folder}: holds points of other {name} ({value}; these have {own.get(name)}). Give another "
                    f"folder, or remove this one"
                )
    (folder / POINTS).mkdir(parents=True, exist_ok=True)
    write_json(path, own)


def _checksum(path: Path) -> str | None:
    """None where the file is missing or damaged: every byte is read."""
    try:
        found = archive.open_archive(path)
        found.verify()
    except (RecordingError, FileNotFoundError):
        return None
    return found.checksum


def _read_json(path: Path) -> dict[str, Any]:
    """Nothing, where there is no file or half of one."""
    try:
        return read_json(path)
    except (FileNotFoundError, ValueError):
        return {}
