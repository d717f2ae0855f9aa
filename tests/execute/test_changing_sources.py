"""A source modified during a run never gets into a recorded target."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reshard.execute import writing
from reshard.source_replicas.compare import ReplicaFiles
from reshard.storage import local
from reshard.verification import stored
from tests.running import LAUNCHER, Argument, Result, done, fails, reshard, warns
from tests.small import World, tensors
from tests.trees import Value, layout, read_tree, same_ranks, scalar, single, value

NEW, OTHER = tensors("new "), tensors("other ")
# Each target rank reads the source rank of the same number.
TWO = single({"w": layout([2], [0, -1])})
BIG = {label: {"w": value(label, (2048, 1024))} for label in ("one", "two")}


def in_place(path: Path, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(content)


def by_rename(path: Path, content: bytes) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(content)
    os.rename(beside, path)


def with_the_same_time(path: Path, content: bytes) -> None:
    status = path.stat()
    in_place(path, content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def renamed_with_the_same_time(path: Path, content: bytes) -> None:
    status = path.stat()
    by_rename(path, content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def removed(path: Path, content: bytes) -> None:
    path.unlink()


WAYS = [in_place, by_rename, with_the_same_time, renamed_with_the_same_time, removed]


@pytest.fixture
def at_first_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What is put in here is called once, when the first bytes of a target are on their way to disk."""
    todo: list[Callable[[], None]] = []
    original = writing.TargetWriter.write

    def write(self: writing.TargetWriter, offset: int, data: memoryview) -> None:
        while todo:
            todo.pop()()
        original(self, offset, data)

    monkeypatch.setattr(writing.TargetWriter, "write", write)
    yield todo


@pytest.mark.deep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_source_modified_during_the_run_is_an_error_without_targets(
    way: Callable[[Path, bytes], None], crc: bool, io: str, world: World, at_first_write: list[Callable[[], None]]
) -> None:
    world.save(OTHER, crc=crc)
    path = world.src / "rank_1" / "net-1_10.ckpt"
    other = path.read_bytes()
    world.save(NEW, crc=crc)
    at_first_write.append(lambda: way(path, other))
    fails(1, *world.words("--jobs", "1", "--io", io), texts=[path])
    assert not (world.dst / "reshard-manifest.json").exists()
    assert not list(world.dst.glob("rank_*/*"))


def test_a_source_truncated_during_the_run_is_an_error(world: World, at_first_write: list[Callable[[], None]]) -> None:
    """By default: a process that looks at it through a memory map would be killed."""
    world.save(NEW)
    for path in world.src.rglob("*.ckpt"):
        at_first_write.append(functools.partial(os.truncate, path, 1))
    fails(1, *world.words("--jobs", "1"), texts=["net-1_10.ckpt"])
    assert not [path for path in world.dst.rglob("*") if path.is_file()]


SHORTENED_WHILE_MAPPED = """
import os, sys
from pathlib import Path
from reshard.execute.reader import FileReader
from reshard.entry import main
plain = FileReader.view
def view(self, source, start, length):
    found = plain(self, source, start, length)
    os.truncate(source.path, 0)
    return found
FileReader.view = view
main()
"""


