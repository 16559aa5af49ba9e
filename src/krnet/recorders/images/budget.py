"""The search for the codec and the quality whose images fit a budget.

a few images -> Search: size and error of each codec -> the best that fits -> checked on all images -> settings
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import torch

from krnet.coding.image_codec import LOSSLESS, common_prefix, decode_image
from krnet.coding.matrix import evenly_spaced
from krnet.coding.search import largest_fitting
from krnet.features.stats import normalise
from krnet.io.stored_rows import RESIDENT_BYTES, block_header_bytes
from krnet.recorders.base import Job
from krnet.recorders.images.codec import ImagesConfig, chunk_samples
from krnet.recorders.images.inputs import Inputs
from krnet.recorders.sizes import overhead_bytes

SEARCH_SAMPLES = 256  # images from which a search for a budget estimates sizes and errors


class Search:
    """Candidates are compared by their sizes and errors on a few images; the chosen one is checked on all images."""

    def __init__(self, job: Job, inputs: Inputs, num_tensors: int):
        self.job, self.inputs, self.images = job, inputs, inputs.images
        self.network = inputs.network(job)
        self.ids = evenly_spaced(len(self.images), SEARCH_SAMPLES)
        self.fixed_bytes = (
            overhead_bytes(job, num_tensors, asdict(inputs.config))
            + 400  # of settings that are not yet known: image_shape and what tells the trunk
            + 8 * len(job.stats.low)
        )
        self._sizes: dict[ImagesConfig, float] = {}

    def settings(self, budget: int) -> dict[str, Any]:
        """Codec, quality and subsampling; those of the smallest file where none fits."""
        candidates, measured = self.inputs.candidates(self.job.settings), list[ImagesConfig]()
        for lossless in (True, False):  # if a lossless codec fits, no quality has to be searched
            own = [config for config in candidates if (config.codec in LOSSLESS) == lossless]
            found = [self.highest_fitting(config, budget) for config in own]
            measured += found
            fitting = [config for config in found if self.size(config) <= budget]
            for best in sorted(fitting, key=self.size if lossless else self.error):
                # All images may take more bytes than the few predict: lower the quality until the file fits.
                for quality in range(best.quality, self.qualities(best)[0] - 1, -1):
                    config = replace(best, quality=quality)
                    if self.file_bytes(self.images.encode(torch.arange(len(self.images)), config)) <= budget:
                        return searched_settings(config)
        return searched_settings(min(measured, key=self.size))

    def qualities(self, config: ImagesConfig) -> tuple[int, int]:
        """The lowest and the highest quality to search."""
        searched = config.codec not in LOSSLESS and "quality" not in self.job.settings
        return (1, 100) if searched else (config.quality, config.quality)

    def highest_fitting(self, config: ImagesConfig, budget: int) -> ImagesConfig:
        fits = lambda quality: self.size(replace(config, quality=quality)) <= budget  # noqa: E731
        return replace(config, quality=largest_fitting(fits, *self.qualities(config)))

    def size(self, config: ImagesConfig) -> float:
        """Bytes of the file, estimated from a few images."""
        if config not in self._sizes:
            self._sizes[config] = self.file_bytes(self.images.encode(self.ids, config))
        return self._sizes[config]

    def file_bytes(self, contents: Iterable[bytes]) -> float:
        """Bytes of the file, estimated from a few images; from all contents, an upper bound within a kilobyte."""
        sizes, prefix = [], None
        for content in contents:
            sizes.append(len(content))
            prefix = content if prefix is None else common_prefix([prefix, content])
        prefix_bytes, length_bytes = len(prefix or b""), 2 if max(sizes) < 2**16 else 4
        image_bytes = sum(sizes) / len(sizes) - prefix_bytes + length_bytes
        stream_bytes = image_bytes * len(self.images)
        blocks = block_header_bytes(round(stream_bytes), 1) if stream_bytes > RESIDENT_BYTES else 0
        return self.fixed_bytes + prefix_bytes + stream_bytes + blocks

    def error(self, config: ImagesConfig) -> float:
        """Mean squared error of the normalised features."""
        job, shape = self.job, self.images.shape
        square_sum, count = 0.0, 0
        for part in self.ids.split(chunk_samples(shape)):
            decoded = [decode_image(content, config.codec, shape) for content in self.images.encode(part, config)]
            expected = normalise(job.source.read(part).to(job.device), job.stats.low, job.stats.high)
            made = normalise(self.network.features(torch.stack(decoded)), job.stats.low, job.stats.high, clamp=False)
            square_sum += (made - expected).square().mean().item() * len(part)
            count += len(part)
        return square_sum / count


def searched_settings(config: ImagesConfig) -> dict[str, Any]:
    return {"codec": config.codec, "quality": config.quality, "subsampling": config.subsampling}
