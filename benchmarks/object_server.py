"""Serves a directory as a bucket of an object store, with a delay before every answer.

usage: python -m benchmarks.object_server DIRECTORY MILLISECONDS BYTES_A_SECOND

Only what conversions take is there: HEAD, GET of a range, lists, PUT with conditions, multipart uploads. Prints its
port. GET /seconds tells how long it was from the first upload that was begun to the last that was completed, since
that was asked before. Delays of several requests pass at the same time, as on a network, and all bytes share so many a
second.
Files are sent by the kernel, and nothing is hashed, so that little of the machine is taken from what is measured.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
import time
import uuid
from datetime import datetime, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE = 1 << 20
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]*)")


class Link:
    """Limits the bytes per second of all connections together."""

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


def _etag(path: Path) -> str:
    status = path.stat()
    return f'"{status.st_size:x}-{status.st_mtime_ns:x}"'


def _iso(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _number(path: Path) -> int:
    return int(path.name)


def handler(root: Path, delay: float, link: Link) -> type[BaseHTTPRequestHandler]:
    """Answers requests for files of a directory."""

    uploads = root.parent / f"{root.name}-uploads"
    uploads.mkdir(exist_ok=True)
    # Metadata of objects, by path, and of uploads, by number.
    metadata: dict[str, dict[str, str]] = {}
    # When uploads were begun and completed.
    times: list[float] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Headers and body in one packet each, at once.
        disable_nagle_algorithm = True
        wbufsize = 1 << 16

        def log_message(self, *arguments: object) -> None:
            """Logs nothing."""

        def handle_expect_100(self) -> bool:
            paths = super().handle_expect_100()
            self.wfile.flush()
            return paths

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            if self.path == "/seconds":
                self._plain(200, str(max(times) - min(times)).encode())
                return times.clear()
            return self._answer(body=True)

        def do_PUT(self) -> None:
            key, query = self._asked()
            whole = root / key
            path = uploads / query["uploadId"][0] / query["partNumber"][0] if "uploadId" in query else whole
            unnamed = uploads / uuid.uuid4().hex
            remaining = int(self.headers["Content-Length"])
            with unnamed.open("wb") as file:
                while remaining:
                    data = self.rfile.read(min(_PIECE, remaining))
                    link.pass_through(len(data))
                    file.write(data)
                    remaining -= len(data)
            with lock:
                if self._is_unmet(whole):
                    unnamed.unlink()
                    return self._plain(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                if key.endswith("/"):
                    unnamed.unlink()
                    whole.mkdir(parents=True, exist_ok=True)
                    return self._plain(200, b"", ETag='"directory"')
                path.parent.mkdir(parents=True, exist_ok=True)
                unnamed.rename(path)
                if path is whole:
                    metadata[str(whole)] = self._metadata()
                return self._plain(200, b"", ETag=_etag(path))

        def do_POST(self) -> None:
            key, query = self._asked()
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "uploads" in query:
                times.append(time.perf_counter() - delay)
                number = uuid.uuid4().hex
                (uploads / number).mkdir()
                metadata[number] = self._metadata()
                text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
                return self._plain(200, text.encode())
            number = query["uploadId"][0]
            if self._is_unmet(root / key):
                return self._plain(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            with (uploads / number / "whole").open("wb") as whole:
                for part in sorted(
                    (path for path in (uploads / number).iterdir() if path.name != "whole"), key=_number
                ):
                    with part.open("rb") as file:
                        while os.sendfile(whole.fileno(), file.fileno(), None, _PIECE << 6):
                            pass
                    part.unlink()
            (root / key).parent.mkdir(parents=True, exist_ok=True)
            (uploads / number / "whole").rename(root / key)
            metadata[str(root / key)] = metadata.pop(number)
            times.append(time.perf_counter())
            text = f"<CompleteMultipartUploadResult><ETag>{_etag(root / key)}</ETag></CompleteMultipartUploadResult>"
            return self._plain(200, text.encode())

        def do_DELETE(self) -> None:
            key, query = self._asked()
            if "uploadId" in query:
                shutil.rmtree(uploads / query["uploadId"][0], ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    (root / key).rmdir() if key.endswith("/") else (root / key).unlink()
            self._plain(204, b"")

        def _asked(self) -> tuple[str, dict[str, list[str]]]:
            time.sleep(delay)
            url = urlsplit(self.path)
            _, _, key = unquote(url.path).lstrip("/").partition("/")
            return key, parse_qs(url.query, keep_blank_values=True)

        def _is_unmet(self, path: Path) -> bool:
            """Whether a condition does not hold under which something is to be written."""
            current = _etag(path) if path.is_file() else None
            required = self.headers.get("If-Match")
            return bool((self.headers.get("If-None-Match") and current) or (required and required != current))

        def _metadata(self) -> dict[str, str]:
            return {name: value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}

        def _answer(self, body: bool) -> None:
            key, query = self._asked()
            if key:
                self._object(root / key, body)
            else:
                self._list(query)

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
            self.send_header("ETag", _etag(path))
            for name, value in metadata.get(str(path), {}).items():
                self.send_header(name, value)
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
            place, _, start = prefix.rpartition("/")
            directory = root / place
            paths = sorted(directory.rglob("*") if flat else directory.iterdir()) if directory.is_dir() else []
            paths = [path for path in paths if flat or path.name.startswith(start)]
            parts = []
            for path in paths[: int(query.get("max-keys", ["1000"])[0])]:
                key = escape(str(path.relative_to(root)))
                if path.is_dir() and not flat:
                    parts.append(f"<CommonPrefixes><Prefix>{key}/</Prefix></CommonPrefixes>")
                elif path.is_file():
                    about = f"<Size>{path.stat().st_size}</Size><LastModified>{_iso(path)}</LastModified>"
                    parts.append(f"<Contents><Key>{key}</Key>{about}</Contents>")
            text = f"<ListBucketResult><KeyCount>{len(parts)}</KeyCount>{''.join(parts)}</ListBucketResult>"
            self._plain(200, text.encode())

        def _plain(self, status: int, text: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
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
