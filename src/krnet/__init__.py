"""Record feature maps in a small file and replay them by sample ID; learn new classes while replaying the old ones.

import krnet

recording = krnet.record(features, labels, out="features.krn")
recording[5]
tasks = krnet.protocol.split("lucir1993", num_classes=100, tasks=10)
krnet.learn("kril", krnet.data.load("cifar100"), tasks, out="runs/kril")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from krnet.errors import KrnetError, RecordingError

if TYPE_CHECKING:
    from krnet import data
    from krnet.api import open, record, verify
    from krnet.data import protocol
    from krnet.features.extract import extract
    from krnet.recording import Recording
    from krnet.task_loop import learn

# Public name -> the module that defines it; None if the name is a module itself.
_HOMES = {
    "Recording": "recording",
    "data": None,
    "extract": "features.extract",
    "learn": "task_loop",
    "open": "api",
    "protocol": "data",
    "record": "api",
    "verify": "api",
}
__all__ = [
    "KrnetError",
    "Recording",
    "RecordingError",
    "data",
    "extract",
    "learn",
    "open",
    "protocol",
    "record",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `krnet --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    return import_module(f"krnet.{name}") if home is None else getattr(import_module(f"krnet.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
