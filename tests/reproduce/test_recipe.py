"""Recipes: what a file means, and every mistake with its file and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from krnet.errors import RecipeError
from krnet.reproduce.recipe import Recipe, merge_settings, read_recipe, recipe_names

GOOD = """
# KRIL ends at 55.2 %.
# Time: a minute.
title = "A title"
work = "learn"
figures = ["curves"]
seeds = [0, 1]

[settings]
data = "digits"
sizes = "4,3x2"
epochs = 7

[quick]
epochs = 1
preset = "paper"

[[runs]]
name = "first"
method = "finetune"

[[runs]]
name = "second"
method = "kril"
epochs = 9
seeds = [5]
quick = { epochs = 2, preset = "none" }

[[runs]]
name = "third"
method = "ncm"
quick = false
""".lstrip()


def read(tmp_path: Path, text: str = GOOD, quick: bool = False) -> Recipe:
    path = tmp_path / "some.toml"
    path.write_text(text)
    return read_recipe("some", quick=quick, path=path)


def test_a_recipe_has_what_its_file_says(tmp_path):
    recipe = read(tmp_path)
    assert (recipe.name, recipe.title, recipe.figures) == ("some", "A title", ("curves",))
    assert recipe.opening == "KRIL ends at 55.2 %.\nTime: a minute." and recipe.time == "a minute."
    assert (
        read(tmp_path, GOOD.replace("a minute.", "a minute,\n# or two.\n# Data: digits.")).time == "a minute, or two."
    )
    assert read(tmp_path, GOOD.replace("# Time: a minute.", "# It takes a minute.")).time == "It takes a minute."
    assert [(run.name, run.work, run.seeds) for run in recipe.runs] == [
        ("first", "learn", (0, 1)),
        ("second", "learn", (5,)),
        ("third", "learn", (0, 1)),
    ]


def test_a_run_beats_the_settings_of_all_and_quick_beats_both(tmp_path):
    common = {"data": "digits", "sizes": "4,3x2"}
    first, second, _ = read(tmp_path).runs
    assert first.settings == {**common, "epochs": 7, "method": "finetune"}
    assert second.settings == {**common, "epochs": 9, "method": "kril"}
    first, second = read(tmp_path, quick=True).runs  # the third is left out
    assert first.settings == {**common, "epochs": 1, "method": "finetune", "preset": "paper"}
    assert second.settings == {**common, "epochs": 2, "method": "kril"}  # the preset is taken away
    assert (first.seeds, second.seeds) == ((0,), (5,))


def test_budgets_make_a_run_each_that_figures_join(tmp_path):
    text = GOOD.replace("epochs = 9", 'epochs = 9\nbudgets = ["8 kB", "1.5 MB"]')
    runs = read(tmp_path, text).runs
    assert [run.name for run in runs] == ["first", "second, 8 kB", "second, 1.5 MB", "third"]
    assert [run.settings.get("budget") for run in runs] == [None, "8kB", "1.5MB", None]
    assert [run.line for run in runs] == ["first", "second", "second", "third"]
    assert [run.name for run in read(tmp_path, text, quick=True).runs] == ["first", "second, 8 kB"]


def test_none_takes_a_setting_away_and_nothing_else():
    assert merge_settings([{"a": 1, "b": 2}, {"a": "none"}, {"c": 3}]) == {"b": 2, "c": 3}
    assert merge_settings([{"a": "none"}, {"a": 1}]) == {"a": 1}


MISTAKES = [
    ('title = "A title"\n', "", r"some.toml: has no title; add title ="),
    ("# KRIL ends at 55.2 %.\n# Time: a minute.\n", "", r"some.toml: does not open with a comment; begin it with #"),
    ("figures =", "figure =", r"some.toml: unknown key 'figure' \(did you mean 'figures'\?\)"),
    ("[settings]", "[setings]", r"unknown key 'setings' \(did you mean 'settings'\?\)"),
    ('work = "learn"', 'work = "lern"', r"some.toml, run 'first': unknown work 'lern'; did you mean 'learn'\?"),
    ('work = "learn"\n', "", r"run 'first': has no work; add work ="),
    ('name = "second"', 'name = "first"', r"run 'first': two runs have this name"),
    ('name = "second"\n', "", r"some.toml: run 2 has no name; add name ="),
    ("seeds = [0, 1]", "seeds = [0, 0]", r"some.toml: seeds is \[0, 0\]; expected different whole numbers"),
    ("seeds = [5]", "seeds = []", r"run 'second': seeds is \[\]"),
    ("seeds = [5]", "seeds = 5", r"run 'second': seeds is 5; expected a list"),
    ('title = "A title"', "title = 3", r"title is 3; expected text"),
    ('figures = ["curves"]', "figures = [1]", r"figures holds 1; expected names"),
    ('method = "kril"', 'method = "krill"', r"run 'second': unknown method 'krill'; did you mean 'kril'\?"),
    ("epochs = 9", "epoch = 9", r"run 'second': unknown setting 'epoch'; did you mean 'epochs'\?"),
    ("epochs = 9", "recorder = 'krent'", r"run 'second': .*'krent'.*did you mean 'krnet'\?"),
    ("epochs = 9", "epochs = 0", r"run 'second': epochs is 0; expected at least 1"),
    ("epochs = 9", "tasks = 2", r"run 'second': sizes is given, and tasks or base_classes, too"),
    ("epochs = 9", "image_size = 64", r"run 'second': image_size is for folders of images; leave it out for digits"),
    ("epochs = 9", "order = 'lucir'", r"run 'second': unknown class order 'lucir'; did you mean 'lucir1993'\?"),
    ("4,3x2", "4,3y2", r"run 'first': sizes is '4,3y2'; expected such as 50,5x10"),
    ('data = "digits"\n', "", r"run 'first': data is None; expected the name of a data"),
    ('data = "digits"', 'data = "pictures"', r"no image_size is given; add .* image_size = 64"),
    ("epochs = 9", 'budget = "9kB"\nbudgets = ["8 kB"]', r"run 'second': expected either budget = .* or budgets = "),
    ("epochs = 9", "budgets = []", r"run 'second': expected either budget = .* or budgets = "),
    ("epochs = 9", "budgets = [8000]", r"run 'second': budgets holds 8000; expected names"),
    ("epochs = 9", 'budgets = ["8 kB", "8 kB"]', r"run 'second, 8 kB': two runs have this name"),
    ("quick = false", "quick = 3", r"run 'third': quick is 3; expected a table of settings, or false"),
    ("[settings]", "[settings", r"some.toml: cannot be read \(.*expected a file of TOML"),
]


@pytest.mark.parametrize(("good", "bad", "message"), MISTAKES)
def test_a_mistake_is_named_with_its_file_and_what_to_do(tmp_path, good, bad, message):
    assert GOOD.count(good)
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, GOOD.replace(good, bad, 1))


def test_settings_of_quick_are_checked_when_quick_is_asked_for(tmp_path):
    text = GOOD.replace("epochs = 1\n", "epoch = 1\n")
    with pytest.raises(RecipeError, match="run 'first': unknown setting 'epoch'"):
        read(tmp_path, text, quick=True)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(RecipeError, match=r"unknown recipe 'cifar100-11'; did you mean 'cifar100-10'\?"):
        read_recipe("cifar100-11")
    with pytest.raises(RecipeError, match=r"unknown recipe '../x'; known recipes: accuracy, "):
        read_recipe("../x")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_opens_with_hardware_and_the_time_to_expect(name):
    recipe = read_recipe(name)
    assert "Hardware:" in recipe.opening and "Time:" in recipe.opening
    assert any(word in recipe.time for word in ("second", "minute", "hour"))
    assert recipe.figures and all(run.settings for run in recipe.runs)


def test_the_recipe_of_the_docs_is_one(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert [run.settings.get("aux") for run in read(tmp_path, block).runs] == [None, 0]
    assert all(run.settings["data"] == "digits" for run in read(tmp_path, block, quick=True).runs)


def test_every_recipe_is_on_the_page_about_them():
    text = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    assert set(recipe_names()) <= set(re.findall(r"`([\w-]+)`", text))
