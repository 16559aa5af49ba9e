"""benchmarks/zoo.py: sets have the shape and type that they are listed with, and follow from the seed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import krnet
from krnet.data import from_arrays

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import zoo


@pytest.fixture
def few_images(monkeypatch) -> None:
    """Random images in the place of CIFAR-100, and as text the alphabet."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, 3, 32, 32), generator=generator, dtype=torch.uint8)
    data = from_arrays(images, [0, 1] * 4, images[:2], [0, 1], layout="NCHW")
    monkeypatch.setattr(zoo.krnet.data, "load", lambda *args, **kwargs: data)
    monkeypatch.setattr(zoo.Zoo, "text", torch.arange(2000) % 256)


def make(out: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    names = ["resnet32-late-float16", "resnet32-vectors", "vit-tokens", "lm-vectors"]
    paths = zoo.make(names, out=out, data_dir=None, scale="tiny", seed=seed, device="cpu")
    assert [path.stem for path in paths] == names
    return {path.stem: load_file(path)["features"] for path in paths}


@pytest.mark.usefixtures("few_images")
def test_sets_of_the_zoo_have_the_listed_form_and_follow_from_the_seed(tmp_path: Path) -> None:
    found, again, other = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "a", seed=1)
    listed = {one.name: one for one in zoo.SETS}
    for name, features in found.items():
        assert features.shape == (12, *listed[name].shape) and features.dtype == listed[name].dtype
        assert features.isfinite().all() and features.float().std() > 0
        assert torch.equal(features, again[name]), f"{name}: the same seed made other features"
        assert not torch.equal(features, other[name]), f"{name}: another seed made the same features"
    # Twelve samples of eight images: the last four are mirror images of the first, whose vectors are alike, not equal.
    vectors = found["resnet32-vectors"]
    assert not torch.equal(vectors[8:], vectors[:4])
    assert (vectors[8:] - vectors[:4]).square().mean() < (vectors[8:] - vectors[4:8]).square().mean()


@pytest.mark.usefixtures("few_images")
def test_a_set_that_is_there_is_kept(tmp_path: Path) -> None:
    (path,) = zoo.make(["resnet32-vectors"], out=tmp_path, data_dir=None, scale="tiny", device="cpu")
    before = path.stat().st_mtime_ns
    assert zoo.make(["resnet32-vectors"], out=tmp_path, data_dir=None, scale="tiny", device="cpu") == [path]
    assert path.stat().st_mtime_ns == before
    assert krnet.record(path, recorder="pca", budget="20kB", device="cpu").shape == (64,)


def test_names_of_sets_are_unique() -> None:
    assert len({one.name for one in zoo.SETS}) == len(zoo.SETS) >= 15
