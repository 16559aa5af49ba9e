"""Store compressed images instead of features; replay them through the trunk that made the features.

    images (N, C, H, W) uint8 -> JPEG, WebP (lossy or lossless) or PNG -> the file   (krnet/coding/image_codec.py)
    ids -> image bytes -> decoded in parallel -> (image - mean) / std -> trunk -> features

The trunk, a network from images to features, is not in the file: an incremental learner has it anyway. It is given as
a module when recording and again when opening (`krnet.open(path, trunk=...)`, `--trunk` on the command line). Its
weights must be the same both times, and what it computes: the file holds a fingerprint of the weights, and what the
trunk made of two fixed images.

With a budget, the smaller lossless codec (WebP or PNG) is taken if it fits. Else JPEG at 4:4:4, JPEG at 4:2:0 and lossy
WebP compete, each at the highest quality that fits; the one with the least error of the features on a few images wins.
Settings that the caller gives are not searched.

A recording that starts from an earlier one (`start`) holds the earlier images first, then the given ones; the features
of the earlier images are its replays. If codec, quality and subsampling stay the same, the earlier bytes are kept. If
not, because the budget has to hold more images now, the decoded images are encoded again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from krnet.errors import NotARecordingError
from krnet.features.samples import Samples
from krnet.io.archive import RowStore
from krnet.nn.fingerprint import is_behaviour
from krnet.recorders.base import PROBE_SAMPLES, Content, Job, Recorder, Stored, register
from krnet.recorders.images.budget import Search
from krnet.recorders.images.codec import (
    ImagesConfig,
    RecordedImages,
    SpooledImages,
    chunk_samples,
    read_shape,
)
from krnet.recorders.images.inputs import Inputs, check_features_match
from krnet.recorders.images.network import ImagesReplayer
from krnet.recorders.ranges import stored_range

IMAGE_COPIES = 6  # float32 numbers for each value of an image, from its pixels to the trunk's input


@register
class ImagesRecorder(Recorder):
    name = "images"
    config_class = ImagesConfig
    package, extra = "PIL", "images"
    inputs = frozenset({"images", "trunk", "start"})
    required = frozenset({"images", "trunk"})
    replay_inputs = frozenset({"trunk"})

    def fit(self, job: Job) -> Content:
        inputs = Inputs.of(job)
        images, config = inputs.images, inputs.config
        started = time.perf_counter()
        network = inputs.network(job)
        check_features_match(job, images, network)
        spooled = SpooledImages(None if job.checkpoint is None else job.checkpoint.parent)
        encoded, made = spooled.add(images.encode(torch.arange(len(images)), config)).tensors()
        tensors = {"low": job.stats.low, "high": job.stats.high, **encoded}
        settings = {**asdict(config), "image_shape": images.shape, **network.describe(images.shape)}
        return Content(tensors=tensors, settings=settings, seconds=time.perf_counter() - started, made=made)

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The smaller lossless codec if it fits; else the lossy one with the least error of the features.

        Candidates are compared by their sizes and errors on a few images; the chosen one is checked on all images.
        """
        inputs = Inputs.of(job)
        search = Search(job, inputs, num_tensors=len(self.stored(job.source.shape, len(inputs.images), {})))
        return search.settings(budget)

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        contents = {"lengths": Stored((num_samples,)), "stream": Stored(), "start": Stored()}
        return {**stored_range(shape), **contents}

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        shape = read_shape(settings)
        return IMAGE_COPIES * min(PROBE_SAMPLES, chunk_samples(shape)) * math.prod(shape)

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: RowStore, device: torch.device
    ) -> ImagesReplayer:
        if not isinstance(trunk := settings.get("trunk"), str):
            raise NotARecordingError(
                f"settings of recorder images refused: trunk is {trunk!r:.99}; expected text. Record again"
            )
        results = settings.get("trunk_results")
        if results is not None and not is_behaviour(results):
            raise NotARecordingError(
                f"settings of recorder images refused: trunk_results is {results!r:.99}; expected numbers. Record again"
            )
        encoded = RecordedImages.read(settings, store, samples.num_samples)
        return ImagesReplayer(encoded, settings, samples.shape, device)
