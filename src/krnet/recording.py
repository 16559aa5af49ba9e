"""Recording: an opened recording file, which replays feature maps by sample ID.

rec[5], rec[2:9], rec[[5, 3]], rec[mask] -> float32 features in the original scale, in the order of the IDs
rec.dataset() -> a Dataset for a DataLoader
rec.loader(256) -> batches on the device
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from krnet.appending import Addition, grown_contents
from krnet.config import check_choice
from krnet.device import pick_device
from krnet.errors import (
    InputError,
    NotARecordingError,
    OversizedRecordingError,
)
from krnet.features.ids import resolve_ids
from krnet.features.labels import stored_labels
from krnet.features.samples import Samples
from krnet.features.sequences import Sequences, check_lengths, no_sequences, stored_lengths
from krnet.features.source import open_features
from krnet.features.stats import normalise, not_finite
from krnet.io import archive
from krnet.io.atomic import AnyPath
from krnet.io.header import RESTORE
from krnet.io.output import copy
from krnet.io.overlap import refuse_overlap, same
from krnet.io.places import is_url
from krnet.io.stored_rows import Rows
from krnet.io.writable import check_writable
from krnet.loading.loader import Loader
from krnet.progress import Watch, closing_watch
from krnet.recorders.base import PROBE_SAMPLES, Replayer, written_by
from krnet.recorders.checks import check_package, check_projects
from krnet.recorders.memory import replay_bytes, sample_bytes
from krnet.recording_data import RecordingDataset
from krnet.recording_file import check_fields, check_probe, destination, naming

PRECISIONS = ("exact", "fast")
CHUNK_BYTES = 64 << 20  # features decoded at once: bounds the memory of a large request beside its result


class Recording:
    """N samples, replayed by ID. Opening reads the header; the tensors are read and checked at the first replay.

    `krnet.record` and `krnet.open` return one. The examples of its methods use this one:

    >>> features, labels = torch.rand(40, 4, 3, 3), torch.arange(40) % 4
    >>> recording = krnet.record(features, labels, recorder="quantized", step=0.1, out="features.krn")
    >>> len(recording)
    40
    """

    def __init__(
        self,
        kept: archive.Archive,
        device: torch.device,
        precision: str = "exact",
        keep: object = None,
        trunk: nn.Module | None = None,
    ):
        """`keep` is an object that lives as long as the recording: a temporary file is removed with it.

        `trunk` makes features of stored images; see Replayer.
        """
        self._archive = kept
        self._keep = keep
        self.device = device
        self.precision = precision
        if kept.metadata.get("kind") != "recording":
            raise NotARecordingError(
                f"{kept.path}: holds a {kept.metadata.get('kind')!r:.40}; expected a finished recording. "
                f"A checkpoint is taken up again by recording with resume"
            )
        self._recorder = written_by(kept.metadata.get("recorder"), kept.metadata.get("settings"), kept.path)
        if trunk is not None and "trunk" not in self._recorder.replay_inputs:
            raise InputError(f"{kept.path}: a trunk is given, and recorder {self.recorder} needs none; leave it out")
        self._trunk = trunk
        check_fields(kept)
        self._samples = self._read_samples()
        self._replayer: Replayer | None = None

    def _read_samples(self) -> Samples:
        kept = self._archive
        return Samples.recall(kept.metadata, kept.nbytes, kept.get, kept.path, kept.limit)

    def __getstate__(self) -> dict[str, Any]:
        # Workers read the tensors from the file: that is cheaper than to send them, and sends nothing on a GPU.
        return {**self.__dict__, "_replayer": None, "_keep": None}

    @property
    def fingerprint(self) -> str:
        """The checksum of the header, which covers the checksums of all tensors: it identifies the file's content.

        >>> krnet.open("features.krn").fingerprint == recording.fingerprint
        True
        """
        return self._archive.checksum

    @property
    def recorder(self) -> str:
        """Name of the recorder that wrote the file.

        >>> recording.recorder
        'quantized'
        """
        return self._recorder.name

    @property
    def lacks(self) -> frozenset[str]:
        """Inputs that a replay needs and that were not given: the trunk, for a recording of images.

        >>> recording.lacks
        frozenset()
        """
        return self._recorder.replay_inputs if self._trunk is None else frozenset()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the recorder that wrote the file.

        >>> recording.settings["step"]
        0.1
        """
        return dict(self._archive.metadata["settings"])

    @property
    def metadata(self) -> dict[str, Any]:
        """What the file says of itself: docs/format.md lists it.

        >>> recording.metadata["num_samples"], recording.metadata["feature_dtype"]
        (40, 'float32')
        """
        return dict(self._archive.metadata)

    def tensor(self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Read and check a stored tensor, for recorders that start from this recording.

        >>> recording.tensor("low").shape
        torch.Size([4])
        """
        return self._archive.tensor(name, shape=shape, dtype=dtype)

    @property
    def path(self) -> Path:
        """The file. Where it was opened by a URL, this is the URL: to be shown, and no Path to work with.

        >>> recording.path.name
        'features.krn'
        """
        return cast(Path, self._archive.path)

    @property
    def max_bytes(self) -> int | None:
        """The memory that the file may ask for, where that was given; None: the rule in terms of its size.

        >>> krnet.open("features.krn", max_bytes="2GB").max_bytes
        2000000000
        """
        return self._archive.limit.max_bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole file.

        >>> recording.nbytes == recording.path.stat().st_size
        True
        """
        return self._archive.nbytes

    @property
    def r2(self) -> float:
        """How well replays match the features, over all samples: 1 is perfect, 0 as good as the mean value.

        >>> 0.9 < recording.r2 < 1
        True
        """
        return float(self._archive.metadata["metrics"]["r2"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample.

        >>> recording.shape
        (4, 3, 3)
        """
        return self._samples.shape

    @property
    def labels(self) -> Tensor | None:
        """Labels (N,) int64 by sample ID; None if the features were recorded without labels.

        >>> recording.labels[:6].tolist()
        [0, 1, 2, 3, 0, 1]
        """
        labels = self._samples.labels
        return None if labels is None else labels.clone()

    @property
    def lengths(self) -> Tensor | None:
        """Lengths (S,) int64 of the sequences that the samples form; None if they were recorded without lengths.

        >>> recording.lengths is None
        True
        """
        return None if self._samples.lengths is None else self._samples.lengths.clone()

    @property
    def sequences(self) -> Sequences:
        """The sequences, for a recording that was made with their lengths: each is replayed by its number.

        >>> texts = krnet.record(torch.rand(9, 4), lengths=[2, 4, 3], recorder="raw")
        >>> len(texts.sequences), texts.sequences[1].shape, [len(found) for found in texts.sequences[:2]]
        (3, torch.Size([4, 4]), [2, 4])
        """
        lengths = self.lengths
        if lengths is None:
            raise no_sequences(self.path)
        return Sequences(lengths, self.replay, self.path)

    @property
    def num_classes(self) -> int | None:
        """Number of different labels; None if there are none.

        >>> recording.num_classes
        4
        """
        return None if self._samples.labels is None else len(self._archive.metadata["classes"])

    def rows(self, name: str, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Rows:
        """Read a stored tensor in parts, for recorders that start from this recording.

        >>> recording.rows("low").read(1, 3).shape
        torch.Size([2])
        """
        return self._archive.rows(name, shape=shape, dtype=dtype)

    def __len__(self) -> int:
        return self._samples.num_samples

    def __repr__(self) -> str:
        return f"Recording({str(self.path)!r}: {len(self)} samples of {self.shape}, {self.nbytes} bytes)"

    def to(self, device: str | torch.device, precision: str | None = None) -> Recording:
        """Return the same recording on another device, or in another precision (exact or fast).

        >>> recording.to("cpu", precision="fast").precision
        'fast'
        """
        check_choice("precision", precision or self.precision, PRECISIONS)
        return Recording(self._archive, pick_device(device), precision or self.precision, self._keep, self._trunk)

    def __getitem__(self, which: Any) -> Tensor:
        """Replay by ID: an integer gives one sample; a slice, list, mask or tensor gives a batch in that order.

        >>> recording[5].shape, recording[[5, 3]].shape, recording[recording.labels == 1].shape
        (torch.Size([4, 3, 3]), torch.Size([2, 4, 3, 3]), torch.Size([10, 4, 3, 3]))
        """
        ids = self._parse_index(which)
        values = self.replay(ids)
        return values.reshape((*ids.shape, *self.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All samples as an array (N, *shape), float32 unless another type is asked for.

        >>> numpy.asarray(recording).shape
        (40, 4, 3, 3)
        """
        if copy is False:
            raise ValueError(f"{self.path}: an array of a recording is always new: its samples are decoded; copy=False")
        array = np.empty((len(self), *self.shape), np.float32 if dtype is None else dtype)
        for ids in torch.arange(len(self)).split(self._chunk_samples):
            array[ids[0] : ids[-1] + 1] = self.replay(ids).cpu().numpy()
        return array

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(len(self)):
            yield self[i]

    def replay(self, ids: Tensor | Sequence[int], precision: str | None = None) -> Tensor:
        """Replay ids (B,), whole numbers in 0 .. N-1 -> float32 (B, *shape) on the recording's device.

        >>> recording.replay([5, 3]).shape
        torch.Size([2, 4, 3, 3])
        """
        ids = self._parse_index(ids).reshape(-1)
        precision = precision or self.precision
        check_choice("precision", precision, PRECISIONS)
        step = self._chunk_samples
        replayer = self.load()  # first, because it refuses a shape that the file is too small for
        result = torch.empty((len(ids), *self.shape), device=self.device)
        for start in range(0, len(ids), step):
            result[start : start + step] = replayer.decode(ids[start : start + step], fast=precision == "fast")
        return result

    def project(self, features: Any) -> Tensor:
        """Show features that are not in the recording as it would give them back: (B, *shape) on its device.

        They are coded as new samples would be, and decoded; nothing is stored. Replays are smoother than the features
        themselves, so a classifier that was trained on replays does better on test features that are projected first.
        Recorders that can do this are krnet, pca, quantized, transform, pq and raw; the others refuse.

        features   (B, *shape), as for krnet.record: a tensor on any device, an array or a file

        >>> unseen = torch.rand(8, 4, 3, 3)
        >>> shown = recording.project(unseen)
        >>> shown.shape, float((shown - unseen).abs().max()) < 0.1
        (torch.Size([8, 4, 3, 3]), True)
        """
        check_projects(self._recorder, self.path, "Record with one of them to project features")
        source, step = open_features(features), self._chunk_samples
        source.check_shape(self.shape, self.path)
        replayer = self.load()
        result = torch.empty((len(source), *self.shape), device=self.device)
        for ids in torch.arange(len(source)).split(step):
            # A tensor is read where it is: one on a GPU does not travel to the CPU and back.
            rows = slice(int(ids[0]), int(ids[-1]) + 1)
            given = features.detach()[rows] if isinstance(features, Tensor) else source.read(ids)
            values = given.to(self.device).float()
            if not values.isfinite().all():
                raise not_finite(source.name, given.cpu(), int(ids[0]))
            result[rows] = replayer.code(values).shown
        return result

    @property
    def _chunk_samples(self) -> int:
        """Number of samples that are decoded at once."""
        return max(1, min(4096, CHUNK_BYTES // (4 * max(1, torch.Size(self.shape).numel()))))

    def load(self) -> Replayer:
        """Return what decodes samples, codes unseen ones and shows their symbols; tensors are read at the first call.

        >>> symbols, shown = recording.load().code(torch.rand(8, 4, 3, 3))
        >>> symbols.shape, torch.equal(recording.load().show(symbols), shown)
        (torch.Size([8, 36]), True)
        """
        if self._replayer is None:
            settings = self._archive.metadata["settings"]
            self._check_size(settings)
            if not self._recorder.replays_without_package:
                check_package(self._recorder)
            with naming(self.path):
                self._replayer = self._recorder.replay(self._samples, settings, self._archive, self.device)
            self._replayer.trunk = self._trunk
        return self._replayer

    def _check_size(self, settings: dict[str, Any]) -> None:
        """Refuse settings that would take far more memory than the file's size speaks for, before anything is made."""
        values = sample_bytes(self.shape)
        self._archive.limit.check(values, f"a few samples of shape {self.shape}")  # some settings follow from the shape
        try:
            num_bytes = replay_bytes(self._recorder, self.shape, len(self), settings)
            num_multiplications = PROBE_SAMPLES * self._recorder.network_multiplications(self.shape, settings)
        except (InputError, KeyError, TypeError):
            return  # the recorder's `replay` refuses these settings, and says why
        except (RuntimeError, OverflowError) as error:  # torch, of sizes whose product overflows
            raise OversizedRecordingError(f"{self.path}: settings of no possible size ({error}). {RESTORE}") from error
        self._archive.limit.check(num_bytes, "to open it and to replay a few samples")
        self._archive.limit.check_work(num_multiplications, "to replay a few samples")

    def _parse_index(self, which: Any) -> Tensor:
        """Turn any index into IDs 0 .. N-1; negative IDs count from the end."""
        return resolve_ids(which, len(self), self.path)

    def info(self) -> dict[str, Any]:
        """Return size, quality and settings as plain values, as `krnet info --json` prints them.

        >>> recording.info()["num_samples"], recording.info()["num_classes"]
        (40, 4)
        """
        metadata = self._archive.metadata
        metrics = metadata["metrics"]
        info = {
            "num_samples": len(self),
            "shape": list(self.shape),
            "recorder": self._recorder.name,
            "bytes": self.nbytes,
            "bytes_per_sample": self.nbytes / len(self),
            "bits_per_value": 8 * self.nbytes / (len(self) * max(1, torch.Size(self.shape).numel())),
            "mse": metrics["mse"],
            "r2": metrics["r2"],
            "zero_ratio": metrics["zero_ratio"],
            "fit_seconds": metadata["times"]["fit_seconds"],
            "feature_bytes": metadata["feature_bytes"],
            "compression_ratio": metadata["feature_bytes"] / self.nbytes,
            "num_classes": self.num_classes,
            "num_sequences": self._num_sequences,
            "iterations": metadata["iterations"],
            "stopped_by": metadata["stopped_by"],
            "twice_as_long": metadata.get("twice_as_long"),
            "fast_extra_mse": self._fast_extra_mse(),
            "settings": metadata["settings"],
            "fit": metadata["fit"],
            "versions": metadata["versions"],
        }
        return info

    @property
    def _num_sequences(self) -> int | None:
        return None if self._samples.lengths is None else len(self._samples.lengths)

    def _fast_extra_mse(self) -> float | None:
        """Return the MSE between fast and exact replays, normalised: as stored, or else measured now on a GPU."""
        if self._recorder.fast_is_exact:
            return 0.0
        stored: float | None = self._archive.metadata["metrics"].get("fast_extra_mse")
        if stored is not None or self.lacks or self.device.type == "cpu":
            return stored
        ids = torch.linspace(0, len(self) - 1, min(256, len(self))).long()
        low, high = self._archive.tensor("low"), self._archive.tensor("high")
        exact, fast = (normalise(self.replay(ids, p), low, high, clamp=False) for p in PRECISIONS)
        return (exact - fast).square().mean().item()

    def check(self) -> dict[str, Any]:
        """Check every byte, and decode a few samples that the file holds as they were decoded when it was written.

        `krnet.verify` calls it. `probe_error` is the largest difference; None where a trunk is missing.

        >>> recording.check()
        {'tensors': 12, 'probe_error': 0.0}
        """
        kept = archive.open_archive(self._archive.path, self.max_bytes)
        kept.verify()
        if not self.lacks:
            return {"tensors": len(kept.names), "probe_error": check_probe(kept, self.replay)}
        self.replay([])  # checks settings and tensors, and decodes nothing
        return {"tensors": len(kept.names), "probe_error": None}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Check the whole file and copy it.

        >>> recording.save("copy.krn").name
        'copy.krn'
        """
        self._archive.verify()
        copy(self._archive.path, Path(path))
        return Path(path)

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
        **settings: Any,
    ) -> Recording:
        """Return the recording with more samples, whose IDs follow on; the features of the old ones are not needed.

        Old samples are replayed as before, to the bit. Recorders that can do this are krnet, pca, quantized, transform
        and pq; the others refuse. New samples are coded with what was learned from the first ones, so record enough of
        these, and of all kinds; `krnet.record(room=...)` plans the bytes for the samples to come.

        features   as for krnet.record; samples of the same shape and type as the old ones
        labels     one integer per new sample, if the recording has labels; they may be of new classes. By default those
                   in the file of features
        lengths    lengths of the new sequences, if the recording holds sequences; the last old one is not continued
        out        file to write, by default a temporary one. If it is the recording's own file, use the Recording that
                   is returned: this one cannot be saved or grown again
        budget     size of the grown file, at most. By default it has as many bytes a sample as now, or as planned with
                   room; the labels of samples that are not sorted by class come on top
        head       as for krnet.record
        key        name of the array, for a file that holds several
        watch      called with a Progress every few steps; `krnet.show_progress` draws a bar

        Nothing is trained; recorder krnet improves each new code by a few gradient steps. With iterations, time_budget
        or a head the new codes are fitted; further settings are those of the fit. R2 afterwards is that of all samples,
        each channel scaled by its range in the first recording.

        A folder of krnet.encode grows in its place, part after part. It takes part_samples, moves and resume, as
        krnet.encode does, and neither out, budget, head nor settings of a fit. With resume, a call that was stopped
        goes on, and one that has finished adds nothing again.

        >>> grown = recording.append(torch.rand(20, 4, 3, 3), labels=[7] * 20)
        >>> len(grown), torch.equal(grown[:40], recording[:])
        (60, True)
        """
        keeper, path = destination(out)
        in_place = not is_url(self._archive.path) and same(path, self.path)
        if in_place:
            keeper = self._keep
        refuse_overlap("append", [path], [features, labels, lengths])
        check_writable(path, num_bytes=self.nbytes)
        source = open_features(features, key=key)
        if labels is None and self.labels is not None:
            labels = stored_labels(features, key, len(source))
        if lengths is None and self.lengths is not None:
            lengths = stored_lengths(features, key, len(source))
        if in_place and archive.open_archive(path).checksum != self.fingerprint:
            raise InputError(
                f"{path}: has changed since this Recording was opened. Append to the Recording that the last append "
                f"returned, or open the file again"
            )
        added = Addition(source, labels, check_lengths(lengths, len(source)), budget, head, watch, settings)
        archive.write(path, *grown_contents(self, self._archive.metadata, added, self.device, path))
        grown = archive.open_archive(path, self.max_bytes)
        return Recording(grown, self.device, self.precision, keeper, self._trunk)

    def dataset(self) -> RecordingDataset:
        """Return a torch Dataset of (feature, label) on the CPU, for a DataLoader with any number of workers.

        >>> feature, label = recording.dataset()[5]
        >>> feature.shape, int(label)
        (torch.Size([4, 3, 3]), 1)
        """
        return RecordingDataset(self)

    def loader(
        self,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        *,
        drop_last: bool = False,
        buffer: int | None = None,
        prefetch: int = 1,
        num_workers: int = 0,
        share: tuple[int, int] = (0, 1),
    ) -> Loader:
        """Return an iterable of batches (features, labels) on the recording's device.

        Each pass has another shuffled order; the orders depend on `seed` only. `loader.state_dict()` says where a pass
        is, and `load_state_dict` takes it up there, after the last batch that was handed out; `set_epoch(n)` begins
        pass n.

        batch_size   samples of a batch; with a share, of all processes together
        drop_last    leave out the last batch of a pass if it is not full
        buffer       samples that are shuffled together. By default all of a file of at most 1 GB, and of a larger one
                     as many as 1 GB of it holds: IDs are cut into ranges, and a few ranges at a time, in random order,
                     are read and shuffled together
        prefetch     batches that are made ahead of time, on a GPU or by each worker
        num_workers  processes that decode on the CPU; the order is the same for any number. 0: decode on the device
        share        (k, n): this is process k of n that train together; it takes every n-th sample of each batch

        >>> [len(labels) for features, labels in recording.loader(16, shuffle=True)]
        [16, 16, 8]
        """
        return Loader(
            self, batch_size, shuffle, seed, drop_last=drop_last, buffer=buffer, prefetch=prefetch,
            num_workers=num_workers, share=share,
        )  # fmt: skip
