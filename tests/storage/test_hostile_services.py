"""Errors of services and credentials: one line, in bounded time, without secrets."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from reshard.storage.s3 import service
from tests.corpus import ROOT
from tests.object_store import KEY, SECRET, Answer, Objects
from tests.running import Argument, fails, reshard

pytestmark = pytest.mark.deep

DEMO = ROOT / "fixtures" / "demo"
CUTS: list[Argument] = [
    "--src-strategy",
    DEMO / "src_strategy.ckpt",
    "--dst-strategy",
    DEMO / "dst_strategy.ckpt",
]


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
