"""Resuming: recorded, skipped and refused targets."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reshard.checkpoints import lay_out_copy
from reshard.convert.target_directory import TargetDirectory
from reshard.errors import RetryableError
from reshard.execute.writing import TargetWriter
from reshard.plan.pieces import TargetFile
from reshard.records import Ledger
from tests.live import live_run
from tests.running import LAUNCHER, Result, done, fails, reshard
from tests.small import COPIED, World, tensors
from tests.trees import same_ranks, tree_bytes, version

FULL = tensors()


def ages(world: World) -> dict[str, tuple[int, int]]:
    """Version per target file: a rewritten file has another."""
    return {str(path.relative_to(world.dst)): version(path) for path in world.dst.glob("rank_*/[!.]*")}


def manifest(world: World) -> bytes:
    return (world.dst / "reshard-manifest.json").read_bytes()


def summary(result: Result) -> dict[str, object]:
    document = json.loads(result.out)
    assert isinstance(document, dict)
    return document


def test_repeating_a_command_writes_nothing(world: World) -> None:
    world.save(FULL)
    world.convert()
    before = ages(world)
    again = summary(world.convert("--json"))
    assert ages(world) == before
    assert again["ranks"] == [] and again["done_before"] == [0, 1]


def test_only_a_missing_target_is_written_again(world: World) -> None:
    world.save(FULL)
    world.convert()
    before = ages(world)
    (world.dst / "rank_1" / "checkpoint_1.ckpt").unlink()
    assert summary(world.convert("--json"))["ranks"] == [1]
    assert ages(world)["rank_0/checkpoint_0.ckpt"] == before["rank_0/checkpoint_0.ckpt"]
    same_ranks(world.found(), world.expected(FULL))


@pytest.mark.parametrize("options", [("--jobs", "1"), ("--io", "pread"), ("--max-memory", "1M"), ("--crc", "never")])
def test_io_options_are_not_part_of_the_identity(world: World, options: tuple[str, ...]) -> None:
    world.save(FULL)
    world.by_rank(0)
    world.convert(*options)
    same_ranks(world.found(), world.expected(FULL))


def test_order_and_repetition_of_filters_are_not_part_of_the_identity(world: World) -> None:
    world.save(FULL)
    world.by_rank(0, "--include", "w", "--include", "v")
    world.convert("--include", "v", "--include", "w", "--include", "v")


@pytest.mark.parametrize(
    "options", [("--format", "safetensors"), ("--prefix", "net"), ("--exclude", "m.*"), ("--include", "w")]
)
@pytest.mark.parametrize("first", ["transform-dir", "by-rank"])
def test_another_conversion_is_refused(world: World, first: str, options: tuple[str, ...]) -> None:
    world.save(FULL)
    world.by_rank(0) if first == "by-rank" else world.convert()
    before = tree_bytes(world.dst)
    for words in (world.words(*options), world.words(1, *options, command="by-rank")):
        fails(3, *words, texts=[str(world.dst)])
    assert tree_bytes(world.dst) == before


def test_another_step_is_refused_and_named(world: World) -> None:
    world.save(FULL)
    world.by_rank(0)
    world.save(FULL, "rank_{rank}/net-2_10.ckpt")
    fails(3, *world.words(1, command="by-rank"), texts=["step", "1_10", "2_10"])
    world.by_rank(1, "--step", "1_10")
    same_ranks(world.found(), world.expected(FULL))


def test_the_manifest_does_not_depend_on_the_runs(world: World, tmp_path: Path) -> None:
    world.save(FULL)
    world.by_rank(1, "--checksum", "crc32")
    assert not (world.dst / "reshard-manifest.json").exists()
    world.by_rank(0, "--checksum", "crc32")
    one = manifest(world)
    shutil.rmtree(world.dst)
    world.convert("--checksum", "crc32", "--jobs", "3")
    assert manifest(world) == one


def test_the_manifest_records_sizes_and_checksums(world: World) -> None:
    world.save(FULL)
    world.convert("--checksum", "crc32", "--max-memory", "1B")
    document = json.loads(manifest(world))
    assert document["version"] == 3 and document["conversion"]["step"] == "1_10"
    assert [entry["rank"] for entry in document["files"]] == [0, 1]
    for entry in document["files"]:
        data = (world.dst / entry["file"]).read_bytes()
        assert entry["size"] == len(data)
        assert entry["crc32"] == f"{zlib.crc32(data):08x}"


def test_a_run_with_overwrite_resumes_by_the_same_command(world: World) -> None:
    world.save(FULL)
    world.convert()
    before = ages(world)
    # As after a kill between the two targets.
    world.save(tensors("other "))
    code = (
        "import os, sys\n"
        "plain = os.rename\n"
        "def rename(old, new, **where):\n"
        "    if str(new).endswith('checkpoint_1.ckpt'):\n"
        "        os._exit(9)\n"
        "    plain(old, new, **where)\n"
        "os.rename = rename\n"
        "from reshard.cli.main import main\n"
        "main()\n"
    )
    words = [str(word) for word in world.words("--overwrite", "--jobs", "1")]
    killed = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert killed.returncode == 9, killed.stderr
    middle = ages(world)
    assert list(middle) == ["rank_0/checkpoint_0.ckpt"] and middle != before
    assert summary(world.convert("--overwrite", "--json"))["ranks"] == [1]
    assert ages(world)["rank_0/checkpoint_0.ckpt"] == middle["rank_0/checkpoint_0.ckpt"]
    same_ranks(world.found(), world.expected(tensors("other ")))
    # That was the end of replacing: now everything is made again.
    assert summary(world.convert("--overwrite", "--json"))["ranks"] == [0, 1]


def test_a_failure_keeps_the_other_finished_targets(world: World) -> None:
    world.save(FULL)
    (world.dst / "rank_0").mkdir(parents=True)
    os.mkfifo(world.dst / "rank_0" / "not in the way")
    world.dst.joinpath("rank_1").write_text("a file where a directory must be")
    result = reshard(*world.words())
    assert result.status in (1, 3), result.err
    assert "rank_1" in result.err.replace("\n", "")
    if result.status == 1:
        assert (world.dst / "rank_0" / "checkpoint_0.ckpt").exists()
    world.dst.joinpath("rank_1").unlink()
    world.convert()
    (world.dst / "rank_0" / "not in the way").unlink()
    same_ranks(world.found(), world.expected(FULL))


def test_only_temporary_files_of_dead_runs_are_removed(world: World) -> None:
    world.save(FULL)
    code = (
        "import sys, time\n"
        "from reshard.storage import local\n"
        "import os\n"
        "os.makedirs(sys.argv[1], exist_ok=True)\n"
        "print(local.create_temporary(sys.argv[1])[1], flush=True)\n"
        "time.sleep(600)\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(world.dst / "rank_0")], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        paths = [Path(str(process.stdout.readline().strip())) for process in started if process.stdout]
        started[0].kill()
        started[0].wait()
        elsewhere = world.dst / "rank_0" / ".reshard-tmp-0badcafe-0123456789ab"
        elsewhere.write_bytes(b"of another machine, a moment ago")
        long_ago = world.dst / "rank_0" / ".reshard-tmp-0badcafe-ba9876543210"
        long_ago.write_bytes(b"of another machine, in 1970")
        os.utime(long_ago, (1, 1))
        world.convert("--ranks", "0")
        assert [path.exists() for path in (*paths, elsewhere, long_ago)] == [False, True, True, False]
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("command", ["convert", "resume"])
@pytest.mark.parametrize("place", [".reshard", "rank_1"])
def test_a_run_that_writes_nothing_removes_files_of_killed_runs(command: str, place: str, world: World) -> None:
    """As of a run that was killed while it wrote what another one wrote first."""
    world.save(FULL)
    world.convert()
    code = "import os, sys\nfrom reshard.storage import local\nlocal.create_temporary(sys.argv[1])\nos._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(world.dst / place)]).returncode == 9
    assert len(list(world.dst.rglob(".reshard-tmp-*"))) == 1
    if command == "resume":
        done("resume", world.dst, "--dry-run")
        assert len(list(world.dst.rglob(".reshard-tmp-*"))) == 1
        done("resume", world.dst)
    else:
        world.convert()
    assert not list(world.dst.rglob(".reshard-tmp-*"))


@pytest.mark.parametrize("options", [("--to", "huggingface"), ("--dst-strategy", "none")])
def test_another_conversion_removes_files_of_killed_runs(options: tuple[str, ...], world: World) -> None:
    """They may be as large as the checkpoint, in directories without a file of the new conversion."""
    world.save(FULL)
    code = (
        "import os\nfrom reshard.execute import writing\n"
        "writing.TargetWriter.commit = lambda self: os._exit(9)\n" + LAUNCHER
    )
    words = list(map(str, world.words("--ranks", "1")))
    assert subprocess.run([sys.executable, "-c", code, *words]).returncode == 9
    assert list((world.dst / "rank_1").glob(".reshard-tmp-*"))
    done("convert", world.src, world.dst, "--src-strategy", world.old, *options, "--overwrite")
    assert not list(world.dst.rglob(".reshard-tmp-*"))


def test_two_processes_of_the_same_conversion_write_one_checkpoint(world: World) -> None:
    world.save(FULL)
    words = [str(word) for word in world.words()]
    runs = [
        subprocess.Popen([sys.executable, "-c", LAUNCHER, *words], stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for run in runs:
        _, output = run.communicate(timeout=60)
        assert run.returncode == 0, output
    same_ranks(world.found(), world.expected(FULL))
    assert len(json.loads(manifest(world))["files"]) == 2
    assert summary(world.convert("--json"))["ranks"] == []


def test_another_conversion_is_refused_before_the_first_target_of_a_run(world: World) -> None:
    world.save(FULL)
    with live_run(world.words()):
        fails(3, *world.words("--prefix", "net"), texts=["another conversion"])
    done(*world.words("--prefix", "net", "--overwrite"))
    assert not [path for path in world.dst.glob("rank_*/.*")]


def before_writing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Another run acts when this one has looked at the directory."""
    plain = TargetDirectory.missing

    def missing(self: TargetDirectory, groups: Any) -> Any:
        act()
        return plain(self, groups)

    monkeypatch.setattr(TargetDirectory, "missing", missing)


