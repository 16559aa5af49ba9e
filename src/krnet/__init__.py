"""Record feature maps in a small file and replay them by sample ID; learn new classes while replaying the old ones.

import krnet

recording = krnet.record(features, labels, out="features.krn")
recording[5]
run = krnet.learn("kril", "cifar100", out="runs/kril")
run.predict(images)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from krnet import errors
from krnet.errors import KrnetError, RecordingError

if TYPE_CHECKING:
    from krnet import data
    from krnet.api import open, record, verify
    from krnet.bench.invert import invert
    from krnet.bench.plan import plan
    from krnet.bench.predict import predict
    from krnet.catalog import list_learners, list_recorders, settings
    from krnet.cli.progress import show_progress
    from krnet.data import protocol
    from krnet.encoding import encode
    from krnet.features.extract import extract
    from krnet.progress import Progress
    from krnet.recording import Recording
    from krnet.run import Run, load_run
    from krnet.task_loop import learn

    __version__: str

# Public name -> the module that defines it; None if the name is a module itself.
_HOMES = {
    "Progress": "progress",
    "Recording": "recording",
    "Run": "run",
    "data": None,
    "encode": "encoding",
    "extract": "features.extract",
    "invert": "bench.invert",
    "learn": "task_loop",
    "list_learners": "catalog",
    "list_recorders": "catalog",
    "load_run": "run",
    "open": "api",
    "plan": "bench.plan",
    "predict": "bench.predict",
    "protocol": "data",
    "record": "api",
    "settings": "catalog",
    "show_progress": "cli.progress",
    "verify": "api",
}
__all__ = [
    "KrnetError",
    "Progress",
    "Recording",
    "RecordingError",
    "Run",
    "data",
    "encode",
    "errors",
    "extract",
    "invert",
    "learn",
    "list_learners",
    "list_recorders",
    "load_run",
    "open",
    "plan",
    "predict",
    "protocol",
    "record",
    "settings",
    "show_progress",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `krnet --help` does not wait for torch."""
    if name == "__version__":
        return import_module("krnet.io.ledger").package_version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    return import_module(f"krnet.{name}") if home is None else getattr(import_module(f"krnet.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", *(name for name in globals() if name.startswith("__"))])
