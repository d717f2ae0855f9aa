"""A real object store on the loopback interface: a server process that the tests start, and a proxy that makes it fail.

`objects` gives a bucket of its own to each test; `Faults` says what goes wrong on the way to it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from reshard.storage import use_endpoint

SECRET = "the-secret-key-that-nobody-may-see"
KEY = "AKIAOFNOBODY"
# In a process of its own, so that it answers whatever the tests do.
_SERVER = """
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def log(self, *arguments):
        pass

app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
print(server.port, flush=True)
# Ends with whoever started it, however that ends.
threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown()), daemon=True).start()
server.serve_forever()
"""
_REFUSALS = {
    "unavailable": (503, "SlowDown", "Please reduce your request rate"),
    "denied": (403, "AccessDenied", "Access Denied"),
}


@dataclass
class Faults:
    """What goes wrong on the way to the store.

    Attributes:
        delay: seconds before every answer.
        choose: says what happens to a request, by its number from 0 on, method and path: ``drop``, which closes the
            connection without an answer; ``cut``, which does so in the middle of the answer; ``unavailable``, a 503;
            ``denied``, a 403; ``lost``, which does what is asked and gives no answer; None for nothing.
        requests: how many there were, by method.
        asked: every request, as method and path.
    """

    delay: float = 0.0
    choose: Callable[[int, str, str], Optional[str]] = lambda number, method, path: None
    requests: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[str, str]] = field(default_factory=list)


class Proxy:
    """Hands requests on to a server, as well as `faults` let it.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self.faults = Faults()
        lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body of an answer are sent one after the other, and clients take 40 ms to say that one came.
            disable_nagle_algorithm = True

            def log_message(self, *arguments: Any) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle()

            def any(self) -> None:
                faults = proxy.faults
                with lock:
                    number = sum(faults.requests.values())
                    faults.requests[self.command] += 1
                    faults.asked.append((self.command, self.path))
                time.sleep(faults.delay)
                self.pass_on(faults.choose(number, self.command, self.path))

            def pass_on(self, fault: Optional[str]) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if fault == "drop":
                    return self.hang_up()
                if fault in _REFUSALS:
                    status, code, message = _REFUSALS[fault]
                    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(text)
                    return None
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                with contextlib.closing(server):
                    server.request(self.command, self.path, body, dict(self.headers))
                    answer = server.getresponse()
                    content = answer.read()
                if fault == "lost":
                    return self.hang_up()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
                if fault == "cut":
                    self.hang_up()
                return None

            def hang_up(self) -> None:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = any

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *arguments: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Objects:
    """A bucket.

    Attributes:
        bucket: its name.
        url: of the service.
        faults: what goes wrong on the way there.
    """

    bucket: str
    url: str
    proxy: Proxy
    client: Any

    @property
    def faults(self) -> Faults:
        return self.proxy.faults

    def path(self, key: str = "") -> str:
        return f"s3://{self.bucket}/{key}" if key else f"s3://{self.bucket}"

    def put(self, key: str, data: bytes) -> str:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)
        return self.path(key)

    def upload(self, place: Path, key: str) -> str:
        """A file, or all files of a directory, put below a key."""
        if place.is_file():
            return self.put(key, place.read_bytes())
        for path in sorted(place.rglob("*")):
            if path.is_file():
                self.put(f"{key}/{path.relative_to(place)}", path.read_bytes())
        return self.path(key)

    def content(self, prefix: str = "") -> dict[str, bytes]:
        """What is there, by key below a prefix."""
        found = {}
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
            for entry in page.get("Contents", ()):
                key = entry["Key"]
                found[key[len(prefix) :].lstrip("/")] = self.client.get_object(Bucket=self.bucket, Key=key)[
                    "Body"
                ].read()
        return found


@pytest.fixture(scope="session")
def object_server() -> Iterator[int]:
    """The port of a server process."""
    pytest.importorskip("boto3")
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    with process:
        assert process.stdout is not None
        port = process.stdout.readline()
        assert port, "the server did not start"
        yield int(port)
        process.communicate("")


@pytest.fixture(scope="session")
def object_proxy(object_server: int) -> Iterator[Proxy]:
    proxy = Proxy(object_server)
    yield proxy
    proxy.close()


@pytest.fixture
def objects(object_server: int, object_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """A bucket of the test's own, which commands find through the environment."""
    import boto3

    object_proxy.faults = Faults()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": object_proxy.url,
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    from reshard.storage.s3 import service

    # Nothing that was learned of the service in another test counts.
    service._service.cache_clear()
    use_endpoint(None)
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{object_server}")
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    yield Objects(bucket, object_proxy.url, object_proxy, client)
    use_endpoint(None)
    client.close()
