"""Adds samples to a folder of parts: coded with the folder's model, in parts behind those that are there.

    manifest, new samples -> part-*.krn, sequences-*.krn -> manifest.json of all, which replaces the old one at once

Until then the folder opens as before, without the new samples. A call that is killed goes on behind its last part.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        coder, num_new = PartCoder(model, added.moves), len(added.features)
        part_samples = added.part_samples or default_part_samples(model)
        first = _finished_before(manifest, added, part_samples, coder) or manifest.num_samples
        held = [part for part in manifest.parts if part.first < first]
        plan = list(part_ranges(first, num_new, part_samples))
        there = _started(folder, [part.name for part in held], added.resume)
        refuse_other_parts(folder, [*((part.first, part.stop) for part in held), *plan])
        labels = None if added.labels is None else open_features(added.labels)
        new = NewSamples(added.features, labels, manifest.origin, first)
        entries, class_names = write_parts(folder, plan, new, coder, there, watch)
        is_new = first == manifest.num_samples
        if is_new:
            manifest = _grown(folder, manifest, added.lengths)
        if labels is not None:
            class_names |= collect(folder, [(part.first, part.stop) for part in held], manifest.origin)[1]
        num_classes = len(class_names) if labels is not None else None
        write_manifest(folder, replace(manifest, num_classes=num_classes, parts=(*held, *entries)))
        forget_lengths(folder, manifest.sequences)
    misfits = sum((entry.measured.misfits for entry in entries), Misfits())
    warn_of_misfits(folder, misfits, num_new, model.r2)


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


def _started(folder: Place, held: Sequence[str], resume: bool) -> list[str]:
    """Parts of a call that was stopped, or has finished just before."""
    there = [name for name in list_parts(folder) if name not in held]
    if there and not resume:
        raise ResumeError(
            f"{folder}: holds {there[0]} of a stopped `krnet append`. Go on with it: --resume (in Python, "
            f"resume=True); or remove {', '.join(there[:3])}{', ...' if len(there) > 3 else ''}"
        )
    return there


def _finished_before(manifest: Manifest, added: Addition, part_samples: int, coder: PartCoder) -> int | None:
    """Where the samples of a finished call begin that is given again to go on with it; None if this is another one."""
    first = manifest.num_samples - len(added.features)
    if not added.resume or first <= 0:
        return None
    plan, listed = list(part_ranges(first, len(added.features), part_samples)), {p.name: p for p in manifest.parts}
    if not all(name_of(part) in listed for part in plan):
        return None
    beginning = added.features.part(0, plan[0][1] - first)
    is_same = listed[name_of(plan[0])].features == digest_of(beginning, coder.coder.block_size)
    return first if is_same else None


def _grown(folder: Place, manifest: Manifest, lengths: Tensor | None) -> Manifest:
    """The manifest with the lengths of all sequences, which get a file beside the old one."""
    if manifest.sequences is None or lengths is None:
        return manifest
    all_lengths = torch.cat([read_lengths(folder, manifest.sequences, manifest.num_samples), lengths])
    return replace(manifest, sequences=place_lengths(folder, all_lengths, sequences_name(int(all_lengths.sum()))))
