"""Hostile, redirecting and silent services: an error in one line, in bounded time, without credentials."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from reshard.storage.s3 import service
from tests.corpus import ROOT
from tests.object_store import KEY, SECRET, Answer, Objects
from tests.running import Argument, done, fails, reshard
from tests.sampling import some_of
from tests.storage.test_writing_to_stores import tree

pytestmark = pytest.mark.deep

DEMO = ROOT / "fixtures" / "demo"
CUTS: list[Argument] = [
    "--src-strategy",
    DEMO / "src_strategy.ckpt",
    "--dst-strategy",
    DEMO / "dst_strategy.ckpt",
]
Edit = Callable[[Answer], Answer]
TRUNCATED = rb"<IsTruncated>.*?</IsTruncated>"


def content(pattern: bytes, new: bytes) -> Edit:
    return lambda answer: answer._replace(content=re.sub(pattern, new, answer.content, flags=re.DOTALL))


def header(name: str, value: str | None) -> Edit:
    def edit(answer: Answer) -> Answer:
        bare = answer.without(name)
        return bare if value is None else bare._replace(headers={**bare.headers, name: value})

    return edit


def lists(edit: Edit) -> Callable[[str, str, Answer], Answer]:
    return lambda method, path, answer: edit(answer) if "list-type=2" in path else answer


def gets(edit: Edit) -> Callable[[str, str, Answer], Answer]:
    def of_object(method: str, path: str, answer: Answer) -> Answer:
        return edit(answer) if method in ("GET", "HEAD") and "list-type=2" not in path else answer

    return of_object


# What is changed, and whether a source is read all the same.
STRANGE: dict[str, tuple[Callable[[str, str, Answer], Answer], bool]] = {
    "a list that is truncated without a token": (
        lists(content(TRUNCATED, b"<IsTruncated>true</IsTruncated>")),
        False,
    ),
    "a list that is truncated for ever": (
        lists(
            content(TRUNCATED, b"<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>")
        ),
        False,
    ),
    "no XML": (lists(lambda answer: answer._replace(content=b"{}")), False),
    "objects with a time that is none": (gets(header("last-modified", "soon")), False),
    "another range than was asked for": (gets(header("content-range", "bytes 0-0/1")), False),
    "a range that is none": (gets(header("content-range", "some bytes")), False),
    "a date that is none": (lambda method, path, answer: header("date", "garbage")(answer), True),
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_impossible_response_is_an_error_in_one_line(name: str, objects: Objects, tmp_path: Path) -> None:
    edit, read = STRANGE[name]
    source = objects.upload(DEMO / "src_checkpoints", "ckpt")
    objects.faults.edit = edit
    result = reshard("convert", source, tmp_path / "out", *CUTS)
    assert (result.status == 0) == read, result.err
    assert len(result.err.strip().splitlines()) < 8 and "internal error" not in result.err
    if read:
        done("convert", DEMO / "src_checkpoints", tmp_path / "plain", *CUTS)
        assert tree(tmp_path / "out") == tree(tmp_path / "plain")
    objects.faults.edit = edit
    result = reshard("convert", DEMO / "src_checkpoints", objects.path("out"), *CUTS)
    assert "internal error" not in result.err and "Traceback" not in result.err
    objects.faults.edit = lambda method, path, answer: answer
    done("convert", DEMO / "src_checkpoints", objects.path("out"), *CUTS)


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """A server outside the endpoint, and the requests that reach it."""
    received: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def any(self) -> None:
            received.append(f"{self.command} {self.path}")
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("status", some_of([301, 302, 307, 308], 1))
def test_redirects_to_another_host_are_refused(
    status: int, elsewhere: tuple[str, list[str]], objects: Objects, tmp_path: Path
) -> None:
    url, received = elsewhere
    source = objects.upload(DEMO / "src_checkpoints", "ckpt")

    def away(method: str, path: str, answer: Answer) -> Answer:
        return Answer(status, {"Location": f"{url}{path}"}, b"") if ".ckpt" in path else answer

    objects.faults.edit = away
    result = fails(1, "convert", source, tmp_path / "out", *CUTS)
    assert "--endpoint-url" in result.err
    assert not received


TOKEN = "the-session-token-that-nobody-may-see"
DOCUMENTS = {
    "ExpiredToken": f"<Token-0>{TOKEN}</Token-0>",
    "SignatureDoesNotMatch": f"<AWSAccessKeyId>{KEY}</AWSAccessKeyId><StringToSign>{SECRET}</StringToSign>",
    "InternalError": f"</Error>cut off {TOKEN} {SECRET}",
}


@pytest.mark.parametrize("code", DOCUMENTS)
def test_credentials_in_a_response_are_not_printed(
    code: str, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    service._service.cache_clear()
    source = objects.upload(DEMO / "src_checkpoints", "ckpt")
    text = f"<Error><Code>{code}</Code><Message>It is {KEY}, {TOKEN}.</Message>{DOCUMENTS[code]}</Error>"
    status = 400 if code == "ExpiredToken" else 403 if code == "SignatureDoesNotMatch" else 500
    objects.faults.edit = lambda method, path, answer: Answer(status, {}, text.encode())
    for more in ([], ["--debug"]):
        result = reshard("convert", source, tmp_path / "out", *CUTS, *more)
        assert result.status == (1 if status == 500 else 3), result.err
        assert not [secret for secret in (TOKEN, KEY, SECRET) if secret in result.err], result.err
    service._service.cache_clear()


@pytest.mark.parametrize("where", ["option", "environment"])
def test_a_password_in_the_url_is_not_printed(
    where: str, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://somebody:the-password@127.0.0.1:9"
    more: list[Argument] = ["--endpoint-url", url]
    if where == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        service._service.cache_clear()
        more = []
    debugs: list[list[Argument]] = [[], ["--debug"]]
    for debug in debugs:
        result = fails(1, "convert", "s3://bucket/in", tmp_path / "out", *CUTS, *more, *debug)
        assert "127.0.0.1:9" in result.err
        assert "the-password" not in result.err and "somebody" not in result.err
    service._service.cache_clear()


@pytest.mark.parametrize("url", ["somebody:the-password@127.0.0.1:9", "http://somebody:a/the-password@127.0.0.1:9"])
def test_a_password_in_an_invalid_url_is_not_printed(
    url: str, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    service._service.cache_clear()
    result = reshard("convert", "s3://bucket/in", tmp_path / "out", *CUTS)
    service._service.cache_clear()
    assert result.status and "127.0.0.1:9" in result.err
    assert "the-password" not in result.err and "somebody" not in result.err


@pytest.mark.parametrize("kind", ["reads", "puts"])
def test_a_silent_service_is_an_error_in_bounded_time(
    kind: str, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = objects.upload(DEMO / "src_checkpoints", "ckpt")
    monkeypatch.setattr("reshard.storage.s3.service._READ_SECONDS", 0.3)
    service._service.cache_clear()
    objects.faults.choose = lambda number, method, path: (
        "silent" if ".ckpt" in path and method == ("GET" if kind == "reads" else "PUT") else None
    )
    started = time.monotonic()
    local: list[Argument] = [source, tmp_path / "out"]
    words = local if kind == "reads" else [DEMO / "src_checkpoints", objects.path("out")]
    fails(1, "convert", *words, *CUTS, texts=["returned an unexpected answer"])
    assert time.monotonic() - started < 15
    service._service.cache_clear()


@pytest.mark.parametrize(
    "path, texts",
    [
        ("obs://bucket/ckpt", "s3://bucket/ckpt --endpoint-url https://obs.REGION.myhuaweicloud.com"),
        ("gs://bucket/ckpt", "s3://bucket/ckpt --endpoint-url https://storage.googleapis.com"),
        ("https://host/bucket/ckpt", "s3://bucket/key --endpoint-url https://HOST"),
        ("S3://bucket/ckpt", "objects as s3://bucket/key"),
        ("hdfs://host/ckpt", "objects as s3://bucket/key"),
    ],
)
def test_schemes_of_other_clients_are_refused_with_the_right_one(path: str, texts: str, tmp_path: Path) -> None:
    scheme = path.partition("://")[0]
    message = f"paths with {scheme}:// are not supported"
    fails(2, "inspect", path, texts=[message, texts])
    fails(2, "convert", path, tmp_path / "out", *CUTS, texts=[message])
    fails(2, "convert", DEMO / "src_checkpoints", path, *CUTS, texts=[message])
    assert not (tmp_path / "out").exists()
