"""A web server on this machine that answers requests for ranges of files, and counts what it sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class RangeServer(ThreadingHTTPServer):
    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.has_ranges = True
        """False: any request is answered with the whole file."""
        self.failures = 0
        """The next so many requests for content are answered with status 503."""
        self.extra = b""
        """More bytes than were asked for."""
        self.sent = 0
        """Bytes of content that were sent."""
        self.num_requests = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has read enough goes away in the middle of an answer."""

    def url(self, name: str = "") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # header and content leave together: else the system waits between them
    server: RangeServer

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.server.num_requests += 1
        path = self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            return self.reply(404, b"none")
        if body and self.server.failures:
            self.server.failures -= 1
            return self.reply(503, b"busy")
        size, asked = path.stat().st_size, self.headers.get("Range")
        start, stop = 0, size
        if asked and self.server.has_ranges:
            start, last = map(int, asked.removeprefix("bytes=").split("-"))
            stop = min(last + 1, size)
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(stop - start) if body else b""
        ranged = asked is not None and self.server.has_ranges
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if ranged else {}
        extra = self.server.extra if ranged else b""
        self.reply(206 if ranged else 200, content + extra if body else None, stop - start + len(extra), headers)

    def reply(
        self, status: int, content: bytes | None, length: int | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content or b"") if length is None else length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if content and self.command != "HEAD":
            self.server.sent += len(content)
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[RangeServer]:
    server = RangeServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
