"""Settings: each described once, under its field, and checked; configs of learners inherit both."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import pytest

from krnet import task_loop as learning
from krnet.config import (
    check_int,
    check_range,
    check_shares,
    default_text,
    describe,
    explain_settings,
    from_dict,
    same_settings,
    unknown_setting,
)
from krnet.errors import SettingError
from krnet.learners import base
from krnet.nn.paper_config import NetworkConfig
from krnet.train.config import FitConfig

CONFIGS = {name: base.get_learner(name).config_class for name in learning.base.learner_names()}
CONFIGS |= {"network": NetworkConfig, "fit": FitConfig, "all learners": base.LearnerConfig}


@dataclass(frozen=True, kw_only=True)
class Plain:
    size: int = 3
    """How large."""
    colour: str = "red"
    """Its colour, which takes
    two lines to tell."""
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class Special(Plain):
    size: int = 5
    colour: str = "blue"
    """Another colour."""
    depth: int = 1
    """How deep."""


@dataclass(frozen=True, kw_only=True)
class Bare(Special):
    pass


# ------------------------------------------------------------------ descriptions


def test_a_description_is_the_text_under_the_field_on_one_line():
    assert describe(Plain) == {"size": "How large.", "colour": "Its colour, which takes two lines to tell."}


def test_a_subclass_inherits_descriptions_and_may_say_them_anew():
    assert describe(Special) == {"size": "How large.", "colour": "Another colour.", "depth": "How deep."}
    assert describe(Bare) == describe(Special)
    assert describe(Plain)["colour"].startswith("Its colour")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_setting_is_described_in_a_sentence(name):
    described = describe(CONFIGS[name])
    assert described.keys() == {field.name for field in fields(CONFIGS[name])}
    for text in described.values():
        assert text.endswith(".") and len(text) > 10


@pytest.mark.parametrize("method", base.learner_names())
def test_a_method_lists_its_own_settings_with_defaults_and_none_that_all_have(method):
    config = CONFIGS[method]
    shown = " ".join(explain_settings(config, without=same_settings(config, base.LearnerConfig)).split())
    common = {field.name: field.default for field in fields(base.LearnerConfig)}
    for field in fields(config):
        own = field.name not in common or common[field.name] != field.default
        line = f"{field.name} {describe(config)[field.name]} [default: {default_text(field)}]"
        assert (line in shown) == own, field.name


# ------------------------------------------------------------------ checks


def test_unknown_names_are_refused_with_the_nearest_or_with_all():
    with pytest.raises(SettingError, match="unknown setting 'colr'; did you mean 'colour'"):
        from_dict(Plain, {"colr": "green"})
    with pytest.raises(SettingError, match="known settings: colour, quiet, size"):
        from_dict(Plain, {"xyz": 1})
    assert str(unknown_setting("krill", ["kril", "joint"], "method")) == (
        "unknown method 'krill'; did you mean 'kril'?"
    )
    assert str(unknown_setting("x", ["kril", "joint"], "method")) == "unknown method 'x'; known methods: joint, kril"


@pytest.mark.parametrize(
    ("given", "expected"), [(0.5, (0.5,)), ([0.5, 0.75], (0.5, 0.75)), ((), ()), ((0, 1), (0, 1))], ids=repr
)
def test_shares_may_be_one_number_or_several(given, expected):
    assert check_shares("drops", given) == expected
    assert base.make_config(base.get_learner("finetune"), {"drops": given}).schedule(0).drops == expected


@pytest.mark.parametrize("given", ["0.5;0.7", 1.5, [-0.1], [0.5, "0.7"], [True], None, float("nan")], ids=repr)
def test_what_is_no_share_is_refused(given):
    with pytest.raises(SettingError, match=r"drops is .*; expected 0 to 1"):
        base.make_config(base.get_learner("finetune"), {"drops": given})


@pytest.mark.parametrize(
    ("value", "low", "high", "expected"),
    [
        (95.0, -math.inf, 1, "at most 1, such as 0.95"),
        (25, 0, 1, "0 to 1, such as 0.25"),
        (1.5, 0, 1, "0 to 1"),
        (101, -math.inf, 1, "at most 1"),
        (-1, 0, math.inf, "at least 0"),
        (math.nan, -math.inf, math.inf, "a finite number"),
    ],
)
def test_a_range_is_said_without_infinite_bounds_and_a_percentage_is_answered_with_its_share(
    value, low, high, expected
):
    with pytest.raises(SettingError) as caught:
        check_range("x", value, low, high)
    assert str(caught.value) == f"x is {value!r}; expected {expected}"


def test_a_whole_number_is_not_taken_for_a_percentage():
    with pytest.raises(SettingError, match=r"expected 0 to 1$"):
        check_int("x", 50, 0, 1)


def test_shares_that_a_learner_adds_are_checked_as_well():
    @dataclass(frozen=True, kw_only=True)
    class Later(base.LearnerConfig):
        later_drops: tuple[float, ...] = (0.9,)
        """Shares."""

    assert Later(later_drops=0.8).later_drops == (0.8,)
    with pytest.raises(SettingError, match="later_drops is 2"):
        Later(later_drops=(0.5, 2))


@pytest.mark.parametrize("name", ["lr", "muon_lr"])
def test_a_learning_rate_beyond_float32_is_refused_by_name(name):
    with pytest.raises(SettingError, match=f"{name} is 1e\\+40"):
        FitConfig(**{name: 1e40})
