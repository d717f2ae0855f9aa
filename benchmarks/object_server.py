"""Serves a directory as a bucket of an object store, read only, with a delay before every answer.

usage: python -m benchmarks.object_server DIRECTORY MILLISECONDS BYTES_A_SECOND

Only what reading takes is there: HEAD, GET of a range, lists. Prints its port. Delays of several requests pass at
the same time, as on a network, and all answers share so many bytes a second. Files are sent by the kernel, so that
little of the machine is taken from what is measured.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE = 256 << 10
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]*)")


class Link:
    """Lets so many bytes a second pass, whoever sends them."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self._lock = threading.Lock()

    def pass_through(self, count: int) -> None:
        """Wait until so many bytes have passed."""
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now) + count / self._rate
            wait = self._free - now
        time.sleep(max(0.0, wait))


def handler(root: Path, delay: float, link: Link) -> type[BaseHTTPRequestHandler]:
    """Answers requests for what lies in a directory."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Headers and body in one packet each, at once.
        disable_nagle_algorithm = True
        wbufsize = 1 << 16

        def log_message(self, *arguments: object) -> None:
            """Nothing is told."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            time.sleep(delay)
            url = urlsplit(self.path)
            _, _, key = unquote(url.path).lstrip("/").partition("/")
            if key:
                self._object(root / key, body)
            else:
                self._list(parse_qs(url.query))

        def _object(self, path: Path, body: bool) -> None:
            if not path.is_file():
                return self._plain(404, b"<Error><Code>NoSuchKey</Code></Error>" if body else b"")
            size = path.stat().st_size
            match = _RANGE.fullmatch(self.headers.get("Range") or "")
            first, last = (int(match[1]), int(match[2] or size - 1)) if match else (0, size - 1)
            last = min(last, size - 1)
            self.send_response(206 if match else 200)
            if match:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("ETag", f'"{size:x}-{path.stat().st_mtime_ns:x}"')
            self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
            self.end_headers()
            self.wfile.flush()
            if not body:
                return None
            with path.open("rb") as file:
                while first <= last:
                    count = min(_PIECE, last - first + 1)
                    link.pass_through(count)
                    sent = 0
                    while sent < count:
                        sent += os.sendfile(self.connection.fileno(), file.fileno(), first + sent, count - sent)
                    first += count
            return None

        def _list(self, query: dict[str, list[str]]) -> None:
            prefix = query.get("prefix", [""])[0]
            flat = "delimiter" not in query
            place = root / prefix
            found = sorted(place.rglob("*") if flat else place.iterdir()) if place.is_dir() else []
            parts = []
            for path in found[: int(query.get("max-keys", ["1000"])[0])]:
                key = escape(str(path.relative_to(root)))
                if path.is_dir() and not flat:
                    parts.append(f"<CommonPrefixes><Prefix>{key}/</Prefix></CommonPrefixes>")
                elif path.is_file():
                    parts.append(f"<Contents><Key>{key}</Key><Size>{path.stat().st_size}</Size></Contents>")
            text = f"<ListBucketResult><KeyCount>{len(parts)}</KeyCount>{''.join(parts)}</ListBucketResult>"
            self._plain(200, text.encode())

        def _plain(self, status: int, text: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle()

    return Handler


class Server(ThreadingHTTPServer):
    """One thread a connection."""

    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    """Serve until standard input ends."""
    directory, milliseconds, rate = sys.argv[1:]
    answers = handler(Path(directory), float(milliseconds) / 1000, Link(float(rate)))
    server = Server(("127.0.0.1", 0), answers)
    print(server.server_port, flush=True)

    def end() -> None:
        sys.stdin.read()
        server.shutdown()

    threading.Thread(target=end, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
