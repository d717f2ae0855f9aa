"""New files in every store: written in any order, invisible before they are complete."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reshard.storage import NewFile, Sending, new_file, remove_file, status_at, store_of, write_whole
from reshard.storage.s3.objects import MIN_PART_BYTES as PART
from reshard.storage.s3.objects import part_bytes
from reshard.storage.s3.service import service
from tests.object_store import KEY, SECRET, Objects
from tests.storage.places import Place, content, failing

pytestmark = pytest.mark.long

SIZES = [0, 1, 100_000, PART, PART + 1, 2 * PART + 12345]
LARGE = 2 * PART + 12345


@contextlib.contextmanager
def writing(path: str, size: int) -> Iterator[NewFile]:
    with contextlib.closing(new_file(path, size)) as file:
        yield file


def write_all(file: NewFile, data: bytes) -> None:
    file.write(0, memoryview(data))


def written(path: str, data: bytes) -> None:
    with writing(path, len(data)) as file:
        write_all(file, data)
        file.finish()
        file.publish()


@given(data=st.data())
@settings(
    max_examples=10,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_bytes_come_in_any_order_from_several_threads(place: Place, data: st.DataObject) -> None:
    size = data.draw(st.one_of(st.integers(0, 5000), st.sampled_from([PART - 1, PART, PART + 1, 2 * PART, LARGE])))
    cuts = data.draw(st.lists(st.integers(0, size), max_size=12))
    near = data.draw(st.lists(st.sampled_from([PART - 1, PART, PART + 1, 2 * PART]), max_size=3))
    places = sorted({0, size, *cuts, *(cut for cut in near if cut < size)})
    pieces = list(itertools.pairwise(places))
    random.Random(data.draw(st.integers(0, 99))).shuffle(pieces)
    whole = content(size)
    path = f"{place.path}/directory/of-{size}"
    with writing(path, size) as file:

        def write(piece: tuple[int, int]) -> None:
            file.write(piece[0], memoryview(whole)[piece[0] : piece[1]])

        with ThreadPoolExecutor(data.draw(st.sampled_from([1, 4]))) as threads:
            list(threads.map(write, pieces))
        assert file.finish().size == size
        file.publish()
    assert place.content().pop(f"directory/of-{size}") == whole
    assert not [name for name in place.content() if ".reshard" in name] and place.uploads() == []


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_invisible_before_it_is_published(place: Place, size: int) -> None:
    path, old, new = place.put("file", b"the one that was there"), b"the one that was there", content(size)
    with writing(path, size) as file, writing(f"{place.path}/other", size) as other:
        for one in (file, other):
            write_all(one, new)
            one.finish()
            assert place.content()["file"] == old and "other" not in place.content()
        assert status_at(f"{place.path}/other") is None
        file.publish()
        assert place.content()["file"] == new
        other.publish()
    assert place.content() == {"file": new, "other": new} and place.uploads() == []


def test_a_file_is_replaced_atomically(place: Place) -> None:
    versions = [content(LARGE), bytes(1000), bytes(PART + 1)]
    path = place.put("file", versions[0])
    visited: set[int] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                visited.add(versions.index(place.content()["file"]))
            except Exception as error:
                # The server that is tested against has none for a moment while it is replaced.
                if "NoSuchKey" not in str(error):
                    raise

    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(look)
        try:
            for version in (versions[1], versions[2], versions[0], versions[1]):
                written(path, version)
        finally:
            done.set()
        looking.result()
    assert visited and place.content() == {"file": versions[1]}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", ["begun", "half", "written", "finished"])
def test_a_discarded_file_leaves_nothing(place: Place, size: int, stage: str) -> None:
    with writing(f"{place.path}/new/file", size) as file:
        if stage == "half":
            file.write(0, memoryview(content(size)[: size * 2 // 3]))
        elif stage != "begun":
            write_all(file, content(size))
        if stage == "finished":
            file.finish()
        file.discard()
        # As often as anybody likes.
        file.discard()
        if size:
            with pytest.raises(OSError):
                file.publish()
    assert place.content() == {} and place.uploads() == []


def test_an_object_closed_without_publishing_leaves_nothing(objects: Objects) -> None:
    with writing(objects.path("file"), LARGE) as file:
        write_all(file, content(LARGE))
        file.finish()
    assert objects.content() == {} and objects.uploads() == []


@pytest.mark.parametrize("seed", range(2))
def test_a_file_discarded_during_writes_leaves_nothing(place: Place, seed: int) -> None:
    chosen = random.Random(seed)
    size = 6 * PART
    whole = content(size)
    parts = [(start, min(size, start + PART // 2)) for start in range(0, size, PART // 2)]
    chosen.shuffle(parts)
    file = new_file(f"{place.path}/file", size)

    def write(piece: tuple[int, int]) -> bool:
        try:
            file.write(piece[0], memoryview(whole)[piece[0] : piece[1]])
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        coming = [threads.submit(write, part) for part in parts]
        time.sleep(chosen.uniform(0, 0.3))
        file.discard()
        list(coming)
    with pytest.raises(OSError):
        file.publish()
    file.close()
    assert place.content() == {} and place.uploads() == []


def test_missing_bytes_are_an_error_on_publishing(place: Place) -> None:
    for size, missing in ((10, 1), (PART, 1), (PART + 1, 1), (LARGE, 1), (LARGE, PART)):
        with writing(f"{place.path}/file", size) as file:
            file.write(0, memoryview(content(size))[: size - missing])
            assert file.finish().size < size
            file.discard()
    assert place.content() == {} and place.uploads() == []


def test_missing_bytes_anywhere_in_an_object_are_an_error(objects: Objects) -> None:
    for size in (10, PART + 1):
        for hole in (0, size // 2, size - 1):
            with writing(objects.path("file"), size) as file:
                file.write(0, memoryview(content(size))[:hole])
                file.write(hole + 1, memoryview(content(size))[hole + 1 :])
                assert file.finish().size < size


@pytest.mark.parametrize("size", [0, 5, PART, PART + 5])
def test_bytes_over_the_planned_size_are_an_error(place: Place, size: int) -> None:
    with writing(f"{place.path}/file", size) as file:
        try:
            file.write(max(0, size - 3), memoryview(b"too many"))
            assert file.finish().size > size
        except OSError as error:
            assert "beyond" in str(error)
        file.discard()
    assert place.content() == {}


def test_a_published_file_has_one_time_in_all_functions(place: Place) -> None:
    for size in (0, 1000, LARGE):
        path = f"{place.path}/of-{size}"
        with writing(path, size) as file:
            write_all(file, content(size))
            finished = file.finish()
            file.publish()
        looked = status_at(path)
        with contextlib.closing(store_of(path).open(path)) as opened:
            assert opened.status() == looked
        assert looked is not None and looked.modified == finished.modified and looked.size == finished.size == size
        assert (looked.device, looked.inode, looked.regular) == (finished.device, finished.inode, True)
        assert abs(looked.modified / 1e9 - time.time()) < 600
    small = f"{place.path}/small"
    write_whole(small, b"1")
    with contextlib.closing(store_of(small).open(small)) as opened:
        assert opened.status() == status_at(small)


@pytest.mark.deep
@pytest.mark.short
def test_numbers_and_sizes_of_parts_stay_within_service_limits() -> None:
    for size in (1, PART, PART + 1, PART * 10_000, PART * 10_000 + 1, 3 << 40, 5 << 40):
        part = part_bytes(size)
        assert part >= 5 << 20 and part % (1 << 20) == 0 and -(-size // part) <= 10_000
        assert part == PART or -(-size // (part - (1 << 20))) > 10_000


def test_a_small_object_is_written_in_one_request(place: Place) -> None:
    place.put("other", b"")
    path = f"{place.path}/file"
    visited: set[bytes] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            visited.add(place.content().get("file", b""))

    texts = [bytes([65 + number]) * (1 + 50_000 * number) for number in range(5)]
    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(look)
        try:
            for text in texts:
                write_whole(path, text)
                assert place.content()["file"] == text
        finally:
            done.set()
        looking.result()
    assert visited <= {b"", *texts}
    assert place.content() == {"file": texts[-1], "other": b""}


@pytest.mark.deep
@pytest.mark.short
def test_files_are_removed(place: Place) -> None:
    path = place.put("a/file", b"1")
    place.put("a/file.more", b"2")
    remove_file(path)
    assert list(place.content()) == ["a/file.more"]
    remove_file(path)
    remove_file(f"{place.path}/nothing/here")
    assert list(place.content()) == ["a/file.more"]


# Requests by method, and by texts that the path contains or not.
REQUESTS = {
    "begin": ("POST", "?uploads", "uploadId"),
    "part": ("PUT", "partNumber=", "nothing"),
    "complete": ("POST", "uploadId=", "nothing"),
    "put": ("PUT", "/file", "?"),
    "abort": ("DELETE", "uploadId=", "nothing"),
}


class Failing:
    """Lets some requests of a kind go wrong, from the first on."""

    def __init__(self, kind: str, fault: str, times: int) -> None:
        self._method, self._has, self._has_not = REQUESTS[kind]
        self._fault = fault
        self.left = times

    def __call__(self, number: int, method: str, path: str) -> str | None:
        if self.left and method == self._method and self._has in path and self._has_not not in path:
            self.left -= 1
            return self._fault
        return None


@pytest.mark.parametrize("fault, times", [("lost", 1), ("lost", 4), ("cut", 1), ("drop", 2), ("unavailable", 4)])
@pytest.mark.parametrize("kind", REQUESTS)
def test_lost_responses_do_not_change_the_file(kind: str, fault: str, times: int, objects: Objects) -> None:
    size = 1000 if kind == "put" else PART + 1000
    path, whole = objects.put("file", b"old"), content(size)
    with writing(path, size) as file:
        objects.faults.choose = faults = Failing(kind, fault, times)
        write_all(file, whole)
        finished = file.finish()
        if kind != "abort":
            file.publish()
    # An answer of no bytes cannot be cut.
    assert faults.left == 0 or (fault == "cut" and faults.left < times)
    looked = status_at(path)
    assert looked is not None and (looked.modified == finished.modified) == (kind != "abort")
    assert objects.content() == {"file": b"old" if kind == "abort" else whole}
    # Nobody knows an upload whose first answer is lost.
    assert objects.uploads() == [] or (kind == "begin" and fault in ("lost", "cut"))


@pytest.mark.parametrize("fault", ["lost", "drop", "refuse"])
@pytest.mark.parametrize("kind", ["begin", "part", "complete", "put"])
def test_a_failed_write_is_an_error_and_leaves_nothing(kind: str, fault: str, objects: Objects) -> None:
    size = 1000 if kind == "put" else PART + 1000
    path, whole = objects.put("file", b"old"), content(size)
    objects.faults.choose = Failing(kind, fault, 9)
    with writing(path, size) as file, pytest.raises(OSError) as caught:
        try:
            write_all(file, whole)
            file.finish()
            file.publish()
        finally:
            file.discard()
    assert path in str(caught.value)
    assert SECRET not in str(caught.value) and KEY not in str(caught.value)
    # The client cannot detect the requests that did arrive; the object is whole.
    assert objects.content()["file"] in ((b"old", whole) if fault == "lost" else (b"old",))
    assert list(objects.content()) == ["file"] and (objects.uploads() == [] or (kind, fault) == ("begin", "lost"))


def test_an_upload_aborted_by_another_program_is_an_error(objects: Objects) -> None:
    path = objects.put("file", b"old")
    with writing(path, LARGE) as file:
        write_all(file, bytes(LARGE))
        file.finish()
        for key, upload in objects.uploads():
            objects.client.abort_multipart_upload(Bucket=objects.bucket, Key=key, UploadId=upload)
        with pytest.raises(OSError):
            file.publish()
        file.discard()
    assert objects.content() == {"file": b"old"} and objects.uploads() == []


@pytest.mark.deep
@pytest.mark.short
def test_of_several_processes_that_create_a_file_one_writes_it(place: Place) -> None:
    path = f"{place.path}/plan"
    store_of(path).make_directory(place.path)
    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(lambda number: store_of(path).create(path, b"%d" % number), range(8)))
    assert sum(created) == 1
    assert place.content() == {"plan": b"%d" % created.index(True)}


def test_objects_of_other_programs_have_one_time_in_all_functions(objects: Objects) -> None:
    for number, metadata in enumerate(({}, {"mtime": "1700000000.25"}, {"mtime": "1700000000"}, {"mtime": "no time"})):
        objects.client.put_object(Bucket=objects.bucket, Key=f"{number}", Body=b"1", Metadata=metadata)
        path = objects.path(f"{number}")
        with contextlib.closing(store_of(path).open(path)) as opened:
            looked = status_at(path)
            assert opened.status() == looked
        assert looked is not None
        if number in (1, 2):
            assert looked.modified == (1_700_000_000_250_000_000, 1_700_000_000_000_000_000)[number - 1]


@pytest.mark.deep
@pytest.mark.short
def test_objects_contain_no_credentials(objects: Objects) -> None:
    objects.faults.choose = failing
    visited: list[str] = []
    with writing(objects.path("run/large"), LARGE) as file:
        write_all(file, bytes(LARGE))
        file.publish()
    write_whole(objects.path("run/small"), b"1")
    for key in objects.content():
        head = objects.client.head_object(Bucket=objects.bucket, Key=key)
        visited.append(f"{key} {head['Metadata']}")
    assert len(visited) == 2
    assert SECRET not in str(visited) and KEY not in str(visited)


@pytest.mark.deep
@pytest.mark.short
def test_puts_do_not_wait_for_100_continue(objects: Objects) -> None:
    place = objects.path("run")
    requests: list[bool] = []
    client = service(place).client
    client.meta.events.register("before-send.s3", lambda request, **_: requests.append("Expect" in request.headers))
    write_whole(f"{place}/small", b"1")
    data = content(LARGE)
    with contextlib.closing(new_file(f"{place}/large", LARGE)) as file:
        file.write(0, memoryview(data))
        file.finish()
        file.publish()
    assert len(requests) > 5 and not any(requests)
    assert objects.content() == {"run/small": b"1", "run/large": data}


@pytest.mark.deep
@pytest.mark.short
def test_parts_are_sent_concurrently_while_others_are_filled(objects: Objects) -> None:
    under_way: list[int] = []
    most, lock, go_on = [0], threading.Lock(), threading.Event()

    def choose(number: int, method: str, path: str) -> None:
        if "partNumber=" in path:
            with lock:
                under_way.append(number)
                most[0] = max(most[0], len(under_way))
            if len(under_way) == 3:
                go_on.set()
            assert go_on.wait(60)
            time.sleep(0.02)
            with lock:
                under_way.remove(number)

    objects.faults.choose = choose
    data = content(5 * PART)
    sending = Sending(3)
    with contextlib.closing(new_file(objects.path("file"), len(data), sending)) as file:
        # One thread fills them all.
        write_all(file, data)
        assert file.finish().size == len(data)
        file.publish()
    sending.close()
    assert most == [3] and objects.content() == {"file": data}


def test_memory_of_parts_is_reused_and_bounded() -> None:
    sending = Sending(2)
    sent = [sending.buffer(PART) for _ in range(3)]
    assert len({id(buffer) for buffer in sent}) == 3
    for buffer in sent:
        sending.give_back(buffer)
    again = [sending.buffer(PART) for _ in range(3)]
    assert sum(any(buffer is old for old in sent) for buffer in again) == 2
    assert len({id(buffer) for buffer in again}) == 3
    sending.give_back(again[0])
    # The last part of a file is smaller.
    assert len(sending.buffer(PART - 1)) == PART - 1
    assert all(buffer is not again[0] for buffer in [sending.buffer(PART)])
    sending.close()


def test_a_failed_part_fails_the_file_and_leaves_nothing(objects: Objects) -> None:
    objects.faults.choose = lambda number, method, path: "refuse" if "partNumber=3" in path else None
    sending = Sending(2)
    with contextlib.closing(new_file(objects.path("file"), 6 * PART, sending)) as file:
        with pytest.raises(PermissionError):
            write_all(file, bytes(6 * PART))
            file.finish()
        file.discard()
    sending.close()
    assert objects.content() == {} and objects.uploads() == []


def test_a_file_is_closed_after_its_last_part_although_others_failed(objects: Objects) -> None:
    on_its_way, go_on = threading.Event(), threading.Event()

    def choose(number: int, method: str, path: str) -> str | None:
        if "partNumber=2" in path:
            on_its_way.set()
            assert go_on.wait(60)
        return "refuse" if "partNumber=1" in path else None

    objects.faults.choose = choose
    sending = Sending(2)
    file = new_file(objects.path("file"), 3 * PART, sending)
    file.write(0, memoryview(bytes(PART)))
    while not any(one.done() for one in file._sent):  # type: ignore[attr-defined]
        time.sleep(0.01)
    with pytest.raises(PermissionError):
        file.write(PART, memoryview(bytes(PART)))
    assert on_its_way.wait(60)
    file.discard()
    threading.Timer(0.2, go_on.set).start()
    file.close()
    assert go_on.is_set()
    assert objects.content() == {} and objects.uploads() == []
    sending.close()
