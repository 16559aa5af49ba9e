"""Record feature maps in a network and replay them by sample ID.

import krnet
recording = krnet.record(features, labels, out="features.krn")
recording[5]
"""

from typing import TYPE_CHECKING, Any

from krnet.errors import KrnetError, RecordingError

if TYPE_CHECKING:
    from krnet.api import open, record, verify
    from krnet.replay import Recording

__all__ = ["KrnetError", "Recording", "RecordingError", "open", "record", "verify"]


def __getattr__(name: str) -> Any:
    """Import torch when it is first needed: `krnet --help` should not wait for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from krnet import api

    return getattr(api, name)
