"""The package of the entropy coder, loaded when it is first needed.

    ans() -> constriction.stream

Its first call looks for numpy. An exception meanwhile makes it panic, and Ctrl-C raises one wherever the main thread
is: so a thread of its own makes the first call.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np


@cache
def ans() -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_load).result()


def _load() -> Any:
    import constriction

    constriction.stream.stack.AnsCoder(np.zeros(0, np.uint32)).get_compressed()
    return constriction.stream
