"""The registry of works; importing this package fills it."""

from krnet.reproduce.works import embed, images, invert, learn, plan, record, speed, zeros  # noqa: F401
