"""Files behind a URL, read by ranges and never as a whole; written whole.

    RemoteFile(url).read(position, size), .read_many([(start, stop), ...])
    list_names(url), sizes(url, names), put(url, source)

Nothing is kept open: an object can be sent to other processes, and used by many threads. What may be a passing fault of
the network is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from krnet.config import require
from krnet.errors import MissingPackageError, StoreError
from krnet.io.places import Url

DELAYS_S = (0.5, 2.0, 8.0)  # before another attempt
HEAD_BYTES = 64 << 10  # fetched at once where less is asked for: most headers end there
AHEAD_BYTES = 4 << 20  # fetched at once by who reads on
MISSING_STATUS = (404, 410)
PASSING_STATUS = (408, 425, 429)  # and all from 500 on
SIZES_AT_ONCE, NUM_THREADS = 256, 16
_known_hosts = set[str]()  # web servers that have answered a request for a range
CHECK_CONNECTION = "Check the URL and the connection, and give the same call again"

T = TypeVar("T")


class RemoteFile:
    def __init__(self, url: Url, size: int | None = None):
        self.url, self._size = url, size
        self._ahead: tuple[int, bytes] = (0, b"")
        """What was fetched last, and where it begins."""

    @property
    def size(self) -> int:
        return self._info["size"]

    @cached_property
    def _info(self) -> dict[str, Any]:
        if self._size is not None:
            return {"size": self._size}
        fs, path = system(self.url)
        found = attempt(self.url, lambda: fs.info(path))
        if found.get("type") == "directory" or not isinstance(found.get("size"), int):
            raise StoreError(f"{self.url}: is a folder, or its server does not say how large it is; expected a file")
        check_ranges(self.url, found["size"])
        return found

    def read(self, position: int, size: int) -> bytes:
        """The bytes from a position on; fewer where the file ends. Who reads on finds what follows fetched already."""
        begin, kept = self._ahead
        stop = min(position + size, self.size)
        if not begin <= position <= stop <= begin + len(kept):
            goes_on = position == begin + len(kept)
            ahead = min(max(stop, position + (AHEAD_BYTES if goes_on and kept else HEAD_BYTES)), self.size)
            begin, kept = position, self.read_many([(position, ahead)])[0] if position < ahead else b""
            self._ahead = begin, kept
        return kept[position - begin : stop - begin]

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes start .. stop - 1 of each range, which lie in the file; requests go out side by side."""
        fs, path = system(self.url)
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]

        def fetch() -> list[bytes]:
            found = fs.cat_ranges([path] * len(ranges), starts, stops, on_error="raise")
            return [bytes(part) for part in found]

        parts = attempt(self.url, fetch) if ranges else []
        for part, (start, stop) in zip(parts, ranges, strict=True):
            if len(part) != stop - start:
                raise StoreError(
                    f"{self.url}: {len(part)} bytes came for {start}..{stop - 1}; expected {stop - start}. Was the "
                    f"file replaced meanwhile? Open it again"
                )
        return parts

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def system(url: Url) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path there. fsspec keeps one of each, for each process."""
    fsspec = require("fsspec", "urls")
    try:
        fs, path = fsspec.core.url_to_fs(url.text)
        return fs, path
    except ImportError as error:
        raise MissingPackageError(
            f"{url}: a package for {url.scheme}:// is not installed ({error}). For http and https run: pip install "
            f"'krnet[urls]'"
        ) from error
    except ValueError as error:
        raise StoreError(f"{url}: is no URL that fsspec knows ({error}). Check the URL") from error


def attempt(url: Url, call: Callable[[], T]) -> T:
    """call(), again after a while where the fault may pass."""
    for delay in (*DELAYS_S, None):
        try:
            return call()
        except Exception as raised:  # each protocol has errors of its own
            error = behind(raised)
            if isinstance(error, FileNotFoundError):
                raise StoreError(f"{url}: no such file. Check the URL") from raised
            if delay is None or not may_pass(error):
                text = str(error).replace(url.text, str(url))
                raise StoreError(f"{url}: {type(error).__name__}: {text:.300}. {CHECK_CONNECTION}") from raised
        time.sleep(delay)
    raise AssertionError("the last attempt returns or raises")


def behind(error: Exception) -> Exception:
    """The fault itself: fsspec says of a web server that cannot be reached that there is no such file."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception) or not _of_network(cause):
        return error
    return error if getattr(cause, "status", None) in MISSING_STATUS else cause


def may_pass(error: Exception) -> bool:
    """Whether a fault may be gone at the next attempt."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and status:
        return status >= 500 or status in PASSING_STATUS
    return _of_network(error) and not isinstance(error, PermissionError)


def _of_network(error: Exception) -> bool:
    return isinstance(error, OSError | TimeoutError) or type(error).__module__.startswith("aiohttp")


def check_ranges(url: Url, size: int) -> None:
    """Refuse an HTTP server that answers any request with the whole file."""
    fs, path = system(url)
    host = urlsplit(url.text).netloc
    if url.scheme not in ("http", "https") or size < 2 or host in _known_hosts:
        return

    def last_byte() -> bytes:
        with fs.open(path, "rb", block_size=1, cache_type="none", size=size) as file:
            file.seek(size - 1)
            return bytes(file.read(1))

    try:
        found = attempt(url, last_byte)
    except StoreError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        found = b""
    if len(found) != 1:
        raise StoreError(
            f"{url}: its server sends whole files only; expected one that answers requests for ranges. Download the "
            f"file, or put it on another server"
        )
    _known_hosts.add(host)


def list_names(url: Url) -> dict[str, int | None]:
    """The files of a folder, and their sizes where the store says them; empty if there is no such folder."""
    fs, path = system(url)

    def listing() -> list[dict[str, Any]]:
        try:
            fs.invalidate_cache(path)
            return list(fs.ls(path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []

    found = attempt(url, listing)
    return {entry["name"].rstrip("/").rpartition("/")[2]: entry.get("size") for entry in found}


def sizes(url: Url, names: Sequence[str]) -> list[int | None]:
    """The sizes of files of a folder; None for a file that is missing."""
    listed = {} if url.scheme in ("http", "https") else list_names(url)  # web servers list nothing, or pages to read
    if listed:
        return [listed.get(name) for name in names]
    fs, _ = system(url)
    found = list[int | None]()
    for start in range(0, len(names), SIZES_AT_ONCE):
        part = [system(url / name)[1] for name in names[start : start + SIZES_AT_ONCE]]
        infos = attempt(url, partial(_infos, fs, part))
        found += [None if isinstance(info, FileNotFoundError) else info.get("size") for info in infos]
    return found


def _infos(fs: Any, paths: list[str]) -> list[Any]:
    """What is known of each file; a FileNotFoundError for one that is missing."""
    found = list[Any]()
    for answer in map_side_by_side(fs.info, paths):
        fault = behind(answer) if isinstance(answer, Exception) else None
        if fault is not None and not isinstance(fault, FileNotFoundError):
            raise fault
        found.append(answer)
    return found


def map_side_by_side(call: Callable[[str], Any], arguments: Sequence[str]) -> list[Any]:
    """call(argument) of each, or the error that it raised, in a few threads."""

    def answer(argument: str) -> Any:
        try:
            return call(argument)
        except Exception as error:
            return error

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(answer, arguments))


def put(url: Url, source: str) -> None:
    """Write a copy of a file of this machine. Stores of objects show it when it is complete."""
    fs, path = system(url)

    def send() -> None:
        try:
            fs.put_file(source, path)
        except FileNotFoundError:  # a store with folders
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.put_file(source, path)

    attempt(url, send)
