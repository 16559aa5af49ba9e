"""What there is to choose from: the recorders, the learners, and the settings of each.

name of a recorder or learner -> settings -> Settings: setting name -> Setting (default, help, type)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from krnet.config import describe, explain_settings, unknown_setting
from krnet.errors import SettingError
from krnet.learners.base import get_learner, learner_names
from krnet.recorders.base import get_recorder, recorder_names
from krnet.train.config import FitConfig


def list_recorders() -> list[str]:
    """Names of all recorders, the ways to store features: for `krnet.record(..., recorder=NAME)`.

    >>> import krnet
    >>> "pca" in krnet.list_recorders()
    True
    """
    return list(recorder_names())


def list_learners() -> list[str]:
    """Names of all learners, the methods that learn task after task: for `krnet.learn(NAME, ...)`.

    >>> import krnet
    >>> "kril" in krnet.list_learners()
    True
    """
    return list(learner_names())


@dataclass(frozen=True)
class Setting:
    """A setting of a recorder or a learner."""

    default: Any
    """None may also mean that the value is found for the features; `help` says so."""
    help: str
    type: str
    """As in the source: "int", "float | None"."""


class Settings(Mapping[str, Setting]):
    """The settings of a recorder or a learner by name; printed, a list of them."""

    def __init__(self, items: Mapping[str, Setting], text: str):
        self._items, self._text = dict(items), text

    def __getitem__(self, name: str) -> Setting:
        if name not in self._items:
            raise KeyError(str(unknown_setting(name, self._items)))
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return self._text


def settings(name: str) -> Settings:
    """The settings of a recorder or a learner, with their defaults: what `krnet.record` and `krnet.learn` take.

    A recorder's settings are keywords of `krnet.record`. Those of a learner go into `krnet.learn(settings={...})`.

    >>> import krnet
    >>> krnet.settings("lucir")["exemplars_per_class"].default
    20
    >>> print(krnet.settings("raw"))
    raw
      dtype               float32 or float16; by default that of the features, and float32 if they have
                          another one. [default: None]
    """
    if not isinstance(name, str):
        raise SettingError(f"name is {name!r}; expected that of a recorder or a learner, such as 'pca' or 'kril'")
    if name in recorder_names():
        recorder = get_recorder(name)
        title = f"{name} ({recorder.needs})" if recorder.needs else name
        parts = [(title, recorder.config_class, recorder.derived)]
        parts += [("its fit", FitConfig, frozenset())] if recorder.trains else []
    elif name in learner_names():
        parts = [(name, get_learner(name).config_class, frozenset())]
    else:
        raise unknown_setting(name, [*recorder_names(), *learner_names()], "name")
    items = {
        field.name: Setting(_default(field), describe(config)[field.name], str(field.type))
        for _, config, derived in parts
        for field in fields(config)
        if field.name not in derived
    }
    texts = [f"{title}\n{explain_settings(config, without=derived)}".rstrip() for title, config, derived in parts]
    return Settings(items, "\n\n".join(texts))


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default
