"""The kernel's locks on open files. They end with their process, even if it is killed."""

from __future__ import annotations

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None


def lock_file(fd: int, *, shared: bool = False, wait: bool = True) -> None:
    """Lock an open file until it is closed; do nothing on a system without locks."""
    if fcntl is not None:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
