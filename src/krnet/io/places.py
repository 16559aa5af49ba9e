"""Where a file is: a path on this machine, or a URL.

    place("runs/a.krn")              -> Path
    place("https://host/a.krn?key")  -> Url, whose name and suffix are those of its path: a.krn, .krn

Any URL that fsspec knows will do; the package of its protocol (s3fs, gcsfs, ...) has to be installed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from krnet.io.atomic import AnyPath

URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")


@dataclass(frozen=True)
class Url:
    text: str
    """All of it, with a key that it may carry; never to be shown."""

    def __str__(self) -> str:
        """Without user, password and query, which may hold keys."""
        parts = urlsplit(self.text)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()

    @property
    def path(self) -> PurePosixPath:
        """The names behind the host; in other stores than web servers what stands for a host is a folder, too."""
        parts = urlsplit(self.text)
        return PurePosixPath(unquote(parts.path if self.scheme in ("http", "https") else parts.netloc + parts.path))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def suffix(self) -> str:
        return self.path.suffix

    @property
    def scheme(self) -> str:
        return urlsplit(self.text).scheme.lower()

    def __truediv__(self, name: str) -> Url:
        """A file in this folder; a query stays behind it."""
        head, mark, query = self.text.partition("?")
        return Url(f"{head.rstrip('/')}/{name}{mark}{query}")


Place = Path | Url


def is_url(given: object) -> bool:
    return isinstance(given, Url) or (isinstance(given, str) and URL.match(given) is not None)


def place(given: AnyPath | Url) -> Place:
    """What a caller gives, as a path or as a URL; file://... is a path."""
    if isinstance(given, Url):
        return given
    text = os.fspath(given)
    if not is_url(text):
        return Path(text)
    url = Url(text)
    return Path(url.path) if url.scheme == "file" else url


def parse_place(text: str) -> str | Path:
    """What a user types: a URL as it is, anything else as a path."""
    return text if is_url(text) else Path(text)
