"""What recorders that quantise and entropy-code have in common: fit, size, budget and replay.

    features -> Basis -> numbers --survey, encode--> CodedNumbers --> the file, beside the basis
    budget -> the finest step with which the file keeps it -> settings

A recorder brings its settings and its Basis.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from krnet.coding.entropy import MAX_ALPHABET, RESTORE
from krnet.coding.matrix import (
    CodedConfig,
    CodedMatrix,
    Matrix,
    MatrixReader,
    TooFineError,
    encode,
    measure,
    too_fine,
)
from krnet.coding.search import find_least
from krnet.config import from_dict
from krnet.device import exact_math
from krnet.errors import InputError, NotARecordingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.recorders.base import Content, Job, Recorder, Stored, planned_overhead
from krnet.recorders.basis import (
    PREFIX,
    UNUSED,
    Basis,
    CodedReplayer,
    matrix_of,
    planned_bytes,
    stored_edges,
    stored_matrix,
)
from krnet.recorders.growth import CodedGrowth
from krnet.recorders.maps import once_for_features

SEARCH_ROWS = 1024  # rows from which sizes are guessed


class CodedRecorder(Recorder):
    """A recorder of quantised, entropy-coded numbers: settings, and a Basis."""

    config_class: ClassVar[type[CodedConfig]]
    inputs = frozenset({"start"})
    fast_is_exact = True
    grows = True
    headroom: ClassVar[int] = 2
    """Of the symbols that tables may have, samples at hand take one part in so many where others are to come, which
    may have wider numbers."""

    def learn(self, job: Job, config: Any) -> Any:
        """What the basis is made of, and takes long to find: the same for every step."""

    @abstractmethod
    def basis(self, job: Job, config: Any, learned: Any) -> tuple[Basis, Any]:
        """The basis, and the settings with all that they left open."""

    def draft(self, job: Job, config: Any, learned: Any) -> tuple[Matrix, Any, dict[str, int]]:
        """The numbers that would be coded, the settings, and about how many bytes each tensor of the basis takes."""
        basis, config = self.basis(job, config, learned)
        return matrix_of(job, basis), config, {name: tensor.nbytes for name, tensor in basis.tensors().items()}

    @abstractmethod
    def restore(self, samples: Samples, config: Any, store: TensorStore, low: Tensor, high: Tensor) -> Basis:
        """The basis from a file; it goes to the device that `low` is on."""

    def stored_basis(self, shape: Sequence[int], config: Any) -> tuple[dict[str, Stored], int]:
        """The tensors of the basis, and the numbers of a sample along it."""
        return {}, math.prod(shape)

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        config = from_dict(self.config_class, settings)
        basis, num_columns = self.stored_basis(shape, config)
        coded = stored_matrix(PREFIX, num_samples, num_columns, config.block_size)
        return {**stored_edges(shape), **basis, **coded}

    def _learn(self, job: Job, config: Any) -> Any:
        return once_for_features(job, self.name, getattr(config, "components", None), lambda: self.learn(job, config))

    def fit(self, job: Job) -> Content:
        if job.start is not None:
            return CodedGrowth(job, self, self.config_class).fit(job.settings)
        config = from_dict(self.config_class, job.settings)
        started = time.perf_counter()
        with exact_math(), torch.inference_mode():
            basis, config = self.basis(job, config, self._learn(job, config))
            numbers = matrix_of(job, basis)
            coded = encode(numbers, config, measure(numbers, config, num_planned=job.num_planned))
        tensors = {"low": job.stats.low, "high": job.stats.high, **basis.tensors(), **coded.tensors(PREFIX)}
        return Content(tensors=tensors, settings=asdict(config), seconds=time.perf_counter() - started)

    def size_bytes(self, job: Job, settings: Mapping[str, Any], *, max_rows: int | None = SEARCH_ROWS) -> int:
        """About how large a file `fit` would make, without coding it; from all samples, or from `max_rows` of them.

        Like all sizes that a budget is kept with, when it has grown to all samples that are planned.
        """
        config = from_dict(self.config_class, settings)
        with exact_math(), torch.inference_mode():
            numbers, config, own = self.draft(job, config, self._learn(job, config))
            found = measure(numbers, config, max_rows=max_rows, num_planned=job.num_planned)
        own |= {"low": job.stats.low.nbytes, "high": job.stats.high.nbytes}
        stored = self.stored(job.source.shape, len(job.source), asdict(config))
        overhead = planned_overhead(job, len(stored), asdict(config))
        return round(found.size_bytes) + sum(own.values()) + overhead

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The finest step that fits: found from some of the samples, then made sure of by coding all of them.

        None is finer than tables have symbols for, however large the budget. A recording that grows keeps its step;
        new samples may have a wider dead zone.
        """
        if job.start is not None:
            return CodedGrowth(job, self, self.config_class).for_budget(budget)
        given = dict(job.settings)
        if "step" in given:
            return given
        self._learn(job, from_dict(self.config_class, given))  # refuses settings before any of them is tried
        widest = min(2 * math.sqrt(math.prod(job.source.shape)) + 1, 1e3)  # beyond all numbers of an orthonormal basis
        finest, unusable, aim, step, kept = 1e-6, 0.0, float(budget), self.config_class.step, None

        def smallness(step: float) -> float:
            nonlocal unusable
            try:
                return -math.log(self.size_bytes(job, {**given, "step": step}))
            except TooFineError:
                unusable = max(unusable, step)
                return -math.inf

        for _ in range(4):
            found = find_least(
                smallness, -math.log(aim), start=step, low=finest, high=widest, slack=UNUSED / 2, tries=16
            )
            step = float(f"{found or widest:.5g}")
            usable, size = self._usable(job, given, step)
            finest = usable if usable > step else finest
            step = usable
            if size <= budget:
                kept = step if kept is None else min(step, kept)
            at_an_end = found is None or step < 1.5 * unusable or step <= finest
            if (1 - UNUSED) * budget <= size <= budget or (at_an_end and (size > budget) == (found is None)):
                break
            # All samples take more, or less, than those that were searched with: aim by as much lower, or higher.
            aim *= (1 - UNUSED / 4) * budget / size
        return {**given, "step": step if kept is None else kept}

    def _usable(self, job: Job, given: Mapping[str, Any], step: float) -> tuple[float, int]:
        """The step, or the finest above it that all samples can be coded with; and the size of the file, at most."""
        while True:
            try:
                content = self.fit(replace(job, settings={**given, "step": step}))
                first, sizes = (content.tensors[PREFIX + name].long() for name in ("first", "sizes"))
                num_symbols = int((first + sizes).max() - first.min())
                most = MAX_ALPHABET // (self.headroom if job.num_planned > len(job.source) else 1)
                if num_symbols > most:
                    raise too_fine(step, num_symbols, most)
                return step, planned_bytes(job, content, PREFIX)
            except TooFineError as error:
                step = float(f"{max(error.coarser, 1.0005 * step):.5g}")

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> CodedReplayer:
        try:
            config = from_dict(self.config_class, settings)
        except InputError as error:
            raise NotARecordingError(f"settings of recorder {self.name} refused: {error}. {RESTORE}") from error
        shape = ((samples.shape or (1,))[0],)
        low, high = (store.tensor(name, shape=shape, dtype=torch.float32).to(device) for name in ("low", "high"))
        basis = self.restore(samples, config, store, low, high)
        coded = CodedMatrix.load(store, PREFIX, samples.num_samples, basis.num_columns, config.block_size)
        return CodedReplayer(MatrixReader(coded, config, device), basis, samples, low, high)
