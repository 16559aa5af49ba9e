"""Which array of a file or mapping is meant: it may hold several, and --key (in Python, key=) names one."""

from __future__ import annotations

from collections.abc import Iterable

from krnet.errors import FeatureError


def pick_array(names: Iterable[str], key: str | None, where: object) -> str:
    """Name of the array to read: `key` if given, else the only one, else "features"."""
    names = sorted(names)  # zarr lists them in no fixed order; messages should not change
    if key is None and len(names) == 1:
        return names[0]
    chosen = "features" if key is None else key
    if chosen not in names:
        raise FeatureError(
            f"{where}: no array called {chosen!r}; it holds {', '.join(map(repr, names)) or 'none at all'}. "
            f"Name one of them with --key (in Python, key=)."
        )
    return chosen


def refuse_key(key: str | None, where: object) -> None:
    if key is not None:
        raise FeatureError(
            f"{where}: the key {key!r} was given for a single array; expected none. Leave out --key (in Python, key=)."
        )
