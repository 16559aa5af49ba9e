"""A place for runs, on few digits: the set is made once for all tests of these folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from krnet.reproduce.features import FeatureSet, open_set
from krnet.reproduce.works.base import Place


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def place(few_digits, shared_folder, tmp_path) -> Place:
    return Place(folder=tmp_path / "run", shared=shared_folder, data_dir=None, device="cpu", watch=None)


@pytest.fixture
def digits(place) -> FeatureSet:
    return open_set("digits", place)
