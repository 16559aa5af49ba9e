"""Autoencoder: a code for every sample, and the decoder that turns it into the sample's feature map.

    fitting   features --normalise--> Encoder -> code (B, code_width) --round to code_bits--> Decoder -> features
    file      the decoder's weights and the codes of all samples; the encoder is not needed any more
    replay    ids -> codes -> Decoder -> normalised features (B, c, h, w) -> original scale

The baseline of Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022): KRNet's decoder, an encoder that
mirrors it, and 1,024 floats a sample. Our deviation is codes of few bits: they are rounded during training, and
gradients pass straight through the rounding (Bengio et al. 2013). All numbers share one quantisation step. A code has
a mean square of 1, so the step bounds its bits; numbers that vary more take more of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from krnet.coding.matrix import CodedMatrix, Matrix, MatrixReader, encode, measure
from krnet.config import from_dict
from krnet.device import exact_math
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.nn.paper_config import DecoderConfig
from krnet.nn.paper_net import Decoder
from krnet.nn.sizing import preset_config, sizes_for
from krnet.recorders.autoencoder import budget as budgets
from krnet.recorders.autoencoder.budget import max_useful_width
from krnet.recorders.autoencoder.network import (
    CODE_NAMES,
    CODES,
    Autoencoder,
    AutoencoderConfig,
    pack,
    stored_tensors,
    unpack,
)
from krnet.recorders.base import Content, Job, Stored, register
from krnet.recorders.checks import reading_settings
from krnet.recorders.fit import NetworkFit, run_fit
from krnet.recorders.maps import normalised
from krnet.recorders.memory import block_numbers
from krnet.recorders.network_replayer import NetworkReplayer
from krnet.recorders.network_sizes import decoder_multiplications, decoder_numbers
from krnet.recorders.presets import PresetRecorder, check_geometry, on_meta
from krnet.recorders.ranges import read_range
from krnet.train.loop import Outcome

PAPER_CODE_WIDTH = 1024
MAX_ENCODER_BYTES = 64 << 20  # the encoder's largest map, for one batch of samples


class AutoencoderFit(NetworkFit):
    net: Autoencoder

    def __init__(self, job: Job, config: AutoencoderConfig):
        self.config = config
        stats = job.stats
        super().__init__(job, lambda: Autoencoder(config, stats.normalised_mean.float(), stats.normalised_std.float()))

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.net(self._to_maps(target))

    def _to_maps(self, x: Tensor) -> Tensor:
        """(B, *shape) -> (B, channels, height, width); vectors stay as they are."""
        config = self.config
        return x if config.vector else x.view(len(x), config.channels, config.height, config.width)

    @torch.inference_mode()
    def codes(self) -> Tensor:
        """The codes (N, code_width) of all samples, on the CPU: float32, or int16 symbols."""
        step = self.config.step
        size = self.job.samples.num_samples, self.config.code_width
        codes = torch.empty(size, dtype=torch.float32 if step is None else torch.int16)
        max_map_values = max(
            math.prod(self.net.decoder.start_shape), self.config.c1 * self.config.height * self.config.width
        )
        with exact_math():
            for ids in torch.arange(len(codes)).split(max(1, MAX_ENCODER_BYTES // (4 * max_map_values))):
                some = self.net.codes(self._to_maps(normalised(self.job, ids)))
                codes[ids[0] : ids[-1] + 1] = some if step is None else (some / step).round()
        return codes

    def content(self, outcome: Outcome) -> Content:
        codes = self.codes()
        if self.config.step is None:
            tensors = {CODES: codes}
        else:
            matrix = Matrix(lambda rows: codes[rows].float(), *codes.shape)
            tensors = encode(matrix, self.config.coding, measure(matrix, self.config.coding)).tensors(f"{CODES}.")
        return Content(
            tensors={
                **tensors,
                **pack(self.net.decoder, self.config.weight_bits),
                "low": self.job.stats.low,
                "high": self.job.stats.high,
            },
            settings=asdict(self.config),
            iterations=outcome.iterations,
            seconds=outcome.seconds,
            stopped_by=outcome.reason,
        )


def read_codes(
    store: TensorStore, config: AutoencoderConfig, num_samples: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """A function of ids (n,) on the CPU that returns their codes (n, code_width) on the device."""
    width = config.code_width
    step = config.step
    if step is None:
        floats = store.tensor(CODES, shape=(num_samples, width), dtype=torch.float32)
        return lambda ids: floats[ids].to(device)
    coded = CodedMatrix.load(store, f"{CODES}.", num_samples, width, config.block_size)
    reader = MatrixReader(coded, config.coding, device)
    return lambda ids: reader.read(ids) * step


@register
class AutoencoderRecorder(PresetRecorder):
    name = "autoencoder"
    config_class = AutoencoderConfig
    inputs = frozenset({"preset", "head"})

    def config(self, job: Job) -> AutoencoderConfig:
        shape = job.source.shape
        network = {name: value for name, value in job.settings.items() if name not in CODE_NAMES}
        if job.preset is not None:
            sizes = preset_config(shape, job.preset, **network)
        else:
            # The paper's learning rate needs the last norm: without it, Adam's steps push the output below zero.
            network = {"last_norm": job.fit.schedule == "paper", **network}
            sizes = sizes_for(shape, job.samples.class_counts(), **network)
        decoder = {field.name: getattr(sizes, field.name) for field in fields(DecoderConfig)}
        code = {name: value for name, value in job.settings.items() if name in CODE_NAMES}
        return from_dict(
            AutoencoderConfig, {"code_width": min(PAPER_CODE_WIDTH, max_useful_width(shape)), **decoder, **code}
        )

    def fit(self, job: Job) -> Content:
        config = self.config(job)
        return run_fit(self, AutoencoderFit(job, config), asdict(config))

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        found = budgets.for_budget(job, budget)
        return {name: value for name, value in found.items() if name in self.setting_names}

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        return stored_tensors(num_samples, from_dict(AutoencoderConfig, settings))

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        config = from_dict(AutoencoderConfig, settings)
        return decoder_numbers(config) + block_numbers(config.block_size, config.code_width)

    def network_multiplications(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        return decoder_multiplications(from_dict(AutoencoderConfig, settings))

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> NetworkReplayer:
        """Check all sizes against the tensors in the file before allocating anything."""
        with reading_settings(self.name):
            config = from_dict(AutoencoderConfig, settings)
            check_geometry(config, samples.shape)
        decoder = on_meta(lambda: Decoder(config, config.code_width))
        decoder.load_state_dict(unpack(store, decoder, config.weight_bits), assign=True)
        if device.type == "cpu":  # where this layout makes depthwise convolutions faster
            decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        low, high = read_range(store, (config.channels,))
        codes = read_codes(store, config, samples.num_samples, device)
        max_map_values = math.prod(decoder.start_shape)
        return NetworkReplayer(decoder, codes, max_map_values, samples, low, high, device)
