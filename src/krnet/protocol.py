"""Class orders and task splits under their public name; krnet.data.protocol holds them."""

from krnet.data.protocol import *  # noqa: F403
