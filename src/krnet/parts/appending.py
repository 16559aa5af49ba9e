"""Adds samples to a folder of parts: coded with the folder's model, in parts behind those that are there.

    manifest, new samples -> part-*.krn, sequences-*.krn -> manifest.json of all, which replaces the old one at once

Until then the folder opens as before, without the new samples. A call that is killed goes on behind its last part.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from krnet.device import dtype_name
from krnet.errors import FeatureError, InputError, LabelError, ResumeError
from krnet.features.feature_source import FeatureSource
from krnet.features.sequences import refuse_lack
from krnet.features.source import open_features
from krnet.io.lock import working_in
from krnet.io.places import Place
from krnet.parts.coding import PartCoder, digest_of
from krnet.parts.folder import list_parts, read_manifest, write_manifest
from krnet.parts.manifest import Manifest
from krnet.parts.misfits import Misfits
from krnet.parts.part import MAX_SAMPLES
from krnet.parts.sequences import forget_lengths, place_lengths, read_lengths, sequences_name
from krnet.parts.shares import collect, name_of
from krnet.parts.writing import (
    NewSamples,
    default_part_samples,
    part_ranges,
    refuse_other_parts,
    warn_of_misfits,
    write_parts,
)
from krnet.progress import Watch
from krnet.recording import Recording


@dataclass(frozen=True)
class Addition:
    """What is added to a folder, and how."""

    features: FeatureSource
    labels: Tensor | None = None
    lengths: Tensor | None = None
    """Of sequences."""
    part_samples: int | None = None
    moves: int | None = None
    resume: bool = False


def append_parts(folder: Place, known: Manifest, model: Recording, added: Addition, watch: Watch | None) -> None:
    """known: the manifest when the folder was opened"""
    _check(folder, known, added)
    with working_in(folder) if isinstance(folder, Path) else nullcontext():
        manifest = read_manifest(folder)
        if manifest.fingerprint != known.fingerprint:
            raise InputError(f"{folder}: has changed since it was opened. Open it again, and append to that recording")
        coder, part_samples = PartCoder(model, added.moves), added.part_samples or default_part_samples(model)
        first = _first_id(folder, manifest, added, part_samples, coder)
        held = [part for part in manifest.parts if part.first < first]
        held_ranges = [(part.first, part.stop) for part in held]
        plan = list(part_ranges(first, len(added.features), part_samples))
        refuse_other_parts(folder, [*held_ranges, *plan])
        labels = None if added.labels is None else open_features(added.labels)
        new = NewSamples(added.features, labels, manifest.origin, first)
        entries, class_names = write_parts(folder, plan, new, coder, list_parts(folder), watch)
        if first == manifest.num_samples:
            manifest = _with_lengths(folder, manifest, added.lengths)
        if labels is not None:
            class_names |= collect(folder, held_ranges, manifest.origin)[1]
        num_classes = None if labels is None else len(class_names)
        write_manifest(folder, replace(manifest, num_classes=num_classes, parts=(*held, *entries)))
        forget_lengths(folder, manifest.sequences)
    misfits = sum((entry.measured.misfits for entry in entries), Misfits())
    warn_of_misfits(folder, misfits, len(added.features), model.r2)


def _check(folder: Place, manifest: Manifest, added: Addition) -> None:
    """Refuse samples unlike those of the folder."""
    new, origin, dtype = added.features, manifest.origin, dtype_name(added.features.dtype)
    new.check_shape(origin.shape, folder)
    if dtype != origin.dtype:
        raise FeatureError(
            f"{new.name}: values of type {dtype}; {folder} was encoded from {origin.dtype}. Convert them to "
            f"{origin.dtype}"
        )
    if (added.labels is not None) != origin.has_labels:
        raise LabelError(
            f"{folder}: has labels, and none are given for the new samples. Give one for each"
            if origin.has_labels
            else f"{folder}: has no labels, and labels are given. Leave them out, or encode all samples anew"
        )
    refuse_lack(None if manifest.sequences is None else torch.ones(1), added.lengths, folder)
    num_samples = manifest.num_samples + len(new)
    if num_samples > MAX_SAMPLES:
        raise InputError(f"{folder}: would hold {num_samples} samples; a folder holds at most {MAX_SAMPLES}")


def _first_id(folder: Place, manifest: Manifest, added: Addition, part_samples: int, coder: PartCoder) -> int:
    """ID of the first new sample: behind those that are there, or where a finished call began that is given again."""
    listed = {part.name: part for part in manifest.parts}
    stopped = [name for name in list_parts(folder) if name not in listed]
    if stopped and not added.resume:
        raise ResumeError(
            f"{folder}: holds {stopped[0]} of a stopped `krnet append`. Go on with it: --resume (in Python, "
            f"resume=True); or remove the files of its parts, {len(stopped)} in all"
        )
    end, num_new = manifest.num_samples, len(added.features)
    plan = list(part_ranges(end - num_new, num_new, part_samples)) if added.resume and not stopped else []
    if num_new >= end or not plan or not all(name_of(part) in listed for part in plan):
        return end
    beginning = added.features.part(0, plan[0][1] - plan[0][0])
    is_same = listed[name_of(plan[0])].features == digest_of(beginning, coder.coder.block_size)
    return end - num_new if is_same else end


def _with_lengths(folder: Place, manifest: Manifest, lengths: Tensor | None) -> Manifest:
    """The manifest with the lengths of all sequences, which get a file beside the old one."""
    if manifest.sequences is None or lengths is None:
        return manifest
    all_lengths = torch.cat([read_lengths(folder, manifest.sequences, manifest.num_samples), lengths])
    return replace(manifest, sequences=place_lengths(folder, all_lengths, sequences_name(int(all_lengths.sum()))))
