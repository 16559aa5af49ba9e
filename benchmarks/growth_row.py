"""The end of appending.py and growing.py: a ledger row of recordings that grew."""

import time

from krnet.io import ledger


def append_row(recipe, args, found, started, files):
    """args: those of the command line; started: time.perf_counter() at the start."""
    settings = {name: value for name, value in vars(args).items() if name not in ("base", "device")}
    seconds = time.perf_counter() - started
    ledger.append(
        recipe, settings=settings, metrics=found, seconds=seconds, seed=0, class_order="lucir1993", files=files
    )
