"""Watchers of long calls, for tests."""

from collections.abc import Callable

from krnet.progress import Progress, Watch


def of_fits(action: Callable[[Progress], object]) -> Watch:
    """Do something at each look at a loss, and not while features are read or compared."""

    def watch(progress: Progress) -> None:
        if progress.unit == "iterations":
            action(progress)

    return watch


def raise_at(iteration: int, error: BaseException) -> Watch:
    """Raise an error at an iteration, or at the first look after it."""

    def stop(progress: Progress) -> None:
        if progress.done >= iteration:
            raise error

    return of_fits(stop)
