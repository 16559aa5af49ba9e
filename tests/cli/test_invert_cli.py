"""`krnet verify --invert` prints what comes back of the images, and refuses its options where it is not asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import krnet
from krnet.cli.app import app

SHORT = ["--set", "iterations=2", "--set", "width=16", "--device", "cpu"]


class Mean(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(x, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inversion")
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), np.uint8)
    np.save(folder / "images.npy", images)
    features = Mean()((torch.from_numpy(images).float() / 255 - 0.5) / 0.25)
    np.save(folder / "features.npy", features.numpy())
    krnet.record(features, torch.arange(40) % 4, recorder="quantized", step=0.01, out=folder / "x.krn")
    torch.jit.script(Mean()).save(folder / "trunk.pt")
    return folder


def verify(folder: Path, *arguments: str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(app, ["verify", str(folder / "x.krn"), *arguments])
    return ran.exit_code, ran.stdout, ran.stderr


def test_the_table_names_replays_real_features_and_means(folder: Path, tmp_path: Path) -> None:
    images, features = str(folder / "images.npy"), str(folder / "features.npy")
    code, out, err = verify(
        folder, "--against", features, "--invert", images, "--pictures", str(tmp_path / "seen"), *SHORT
    )
    assert code == 0, err
    assert all(text in out for text in ("from replays", "from real features", "mean of the class", "mean of all", "dB"))
    assert (tmp_path / "seen" / "inversion.png").is_file() and "inversion.png" in out


def test_a_trunk_makes_the_real_features_of_images_that_are_normalised(folder: Path) -> None:
    images, trunk = str(folder / "images.npy"), str(folder / "trunk.pt")
    given = ["--invert", images, "--trunk", trunk, "--json", *SHORT]
    code, out, err = verify(folder, *given, "--mean", "0.5", "--std", "0.25")
    assert code == 0, err
    found = json.loads(out)["inversion"]
    assert found["real"]["ssim"] == pytest.approx(found["replayed"]["ssim"], abs=0.05)
    code, _, err = verify(folder, *given)
    assert code == 1 and "mean and std of the images (--mean, --std)" in err


def test_options_of_the_inversion_are_refused_without_it(folder: Path, tmp_path: Path) -> None:
    for arguments, name in ((["--pictures", str(tmp_path)], "--pictures"), (SHORT[:2], "--set")):
        code, _, err = verify(folder, *arguments)
        assert code == 1 and f"{name} is for --invert" in err
