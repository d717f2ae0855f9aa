"""Network file systems: request sizes follow measured latencies, not answers of the page cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.asked import Task
from reshard.checkpoints import FileHandles
from reshard.convert import run
from reshard.convert.ends import request_of
from reshard.execute import Budget
from reshard.execute.budget import choose_io
from reshard.execute.reader import FileReader
from reshard.plan.pieces import StoredSlice
from reshard.storage.local import LocalStore
from reshard.storage.store import LOCAL, OBJECTS, REMOTE, Measured, Storage, round_trip_of, storage_with
from reshard.text.messages import Report
from tests.asking import conversion_of
from tests.corpus import FIXTURES, ROOT
from tests.running import Argument, done
from tests.small import World
from tests.trees import layout, single, tree_bytes, value

pytestmark = pytest.mark.deep

MS = 1e-3
HIT = 5e-6
DEMO = FIXTURES / "demo"
WORDS: list[Argument] = ["--src-strategy", DEMO / "src_strategy.ckpt", "--dst-strategy", DEMO / "dst_strategy.ckpt"]
ROUND_TRIPS = st.floats(0, 10)


def slowed(milliseconds: float, file_system: str, *words: Argument) -> str:
    """A command's output if every read takes this round trip, on a file system of this type."""
    command = [sys.executable, "-m", "benchmarks.slow_reads", milliseconds, file_system, *words]
    process = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([], None),
        ([5 * MS], 5 * MS),
        ([1 * MS, 3 * MS, 2 * MS], 2 * MS),
        # Opening a file is often several round trips.
        ([30 * MS, 10 * MS], 10 * MS),
        # Reads from the page cache are ignored if there are others.
        ([HIT, 5 * MS, HIT, 6 * MS, HIT, 7 * MS], 6 * MS),
        ([HIT] * 64, None),
        # A machine that is busy for a moment is no network.
        ([HIT] * 63 + [40 * MS], None),
    ],
    ids=str,
)
def test_the_round_trip_is_measured_on_blocking_requests(seconds: list[float], expected: float | None) -> None:
    assert round_trip_of(seconds) == expected


@pytest.mark.parametrize(
    ("round_trip", "in_flight"), [(0.3 * MS, 4), (1 * MS, 4), (6 * MS, 4), (12 * MS, 8), (24 * MS, 16), (1.0, 32)]
)
def test_a_longer_round_trip_increases_concurrent_requests(round_trip: float, in_flight: int) -> None:
    for least in (REMOTE, OBJECTS):
        measured = Measured(least)
        measured.request(round_trip)
        if round_trip >= MS:
            assert measured.storage().round_trip == round_trip
        assert storage_with(round_trip, 0, least).in_flight == in_flight


@given(ROUND_TRIPS, ROUND_TRIPS)
def test_request_sizes_grow_with_the_round_trip_from_the_default(one: float, other: float) -> None:
    quick, slow = (storage_with(seconds, 0, REMOTE) for seconds in sorted((one, other)))
    for less, more in ((REMOTE, quick), (quick, slow)):
        assert less.in_flight <= more.in_flight and less.worth_skipping <= more.worth_skipping
        assert less.window <= more.window and less.small <= more.small
    assert slow.small <= slow.window


def test_without_a_measured_round_trip_the_defaults_apply() -> None:
    measured = Measured(REMOTE, usual=0.0)
    assert measured.storage() == REMOTE
    for _ in range(100):
        measured.request(HIT)
    assert measured.storage() == REMOTE
    for _ in range(100):
        measured.request(20 * MS)
    assert measured.storage().in_flight > REMOTE.in_flight


@given(st.integers(1, 128), st.integers(1, 1 << 32), ROUND_TRIPS)
def test_only_large_requests_exceed_the_default_concurrency(jobs: int, max_memory: int, round_trip: float) -> None:
    usual, measured = (
        Budget.of(jobs, max_memory, storage) for storage in (REMOTE, storage_with(round_trip, 0, REMOTE))
    )
    assert usual.threads <= measured.threads <= max(jobs, 64)
    if measured.threads > usual.threads:
        # An eighth is for windows of small reads.
        assert measured.block_bytes >= REMOTE.large * 3 // 4
    if max_memory >= 1 << 20:
        assert measured.buffer_bytes <= max(max_memory, measured.threads * (64 << 10))


