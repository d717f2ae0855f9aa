"""An upload that a killed process began is gone on with: what is there, and right, is not sent again."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys

import pytest

from reshard.storage import new_file, status_at, store_of
from reshard.storage.s3.new_object import LEAST_PART_BYTES as PART
from tests.corpus import ROOT
from tests.object_store import Objects

pytestmark = pytest.mark.long

SIZE = 2 * PART + 1000
_BEGINS = """
import os, random, sys
from reshard.storage import new_file
path, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
file = new_file(path, size)
file.write(0, memoryview(random.Random(0).randbytes(size))[:count])
os._exit(9)
"""


def data(size: int = SIZE) -> bytes:
    return random.Random(0).randbytes(size)


def killed(path: str, size: int = SIZE, count: int = 2 * PART) -> None:
    """A process that is gone after it has sent some bytes."""
    words = [sys.executable, "-c", _BEGINS, path, str(size), str(count)]
    assert subprocess.run(words, cwd=ROOT, timeout=120, check=False).returncode == 9


def write(path: str, content: bytes) -> int:
    """Write an object; when it says that it was written."""
    with contextlib.closing(new_file(path, len(content))) as file:
        # From the end, as threads may.
        for start in reversed(range(0, len(content), PART)):
            file.write(start, memoryview(content)[start : start + PART])
        found = file.finish()
        assert found.size == len(content)
        file.publish()
    return found.modified


def parts_sent(objects: Objects) -> list[int]:
    sent = [path for method, path in objects.faults.asked if method == "PUT" and "partNumber=" in path]
    return sorted(int(path.split("partNumber=")[1].split("&")[0]) for path in sent)


@pytest.mark.short
def test_parts_that_are_there_are_not_sent_again(objects: Objects) -> None:
    path = objects.path("run/file")
    killed(path)
    ((_, begun),) = objects.uploads()
    objects.faults.asked.clear()
    modified = write(path, data())
    assert parts_sent(objects) == [3]
    completed = [asked for method, asked in objects.faults.asked if method == "POST"]
    assert len(completed) == 1 and begun in completed[0]
    assert objects.content() == {"run/file": data()} and objects.uploads() == []
    status = status_at(path)
    assert status is not None and status.modified == modified


@pytest.mark.parametrize("wrong", [0, 1])
def test_parts_of_other_bytes_are_sent_again(wrong: int, objects: Objects) -> None:
    path = objects.path("run/file")
    killed(path)
    content = bytearray(data())
    content[wrong * PART + 17] ^= 1
    objects.faults.asked.clear()
    write(path, bytes(content))
    assert parts_sent(objects) == [wrong + 1, 3]
    assert objects.content() == {"run/file": bytes(content)} and objects.uploads() == []


def test_what_is_of_another_size_or_was_aborted_is_begun_anew(objects: Objects) -> None:
    path = objects.path("run/file")
    killed(path)
    ((_, begun),) = objects.uploads()
    objects.client.abort_multipart_upload(Bucket=objects.bucket, Key="run/file", UploadId=begun)
    objects.faults.asked.clear()
    write(path, data())
    assert parts_sent(objects) == [1, 2, 3]
    killed(path, SIZE + PART)
    objects.faults.asked.clear()
    write(path, data())
    assert parts_sent(objects) == [1, 2, 3]
    store_of(path).remove_dead(objects.path("run"), complete=True)
    assert objects.content() == {"run/file": data()} and objects.uploads() == []


def test_only_one_of_several_that_come_at_the_same_time_may_go_on(objects: Objects) -> None:
    path = objects.path("run/file")
    killed(path)
    with contextlib.closing(new_file(path, SIZE)) as other:
        other.write(0, memoryview(data())[:PART])
        objects.faults.asked.clear()
        write(path, data())
        assert parts_sent(objects) == [1, 2, 3]
        other.write(PART, memoryview(data())[PART:])
        other.finish()
        other.publish()
    assert objects.content() == {"run/file": data()} and objects.uploads() == []


def test_what_will_be_written_again_is_not_aborted_before(objects: Objects) -> None:
    for name in ("file", "other"):
        killed(objects.path(f"run/{name}"), count=PART)
    store_of(objects.path("run")).remove_dead(objects.path("run"), False, keep={objects.path("run/file")})
    assert [key for key, _ in objects.uploads()] == ["run/file"]
    objects.faults.asked.clear()
    write(objects.path("run/file"), data())
    assert parts_sent(objects) == [2, 3] and objects.uploads() == []
    assert objects.content() == {"run/file": data()}
