"""Every store gives the same results: local files, objects, and objects behind a failing network."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reshard.checkpoints import FileHandles
from reshard.errors import RetryableError, UsageError
from reshard.storage import (
    DirectoryEntry,
    OpenFile,
    UnfitError,
    exists,
    for_each,
    is_directory,
    is_regular_file,
    names_in,
    opened_regular,
    read_each,
    read_range,
    read_small,
    status_at,
    store_of,
)
from tests.object_store import Objects
from tests.storage.places import Place, content

MIB = 1 << 20


def opened(path: str) -> OpenFile:
    return store_of(path).open(path)


@pytest.mark.deep
def test_status_distinguishes_files_directories_and_missing_paths(place: Place) -> None:
    file = place.put("a/b/file.bin", b"12345")
    for path, regular, directory in ((file, True, False), (f"{place.path}/a", False, True), (place.path, False, True)):
        status = status_at(path)
        assert status is not None and (status.regular, status.directory) == (regular, directory)
        assert (exists(path), is_regular_file(path), is_directory(path)) == (True, regular, directory)
    status = status_at(file)
    assert status is not None and status.size == 5
    for absent in (f"{place.path}/a/b/fil", f"{place.path}/a/b/file.bin.more", f"{place.path}/nothing/at/all"):
        assert status_at(absent) is None and not exists(absent)


@pytest.mark.deep
def test_entries_lists_names_in_a_directory(place: Place) -> None:
    for name in ("b/x", "b/y/z", "a", "a.more", "c d/e", "ü", "100%", "#1"):
        place.put(name, name.encode())
    assert names_in(place.path) == sorted(["b", "a", "a.more", "c d", "ü", "100%", "#1"])
    assert names_in(f"{place.path}/b") == ["x", "y"]
    assert names_in(f"{place.path}/") == names_in(place.path)
    assert names_in(f"{place.path}/nothing") == []
    assert names_in(f"{place.path}/a") == []
    kinds = {entry.name: (entry.is_dir(), entry.is_file()) for entry in store_of(place.path).entries(place.path)}
    assert kinds["b"] == (True, False) and kinds["a"] == (False, True)


def test_directories_are_listed_together_in_order(place: Place) -> None:
    for number in range(7):
        place.put(f"rank_{number}/file-{number}", b"")
    directories = [f"{place.path}/rank_{number}" for number in range(7)]
    listing = for_each(lambda path: store_of(path).entries(path), directories)

    def names(entries: list[DirectoryEntry]) -> list[str]:
        return [entry.name for entry in entries]

    assert list(map(names, listing)) == [[f"file-{number}"] for number in range(7)]


def test_a_missing_file_cannot_be_opened(place: Place) -> None:
    place.put("directory/file", b"")
    with pytest.raises(FileNotFoundError), opened_regular(f"{place.path}/nothing"):
        pass
    with pytest.raises(UnfitError, match="is a directory"), opened_regular(f"{place.path}/directory"):
        pass


def test_small_files_are_read_up_to_a_limit(place: Place) -> None:
    path = place.put("small", b"x" * 100)
    assert read_small(path, 100) == b"x" * 100
    with pytest.raises(UnfitError, match="larger than any such file"):
        read_small(path, 99)
    assert read_small(place.put("empty", b""), 100) == b""


def test_a_read_ends_at_the_end_of_the_file(place: Place) -> None:
    file = opened(place.put("file", bytes(range(100))))
    assert file.size() == 100
    assert file.read(90, 50) == bytes(range(90, 100))
    assert file.read(100, 1) == file.read(1000, 1) == b""
    out = bytearray(20)
    assert file.read_into(95, memoryview(out)) == 5 and out[:5] == bytes(range(95, 100))
    assert file.read_into(100, memoryview(out)) == 0
    file.close()


def test_names_that_no_object_can_have_are_refused() -> None:
    for path in (
        "s3://",
        "s3:///key",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://b u/x",
        f"s3://bucket/{'x' * 2000}",
    ):
        with pytest.raises(UsageError):
            status_at(path)


@pytest.mark.deep
@given(data=st.data())
# Shrinking a failure would take very many requests.
@settings(
    max_examples=12,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_read_range_equals_the_file(place: Place, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([0, 1, 65535, 65536, 65537, 300_000, 3 * MIB]))
    whole = content(size)
    path = place.put(f"of-{size}", whole)
    file = opened(path)
    reads = data.draw(st.lists(st.tuples(st.integers(0, size), st.integers(0, size + 10)), min_size=1, max_size=6))
    for offset, count in reads:
        length = max(0, min(count, size - offset))
        assert read_range(file, offset, length, count) == whole[offset : offset + count]
        out = bytearray(count)
        done = file.read_into(offset, memoryview(out))
        assert 0 < done <= length or not length
        assert out[:done] == whole[offset : offset + done]
    inside = [(offset, min(count, size - offset)) for offset, count in reads]
    assert list(read_each(file, inside)) == [whole[offset : offset + count] for offset, count in inside]
    file.close()


@pytest.mark.deep
@pytest.mark.parametrize("size", [10, 100_000, 2 * MIB])
def test_a_replaced_file_is_an_error_for_its_reader(place: Place, size: int) -> None:
    path = place.put("file", content(size))
    with FileHandles() as handles:
        with handles.borrow(path) as file:
            file.read(0, 5)
        # Of the same size, and soon after.
        place.remove("file")
        place.put("file", bytes(size))
        with pytest.raises((RetryableError, OSError), match="was replaced or changed while it was read"):
            with handles.borrow(path) as file:
                file.read(size // 2, max(1, size // 2))
            handles.check_unchanged([path])
            handles.close()
            with handles.borrow(path) as file:
                raise AssertionError("opened as if it were the same")


@pytest.mark.deep
def test_versions_of_a_file_have_another_status(place: Place) -> None:
    path = place.put("file", b"one")
    with contextlib.closing(store_of(path).open(path)) as file:
        first = file.status()
    assert first == status_at(path)
    place.remove("file")
    place.put("file", b"two")
    with contextlib.closing(store_of(path).open(path)) as file:
        other = file.status()
    assert (other.inode, other.changed) != (first.inode, first.changed)


def test_a_listing_of_many_pages_is_complete(objects: Objects) -> None:
    for number in range(25):
        objects.put(f"many/{number:03}/x", b"")
    store = store_of(objects.path("many"))
    client = store._service.client  # type: ignore[attr-defined]

    def small(params: dict[str, object], **_: object) -> None:
        params.setdefault("MaxKeys", 4)

    client.meta.events.register("provide-client-params.s3.ListObjectsV2", small)
    try:
        before = objects.faults.requests["GET"]
        assert names_in(objects.path("many")) == [f"{number:03}" for number in range(25)]
        assert objects.faults.requests["GET"] - before == 7
    finally:
        client.meta.events.unregister("provide-client-params.s3.ListObjectsV2", small)


def test_a_directory_marker_is_not_a_file(objects: Objects) -> None:
    objects.put("run/", b"")
    objects.put("run/rank_0/", b"")
    objects.put("run/rank_0/file", b"1")
    assert names_in(objects.path("run")) == ["rank_0"] and is_directory(objects.path("run"))
    assert names_in(objects.path("run/rank_0")) == ["file"]


@pytest.mark.deep
def test_an_unreachable_store_is_a_retryable_error(objects: Objects) -> None:
    path = objects.put("file", content(MIB))
    file = opened(path)
    objects.faults.choose = lambda number, method, path: "unavailable"
    with pytest.raises(OSError, match="returned an unexpected answer"):
        file.read(MIB // 2, MIB // 2)


def test_small_reads_nearby_share_requests(objects: Objects) -> None:
    path = objects.put("file", content(2 * MIB))
    file = opened(path)
    before = objects.faults.requests["GET"]
    whole = b"".join(file.read(offset, 512) for offset in range(0, 2 * MIB, 512))
    assert whole == content(2 * MIB)
    assert objects.faults.requests["GET"] - before <= 7


@pytest.mark.deep
def test_headers_at_equal_distances_are_read_ahead(objects: Objects) -> None:
    distance = 5 * MIB // 4
    file = opened(objects.put("file", bytes(20 * distance)))
    round_trips = 0
    for number in range(20):
        before = objects.faults.requests["GET"]
        file.read(number * distance + number % 3, 100)
        round_trips += objects.faults.requests["GET"] > before
    assert round_trips <= 7


def test_refused_connections_are_tried_again(objects: Objects) -> None:
    from botocore.exceptions import EndpointConnectionError

    path = objects.put("file", b"1")
    client = store_of(path)._service.client  # type: ignore[attr-defined]
    refused: list[object] = []

    def refuse(**_: object) -> None:
        if len(refused) < 3:
            refused.append(None)
            raise EndpointConnectionError(endpoint_url=objects.url)

    client.meta.events.register("before-send.s3", refuse)
    store_of(path).remove(path)
    assert len(refused) == 3 and objects.content() == {}
