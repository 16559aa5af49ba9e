"""Shared by recorders quantized, transform and pca, which quantise and entropy-code: fit, size, budget and replay.

    features -> Basis -> coefficients --measure, encode--> CodedMatrix -> the file, together with the basis
    budget -> the finest quantisation step whose file fits the budget -> settings

A recorder supplies its settings and its Basis.
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

from krnet.coding.entropy import MAX_ALPHABET
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
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.recorders.base import Content, Job, Recorder, Stored
from krnet.recorders.basis import (
    MAX_UNUSED_SHARE,
    PREFIX,
    Basis,
    CodedReplayer,
    matrix_of,
    planned_bytes,
    stored_matrix,
)
from krnet.recorders.checks import reading_settings
from krnet.recorders.growth import CodedGrowth
from krnet.recorders.maps import once_for_features
from krnet.recorders.memory import block_numbers
from krnet.recorders.ranges import read_range, stored_range
from krnet.recorders.sizes import planned_overhead

SEARCH_ROWS = 1024  # samples from which a search estimates sizes


class CodedRecorder(Recorder):
    """A recorder that quantises and entropy-codes the coefficients of a Basis."""

    config_class: ClassVar[type[CodedConfig]]
    inputs = frozenset({"start"})
    fast_is_exact = True
    grows = True
    projects = True
    headroom: ClassVar[int] = 2
    """If the file is to grow, its first samples use at most MAX_ALPHABET / headroom symbols: coefficients of later
    samples may be larger."""

    def learn(self, job: Job, config: Any) -> Any:
        """The slow part of computing the basis; it does not depend on the step, and a search does it once."""

    @abstractmethod
    def basis(self, job: Job, config: Any, learned: Any) -> tuple[Basis, Any]:
        """The basis, and the config with all open settings decided."""

    def draft(self, job: Job, config: Any, learned: Any) -> tuple[Matrix, Any, dict[str, int]]:
        """The matrix that would be coded, the complete config, and estimated bytes of each tensor of the basis."""
        basis, config = self.basis(job, config, learned)
        return matrix_of(job, basis), config, {name: tensor.nbytes for name, tensor in basis.tensors().items()}

    @abstractmethod
    def restore(self, samples: Samples, config: Any, store: TensorStore, low: Tensor, high: Tensor) -> Basis:
        """The basis, read from a file, on the device of `low`."""

    def stored_basis(self, shape: Sequence[int], config: Any) -> tuple[dict[str, Stored], int]:
        """The tensors of the basis, and the number of coefficients of a sample."""
        return {}, math.prod(shape)

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        config = from_dict(self.config_class, settings)
        basis, num_columns = self.stored_basis(shape, config)
        coded = stored_matrix(PREFIX, num_samples, num_columns, config.block_size)
        return {**stored_range(shape), **basis, **coded}

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        config = from_dict(self.config_class, settings)
        return block_numbers(config.block_size, self.stored_basis(shape, config)[1])

    def floor_bytes(self, num_samples: int, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        """With the tensors whose lengths are known; each number of them takes a byte at least."""
        counted = [tensor.shape for tensor in self.stored(shape, num_samples, settings).values() if tensor.shape]
        return super().floor_bytes(num_samples, shape, settings) + sum(map(math.prod, counted))

    def _learn_once(self, job: Job, config: Any) -> Any:
        return once_for_features(job, self.name, getattr(config, "components", None), lambda: self.learn(job, config))

    def fit(self, job: Job) -> Content:
        if job.start is not None:
            return CodedGrowth(job, self, self.config_class).fit(job.settings)
        config = from_dict(self.config_class, job.settings)
        started = time.perf_counter()
        with exact_math(), torch.inference_mode():
            basis, config = self.basis(job, config, self._learn_once(job, config))
            matrix = matrix_of(job, basis)
            coded = encode(matrix, config, measure(matrix, config, num_planned=job.num_planned))
        tensors = {"low": job.stats.low, "high": job.stats.high, **basis.tensors(), **coded.tensors(PREFIX)}
        return Content(tensors=tensors, settings=asdict(config), seconds=time.perf_counter() - started)

    def size_bytes(self, job: Job, settings: Mapping[str, Any], *, max_rows: int | None = SEARCH_ROWS) -> int:
        """Estimated size of the file of `fit`, grown to all planned samples, without encoding it.

        Measured on `max_rows` samples, or on all of them if that is None.
        """
        config = from_dict(self.config_class, settings)
        with exact_math(), torch.inference_mode():
            matrix, config, basis_bytes = self.draft(job, config, self._learn_once(job, config))
            stats = measure(matrix, config, max_rows=max_rows, num_planned=job.num_planned)
        basis_bytes |= {"low": job.stats.low.nbytes, "high": job.stats.high.nbytes}
        stored = self.stored(job.source.shape, len(job.source), asdict(config))
        overhead = planned_overhead(job, len(stored), asdict(config))
        return round(stats.size_bytes) + sum(basis_bytes.values()) + overhead

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The finest step whose file fits the budget.

        The search estimates sizes from SEARCH_ROWS samples; then all samples are encoded to verify the result. No step
        gives more symbols than MAX_ALPHABET, however large the budget. A recording that grows keeps its step; its new
        samples may get a wider dead zone.
        """
        if job.start is not None:
            return CodedGrowth(job, self, self.config_class).for_budget(budget)
        given = dict(job.settings)
        if "step" in given:
            return given
        self._learn_once(job, from_dict(self.config_class, given))  # refuses wrong settings before the search
        # Normalised values lie in [0, 1]: no coefficient along an orthonormal basis exceeds sqrt(values).
        max_step = min(2 * math.sqrt(math.prod(job.source.shape)) + 1, 1e3)
        min_step, too_fine_step, aim_bytes = 1e-6, 0.0, float(budget)
        step, best_step = self.config_class.step, None

        def smallness(step: float) -> float:
            nonlocal too_fine_step
            try:
                return -math.log(self.size_bytes(job, {**given, "step": step}))
            except TooFineError:
                too_fine_step = max(too_fine_step, step)
                return -math.inf

        for _ in range(4):
            found = find_least(
                smallness,
                -math.log(aim_bytes),
                start=step,
                low=min_step,
                high=max_step,
                slack=MAX_UNUSED_SHARE / 2,
                tries=16,
            )
            step = float(f"{found or max_step:.5g}")
            usable_step, size_bytes = self._fit_usable_step(job, given, step)
            min_step = usable_step if usable_step > step else min_step
            step = usable_step
            if size_bytes <= budget:
                best_step = step if best_step is None else min(step, best_step)
            # At an end of the range: no step fits, or a finer one would have too many symbols.
            at_an_end = found is None or step < 1.5 * too_fine_step or step <= min_step
            if (1 - MAX_UNUSED_SHARE) * budget <= size_bytes <= budget or (
                at_an_end and (size_bytes > budget) == (found is None)
            ):
                break
            # The estimate from SEARCH_ROWS samples was off: correct the aim by the ratio of budget to real size.
            aim_bytes *= (1 - MAX_UNUSED_SHARE / 4) * budget / size_bytes
        return {**given, "step": step if best_step is None else best_step}

    def _fit_usable_step(self, job: Job, given: Mapping[str, Any], step: float) -> tuple[float, int]:
        """Encode all samples with `step`, or with the finest step above it that does not need too many symbols.

        Returns that step, and an upper bound of the file's size.
        """
        while True:
            try:
                content = self.fit(replace(job, settings={**given, "step": step}))
                first, sizes = (content.tensors[PREFIX + name].long() for name in ("first", "sizes"))
                num_symbols = int((first + sizes).max() - first.min())
                max_symbols = MAX_ALPHABET // (self.headroom if job.num_planned > len(job.source) else 1)
                if num_symbols > max_symbols:
                    raise too_fine(step, num_symbols, max_symbols)
                return step, planned_bytes(job, content, PREFIX)
            except TooFineError as error:
                step = float(f"{max(error.coarser, 1.0005 * step):.5g}")

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> CodedReplayer:
        with reading_settings(self.name):
            config = from_dict(self.config_class, settings)
        low, high = read_range(store, samples.shape, device)
        basis = self.restore(samples, config, store, low, high)
        coded = CodedMatrix.load(store, PREFIX, samples.num_samples, basis.num_columns, config.block_size)
        return CodedReplayer(MatrixReader(coded, config, device), basis, samples, low, high)