def test_a_process_killed_by_a_truncated_map_leaves_only_a_temporary_file(
    world: World,
) -> None:
    world.save(NEW)
    original = {path: path.read_bytes() for path in world.src.rglob("*.ckpt")}
    words = [str(word) for word in world.words("--jobs", "1", "--io", "mmap")]
    killed = subprocess.run([sys.executable, "-c", SHORTENED_WHILE_MAPPED, *words], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGBUS
    assert not list(world.dst.glob("rank_*/checkpoint_*"))
    for path, content in original.items():
        path.write_bytes(content)
    world.convert()
    assert sorted(world.found()) == [0, 1]
    assert not list(world.dst.rglob(".reshard-tmp-*"))


@pytest.mark.parametrize("command", ["fingerprint", "verify --src", "verify --replicas", "--verify"])
def test_commands_that_print_results_refuse_a_source_modified_meanwhile(
    command: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fingerprint of half of each of two checkpoints is worse than none, and so is a difference from it."""
    world.save(NEW)
    path = world.src / "rank_0" / "net-1_10.ckpt"
    words: dict[str, list[Argument]] = {
        "fingerprint": ["fingerprint", world.src, "--strategy", world.old],
        "verify --src": ["verify", world.dst, *world.words()[1:2], *world.words()[3:]],
        "verify --replicas": ["verify", world.src, "--replicas", "--strategy", world.old],
        "--verify": world.words("--verify"),
    }
    words["verify --src"].insert(2, "--src")
    if command == "verify --src":
        world.convert()
    reader: Any = ReplicaFiles if command == "verify --replicas" else stored._Runs
    original = reader.read
    read_before: list[str] = []

    def read(self: Any, *words: Any) -> None:
        original(self, *words)
        # A replica's reader gets the rank.
        is_it = words[1][0] == 0 if reader is ReplicaFiles else str(path) in self._file.path
        if is_it and not read_before:
            read_before.append(str(path))
            in_place(path, path.read_bytes()[:1])

    monkeypatch.setattr(reader, "read", read)
    fails(1, *words[command], texts=[path, "replaced or changed"])
    assert read_before


@pytest.mark.parametrize("command", ["transform-dir", "strategy check"])
def test_replicas_under_rewrite_are_not_reported_as_a_wrong_strategy(
    command: str, plain: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.save(OTHER)
    other = {path: path.read_bytes() for path in plain.src.glob("rank_[01]/*")}
    plain.save(NEW)
    original = ReplicaFiles.read

    def read(self: ReplicaFiles, *arguments: Any) -> None:
        for path, content in other.items():
            in_place(path, content)
        original(self, *arguments)

    monkeypatch.setattr(ReplicaFiles, "read", read)
    words = plain.words() if command == "transform-dir" else ["strategy", "check", plain.old, plain.src]
    fails(1, *words, texts=["replaced or changed"])


def test_targets_of_unchanged_sources_are_finished(tmp_path: Path, at_first_write: list[Callable[[], None]]) -> None:
    world = World(tmp_path, TWO, TWO)
    world.save(NEW)
    path = world.src / "rank_1" / "net-1_10.ckpt"
    at_first_write.append(lambda: in_place(path, b"\xff"))
    fails(1, *world.words("--jobs", "1"), texts=["rank_1", "replaced or changed"])
    assert list(world.found()) == [0]


def test_sources_modified_after_their_targets_prevent_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another checkpoint is copied over the source: rank 0's target is of the one, rank 1's would be of the other."""
    world = World(tmp_path, TWO, TWO)
    world.save(NEW)
    at_commit(monkeypatch, lambda path: in_place(world.src / path.parent.name / "net-1_10.ckpt", b"\xff"))
    fails(1, *world.words("--jobs", "1"), texts=["rank_0", "replaced or changed"])
    assert not (world.dst / "reshard-manifest.json").exists()


def test_a_changed_source_is_detected_with_fewer_handles_than_files(
    world: World, at_first_write: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.checkpoints.files.default_limit", lambda: 1)
    world.save(OTHER)
    path = world.src / "rank_1" / "net-1_10.ckpt"
    other = path.read_bytes()
    world.save(NEW)
    at_first_write.append(lambda: renamed_with_the_same_time(path, other))
    fails(1, *world.words("--jobs", "1"), texts=[path])
    assert not list(world.dst.glob("rank_*/*"))


def other_source(world: World, full: dict[str, Value], same_times: bool) -> Path:
    """A second source tree, alike in names, sizes and headers, perhaps also in times."""
    first, world.src = world.src, world.root / "other"
    world.save(full)
    second, world.src = world.src, first
    if same_times:
        for path in first.rglob("*.ckpt"):
            status = path.stat()
            os.utime(second / path.relative_to(first), ns=(status.st_atime_ns, status.st_mtime_ns))
    return second


@pytest.mark.parametrize("same_times", [False, True])
@pytest.mark.parametrize("command", ["--ranks", "by-rank"])
def test_targets_of_two_sources_are_never_mixed(same_times: bool, command: str, world: World) -> None:
    def convert(rank: int, *options: str) -> Result:
        words = world.words(rank, *options, command=command) if command == "by-rank" else world.words(
            command, str(rank), *options
        )  # fmt: skip
        return reshard(*words)

    world.save(NEW)
    first, second = world.src, other_source(world, OTHER, same_times)
    assert convert(0).status == 0
    world.src = second
    refused = convert(1)
    assert refused.status == 3 and "--overwrite" in refused.err
    assert not (world.dst / "rank_1").exists()
    world.src = first
    assert convert(1).status == 0
    same_ranks(world.found(), world.expected(NEW))


def test_values_such_as_the_step_distinguish_sources(world: World) -> None:
    world.save(NEW, copied={"global_step": scalar(100)})
    world.convert("--ranks", "0")
    world.save(NEW, copied={"global_step": scalar(101)})
    fails(3, *world.words(), texts=["sizes, headers or contents differ"])


@pytest.mark.parametrize("command", ["--ranks", "by-rank"])
def test_values_distinguish_sources_of_machines_without_a_common_file(command: str, tmp_path: Path) -> None:
    """Each machine has the files that its ranks need, one of them those of another run's save."""
    world = World(tmp_path, TWO, TWO)

    def convert(rank: int, step: int, *options: str) -> Result:
        shutil.rmtree(world.src, ignore_errors=True)
        # Generator states belong to one rank, so they distinguish no sources.
        copied = {"global_step": scalar(step), "rng_state": scalar(rank)}
        world.save(NEW, ranks=[rank], copied=copied)
        if command == "by-rank":
            return reshard(*world.words(rank, *options, command=command))
        return reshard(*world.words(command, rank, *options))

    assert convert(0, 100).status == 0
    refused = convert(1, 101)
    assert refused.status == 3
    warns(refused, "source files of rank 1", "global_step", "--overwrite")
    assert not (world.dst / "rank_1").exists()
    done_ = convert(1, 100)
    assert done_.status == 0 and "warning" not in done_.err, done_.err
    assert (world.dst / "reshard-manifest.json").exists()


def test_a_copy_of_the_source_resumes_in_silence(world: World) -> None:
    """Other times, other inodes, the same contents."""
    world.save(NEW)
    world.convert("--ranks", "0")
    world.src = Path(shutil.copytree(world.src, world.root / "copy", copy_function=shutil.copyfile))
    assert "warning" not in world.convert().err
    assert sorted(world.found()) == [0, 1]


def at_commit(monkeypatch: pytest.MonkeyPatch, todo: Callable[[Path], None]) -> None:
    """Call a function with each target as soon as it exists."""
    original = writing.TargetWriter.commit

    def commit(self: writing.TargetWriter) -> None:
        original(self)
        todo(Path(self.target.path))

    monkeypatch.setattr(writing.TargetWriter, "commit", commit)


@pytest.mark.parametrize(
    "todo",
    [
        lambda path: path.unlink(),
        lambda path: os.utime(path, ns=(0, 0)),
        lambda path: path.write_bytes(b"x"),
        lambda path: shutil.rmtree(path.parent.parent / ".reshard"),
    ],
    ids=["removed", "touched", "changed", "records removed"],
)
@pytest.mark.parametrize("options", [(), ("--ranks", "0")])
def test_targets_removed_or_modified_during_the_run_are_an_error(
    todo: Callable[[Path], None], options: tuple[str, ...], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(NEW)
    with monkeypatch.context() as patch:
        at_commit(patch, lambda path: todo(path) if path.parent.name == "rank_0" else None)
        failed = reshard(*world.words(*options, "--jobs", "1"))
    assert failed.status in (1, 3), failed.err
    assert not (world.dst / "reshard-manifest.json").exists()
    done(*world.words("--overwrite"))
    assert (world.dst / "reshard-manifest.json").exists()


def test_a_target_removed_while_checksums_are_computed_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(NEW)
    world.convert()

    def crc_of_file(path: str) -> int:
        if "rank_1" in path:
            (world.dst / "rank_0" / "checkpoint_0.ckpt").unlink()
        return 0

    monkeypatch.setattr("reshard.checkpoints.formats.crc.crc_of_file", crc_of_file)
    fails(1, *world.words("--checksum", "crc32"), texts=["targets of rank 0"])
    assert not (world.dst / "reshard-manifest.json").exists()


@pytest.mark.parametrize("command", ["--ranks", "by-rank"])
def test_a_directory_without_one_target_is_not_complete(command: str, world: World) -> None:
    world.save(NEW)
    world.convert()
    shutil.rmtree(world.dst / "rank_0")
    result = world.by_rank(1) if command == "by-rank" else world.convert("--ranks", "1")
    assert "all ranks are there" not in result.err
    assert not (world.dst / "reshard-manifest.json").exists()
    world.convert()
    assert (world.dst / "reshard-manifest.json").exists()


@pytest.mark.long
def test_a_source_that_is_rewritten_at_random_moments_is_never_mixed(tmp_path: Path) -> None:
    """Real processes: one converts, one writes another checkpoint of equal size over the source."""
    world = World(tmp_path, TWO, TWO)
    mixed = ended = 0
    trees: dict[str, dict[int, dict[str, Value]]] = {}
    for label in ("one", "two"):
        world.src = tmp_path / label
        world.save(BIG[label])
        trees[label] = world.expected(BIG[label])
    for number in range(40):
        shutil.rmtree(world.dst, ignore_errors=True)
        world.src = tmp_path / "src"
        shutil.copytree(tmp_path / "one", world.src, dirs_exist_ok=True)
        words = [str(word) for word in world.words("--quiet", "--overwrite")]
        with subprocess.Popen([sys.executable, "-c", LAUNCHER, *words], stderr=subprocess.PIPE) as process:
            time.sleep(0.1 + number * 0.01)
            for path in (tmp_path / "two").rglob("*.ckpt"):
                in_place(world.src / path.relative_to(tmp_path / "two"), path.read_bytes())
            process.communicate()
        if (world.dst / "reshard-manifest.json").exists():
            ended += 1
            ranks = read_tree(world.dst)
            whole = [all(ranks[r][n].same(v) for r in tree for n, v in tree[r].items()) for tree in trees.values()]
            mixed += not any(whole)
    assert not mixed and ended


@pytest.mark.parametrize("way", WAYS)
def test_files_beside_weights_modified_during_a_run_are_not_copied(
    way: Callable[[Path, bytes], None], world: World, at_first_write: list[Callable[[], None]]
) -> None:
    """No target mixes parts of two saves; the same command again reads the new one."""
    world.save(NEW)
    model = world.root / "model"
    words: list[Argument] = ["convert", model, world.dst, "--to", "huggingface"]
    done("convert", world.src, model, "--src-strategy", world.old, "--to", "huggingface")
    shutil.rmtree(model / ".reshard")
    files = {"config.json": b'{"dtype": "float32"}', "tokenizer.json": b"old" * 1000}
    for name, content in files.items():
        (model / name).write_bytes(content)
    at_first_write.append(lambda: way(model / "tokenizer.json", b"new"))
    fails(1, *words, texts=[model / "tokenizer.json"])
    assert not [name for name in (*files, "reshard-manifest.json") if (world.dst / name).exists()]
    (model / "tokenizer.json").write_bytes(b"newest")
    done(*words)
    assert (world.dst / "tokenizer.json").read_bytes() == b"newest"
    assert (world.dst / "config.json").read_bytes() == files["config.json"]


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_modified_during_get_gives_no_file(
    way: Callable[[Path, bytes], None], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(OTHER)
    path = world.src / "rank_0" / "net-1_10.ckpt"
    other = path.read_bytes()
    world.save(NEW)
    words: list[Argument] = ["get", world.src, "w", "--strategy", world.old, "-o", world.root / "made" / "w.npy"]
    create = local.create_temporary

    def created(directory: str) -> tuple[int, str]:
        """By now the first block was read."""
        way(path, other)
        return create(directory)

    with monkeypatch.context() as patch:
        patch.setattr(local, "create_temporary", created)
        fails(1, *words, texts=[path])
    assert not (world.root / "made").exists()
    path.write_bytes(other)
    done(*words)