def slow_open(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Opening and reading take so long from now on."""
    open_file, pread = os.open, os.pread

    def later(*arguments: Any, **named: Any) -> int:
        time.sleep(seconds)
        return open_file(*arguments, **named)

    def read_later(*arguments: Any) -> bytes:
        time.sleep(seconds)
        return pread(*arguments)

    monkeypatch.setattr(os, "open", later)
    monkeypatch.setattr(os, "pread", read_later)


@pytest.mark.parametrize("file_system", ["nfs4", "lustre", "fuse.something", "ext4", "tmpfs"])
def test_only_network_file_systems_report_a_round_trip(
    file_system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.storage.store.file_system_of", lambda path: file_system)
    path = tmp_path / "a"
    path.write_bytes(bytes(range(100)))
    store = LocalStore()
    before = store.costs(str(path))
    slow_open(monkeypatch, 0.02)
    file = store.open(str(path))
    assert file.read(10, 5) == bytes(range(10, 15)) and file.read(90, 50) == bytes(range(90, 100))
    out = bytearray(4)
    assert file.read_into(1, memoryview(out)) == 4 and out == bytes(range(1, 5))
    assert file.size() == file.status().size == 100 and not file.pinned
    file.close()
    after = store.costs(str(path))
    if file_system in ("ext4", "tmpfs"):
        assert before is LOCAL and after is LOCAL
        return
    assert before == REMOTE and after.in_flight > REMOTE.in_flight
    assert after.round_trip is not None and after.round_trip >= 0.02
    # A file system without reads has no measured round trip.
    assert LocalStore().costs(str(path)) == REMOTE
    assert store.costs(str(tmp_path / "nothing" / "here")) == REMOTE


def test_plan_json_describes_requests_to_network_disks(tmp_path: Path) -> None:
    words: list[Argument] = ["plan", DEMO / "src_checkpoints", tmp_path / "out", *WORDS, "--jobs", 2]
    document = json.loads(slowed(12, "nfs4", *words, "--json"))
    requests = document["requests"]
    assert requests["found"] == "measured" and requests["round_trip"] >= 0.012
    # As many as have room in memory, being large.
    assert requests["at_a_time"] == document["threads"] == 16
    assert document["io"]["way"] == "pread" and "round trip for each page" in document["io"]["why"]


def test_plan_describes_requests_to_network_disks_in_words(tmp_path: Path) -> None:
    weights = FIXTURES / "full_weights/h01_bf16_sharded/model"
    words: list[Argument] = ["plan", weights, tmp_path / "out", "--to", "huggingface", "--jobs", 2]
    text = slowed(12, "lustre", *words)
    assert "requests 16 at a time, of up to" in text and " ms so far" in text
    assert "io       pread, as mmap would take a round trip" in text
    here = slowed(12, "ext4", *words)
    assert "requests" not in here and "io       pread, as mmap is hardly quicker on a local disk" in here


def test_a_slow_disk_does_not_change_the_output(tmp_path: Path) -> None:
    created = []
    for name, milliseconds, file_system in (("here", 0, "ext4"), ("far", 2, "nfs4")):
        place = tmp_path / name
        slowed(milliseconds, file_system, "convert", DEMO / "src_checkpoints", place, *WORDS, "--verify")
        created.append({name: data for name, data in tree_bytes(place).items() if name.endswith(".ckpt")})
    assert created[0] == created[1] and created[0]


@pytest.mark.parametrize(
    ("io", "storage", "way"),
    [
        ("auto", LOCAL, "pread"),
        ("auto", REMOTE, "pread"),
        ("auto", OBJECTS, "pread"),
        ("pread", LOCAL, "pread"),
        ("mmap", LOCAL, "mmap"),
        ("mmap", REMOTE, "mmap"),
        ("mmap", OBJECTS, "pread"),
    ],
)
def test_io_mmap_uses_maps_where_possible(io: str, storage: Storage, way: str) -> None:
    assert choose_io(io, storage)[0] == way
    assert Budget.of(1, storage=storage, io=io).mapped == (way == "mmap")


def test_plan_describes_io_mmap(tmp_path: Path) -> None:
    words: list[Argument] = ["plan", DEMO / "src_checkpoints", tmp_path / "out", *WORDS, "--io", "mmap"]
    assert done(*words, "--json").json["io"] == {"way": "mmap", "why": "as requested"}
    assert "io       mmap, as requested" in done(*words).out


@pytest.mark.parametrize("files", [2, 8, 30])
@pytest.mark.parametrize("window_bytes", [256 << 10, 1 << 20])
def test_small_pieces_of_many_files_are_read_in_few_requests(
    files: int, window_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece, count = 512, 400
    contents = [bytes([number, 7]) * (piece * count // 2) for number in range(files)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    requests = []
    pread = os.pread

    def counting(descriptor: int, size: int, offset: int) -> bytes:
        requests.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    with FileHandles() as handles:
        reader = FileReader(handles, Budget.of(1, storage=REMOTE)._replace(window_bytes=window_bytes))
        for start in range(0, piece * count, piece):
            for number, content in enumerate(contents):
                source = StoredSlice(str(tmp_path / str(number)), number, ((0, len(content)),), ((0, len(content)),))
                out = bytearray(piece)
                reader.read_into(source, start, memoryview(out))
                assert out == content[start : start + piece]
    # Without room for a window of each file, every piece would take a request.
    assert len(requests) <= files * count // 4 and max(requests) <= REMOTE.window


def test_threads_waiting_for_targets_stay_within_the_limit_of_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = storage_with(50 * MS, least=REMOTE)
    ranks = 128
    world = World(tmp_path, single({"w": layout([1], [-1, -1])}), single({"w": layout([ranks], [-1, 0])}))
    world.save({"w": value("w", (4, ranks))})
    monkeypatch.setattr("reshard.checkpoints.files.default_limit", lambda: 256)
    monkeypatch.setattr(LocalStore, "costs", lambda _, path: far if path == str(world.dst) else LOCAL)
    asked = conversion_of(world.src, world.dst, src_strategy=world.old, dst_strategy=world.new, jobs=8)
    planned = run(request_of(asked, Report(), Task(dry_run=True)))
    budget, work = planned.budget, [*planned.sizes]
    assert len(work) == ranks and budget.threads == 32
    # Each has a descriptor of its own, and one of its directory.
    open_together = budget.threads * max(map(len, planned.plan.groups(work, budget.limits)))
    assert 2 * open_together <= 256 // 2
