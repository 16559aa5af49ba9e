"""Recipes over many feature sets: combinations, sizes in bits a value, and the sets of the zoo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from krnet.errors import DataError, RecipeError, SettingError
from krnet.reproduce import zoo
from krnet.reproduce.features import shape_of
from krnet.reproduce.recipe import read_recipe
from krnet.reproduce.works.base import Place, get_work

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import zoo as maker

RECIPE = """
# Hardware: none. Time: none.
title = "A title"
work = "record"

[[each]]
features = ["digits", "cifar100-base"]
bits_per_value = [1, 4]

[[each]]
features = ["tiny-imagenet"]
bits_per_value = [0.5]

[[runs]]
name = "pca"
recorder = "pca"

[[runs]]
name = "pq"
recorder = "pq"
each = [{ bits_per_value = [2] }]
features = "digits"
""".lstrip()


def read(tmp_path: Path, text: str = RECIPE, quick: bool = False):
    (tmp_path / "some.toml").write_text(text)
    return read_recipe("some", quick=quick, path=tmp_path / "some.toml")


def test_a_run_is_repeated_for_each_combination_unless_it_has_its_own(tmp_path):
    runs = read(tmp_path).runs
    assert [run.name for run in runs] == [
        "pca, digits, 1", "pca, digits, 4", "pca, cifar100-base, 1", "pca, cifar100-base, 4", "pca, tiny-imagenet, 0.5",
        "pq, 2",
    ]  # fmt: skip
    assert [run.line for run in runs[:2]] == ["pca, digits"] * 2 and runs[-1].line == "pq"
    assert runs[3].settings == {"recorder": "pca", "features": "cifar100-base", "bits_per_value": 4}
    assert [run.name for run in read(tmp_path, quick=True).runs] == ["pca, digits, 1", "pq, 2"]


@pytest.mark.parametrize("bad", ["each = [3]", "each = [{ bits_per_value = 2 }]", "each = [{ bits_per_value = [] }]"])
def test_combinations_that_are_no_lists_are_refused(tmp_path, bad):
    with pytest.raises(RecipeError, match=r"run 'pq': each holds .*expected tables of lists"):
        read(tmp_path, RECIPE.replace("each = [{ bits_per_value = [2] }]", bad))


def test_the_sets_that_recipes_name_are_those_that_the_benchmark_makes():
    made = {one.name: one.shape for one in maker.SETS}
    assert made == dict(zoo.SHAPES)
    for scale in zoo.SCALES:
        assert scale in maker.EFFORT
    for name in ("zoo", "zoo-cpu"):
        runs = read_recipe(name).runs
        scale = "full" if name == "zoo" else "small"
        named = {run.settings["features"] for run in runs if run.settings["recorder"] == "krnet"}
        assert named == {f"zoo-{scale}-{own}" for own in made}
        for features in named:
            sizes = [run.settings["bits_per_value"] for run in runs if run.settings["features"] == features]
            assert set(sizes) == ({1, 2, 4} if len(shape_of(features)) == 1 else {0.25, 1, 4})


def test_a_set_of_the_zoo_is_recorded_within_its_bits_a_value(tmp_path):
    (tmp_path / "zoo-small").mkdir()
    save_file({"features": torch.randn(200, 192).half()}, tmp_path / "zoo-small" / "lm-vectors.safetensors")
    place = Place(folder=tmp_path / "run", shared=tmp_path / "shared", data_dir=tmp_path, device="cpu", watch=None)
    settings = {"features": "zoo-small-lm-vectors", "recorder": "quantized", "bits_per_value": 4}
    work = get_work("record")
    row = work.perform("test", settings, 0, place)
    assert 0.9 * 200 * 192 / 2 < row["metrics"]["bytes"] <= 200 * 192 / 2
    assert row["metrics"]["replay_accuracy"] is None and row["settings"]["bits_per_value"] == 4
    assert work.matches(row, settings, 0) and not work.matches(row, settings | {"bits_per_value": 2}, 0)


def test_a_set_that_was_not_made_is_named_with_the_command_that_makes_it(tmp_path):
    command = r"benchmarks/zoo.py --scale full --out \S+ --only vit-tokens"
    with pytest.raises(DataError, match=rf"vit-tokens\.safetensors: no such file; .*{command}"):
        zoo.open_zoo("zoo-full-vit-tokens", tmp_path)


@pytest.mark.parametrize("name", ["zoo-full-vit-token", "zoo-huge-vit-tokens", "zoo-"])
def test_an_unknown_set_is_refused(name):
    with pytest.raises(SettingError, match="unknown feature set"):
        shape_of(name)


def test_bits_a_value_and_a_budget_exclude_each_other():
    with pytest.raises(SettingError, match="give one of them"):
        get_work("record").check({"features": "digits", "recorder": "pca", "bits_per_value": 1, "budget": "20kB"})
