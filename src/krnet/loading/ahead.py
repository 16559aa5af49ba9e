"""Batches on a GPU, made ahead of time on a stream of their own while the consumer works on earlier ones.

make(item) for each item, `depth` of them ahead -> batches (features, labels)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]


def ahead(make: Callable[[T], Batch], items: Iterable[T], depth: int, device: torch.device) -> Iterator[Batch]:
    """The same thread starts the work and goes on; it is the GPU that works ahead."""
    own_stream = torch.cuda.Stream(device)
    queue: deque[tuple[Batch, torch.cuda.Event]] = deque()
    for item in items:
        with torch.cuda.stream(own_stream):
            queue.append((make(item), own_stream.record_event()))
        if len(queue) > depth:
            yield _hand_over(*queue.popleft(), device)
    while queue:
        yield _hand_over(*queue.popleft(), device)


def _hand_over(batch: Batch, made: torch.cuda.Event, device: torch.device) -> Batch:
    consumer = torch.cuda.current_stream(device)
    consumer.wait_event(made)
    for tensor in batch:
        tensor.record_stream(consumer)  # else the other stream could reuse its memory too early
    return batch