def test_a_run_whose_conversion_was_replaced_meanwhile_gives_no_target_its_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(FULL)
    another = world.words("--format", "safetensors", "--overwrite")
    before_writing(monkeypatch, lambda: done(*another, subprocess_=True))
    fails(3, *world.words(), texts=["another conversion"])
    assert {path.suffix for path in world.dst.glob("rank_*/[!.]*")} == {".safetensors"}
    assert done("status", world.dst, "--json").json["complete"]


def test_a_record_of_a_conversion_that_was_replaced_meanwhile_counts_for_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one, killed before its first target, would take the late target for its own."""
    world.save(FULL)
    plain = Ledger.add_done
    other = world.words("--exclude", "m.*", "--overwrite")

    def late(self: Ledger, record: Any, flush: bool) -> None:
        monkeypatch.setattr(Ledger, "add_done", plain)
        process = os.fork()
        if not process:
            monkeypatch.setattr(TargetDirectory, "missing", lambda *_: os._exit(9))
            reshard(*other)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
        plain(self, record, flush)

    monkeypatch.setattr(Ledger, "add_done", late)
    fails(3, *world.words(), texts=["another conversion"])
    done(*other)
    same_ranks(world.found(), world.expected(tensors(names=["w", "v"])))


def test_runs_from_two_sources_at_once_are_not_joined(world: World) -> None:
    """As with machines that have copies of their own, before either has finished a target."""
    world.save(FULL)
    with live_run(world.words(0, command="by-rank")):
        world.src = world.root / "other"
        world.save(tensors("other "))
        for options in ((), ("--overwrite",)):
            fails(3, *world.words(1, *options, command="by-rank"), texts=["source files"])
    world.convert("--overwrite")
    same_ranks(world.found(), world.expected(tensors("other ")))


def test_a_run_adds_nothing_to_the_same_conversion_of_another_source(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(FULL)
    words = world.words(0, command="by-rank")
    world.src = world.root / "other"
    world.save(tensors("other "))

    def overwrite() -> None:
        done(*world.words("--overwrite"), subprocess_=True)
        (world.dst / "rank_0" / "checkpoint_0.ckpt").unlink()

    before_writing(monkeypatch, overwrite)
    fails(3, *words, texts=["source files"])
    monkeypatch.undo()
    world.convert()
    same_ranks(world.found(), world.expected(tensors("other ")))


def test_a_dry_run_lists_remaining_targets_and_changes_nothing(world: World) -> None:
    world.save(FULL)
    assert summary(world.convert("--dry-run", "--json"))["ranks"] == [0, 1]
    assert not world.dst.exists()
    world.by_rank(1)
    before = sorted(world.dst.rglob("*"))
    assert summary(world.convert("--dry-run", "--json"))["ranks"] == [0]
    assert sorted(world.dst.rglob("*")) == before


def test_files_of_the_user_among_records_are_unchanged(world: World) -> None:
    world.save(FULL)
    mine = world.dst / ".reshard" / "mine" / "x"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    (world.dst / ".reshard" / ".DS_Store").write_text("stray")
    odd = world.dst / ".reshard" / "done" / "deeper" / "x"
    odd.parent.mkdir(parents=True)
    odd.write_text("also precious")
    world.convert()
    world.by_rank(0, "--overwrite")
    world.convert("--overwrite")
    assert mine.read_text() == "precious" and odd.read_text() == "also precious"
    same_ranks(world.found(), world.expected(FULL))


def test_a_failed_first_run_keeps_an_existing_directory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    world.dst.mkdir(mode=0o750)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert reshard(*world.words()).status == 1
    assert world.dst.is_dir() and (world.dst.stat().st_mode & 0o777) == 0o750
    assert not list(world.dst.rglob("*"))


def test_overwrite_restarts_when_the_source_changed(world: World) -> None:
    world.save(FULL)
    world.convert()
    world.save(tensors("second "))
    with pytest.MonkeyPatch.context() as patch:
        plain = os.rename

        def rename(old: str, new: str, **where: int) -> None:
            if str(new).endswith("checkpoint_1.ckpt"):
                raise OSError(5, "Input/output error")
            plain(old, new, **where)

        patch.setattr(os, "rename", rename)
        assert reshard(*world.words("--overwrite", "--jobs", "1")).status == 1
    third = tensors("third ")
    world.save(third, copied={**COPIED, "epoch_num": COPIED["global_step"]})
    assert summary(world.convert("--overwrite", "--json"))["ranks"] == [0, 1]
    ranks = world.found()
    assert all(ranks[rank]["w"].same(world.expected(third)[rank]["w"]) for rank in (0, 1))


def test_the_manifest_contains_checksums_that_any_run_requested(world: World) -> None:
    world.save(FULL)
    manifests = set()
    for options in ([("--checksum", "crc32"), ()], [(), ("--checksum", "crc32")], [("--checksum", "crc32")] * 2):
        for rank, chosen in enumerate(options):
            world.by_rank(rank, *chosen)
        manifests.add(str(json.loads(manifest(world))["files"]))
        shutil.rmtree(world.dst)
    assert len(manifests) == 1
    done(*world.words("--ranks", "1", "--checksum", "crc32"))
    world.convert()
    assert str(json.loads(manifest(world))["files"]) in manifests
    done("verify", world.dst)


@pytest.mark.parametrize(
    "written", [[(0, b"here")], [(0, b"he"), (2, b"re")], [(0, b"he")], [(0, b"here"), (0, b"he")]]
)
def test_a_file_is_committed_only_with_the_planned_size(tmp_path: Path, written: list[tuple[int, bytes]]) -> None:
    layout = lay_out_copy(4)
    path = tmp_path / "rank_0" / "a"
    writer = TargetWriter(TargetFile(0, str(path), layout, (), frozenset()), lambda *_: None, allocated=True)
    for offset, data in written:
        writer.write(offset, memoryview(data))
    if sum(len(data) for _, data in written) == layout.size:
        writer.commit()
        assert path.read_bytes() == b"here"
        return
    with pytest.raises(RetryableError, match="4 were planned"):
        writer.commit()
    assert not list(tmp_path.rglob("*a")) and not list(tmp_path.rglob(".reshard-tmp-*"))


def test_a_descriptor_in_use_by_a_write_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is given up by one thread while another one is writing to it."""
    layout = lay_out_copy(4)
    writer = TargetWriter(TargetFile(0, str(tmp_path / "rank_0" / "a"), layout, (), frozenset()), lambda *_: None)
    plain = os.pwrite
    begun: queue.Queue[int] = queue.Queue()
    given_up = threading.Event()

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        begun.put(fd)
        assert given_up.wait(10)
        return plain(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    thread = threading.Thread(target=writer.write, args=(0, memoryview(b"here")))
    thread.start()
    try:
        fd = begun.get(timeout=10)
        writer.fail(RetryableError("given up"))
        other = os.open(tmp_path, os.O_RDONLY)
        try:
            assert other != fd
            os.fstat(fd)
        finally:
            os.close(other)
    finally:
        given_up.set()
        thread.join()
    with pytest.raises(OSError):
        os.fstat(fd)
    writer.write(0, memoryview(b"late"))
    assert begun.empty()
    assert not list((tmp_path / "rank_0").glob("*")) if (tmp_path / "rank_0").exists() else True


def test_ranks_that_another_run_writes_meanwhile_are_not_counted_as_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(FULL)
    before_writing(monkeypatch, lambda: done(*world.words(1, command="by-rank"), subprocess_=True))
    summary = done(*world.words("--json")).json
    assert summary["ranks"] == [0] and summary["done_before"] == [1]
