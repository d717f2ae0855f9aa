"""Network file systems: larger requests, and more of them at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reshard.asked import Task
from reshard.checkpoints import FileHandles
from reshard.convert import run
from reshard.convert.ends import request_of
from reshard.execute import Budget
from reshard.execute.budget import choose_io
from reshard.execute.reader import FileReader
from reshard.plan.pieces import StoredSlice
from reshard.storage.local import LocalStore
from reshard.storage.store import LOCAL, OBJECTS, REMOTE, Costs
from reshard.text.messages import Report
from tests.asking import conversion_of
from tests.corpus import FIXTURES, ROOT
from tests.running import Argument, done
from tests.small import World
from tests.trees import layout, single, tree_bytes, value

pytestmark = pytest.mark.deep

DEMO = FIXTURES / "demo"
WORDS: list[Argument] = ["--src-strategy", DEMO / "src_strategy.ckpt", "--dst-strategy", DEMO / "dst_strategy.ckpt"]


def slowed(milliseconds: float, file_system: str, *words: Argument) -> str:
    """A command's output if every read takes this round trip, on a file system of this type."""
    command = [sys.executable, "-m", "benchmarks.slow_reads", milliseconds, file_system, *words]
    process = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("file_system", ["nfs4", "lustre", "fuse.something", "ext4", "tmpfs"])
def test_unknown_file_systems_count_as_remote(
    file_system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.storage.local.file_system_of", lambda path: file_system)
    expected = LOCAL if file_system in ("ext4", "tmpfs") else REMOTE
    store = LocalStore()
    assert store.costs(str(tmp_path)) == store.costs(str(tmp_path / "nothing" / "here")) == expected


def test_plan_json_describes_requests_to_network_disks(tmp_path: Path) -> None:
    words: list[Argument] = ["plan", DEMO / "src_checkpoints", tmp_path / "out", *WORDS, "--jobs", 2]
    document = json.loads(slowed(12, "nfs4", *words, "--json"))
    requests = document["requests"]
    assert requests["round_trip"] is None and requests["at_a_time"] == document["threads"] == 8
    assert document["io"]["way"] == "pread" and "round trip for each page" in document["io"]["why"]


def test_a_slow_disk_does_not_change_the_output(tmp_path: Path) -> None:
    created = []
    for name, milliseconds, file_system in (("here", 0, "ext4"), ("far", 2, "nfs4")):
        place = tmp_path / name
        slowed(milliseconds, file_system, "convert", DEMO / "src_checkpoints", place, *WORDS, "--verify")
        created.append({name: data for name, data in tree_bytes(place).items() if name.endswith(".ckpt")})
    assert created[0] == created[1] and created[0]


@pytest.mark.parametrize(
    ("io", "costs", "way"),
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
def test_io_mmap_uses_maps_where_possible(io: str, costs: Costs, way: str) -> None:
    assert choose_io(io, costs)[0] == way
    assert Budget.of(1, costs=costs, io=io).mapped == (way == "mmap")


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
        reader = FileReader(handles, Budget.of(1, costs=REMOTE)._replace(window_bytes=window_bytes))
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
    ranks = 128
    world = World(tmp_path, single({"w": layout([1], [-1, -1])}), single({"w": layout([ranks], [-1, 0])}))
    world.save({"w": value("w", (4, ranks))})
    monkeypatch.setattr("reshard.checkpoints.files.default_limit", lambda: 256)
    monkeypatch.setattr(LocalStore, "costs", lambda _, path: REMOTE if path == str(world.dst) else LOCAL)
    asked = conversion_of(world.src, world.dst, src_strategy=world.old, dst_strategy=world.new, jobs=8)
    planned = run(request_of(asked, Report(), Task(dry_run=True)))
    budget, work = planned.budget, [*planned.sizes]
    assert len(work) == ranks and budget.threads == 32
    # Each has a descriptor of its own, and one of its directory.
    open_together = budget.threads * max(map(len, planned.plan.groups(work, budget.limits)))
    assert 2 * open_together <= 256 // 2
