"""Images with permanent sample IDs, from named data sets, folders or arrays; class orders and task splits."""

from krnet.data import protocol
from krnet.data.dataset import DataSet, Split, channel_stats, from_arrays
from krnet.data.registry import load, register

__all__ = ["DataSet", "Split", "channel_stats", "from_arrays", "load", "protocol", "register"]
