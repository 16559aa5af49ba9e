"""Upper bounds of a file's bytes, for searches that keep to a budget without writing files.

job, settings         -> overhead_bytes   -> header, labels and probe
                      -> planned_overhead -> likewise, once the file has grown
declared tensors, job -> file_bytes       -> the whole file
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from krnet.recorders.base import PROBE_SAMPLES, PROBE_VALUES, Job, Stored, tensor_bytes

HEADER_BYTES, ENTRY_BYTES = 1400, 170  # upper bounds: the header's fixed part, and one tensor's entry in the header


def overhead_bytes(job: Job, num_tensors: int, settings: Mapping[str, Any]) -> int:
    """Upper bound of the file's bytes beside the recorder's own `num_tensors` tensors: header, labels and probe.

    It exceeds the true number by about a kilobyte at most, because the digits of the header's numbers are known only
    when the file is written.
    """
    metadata, tensors = job.samples.describe()
    text = json.dumps(json.dumps([metadata, settings], separators=(",", ":")))  # the header holds JSON inside JSON
    probe_bytes = min(PROBE_SAMPLES, len(job.source)) * (8 + 4 * min(PROBE_VALUES, math.prod(job.source.shape)))
    label_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return HEADER_BYTES + ENTRY_BYTES * (num_tensors + len(tensors)) + len(text) + probe_bytes + label_bytes


def planned_overhead(job: Job, num_tensors: int, settings: Mapping[str, Any]) -> int:
    """`overhead_bytes` once the file has grown to num_planned samples; labels and classes grow in proportion."""
    metadata, tensors = job.samples.describe()
    label_bytes = len(json.dumps(metadata["classes"])) + sum(tensor.nbytes for tensor in tensors.values())
    growth = (job.num_planned - len(job.source)) / len(job.source)
    return overhead_bytes(job, num_tensors, settings) + math.ceil(growth * label_bytes)


def file_bytes(job: Job, stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> int:
    """Upper bound of the size of a file of these tensors, as far as their sizes are known."""
    return tensor_bytes(stored) + overhead_bytes(job, len(stored), settings)
