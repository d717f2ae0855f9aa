"""Uploads of dead processes are aborted; those of live ones, and unclaimed ones, are unchanged."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Optional

import pytest

from reshard.storage import new_file, store_of
from reshard.storage.s3 import leases
from reshard.storage.s3.new_object import MIN_PART_BYTES as PART
from tests.corpus import ROOT
from tests.object_store import Objects
from tests.storage.places import wait_until_killed

pytestmark = pytest.mark.long

HEX = "0123456789ab"


def remove_dead(objects: Objects, directory: str = "run", complete: bool = False) -> None:
    store_of(objects.path(directory)).remove_dead(objects.path(directory), complete)


def begin(objects: Objects, key: str, parts: int = 1) -> str:
    """Begin an upload as any program does."""
    upload: str = objects.client.create_multipart_upload(Bucket=objects.bucket, Key=key)["UploadId"]
    for number in range(1, parts + 1):
        objects.client.upload_part(Bucket=objects.bucket, Key=key, UploadId=upload, PartNumber=number, Body=bytes(1000))
    return upload


def claim(objects: Objects, who: str, writes: Optional[str], directory: str = "run") -> str:
    content = b"" if writes is None else json.dumps({"writes": objects.path(writes)}).encode()
    objects.put(f"{directory}/.reshard-tmp-{who}", content)
    return f"{directory}/.reshard-tmp-{who}"


@pytest.fixture(scope="module")
def dead() -> str:
    """A process of this machine that has died."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return f"{leases._machine()}-{process.pid}-{HEX}"


