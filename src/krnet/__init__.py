"""Record feature maps in a network and replay them by sample ID; learn new classes on the replays of the old ones.

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
    from krnet import data, protocol
    from krnet.api import open, record, verify
    from krnet.learning import learn
    from krnet.replay import Recording

__all__ = ["KrnetError", "Recording", "RecordingError", "data", "learn", "open", "protocol", "record", "verify"]
_MODULES = {"data": "data", "protocol": "protocol", "learn": "learning"}


def __getattr__(name: str) -> Any:
    """Import torch when it is first needed: `krnet --help` should not wait for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"krnet.{_MODULES.get(name, 'api')}")
    return module if name in ("data", "protocol") else getattr(module, name)
