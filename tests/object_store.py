"""A real object store on the loopback interface: a server process, and a proxy that injects failures.

`objects` gives a bucket of its own to each test; `Faults` decides which requests fail on the way to it.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from reshard.storage import use_endpoint

SECRET = "the-secret-key-that-nobody-may-see"
KEY = "AKIAOFNOBODY"
# In a separate process, so that tests do not block it.
_SERVER = """
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    def log(self, *arguments):
        pass

app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
print(server.port, flush=True)
# Ends with its parent process.
threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown()), daemon=True).start()
server.serve_forever()
"""


class Answer(NamedTuple):
    """What a service answers."""

    status: int
    headers: dict[str, str]
    content: bytes

    def without(self, name: str) -> Answer:
        return self._replace(headers={key: value for key, value in self.headers.items() if key.lower() != name})


@dataclass
class Faults:
    """What goes wrong on the way to the store.

    Attributes:
        delay: seconds before every answer.
        choose: decides what happens to a request, by its number from 0 on, method and path: ``drop``, which closes the
            connection without an answer; ``cut``, which does so in the middle of the answer; ``unavailable``, a 503;
            ``lost``, which does what is asked and gives no answer; ``refuse``, a 403; ``conflict``, a 409; ``silent``,
            which never answers; None for nothing.
        edit: changes an answer, given method, path, status, headers and content.
        conditions: of writes: ``heed``; ``ignore``, as services do that do not know them; ``refuse``, a 501.
        clock: seconds that the service's clock is ahead of when its objects say that they were put.
        requests: how many there were, by method.
        asked: every request, as method and path.
    """

    delay: float = 0.0
    conditions: str = "heed"
    clock: float = 0.0
    choose: Callable[[int, str, str], str | None] = lambda number, method, path: None
    edit: Callable[[str, str, Answer], Answer] = lambda method, path, answer: answer
    requests: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[str, str]] = field(default_factory=list)


_REFUSALS = {
    "unavailable": (503, "SlowDown", "Please reduce your request rate"),
    "refuse": (403, "AccessDenied", "Access Denied"),
    "conflict": (409, "ConditionalRequestConflict", "A conflicting operation is under way"),
    "not implemented": (501, "NotImplemented", "A header implies functionality that is not implemented"),
    "unmet": (412, "PreconditionFailed", "At least one of the preconditions did not hold"),
    "no upload": (404, "NoSuchUpload", "The specified upload does not exist."),
    "absent": (404, "NoSuchKey", "The specified key does not exist."),
}
_CONDITIONS = ("if-match", "if-none-match")


class Proxy:
    """Hands requests on to a server, as well as `faults` let it.

    Conditions of writes are seen to here, so that looking and writing are one, as in a real service.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self.faults = Faults()
        self.closed = threading.Event()
        lock = threading.Lock()
        writing: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

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

            def pass_on(self, fault: str | None) -> None:
                faults = proxy.faults
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if len(body) < length:
                    # Its sender was killed. The server would wait for the rest, and others for the object.
                    return self.hang_up()
                answer: http.client.HTTPResponse | None
                refusal: str | None = None
                if fault == "drop":
                    return self.hang_up()
                if fault == "silent":
                    proxy.closed.wait(60)
                    return self.hang_up()
                if fault in _REFUSALS:
                    return self.refuse(fault)
                completes = self.command == "POST" and "uploadId=" in self.path
                if (self.command in ("PUT", "DELETE") and "?" not in self.path) or completes:
                    with lock:
                        alone = writing[self.path.partition("?")[0]]
                    with alone:
                        refusal = self.unmet()
                        answer, content = self.ask(self.command, body) if refusal is None else (None, b"")
                else:
                    answer, content = self.ask(self.command, body)
                if answer is not None and answer.status == 500 and "uploadId=" in self.path and not self.is_under_way():
                    # The server's own fault, where other services have an answer.
                    answer, refusal = None, "no upload"
                if fault == "lost":
                    return self.hang_up()
                if answer is None:
                    return self.refuse(str(refusal))
                head_length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                headers = {
                    name: value
                    for name, value in answer.getheaders()
                    if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date")
                }
                headers["Date"] = self.date_time_string()
                status, headers, content = faults.edit(self.command, self.path, Answer(answer.status, headers, content))
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", head_length or str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
                if fault == "cut":
                    self.hang_up()
                return None

            def ask(
                self, method: str, body: bytes = b"", path: str | None = None
            ) -> tuple[http.client.HTTPResponse, bytes]:
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                own = method == self.command
                heeded = self.command not in ("PUT", "POST", "DELETE")
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if (heeded or name.lower() not in _CONDITIONS) and (own or not name.lower().startswith("content-"))
                }
                with contextlib.closing(server):
                    server.request(method, path or self.path, body, headers)
                    answer = server.getresponse()
                    return answer, answer.read()

            def unmet(self) -> str | None:
                """Why a conditional write is refused."""
                match, none_match = (self.headers.get(name) for name in _CONDITIONS)
                if (match or none_match) is None or proxy.faults.conditions == "ignore":
                    return None
                if proxy.faults.conditions == "refuse":
                    return "not implemented"
                exists, _ = self.ask("HEAD", path=self.path.partition("?")[0])
                if exists.status == 404:
                    return None if match is None else "absent"
                return None if match is not None and match == exists.getheader("ETag") else "unmet"

            def is_under_way(self) -> bool:
                """Whether the requested upload exists."""
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                bucket = self.path.split("/")[1]
                with contextlib.closing(server):
                    server.request(
                        "GET", f"/{bucket}?uploads", headers={"Authorization": self.headers["Authorization"]}
                    )
                    actual = server.getresponse().read().decode()
                return parse_qs(urlsplit(self.path).query)["uploadId"][0] in actual

            def refuse(self, kind: str) -> None:
                status, code, message = _REFUSALS[kind]
                text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            def date_time_string(self, timestamp: float | None = None) -> str:
                return super().date_time_string((timestamp or time.time()) + proxy.faults.clock)

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
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Bucket:
    """A bucket.

    Attributes:
        bucket: its name.
        client: reaches it without faults.
    """

    bucket: str
    client: Any

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

    def uploads(self) -> list[tuple[str, str]]:
        """Multipart uploads that are under way, as key and number."""
        actual = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return [(upload["Key"], upload["UploadId"]) for upload in actual]

    def names(self, prefix: str = "") -> list[str]:
        """The keys of objects below a prefix, without it."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [entry["Key"][len(prefix) :] for page in pages for entry in page.get("Contents", ())]

    def content(self, prefix: str = "") -> dict[str, bytes]:
        """The objects by key below a prefix."""
        return {
            name.lstrip("/"): self.client.get_object(Bucket=self.bucket, Key=prefix + name)["Body"].read()
            for name in self.names(prefix)
        }


@dataclass
class Objects(Bucket):
    """A bucket behind a proxy.

    Attributes:
        url: of the service.
        faults: what goes wrong on the way there.
    """

    url: str
    proxy: Proxy

    @property
    def faults(self) -> Faults:
        return self.proxy.faults


def use_service(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands find a service through the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": url,
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def object_server() -> Iterator[int]:
    """The port of a server process."""
    pytest.importorskip("boto3")
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
    from botocore.loaders import create_loader

    proxy = Proxy(object_server)
    with pytest.MonkeyPatch.context() as patch:
        # A client's session parses a megabyte of JSON otherwise, the same for every test.
        patch.setattr("botocore.session.create_loader", functools.cache(create_loader))
        yield proxy
    proxy.close()


@pytest.fixture
def objects(object_server: int, object_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """A bucket of the test's own, which commands find through the environment; pauses before retries are short."""
    import boto3

    object_proxy.faults = Faults()
    use_service(object_proxy.url, monkeypatch)
    from reshard.storage.s3 import service

    # Nothing that was learned of the service in another test counts.
    service._service.cache_clear()
    use_endpoint(None)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.005)
    client = boto3.session.Session().client("s3", endpoint_url=f"http://127.0.0.1:{object_server}")
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    yield Objects(bucket, client, object_proxy.url, object_proxy)
    use_endpoint(None)
    client.close()
