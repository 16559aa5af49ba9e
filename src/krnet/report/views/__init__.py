"""The registry of views; importing this package fills it."""

from krnet.report.views import accuracy, embedding, inversion, kept_bytes, matrix, rate, speed, table  # noqa: F401
from krnet.report.views.base import draw, heading, view_names

__all__ = ["draw", "heading", "view_names"]
