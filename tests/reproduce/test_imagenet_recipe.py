"""The recipes of ImageNet-Subset, end to end on small generated folders: the network, crops and methods of 224 px."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from krnet.data import folder as imagefolder
from krnet.data import registry
from krnet.io import ledger
from krnet.io.kept import find_kept
from krnet.reproduce import loop
from krnet.reproduce.recipe import read_recipe
from krnet.reproduce.works import learn

IMAGE_SIZE = 98  # networks see 86 pixels of it; above 96 everything is as for 256 and 224
QUICK = f"""
base_epochs = 1
epochs = 1
batch_size = 4
image_size = {IMAGE_SIZE}
"""


def paint(root: Path, num_classes: int, per_class: int) -> None:
    """Noise of one tint a class, in folders named as ImageNet's are."""
    rng = np.random.default_rng(0)
    for number in range(num_classes):
        tint = rng.integers(0, 200, 3)
        for part, count in (("train", per_class), ("val", 1)):
            place = root / part / f"n{1440764 + 97 * number:08d}"
            place.mkdir(parents=True)
            for nth in range(count):
                pixels = tint + rng.integers(0, 56, (20, 24, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{place.name}_{nth}.JPEG")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "paper.csv").write_text("")
    monkeypatch.setattr(imagefolder, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "results" / "ledger.jsonl"))
    learn._load.cache_clear()
    return tmp_path


def write_small(clone: Path, name: str, *changes: tuple[str, str]) -> None:
    """The recipe with few epochs, and with the sizes of --quick, but not with its data."""
    text = (find_kept("recipes") / f"{name}.toml").read_text()
    text = text.replace("image_size = 256\n", "").replace('preset = "paper"\n', f'preset = "paper"{QUICK}', 1)
    text = re.sub(r"^quick = \{ (recorder_iterations = 2), (recorder_settings = .*) \}$", r"\1\n\2", text, flags=re.M)
    text = re.sub(r"^quick = \{ (gan_epochs = 1) \}$", r"\1", text, flags=re.M)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (clone / "recipes").mkdir()
    (clone / "recipes" / f"{name}.toml").write_text(text)


def only(text: str, *names: str) -> str:
    """Runs of other names are left out."""
    head, *runs = text.split("[[runs]]\n")
    return "[[runs]]\n".join([head, *(run for run in runs if run.split('"')[1] in names)])


def run(clone: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    monkeypatch.chdir(clone)
    assert loop.reproduce(name, seeds=[0], data_dir=clone / "data", device="cpu") == []
    rows = ledger.read()
    assert loop.missing(read_recipe(name), rows, [0]) == []  # its own rows match, by image size and classes too
    assert all(row["metrics"]["image_size"] == IMAGE_SIZE for row in rows)
    assert all(row["settings"]["backbone"] == "resnet18" for row in rows)
    return rows


def test_recipe_of_the_five_task_protocol_runs_on_a_folder_of_six_classes(clone, monkeypatch):
    paint(clone / "data" / "imagenet", 7, 4)
    changes = [('subset = "lucir1993"', 'subset = "6"'), ('sizes = "50,10x5"', 'sizes = "4,1x2"')]
    write_small(clone, "imagenet-subset-5", *changes)
    path = clone / "recipes" / "imagenet-subset-5.toml"
    path.write_text(only(path.read_text(), "KRIL", "fine-tuning"))
    rows = run(clone, "imagenet-subset-5", monkeypatch)
    assert [row["metrics"]["method"] for row in rows] == ["kril", "finetune"]
    assert rows[0]["metrics"]["subset"] == "6" and rows[0]["settings"]["gamma"] == 5e-4


@pytest.mark.slow
def test_every_run_of_the_recipe_works_on_the_100_of_1000_classes_that_lucir_draws(clone, monkeypatch):
    paint(clone / "data" / "imagenet", 1000, 1)
    changes = [("batch_size = 4", "batch_size = 25"), ('sizes = "50,5x10"', 'sizes = "50,25x2"')]
    write_small(clone, "imagenet-subset-10", *changes, ("learned_tasks = [0, 5, 10]", "learned_tasks = [0, 1, 2]"))
    rows = run(clone, "imagenet-subset-10", monkeypatch)
    assert {row["settings"]["recorder"] for row in rows if row["metrics"]["method"] == "kril"} == {"paper", "raw"}
    assert len(rows) == len(read_recipe("imagenet-subset-10").runs)
    assert all(row["settings"]["tasks"] == [50, 25, 25] for row in rows)


def test_the_folder_of_tiny_imagenet_is_found_by_its_name_in_the_data_folder(clone, monkeypatch):
    paint(clone / "data" / "tiny-imagenet-100", 3, 2)
    plan = learn.LearnPlan.of(read_recipe("large-maps-10").runs[0].settings, seed=0)
    found = plan.load(clone / "data")
    assert (found.name, found.image_shape, found.crop) == (plan.data_name, (3, 64, 64), None)
    assert plan.settings["backbone"] == "resnet18-small" and plan.settings["fixed_layers"] == 13
    assert registry.load("tiny-imagenet-100", clone / "data", image_size=64).digest == found.digest
