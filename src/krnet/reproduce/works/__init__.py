"""The registry of works; importing this package fills it."""

from krnet.reproduce.works import embed as embed
from krnet.reproduce.works import images as images
from krnet.reproduce.works import record as record
from krnet.reproduce.works import speed as speed
from krnet.reproduce.works import zeros as zeros
