"""Check that a resumed call does the work that the stopped one began: the same settings, and the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from krnet.device import dtype_name
from krnet.errors import DataError, ResumeError
from krnet.io.places import Place

START_ANEW = "leave out --resume (in Python, resume=True) to start anew"
# Largest difference between rows of two calls, relative to the largest value: devices differ by about 1e-6 in float32.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}


def check_same_work(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise ResumeError(
                f"{path}: was made with {name} {before.get(name)}; this call has {now.get(name)}. Give the same again, "
                f"or {START_ANEW}"
            )


def check_same_rows(path: Place, before: Tensor, now: Tensor, *, otherwise: str = START_ANEW) -> None:
    difference = (before.float() - now.float()).abs().max().item()
    limit = TOLERANCES[dtype_name(before.dtype)] * max(before.float().abs().max().item(), 1e-30)
    if not difference <= limit:
        raise ResumeError(
            f"{path}: a batch of it, computed again, differs by {difference:.3g}; expected at most {limit:.3g}. Give "
            f"the images of the first call, in their order and without random crops or flips, or "
            f"{otherwise}"
        )


def no_images(source_name: str) -> DataError:
    return DataError(f"{source_name}: no images came; expected at least one batch. Was it used up already?")
