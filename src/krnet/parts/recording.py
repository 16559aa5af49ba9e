"""A folder of parts as one recording: samples by ID, labels, size and quality, as those of a single file.

    DIR/ -> open_parts -> PartsRecording

Opening reads the manifest and the header of the model; parts are opened when a sample of theirs is first replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from krnet.device import pick_device
from krnet.errors import ChecksumError, InputError, SettingError
from krnet.features.dtypes import DTYPES
from krnet.features.labels import check_labels, stored_labels
from krnet.features.samples import Samples
from krnet.features.sequences import check_lengths, stored_lengths
from krnet.features.source import open_features
from krnet.features.stats import chain_digests
from krnet.io import archive
from krnet.io.atomic import AnyPath, make_folder
from krnet.io.folders import list_folder
from krnet.io.output import copy
from krnet.io.overlap import refuse_overlap, same
from krnet.io.places import Place, Url, place
from krnet.io.writable import check_name
from krnet.parts.appending import Addition, append_parts
from krnet.parts.folder import check_output, read_manifest, write_manifest
from krnet.parts.manifest import MANIFEST, MODEL, Manifest
from krnet.parts.part import REPAIR, Part
from krnet.parts.reading import PartsReplayer, open_listed
from krnet.parts.sequences import read_lengths
from krnet.parts.symbols import Coder
from krnet.progress import Watch, closing_watch
from krnet.recording import Recording
from krnet.recording_file import check_probe, naming


class PartsRecording(Recording):
    """Coded samples in many files, and the model that shows them."""

    def __init__(
        self, folder: AnyPath | Url, device: torch.device, precision: str = "exact", max_bytes: int | None = None
    ):
        self.folder = place(folder)
        self._lengths: Tensor | None = None
        self.manifest = read_manifest(self.folder)
        self.model = Recording(archive.open_archive(self.folder / MODEL, max_bytes), device)
        if (self.model.fingerprint, self.model.shape) != (self.manifest.origin.model, self.manifest.origin.shape):
            raise ChecksumError(f"{self.model.path}: is not the model that {MANIFEST} lists. {REPAIR}")
        super().__init__(_as_one(self.model, self.manifest), device, precision)

    def _read_samples(self) -> Samples:
        return Samples(self.manifest.num_samples, self.model.shape, None)

    def __repr__(self) -> str:
        found = f"{len(self)} samples of {self.shape} in {len(self.manifest.parts)} parts, {self.nbytes} bytes"
        return f"Recording({str(self.path)!r}: {found})"

    @property
    def path(self) -> Path:
        return cast(Path, self.folder)  # a URL is to be shown, as in Recording

    @property
    def max_bytes(self) -> int | None:
        return self.model.max_bytes

    @property
    def nbytes(self) -> int:
        """Of model and parts."""
        return self.manifest.size_bytes

    @property
    def num_classes(self) -> int | None:
        return self.manifest.num_classes

    @property
    def labels(self) -> Tensor | None:
        """Read from all parts, at each call."""
        if self.manifest.num_classes is None:
            return None
        return torch.cat([part.labels for part in self._parts() if part.labels is not None])

    @property
    def lengths(self) -> Tensor | None:
        """Read at the first call."""
        if self._lengths is None and self.manifest.sequences is not None:
            self._lengths = read_lengths(self.folder, self.manifest.sequences, len(self), self.max_bytes)
        return None if self._lengths is None else self._lengths.clone()

    @property
    def _num_sequences(self) -> int | None:
        return None if self.manifest.sequences is None else self.manifest.sequences.num_sequences

    def _parts(self) -> Iterator[Part]:
        for number in range(len(self.manifest.parts)):
            yield open_listed(self.folder, self.manifest, number, self.max_bytes)

    def load(self) -> PartsReplayer:
        if self._replayer is None:
            self._replayer = PartsReplayer(self.folder, self.manifest, Coder(self.model), self.max_bytes)
        assert isinstance(self._replayer, PartsReplayer), "another replayer"
        return self._replayer

    def to(self, device: str | torch.device, precision: str | None = None) -> PartsRecording:
        return PartsRecording(self.folder, pick_device(device), precision or self.precision, self.max_bytes)

    def info(self) -> dict[str, Any]:
        worst, misfits = self.manifest.worst, self.manifest.measured.misfits
        parts = {
            "num_parts": len(self.manifest.parts),
            "model_bytes": self.manifest.model_bytes,
            "model_r2": self.model.r2,
            "worst_part": {"name": worst.name, "r2": worst.measured.moments.r2},
            "misfits": misfits.describe(),
        }
        return {**super().info(), **parts}

    def check(self) -> dict[str, Any]:
        """The model and all parts: every byte, and a few samples of each, see Recording.check."""
        found = self.model.check()
        errors, num_tensors = [found["probe_error"]], found["tensors"]
        for part in self._parts():
            part.kept.verify()
            with naming(part.kept.path):
                errors.append(check_probe(part.kept, partial(self._replay_from, part.entry.first)))
            num_tensors += len(part.kept.names)
        if self.manifest.sequences is not None:
            read_lengths(self.folder, self.manifest.sequences, len(self), self.max_bytes)  # checks every byte
            num_tensors += 1
        quality = {name: value for name, value in self.info().items() if name in REPORTED}
        return {"tensors": num_tensors, "probe_error": max(errors), "coded_r2": self.r2, **quality}

    def _replay_from(self, first: int, ids: Tensor) -> Tensor:
        return self.replay(ids + first)

    def save(self, path: AnyPath) -> Path:
        """Check all files and copy the folder."""
        target = check_name(path)
        check_output(target)
        if list_folder(target):
            raise InputError(f"{target}: is not empty; expected a new folder. Choose another name")
        self.check()
        make_folder(target)
        sequences = [] if self.manifest.sequences is None else [self.manifest.sequences.name]
        for name in [MODEL, *sequences, *(part.name for part in self.manifest.parts)]:
            copy(self.folder / name, target / name)
        write_manifest(target, self.manifest)
        return target

    @closing_watch
    def append(
        self,
        features: Any,
        labels: Any = None,
        *,
        lengths: Any = None,
        out: AnyPath | None = None,
        budget: int | str | None = None,
        head: nn.Module | None = None,
        key: str | None = None,
        watch: Watch | None = None,
        part_samples: int | None = None,
        moves: int | None = None,
        resume: bool = False,
        **settings: Any,
    ) -> Recording:
        """Code more samples with the folder's model, into parts behind those that are there; see krnet.encode.

        The folder itself grows: `out` is it, or nothing. Until all new parts are there it opens as before. A call that
        was stopped goes on behind its last part with `resume`; samples that a finished call has added are not added
        again.
        """
        self._check_append(out, {"budget": budget, "head": head, **settings})
        refuse_overlap("encode", [self.folder] if isinstance(self.folder, Path) else [], [features, labels, lengths])
        source = open_features(features, key=key)
        if labels is None and self.num_classes is not None:
            labels = stored_labels(features, key, len(source))
        if lengths is None and self.manifest.sequences is not None:
            lengths = stored_lengths(features, key, len(source))
        added = Addition(
            source, check_labels(labels, len(source)), check_lengths(lengths, len(source)), part_samples, moves, resume
        )
        append_parts(self.folder, self.manifest, self.model, added, watch)
        return PartsRecording(self.folder, self.device, self.precision, self.max_bytes)

    def _check_append(self, out: AnyPath | None, settings: dict[str, Any]) -> None:
        given = [name for name, value in settings.items() if value is not None]
        if given:
            raise SettingError(
                f"{given[0]} is given for {self.folder}, a folder of parts, where nothing is fitted; expected "
                f"part_samples, moves or resume alone. Leave it out"
            )
        if out is not None and not _is_place(out, self.folder):
            raise InputError(
                f"{out}: is not {self.folder}, a folder of parts, which grows in its place. Leave the output out; or "
                f"copy the folder first, and append to the copy"
            )


def _is_place(given: AnyPath, folder: Place) -> bool:
    """Whether a caller's path or URL is that of the folder."""
    found = place(given)
    return same(found, folder) if isinstance(found, Path) and isinstance(folder, Path) else str(found) == str(folder)


REPORTED = ("num_parts", "model_r2", "worst_part", "misfits")  # by check, of what info says


def _as_one(model: Recording, manifest: Manifest) -> archive.Archive:
    """The model's archive, but it says what the manifest says of the samples."""
    kept, parts = archive.open_archive(model.path, model.max_bytes), manifest.parts
    measured = manifest.measured
    moments, values = measured.moments, max(1, measured.moments.count)
    item_bytes = DTYPES[manifest.origin.dtype].itemsize
    told = {
        "num_samples": manifest.num_samples,
        "classes": None,
        "features": reduce(chain_digests, (part.features for part in parts)),
        "feature_bytes": moments.count * item_bytes,
        "feature_dtype": manifest.origin.dtype,
        "metrics": {"mse": moments.mse, "r2": moments.r2, "zero_ratio": measured.num_zeros / values},
        "parts": [part.num_samples for part in parts],
    }
    return replace(kept, checksum=manifest.fingerprint, metadata={**kept.metadata, **told})