_WRITES = """
import sys
from reshard.storage import new_file
file = new_file(sys.argv[1], int(sys.argv[2]))
file.write(0, memoryview(bytes(int(sys.argv[2]) * 2 // 3)))
print("half", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def half_written(path: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", _WRITES, path, str(2 * PART)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        yield process
        process.kill()
        process.communicate()


@pytest.mark.short
@pytest.mark.parametrize("complete", [False, True])
def test_an_upload_of_a_killed_process_is_aborted(complete: bool, objects: Objects) -> None:
    objects.put("run/file", b"old")
    with half_written(objects.path("run/file")) as process:
        remove_dead(objects, complete=complete)
        assert [key for key, _ in objects.uploads()] == ["run/file"] and len(objects.content("run/.")) == 1
        # Before and after its parent waits for it.
        process.send_signal(signal.SIGKILL)
        if complete:
            process.wait()
        else:
            wait_until_killed(process.pid)
        foreign = begin(objects, "run/of another program")
        remove_dead(objects, complete=complete)
        assert objects.uploads() == [("run/of another program", foreign)]
        assert objects.content() == {"run/file": b"old"}


@pytest.mark.short
def test_uploads_of_living_processes_stay(objects: Objects, dead: str) -> None:
    data = bytes(range(256)) * (2 * PART // 256)
    with contextlib.closing(new_file(objects.path("run/mine"), len(data))) as mine:
        mine.write(0, memoryview(data)[:PART])
        # Of a dead one: the same object's, and another's.
        same, other = begin(objects, "run/mine"), begin(objects, "run/other")
        claim(objects, dead, "run/other")
        preserved = claim(objects, f"{dead[:-1]}c", "run/mine")
        remove_dead(objects)
        remaining = dict(objects.uploads())
        assert other not in remaining.values() and sorted(key for key, _ in objects.uploads()) == [
            "run/mine",
            "run/mine",
        ]
        assert preserved in objects.content() and len(objects.content("run/.")) == 2
        mine.write(PART, memoryview(data)[PART:])
        mine.finish()
        mine.publish()
    assert objects.uploads() == [("run/mine", same)]
    # Now no process writes it.
    remove_dead(objects)
    assert objects.content() == {"run/mine": data} and objects.uploads() == []


@pytest.mark.short
def test_an_upload_of_another_machine_is_aborted_after_its_lease_expired(objects: Objects) -> None:
    fresh = begin(objects, "run/file")
    mark = claim(objects, f"deadbeef-1-{HEX}", "run/file")
    for clock in (0.0, leases.DEAD_AFTER - 60):
        objects.faults.clock = clock
        remove_dead(objects, complete=True)
        assert objects.uploads() == [("run/file", fresh)] and list(objects.content()) == [mark]
    objects.faults.clock = leases.DEAD_AFTER + 5
    remove_dead(objects)
    assert objects.uploads() == [] and objects.content() == {}


def test_only_uploads_claimed_in_the_directory_are_aborted(objects: Objects, dead: str) -> None:
    for key in ("run/file", "run/file.more", "run/fil", "run/deep/file", "elsewhere/file", "file"):
        begin(objects, key)
    elsewhere = claim(objects, dead, "elsewhere/file", "elsewhere")
    claim(objects, dead, "run/file")
    remove_dead(objects)
    remaining = ["elsewhere/file", "file", "run/deep/file", "run/fil", "run/file.more"]
    assert sorted(key for key, _ in objects.uploads()) == remaining
    assert list(objects.content()) == [elsewhere]
    remove_dead(objects, "elsewhere/")
    assert sorted(key for key, _ in objects.uploads()) == remaining[1:] and objects.content() == {}


def test_dead_uploads_in_a_bucket_root_are_aborted(objects: Objects, dead: str) -> None:
    begin(objects, "file")
    begin(objects, "run/file")
    objects.put(f".reshard-tmp-{dead}", json.dumps({"writes": objects.path("file")}).encode())
    remove_dead(objects, "")
    assert [key for key, _ in objects.uploads()] == ["run/file"] and objects.content() == {}
    with contextlib.closing(new_file(objects.path("file"), 2 * PART)) as file:
        file.write(0, memoryview(bytes(PART)))
        assert [key.startswith(".reshard-tmp-") for key in objects.content()] == [True]
        remove_dead(objects, "")
        assert len(objects.uploads()) == 2


DAMAGED = [
    b"",
    b"\xff\xfe\x00",
    b"[1]",
    b"{}",
    b"7",
    b"null",
    b'"writes"',
    b'{"writes": 5}',
    b'{"writes": null}',
    b'{"writes": ["run/file"]}',
    b'{"writes": ""}',
    b'{"writes": "s3://"}',
    b'{"writes": "/run/file"}',
    b'{"writes": "s3://BUCKET/run/../run/file"}',
    b'{"writes": "s3://BUCKET/run//file"}',
    b'{"writes": "s3://BUCKET/run/\\ud800"}',
    b'{"writes": "s3://BUCKET/run/\\udc80"}',
    b'{"writes": "s3://BUCKET/run/\\u0000"}',
    b'{"writes": "s3://BUCKET/run"}',
    b'{"writes": "s3://BUCKET/run/"}',
    b'{"writes": "s3://BUCKET/run/deep/foreign"}',
    b'{"writes": "s3://BUCKET/elsewhere/foreign"}',
    b'{"writes": "s3://another-bucket/run/foreign"}',
    b'{"writes": "s3://BUCKET/run/' + b"x" * 2000 + b'"}',
    b"[" * 8000,
    b"9" * 8000,
    b'{"writes": "s3://BUCKET/run/foreign", ' + b" " * (1 << 20) + b"}",
]


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_damaged_claims_are_ignored(number: int, objects: Objects, dead: str) -> None:
    foreign = [begin(objects, key) for key in ("run/foreign", "run/deep/foreign", "elsewhere/foreign", "run")]
    begin(objects, "run/file")
    damaged = DAMAGED[number].replace(b"BUCKET", objects.bucket.encode())
    objects.put(f"run/.reshard-tmp-{dead[:-1]}0", damaged)
    claim(objects, dead, "run/file")
    objects.put("run/.reshard-tmp-of something else", damaged)
    remove_dead(objects)
    assert sorted(upload for _, upload in objects.uploads()) == sorted(foreign)
    remaining = objects.content("run/")
    assert f".reshard-tmp-{dead}" not in remaining and ".reshard-tmp-of something else" in remaining


def test_an_upload_started_during_cleanup_stays(objects: Objects, dead: str) -> None:
    begin(objects, "run/file")
    claim(objects, dead, "run/file")
    started: list[str] = []

    def choose(number: int, method: str, path: str) -> None:
        if method == "GET" and "uploads" in path and not started:
            claim(objects, f"deadbeef-1-{HEX}", "run/file")
            started.append(begin(objects, "run/file"))

    objects.faults.choose = choose
    remove_dead(objects)
    assert started and started[0] in [upload for _, upload in objects.uploads()]


@pytest.mark.parametrize("stage", ["uploads", "uploadId="])
def test_an_upload_of_a_resuming_run_is_not_aborted(stage: str, objects: Objects) -> None:
    path = objects.path("run/file")
    with half_written(path):
        pass
    with contextlib.closing(new_file(path, 2 * PART)) as file:
        started: list[str] = []

        def choose(number: int, method: str, requests: str) -> None:
            # Before uploads are listed, or before one is aborted.
            if not started and stage in requests and method in ("GET", "DELETE"):
                started.append(requests)
                file.write(0, memoryview(bytes(PART)))

        objects.faults.choose = choose
        remove_dead(objects)
        objects.faults.choose = lambda *_: None
        file.write(PART, memoryview(bytes(PART)))
        file.finish()
        file.publish()
    assert started and objects.content()["run/file"] == bytes(2 * PART)
    remove_dead(objects)
    assert list(objects.content()) == ["run/file"] and not objects.uploads()


def test_without_permission_to_list_uploads_claims_are_removed(objects: Objects, dead: str) -> None:
    begin(objects, "run/file")
    claim(objects, dead, "run/file")
    objects.faults.choose = lambda number, method, path: "refuse" if "uploads" in path else None
    remove_dead(objects)
    assert objects.content() == {} and len(objects.uploads()) == 1


def test_without_access_no_upload_is_aborted(objects: Objects, dead: str) -> None:
    begin(objects, "run/file")
    mark = claim(objects, dead, "run/file")
    objects.faults.choose = lambda *_: "refuse"
    remove_dead(objects)
    objects.faults.choose = lambda *_: None
    remove_dead(objects, "nothing/here")
    assert list(objects.content()) == [mark] and len(objects.uploads()) == 1
