"""The registry of views; importing this package fills it."""

from krnet.report.views import (  # noqa: F401
    accuracy,
    embedding,
    inversion,
    kept_bytes,
    lead,
    matrix,
    parts,
    rate,
    speed,
    table,
)
from krnet.report.views.base import draw, heading, view_names

__all__ = ["draw", "heading", "view_names"]
