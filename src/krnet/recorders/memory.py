"""What a recording takes in memory: an upper bound from its header, for the limit of krnet.io.memory.

    Recorder.stored (numbers decoded at opening) + Recorder.working_numbers + samples + labels -> replay_bytes

Tensors that the file holds as they are need no bound: their shapes must be those of the file, which are checked before
they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from krnet.recorders.base import FLOAT_BYTES, PROBE_SAMPLES, Recorder

FIXED_BYTES = 64 << 20  # chunks in which tensors are decoded and samples replayed
DECODED_BYTES = 10  # of each number that is decoded at opening: its symbol, the number, and chunks of both
SAMPLE_COPIES = 8  # of a sample while it is replayed and brought to its scale
SAMPLE_ID_BYTES = 64  # of each sample: its label, its group and its slot, and copies of them
BLOCK_COPIES, ROW_COPIES = 6, 5  # float32 numbers for each symbol of a block, and for each number of a row


def replay_bytes(recorder: Recorder, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> int:
    """Upper bound of the memory to open a file and to replay PROBE_SAMPLES samples, as `krnet verify` does."""
    stored = recorder.stored(shape, num_samples, settings)
    num_decoded = sum(tensor.num_decoded for tensor in stored.values())
    working_bytes = FLOAT_BYTES * recorder.working_numbers(shape, settings)
    labels_bytes = SAMPLE_ID_BYTES * num_samples
    return FIXED_BYTES + DECODED_BYTES * num_decoded + working_bytes + sample_bytes(shape) + labels_bytes


def sample_bytes(shape: Sequence[int]) -> int:
    """Memory of a few samples while they are replayed."""
    return FLOAT_BYTES * SAMPLE_COPIES * PROBE_SAMPLES * math.prod(shape)


def block_numbers(block_size: int, num_columns: int) -> int:
    """Of a coded matrix: numbers that exist while PROBE_SAMPLES rows are read, each from a block of its own."""
    return num_columns * (BLOCK_COPIES * block_size + ROW_COPIES * PROBE_SAMPLES)


def map_numbers(*sizes: int) -> int:
    """Of a network: numbers of its maps that exist at once for one sample; the sizes are those of its maps."""
    return SAMPLE_COPIES * max(sizes)
