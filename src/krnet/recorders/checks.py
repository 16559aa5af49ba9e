"""Refuse inputs and settings, of a caller or of a file, that a recorder cannot use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from krnet.config import unknown_setting
from krnet.errors import InputError, MissingPackageError, NotARecordingError, SettingError
from krnet.io.header import RESTORE
from krnet.recorders.base import FIT_NAMES, INPUTS, UNTRAINED_NAMES, Recorder, get_recorder, recorder_names


def check_inputs(recorder: Recorder, given: Mapping[str, object]) -> None:
    """Refuse inputs that a recorder does not take, and the lack of one that it requires.

    given: each input that the caller's function takes, None where it is left out.
    """
    for name, value in given.items():
        if value is None and name in recorder.required:
            raise missing_input(recorder, name)
        if value is not None and name not in recorder.inputs:
            takers = [other for other in recorder_names() if name in get_recorder(other).inputs]
            raise InputError(
                f"{name} is given, and recorder {recorder.name} has no use for it; leave {name} out, or take recorder "
                f"{' or '.join(takers)}"
            )


def check_package(recorder: Recorder) -> None:
    """Refuse a recorder whose package is not installed."""
    if not recorder.is_usable:
        raise MissingPackageError(f"recorder {recorder.name} {recorder.needs}. Install it, or take another recorder")


def check_projects(recorder: Recorder, path: object, advice: str) -> None:
    """Refuse the recorder of a file if it codes no other samples than those that it was fitted to."""
    if not recorder.projects:
        able = [name for name in recorder_names() if get_recorder(name).projects]
        raise InputError(
            f"{path}: written by recorder {recorder.name}, which cannot code samples that it was not fitted to; those "
            f"that can are {', '.join(able)}. {advice}"
        )


def missing_input(recorder: Recorder, name: str) -> InputError:
    """The error for an input that a recorder requires and that is not given."""
    needed = [other for other in INPUTS if other in recorder.required]
    return InputError(
        f"recorder {recorder.name} needs {' and '.join(needed)}; {name} is missing. Give "
        f"{' and '.join(f'{other}=' for other in needed)} ({', '.join(f'--{other}' for other in needed)})"
    )


def check_names(recorder: Recorder, given: Iterable[str]) -> None:
    """Refuse settings that a recorder does not have, and name the recorders that have them."""
    fit_names = FIT_NAMES if recorder.trains else UNTRAINED_NAMES
    known = fit_names | recorder.setting_names
    recorders = [get_recorder(other) for other in recorder_names()]
    for name in given:
        if name in known:
            continue
        if name in FIT_NAMES:
            trainers = ", ".join(sorted(other.name for other in recorders if other.trains))
            raise SettingError(
                f"{name} is given, a setting of a network's fit, and recorder {recorder.name} fits none; leave {name} "
                f"out, or take a recorder that trains a network: {trainers}"
            )
        owners = [other.name for other in recorders if name in other.setting_names]
        if owners:
            raise SettingError(
                f"{name} is given, a setting of recorder {' or '.join(sorted(owners))} and not of {recorder.name}; "
                f"leave {name} out, or name the recorder (recorder={owners[0]!r}, --recorder {owners[0]})"
            )
        raise unknown_setting(name, known)


@contextmanager
def reading_settings(name: str) -> Iterator[None]:
    """Say of settings in a file that they are refused, and whose they are; `name` is the recorder's."""
    try:
        yield
    except (InputError, KeyError, TypeError) as error:
        raise NotARecordingError(f"settings of recorder {name} refused: {error}. {RESTORE}") from error
