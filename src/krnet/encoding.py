"""Encode samples with a model that is fitted already, into a folder of parts.

    model, features -> encode -> OUT/: model.krn, part-*.krn, manifest.json

Nothing is trained. A part is written when all of its samples are coded, so a call that is killed goes on behind the
last part. Memory does not depend on the number of samples: features pass through it a few at a time, and the coded
samples of one part.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from krnet.config import parse_size
from krnet.device import dtype_name, pick_device
from krnet.errors import InputError, LabelError, LengthsError, ResumeError
from krnet.features.feature_source import FeatureSource
from krnet.features.joined import join, members
from krnet.features.labels import check_labels, has_labels
from krnet.features.sequences import check_lengths, stored_lengths
from krnet.features.source import open_features
from krnet.io import archive
from krnet.io.atomic import AnyPath, remove_leftovers
from krnet.io.folders import list_folder
from krnet.io.lock import working_in
from krnet.io.output import copy
from krnet.io.overlap import refuse_overlap
from krnet.io.places import Place, is_url, place
from krnet.io.writable import check_name, check_writable
from krnet.parts.coding import PartCoder
from krnet.parts.folder import check_output, is_folder_of_parts, write_manifest
from krnet.parts.manifest import MANIFEST, MODEL, Manifest
from krnet.parts.part import MAX_SAMPLES, NAME, Origin
from krnet.parts.recording import PartsRecording
from krnet.parts.sequences import place_lengths
from krnet.parts.shares import collect, missing_parts, name_of
from krnet.parts.writing import (
    NewSamples,
    default_part_samples,
    part_ranges,
    refuse_other_parts,
    warn_of_misfits,
    write_parts,
)
from krnet.progress import Watch, announcing, closing_watch
from krnet.ranks import wait
from krnet.recorders.base import get_recorder
from krnet.recorders.checks import check_projects
from krnet.recording import Recording


@closing_watch
def encode(
    model: AnyPath | Recording,
    features: Any,
    labels: Any = None,
    *,
    lengths: Any = None,
    out: AnyPath,
    part_samples: int | None = None,
    moves: int | None = None,
    resume: bool = False,
    device: str | None = None,
    key: str | None = None,
    max_bytes: int | str | None = None,
    watch: Watch | None = None,
) -> Recording:
    """Code samples with what another recording was fitted to, and write them to a folder that opens as one recording.

    Nothing is trained, so this is far faster than `krnet.record`, and memory does not grow with the number of samples.
    Recorders that can do this are krnet, pca, quantized, transform, pq, rotation, fp8 and raw. Samples that the model
    does not fit raise a KrnetWarning that names them; they are coded all the same.

    model         a recording (.krn), or a folder of krnet.encode; a path or a URL. The folder gets a copy
    features      as for krnet.record; or a list of paths and URLs, whose samples follow each other
    labels        one integer per sample. By default those that lie beside the features, as `krnet.extract` writes them
    lengths       of sequences, see krnet.record; one may lie in several parts. By default the arrays `lengths` beside
                  the features. They are kept in `sequences.krn`
    out           folder to write, a path or a URL: `model.krn`, `part-*.krn` and, last, `manifest.json`
    part_samples  samples in a part; by default as many as take about 32 MB, and at most 65,536
    moves         for recorder krnet: gradient steps that improve each code; by default 2, or 20 without axes
    resume        keep the parts that a stopped call has finished, once they are found to be of this model and these
                  features; a finished folder is checked and returned
    max_bytes     memory that the model may ask for, see krnet.open

    >>> more = krnet.encode("features.krn", torch.rand(60, 4, 3, 3), out="more")
    >>> len(more), more[59].shape, len(krnet.open("more"))
    (60, torch.Size([4, 3, 3]), 60)
    """
    recording = encode_share(
        model, features, labels, lengths=lengths, out=out, share=(0, 1), part_samples=part_samples, moves=moves,
        resume=resume, device=device, key=key, max_bytes=max_bytes, watch=watch,
    )  # fmt: skip
    assert recording is not None, "the only process finds all parts"
    return recording


def encode_share(
    model: AnyPath | Recording,
    features: Any,
    labels: Any = None,
    *,
    lengths: Any = None,
    out: AnyPath,
    share: tuple[int, int],
    is_waiting: bool = False,
    part_samples: int | None = None,
    moves: int | None = None,
    resume: bool = False,
    device: str | None = None,
    key: str | None = None,
    max_bytes: int | str | None = None,
    watch: Watch | None = None,
) -> Recording | None:
    """As `encode`, but only part k of n of the work, for share (k, n): each n-th part of the folder.

    Processes with the other shares write to the same folder. The last one that finishes writes the manifest, and
    returns the recording; others return None, or wait for it if `is_waiting`.
    """
    number, count = share
    folder = place(out) if is_url(out) else check_name(out)
    if isinstance(folder, Path):
        refuse_overlap("encode", [folder], [model, *_given(features), labels, lengths])
    check_output(folder)
    recording = _open_model(model, device, max_bytes)
    source, label_source = _open_samples(features, labels, key)
    sequence_lengths = _open_lengths(lengths, features, source, key)
    _check(recording, source)
    origin = Origin(recording.fingerprint, recording.shape, dtype_name(source.dtype), label_source is not None)
    with working_in(folder, together=count > 1) if isinstance(folder, Path) else nullcontext():
        plan = list(part_ranges(0, len(source), part_samples or default_part_samples(recording)))
        own = plan[number::count]
        started = _started(folder, own if count > 1 else None)
        if started and not resume:
            raise ResumeError(
                f"{folder}: holds {started[-1]} already. Go on with it: --resume (in Python, resume=True); or choose "
                f"another folder"
            )
        _place_model(folder, recording)
        refuse_other_parts(folder, plan)
        sequences = place_lengths(folder, sequence_lengths)
        new = NewSamples(source, label_source, origin)
        entries, class_names = write_parts(folder, own, new, PartCoder(recording, moves), started, watch)
        if count > 1:
            if is_waiting:
                wait(partial(missing_parts, folder, plan), folder, announcing(watch))
            elif missing_parts(folder, plan)[0]:
                return None
            entries, class_names = collect(folder, plan, origin)
        num_classes = len(class_names) if origin.has_labels else None
        manifest = Manifest(origin, recording.nbytes, num_classes, tuple(entries), sequences)
        write_manifest(folder, manifest)
    warn_of_misfits(folder, manifest.measured.misfits, len(source), recording.r2)
    return PartsRecording(folder, recording.device, max_bytes=recording.max_bytes)


# ------------------------------------------------------------------ what is given


def _open_model(model: AnyPath | Recording, device: str | None, max_bytes: int | str | None) -> Recording:
    if isinstance(model, PartsRecording):
        model = model.model
    if isinstance(model, Recording):
        return model if device is None else model.to(device)
    limit = None if max_bytes is None else parse_size(max_bytes, "max_bytes")
    kept = archive.open_archive(place(model) / MODEL if is_folder_of_parts(model) else model, limit)
    return Recording(kept, pick_device(device))


def _open_samples(features: Any, labels: Any, key: str | None) -> tuple[FeatureSource, FeatureSource | None]:
    """Features, and labels if there are any, each as one source."""
    given = _given(features)
    source = join([open_features(one, key=key) for one in given])
    if labels is not None:
        return source, _label_source(labels, len(source))
    if key is not None or not any(map(has_labels, given)):
        return source, None
    if not all(map(has_labels, given)):
        raise LabelError(
            f"{source.name}: some of these files hold labels, and others hold none. Give all labels in one file "
            f"(--labels; in Python, labels=), or leave them out with --key features (key='features')"
        )
    beside = join([open_features(one, key="labels") for one in given])
    return source, _check_label_source(beside, len(source))


def _given(features: Any) -> list[Any]:
    """Each of several files, or what else is given."""
    several = isinstance(features, list | tuple) and features and all(map(_is_path, features))
    return list(features) if several else [features]


def _open_lengths(lengths: Any, features: Any, source: FeatureSource, key: str | None) -> Tensor | None:
    """Lengths of sequences if there are any; those of several files follow each other, as their samples do."""
    if lengths is not None:
        return check_lengths(lengths, len(source))
    files = zip(_given(features), members(source), strict=True)
    found = [stored_lengths(given, key, len(member)) for given, member in files]
    whole = [part for part in found if part is not None]
    if 0 < len(whole) < len(found):
        raise LengthsError(
            f"{source.name}: some of these files hold lengths of sequences, and others hold none. Give all lengths in "
            f"one file (--lengths; in Python, lengths=), or leave them out with --key features (key='features')"
        )
    return torch.cat(whole) if whole else None


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _label_source(labels: Any, num_samples: int) -> FeatureSource:
    """Labels of any kind; those in a .npy file are read part by part."""
    if _is_path(labels) and place(labels).suffix.lower() == ".npy":
        return _check_label_source(open_features(labels), num_samples)
    return open_features(check_labels(labels, num_samples))


def _check_label_source(found: FeatureSource, num_samples: int) -> FeatureSource:
    if (len(found), found.shape) != (num_samples, ()) or found.dtype.is_floating_point:
        raise LabelError(
            f"{found.name}: labels of shape {(len(found), *found.shape)} and type {dtype_name(found.dtype)}; expected "
            f"{num_samples} integers, one per sample. Do they belong to these features?"
        )
    return found


def _check(model: Recording, source: FeatureSource) -> None:
    """Refuse a model that cannot code unseen samples, and samples unlike its own."""
    check_projects(get_recorder(model.recorder), model.path, "Fit a model with one of them")
    source.check_shape(model.shape, model.path)
    if len(source) > MAX_SAMPLES:
        raise InputError(f"{source.name}: {len(source)} samples; a folder holds at most {MAX_SAMPLES}. Make several")


# ------------------------------------------------------------------ what is there already


def _started(folder: Place, own: Sequence[tuple[int, int]] | None) -> list[str]:
    """The files of an earlier call; of several processes at work, the parts that are this one's own."""
    there = list_folder(folder)
    if own is not None:
        return [name for name in map(name_of, own) if name in there]
    return [name for name in there if name in (MODEL, MANIFEST) or NAME.fullmatch(name)]


def _place_model(folder: Place, model: Recording) -> None:
    """Copy the model into the folder; refuse a folder of another model."""
    path = folder / MODEL
    if isinstance(path, Path):
        remove_leftovers(path)
    if MODEL not in list_folder(folder):
        if isinstance(path, Path):
            check_writable(path, num_bytes=model.nbytes)
        copy(place(model.path), path)
    found = archive.open_archive(path)
    if found.checksum != model.fingerprint:
        raise ResumeError(
            f"{path}: is another model than {model.path}; expected the same. Give that one, or choose another folder"
        )
    found.verify()
