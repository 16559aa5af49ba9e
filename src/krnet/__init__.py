"""Record feature maps in a network and replay them by sample ID.

import krnet
recording = krnet.record(features, labels, out="features.krn")
recording[5]
"""

from krnet.api import open, record, verify
from krnet.errors import KrnetError, RecordingError
from krnet.replay import Recording

__all__ = ["KrnetError", "Recording", "RecordingError", "open", "record", "verify"]
