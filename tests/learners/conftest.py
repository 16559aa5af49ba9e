"""Fixtures of the tests of learners. A module that needs other data has a fixture of its own by the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from krnet import data
from learning_tools import small_digits


@pytest.fixture(scope="module")
def digits() -> data.DataSet:
    return small_digits()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for base tasks that the runs of a module share."""
    return tmp_path_factory.mktemp("shared")
