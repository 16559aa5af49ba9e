"""Codes samples into the parts of a folder: those that are there are checked and kept, the others written.

    part_ranges(first, num_samples, part_samples) -> plan: [(first, stop), ...]
    write_parts(folder, plan, samples, coder)     -> what the manifest says of each part, and the classes of the samples

A part appears when all of its samples are coded, so a call that is killed goes on behind the last part.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from krnet.config import check_int
from krnet.errors import KrnetWarning, ResumeError
from krnet.features.feature_source import FeatureSource
from krnet.features.joined import members
from krnet.features.stats import changed
from krnet.io.atomic import TEMPORARY_END, remove_leftovers
from krnet.io.folders import list_folder
from krnet.io.places import Place
from krnet.parts.coding import PartCoder, digest_of
from krnet.parts.folder import list_parts
from krnet.parts.misfits import Misfits
from krnet.parts.part import MAX_SAMPLES, Entry, Origin, open_part, part_name, write_part
from krnet.parts.shares import Range, name_of
from krnet.progress import Watch, counting
from krnet.recording import Recording

PART_BYTES = 32 << 20  # about what a part takes, and what is lost of the work when a call is killed
MAX_PART_SAMPLES = 1 << 16
PART_END = ".krn"
PART_STEP = 256  # parts hold a multiple of it: whole blocks of the entropy coder


@dataclass(frozen=True)
class NewSamples:
    """Samples that are to be coded."""

    features: FeatureSource
    labels: FeatureSource | None
    origin: Origin
    first: int = 0
    """ID of the first of them."""

    def part(self, first: int, stop: int) -> tuple[FeatureSource, Tensor | None]:
        """Features and labels of the samples with these IDs."""
        begin, end = first - self.first, stop - self.first
        labels = None if self.labels is None else self.labels.read(torch.arange(begin, end)).long()
        return self.features.part(begin, end), labels


def part_ranges(first: int, num_samples: int, part_samples: int) -> Iterator[Range]:
    """(first, stop) of each part of so many samples. They depend on nothing else, so that every call cuts alike."""
    check_int("part_samples", part_samples, 1, MAX_SAMPLES)
    step, end = -(-part_samples // PART_STEP) * PART_STEP, first + num_samples
    for begin in range(first, end, step):
        yield begin, min(begin + step, end)


def default_part_samples(model: Recording) -> int:
    return max(1, min(MAX_PART_SAMPLES, PART_BYTES * len(model) // model.nbytes))


def write_parts(
    folder: Place,
    plan: Sequence[Range],
    samples: NewSamples,
    coder: PartCoder,
    there: Collection[str],
    watch: Watch | None = None,
) -> tuple[list[Entry], set[int]]:
    """there: names of parts that may be kept"""
    entries, class_names, done = list[Entry](), set[int](), 0
    tell = counting(watch, "encoding", sum(stop - first for first, stop in plan))
    for first, stop in plan:
        features, labels = samples.part(first, stop)
        entry = finished(folder, there, first, features, labels, samples.origin, coder)
        if entry is None:
            coded = coder.code(features, first, lambda num, done=done: tell(done + num))  # type: ignore[misc]
            _refuse_changed(samples.features)
            entry = Entry(first, stop - first, 0, "", coded.features, coded.measured)
            entry = write_part(folder, samples.origin, entry, labels, coded.tensors)
        entries.append(entry)
        class_names.update([] if labels is None else labels.unique().tolist())
        done += stop - first
        tell(done)
    return entries, class_names


def finished(
    folder: Place,
    there: Collection[str],
    first: int,
    source: FeatureSource,
    labels: Tensor | None,
    origin: Origin,
    coder: PartCoder,
) -> Entry | None:
    """The part of these samples, if it is among those that are there; refused if it is damaged, or that of others."""
    name = part_name(first, len(source))
    if name not in there:
        return None
    part = open_part(folder, name)
    part.kept.verify()
    is_same = part.origin == origin and part.entry.features == digest_of(source, coder.coder.block_size)
    if labels is not None and is_same:
        is_same = part.labels is not None and torch.equal(part.labels, labels)
    if not is_same:
        raise ResumeError(
            f"{folder / name}: holds other samples than these, or is of another model. Give the same model, features "
            f"and labels as before, or choose another folder"
        )
    return part.entry


def refuse_other_parts(folder: Place, plan: Sequence[Range]) -> None:
    """Refuse parts of other ranges; remove what killed calls have left behind."""
    names = set(map(name_of, plan))
    for name in list_parts(folder):
        if name not in names:
            raise ResumeError(
                f"{folder / name}: is not among the parts of these samples, which begin with {min(names)}. Give the "
                f"same features, and --part-samples as before (in Python, part_samples=), or choose another folder"
            )
    if isinstance(folder, Path):
        for name in list_folder(folder):
            if name.endswith(TEMPORARY_END):
                remove_leftovers(folder / f"{name[1:].partition(PART_END)[0]}{PART_END}")


def _refuse_changed(source: FeatureSource) -> None:
    """Refuse features whose files have changed since they were opened."""
    for member in members(source):
        if member.file is not None:
            difference = member.file.before.difference(member.file.state())
            if difference is not None:
                raise changed(member, difference)


def warn_of_misfits(folder: Place, misfits: Misfits, num_samples: int, model_r2: float) -> None:
    if misfits.num_samples:
        ids = ", ".join(map(str, misfits.first_ids)) + (", ..." if misfits.num_samples > len(misfits.first_ids) else "")
        warnings.warn(
            f"{folder}: the model does not fit {misfits.num_samples} of {num_samples} samples (IDs {ids}): their R2 is "
            f"{misfits.moments.r2:.3f}, or they take far more bytes than others; that of the model's own samples is "
            f"{model_r2:.3f}. Are they made by the same trunk, and scaled alike? If so, fit a model to such samples",
            KrnetWarning,
            stacklevel=3,
        )
