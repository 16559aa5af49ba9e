"""Values that are made when they are first needed, and kept while there is room.

    ByteCache(max_bytes).get(key, make) -> the kept value, or make()

The values that were used last are kept, up to `max_bytes` in all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Protocol, TypeVar


class HasBytes(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=HasBytes)


class ByteCache:
    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes = max_bytes, 0
        self._values = OrderedDict[Hashable, Any]()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of this key, made if it is not kept. Two threads may make the same value; either will do."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                kept: T = self._values[key]
                return kept
        made = make()
        with self._lock:
            if key not in self._values and made.nbytes <= self.max_bytes:
                self._values[key] = made
                self.nbytes += made.nbytes
                while self.nbytes > self.max_bytes:
                    self.nbytes -= self._values.popitem(last=False)[1].nbytes
        return made
