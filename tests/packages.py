"""Tests of recorders whose package may be missing.

if_usable("zfp half", "zfp") -> the parameter; its tests are skipped, with the reason, where zfp's package is missing
"""

from __future__ import annotations

from typing import Any

import pytest

from krnet.recorders.base import get_recorder


def if_usable(parameter: str, recorder: str) -> Any:
    found = get_recorder(recorder)
    return pytest.param(parameter, marks=pytest.mark.skipif(not found.is_usable, reason=found.needs))
