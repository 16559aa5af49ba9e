"""The registry of works; importing this package fills it."""

from krnet.reproduce.works import learn, plan  # noqa: F401
