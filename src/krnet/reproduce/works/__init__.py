"""The registry of works; importing this package fills it."""

from krnet.reproduce.works import record as record
