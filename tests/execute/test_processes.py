"""Worker processes: the same bytes as threads; after a crash only files that the next run removes."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.synthetic import Model, Scheme, write_checkpoint, write_strategy
from reshard import processes
from reshard.errors import CheckpointError, RetryableError
from reshard.execute import budget, parts, run
from reshard.numbers import sweep
from reshard.processes import OWN_THREAD, Crew, LostWorkerError, Notify, may_fork
from reshard.storage import store as costs
from reshard.storage.local import NewLocalFile, WrittenFile
from reshard.verification import reading
from tests.conftest import LONG
from tests.corpus import ROOT
from tests.dask_cluster import until
from tests.execute.test_changing_sources import in_place
from tests.reference import Strategy
from tests.running import Argument, done, fails
from tests.sampling import some_of
from tests.small import World, tensors
from tests.trees import layout, same_ranks, tree_bytes, value

FULL = tensors()

# Small work is done by worker processes, too, and small files are cut into many parts.
FORCED = """
import os, signal, sys, time
from reshard import defaults
defaults.usable_cpus = lambda: 64
from reshard import processes
from reshard.execute import budget, parts, run
budget.MIN_WRITERS_FOR_MAPS = 0
processes.MIN_BYTES_PER_PROCESS = 1
parts.MIN_PART_BYTES = parts.MAX_PART_BYTES = 20000
from reshard.storage.local import WrittenFile
write, window, parent, calls = WrittenFile.write, WrittenFile.window, os.getpid(), 0
def each(at):
    global calls
    if os.getpid() != parent:
        calls += 1
        if at == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        if not at:
            time.sleep(0.05)
at = int(sys.argv.pop(1))
if at >= 0:
    WrittenFile.write = lambda self, offset, data: (each(at), write(self, offset, data))[1]
    WrittenFile.window = lambda self, offset, count: (each(at), window(self, offset, count))[1]
from reshard.entry import main
main()
"""

MODEL = Model(layers=3, matrices=2, rows=96, columns=128)
KINDS = {
    "rows": (Scheme(data=2, model=4, sharded=True), Scheme(model=6)),
    "columns of the same rows": (Scheme(model=2), Scheme(model=8, cut=1)),
    "one file": (Scheme(model=4, cut=1), Scheme()),
}


@pytest.fixture(autouse=True)
def _threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that tests before these left behind do not count."""
    before, enumerated = set(processes.other_threads()), processes.other_threads
    monkeypatch.setattr(processes, "other_threads", lambda: [one for one in enumerated() if one not in before])


@pytest.fixture
def crews(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the smallest work done by worker processes; how many of them were made, time after time."""
    created: list[int] = []

    class Counted(Crew):
        def __init__(self, count: int, *others: Any) -> None:
            created.append(count)
            super().__init__(count, *others)

    for module in (budget, costs):
        monkeypatch.setattr(module, "usable_cpus", lambda: 64)
    for module in (run, reading, sweep):
        monkeypatch.setattr(module, "Crew", Counted)
    for module in (budget, reading, sweep):
        monkeypatch.setattr(module, "private_bytes", lambda: 1 << 20)
    monkeypatch.setattr(processes, "MIN_BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(budget, "MIN_WRITERS_FOR_MAPS", 0)
    return created


def prepared(place: Path, kind: str, model: Model = MODEL) -> list[str]:
    old, new = KINDS[kind]
    write_checkpoint(place / "src", model, old)
    write_strategy(place / "old", model, old)
    write_strategy(place / "new", model, new)
    words = ["convert", place / "src", place / "dst", "--src-strategy", place / "old", "--dst-strategy", place / "new"]
    return [str(word) for word in words]


def start(words: Sequence[str], at: int) -> subprocess.Popen[str]:
    """Start a run whose workers die at their ``at``-th write, are slow (0), or as they are (-1)."""
    command = [sys.executable, "-c", FORCED, str(at), *words]
    return subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=hear_hangups
    )


def hear_hangups() -> None:
    """These tests may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def temporary_files(place: Path) -> list[Path]:
    return list(place.rglob(".reshard-tmp-*"))


# Prints what worker processes import.
AUDITED = """
import os, sys
def audit():
    sys.addaudithook(lambda event, words: event == "import" and print(words[0], file=sys.stderr))
os.register_at_fork(after_in_child=audit)
"""


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [(), ("--cast", "BFloat16")])
def test_worker_processes_import_nothing(kind: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Each would take time, and memory beyond the limit of all processes together."""
    assert not imported_by_workers([*prepared(tmp_path, kind), *options])


def test_worker_processes_import_nothing_for_pieces_in_maps(tmp_path: Path) -> None:
    """Places in maps are not kept, so NumPy gathers pieces of 2 KiB there."""
    model = Model(layers=1, matrices=1, rows=64, columns=2048)
    assert not imported_by_workers(prepared(tmp_path, "one file", model))


def test_worker_processes_import_nothing_for_a_later_stage(tmp_path: Path) -> None:
    """Only the files of the second stage gather elements."""
    rows, columns = layout([2], [0, -1]), layout([2], [-1, 0])
    source: Strategy = [{"devices": 1, "layouts": {name: layout([1], [-1, -1])}} for name in "ab"]
    target: Strategy = [{"devices": 2, "layouts": {name: cut}} for name, cut in (("a", rows), ("b", columns))]
    world = World(tmp_path, source, target)
    world.save({name: value(name, (96, 128)) for name in "ab"})
    assert not imported_by_workers([str(word) for word in world.words()])


def imported_by_workers(words: Sequence[str]) -> str:
    """What worker processes of a conversion import."""
    command = [sys.executable, "-c", AUDITED + FORCED, "-1", *words, "--jobs", "4", "--quiet"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr


# Jobs and bytes of a part. The default suite takes one pair for each kind of cut and checksum.
WORKERS = [(2, 5000), (5, 64 << 20), (16, 5000), (5, 5000), (16, 64 << 20), (2, 64 << 20)]


@pytest.mark.deep
@pytest.mark.parametrize("checksum", ["none", "crc32"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_processes_write_the_same_files(
    kind: str, checksum: str, tmp_path: Path, crews: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = prepared(tmp_path, kind)
    done(*words, "--jobs", 1, "--checksum", checksum)
    assert not crews
    expected = tree_bytes(tmp_path / "dst")
    number = 3 * (checksum == "crc32") + list(KINDS).index(kind)
    workers = WORKERS if LONG else [WORKERS[number]]
    for jobs, part_bytes in workers:
        monkeypatch.setattr(parts, "MAX_PART_BYTES", part_bytes)
        monkeypatch.setattr(parts, "MIN_PART_BYTES", part_bytes)
        words[2] = str(tmp_path / f"dst{jobs}-{part_bytes}")
        done(*words, "--jobs", jobs, "--checksum", checksum)
        files = tree_bytes(Path(words[2]))
        assert {path: data for path, data in files.items() if "rank_" in str(path)} == {
            path: data for path, data in expected.items() if "rank_" in str(path)
        }
        done("verify", words[2], "--src", words[1], *words[3:], "--jobs", 1)
    assert crews == [jobs for jobs, _ in workers]


@pytest.mark.parametrize(("jobs", "made"), [(3, []), (4, [4])])
def test_few_jobs_write_one_file_by_threads(
    jobs: int, made: list[int], tmp_path: Path, crews: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "MIN_WRITERS_FOR_MAPS", 4)
    done(*prepared(tmp_path, "one file"), "--jobs", jobs)
    assert crews == made


@pytest.fixture
def small_steps(crews: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Likewise, with small reads."""
    monkeypatch.setattr(reading, "_MIN_BLOCK", 512)
    monkeypatch.setattr(reading, "_MAX_BLOCK", 512)
    monkeypatch.setattr(reading, "_TINY", 0)
    monkeypatch.setattr(reading, "_MAX_TASKS", 3)
    monkeypatch.setattr(sweep, "CHUNK_ELEMENTS", 700)
    return crews


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_processes_verify_alike(kind: str, tmp_path: Path, small_steps: list[int]) -> None:
    words = prepared(tmp_path, kind)
    done(*words, "--jobs", 1)
    strategy: list[Argument] = ["--strategy", tmp_path / "new"]
    arguments: list[Argument] = [tmp_path / "dst", "--src-strategy", tmp_path / "new"]
    commands: list[list[Argument]] = [
        ["verify", words[2], "--src", *words[1:2], *words[3:], "--json"],
        ["fingerprint", tmp_path / "dst", *strategy, "--json"],
        ["stats", *arguments, "--json"],
    ]
    for command in commands:
        small_steps.clear()
        alone = done(*command, "--jobs", 1).out
        assert not small_steps
        assert done(*command, "--jobs", 3).out == alone
        assert small_steps and set(small_steps) == {3}, command[0]


def test_a_thread_waiting_for_a_worker_ends_after_an_error(
    tmp_path: Path, small_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier tasks may finish after later ones; workers run each task once, and in order."""
    words = prepared(tmp_path, "rows")
    done(*words, "--jobs", 1)
    late = iter([False] * 6 + [True])

    # That of the fixture, which counts.
    class HeldUp(vars(reading)["Crew"]):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            own: Any = self
            take, self.timer = own._idle.get, threading.Timer(30, self.kill)

            def held_up() -> Any:
                time.sleep(next(late, False))
                return take()

            own._idle = SimpleNamespace(get=held_up, put=own._idle.put)
            self.timer.start()

        def close(self) -> None:
            self.timer.cancel()
            super().close()

    monkeypatch.setattr(reading, "Crew", HeldUp)
    done("verify", words[2], "--src", *words[1:2], *words[3:], "--jobs", 3)
    assert small_steps


def test_a_difference_found_by_a_worker_is_reported(tmp_path: Path, small_steps: list[int]) -> None:
    words = prepared(tmp_path, "columns of the same rows")
    done(*words, "--jobs", 1)
    path = tmp_path / "dst" / "rank_5" / "checkpoint_5.ckpt"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    result = fails(4, "verify", words[2], "--src", words[1], *words[3:], "--jobs", 3)
    assert small_steps == [3] and "on rank 5: differs" in result.out and result.out.count("differs") == 1


def test_a_file_with_several_writers_is_written_through_maps(
    tmp_path: Path, crews: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = prepared(tmp_path, "one file")
    allocated: list[bool] = []
    allocate = NewLocalFile.allocate

    def counted(self: NewLocalFile, size: int) -> bool:
        allocated.append(allocate(self, size))
        return allocated[-1]

    monkeypatch.setattr(NewLocalFile, "allocate", counted)
    monkeypatch.setattr("reshard.storage.local.file_system_of", lambda path: "ext4")

    def refused(self: WrittenFile, offset: int, data: memoryview) -> None:
        raise AssertionError("written without a map")

    monkeypatch.setattr(WrittenFile, "write", refused)
    done(*words, "--jobs", 4)
    assert allocated == [True]
    done("verify", words[2], "--src", words[1], *words[3:])


def test_insufficient_space_for_a_mapped_file_is_an_error_before_writing(
    tmp_path: Path, crews: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = prepared(tmp_path, "one file")
    monkeypatch.setattr("reshard.storage.local.file_system_of", lambda path: "ext4")

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    fails(1, *words, "--jobs", 4, texts=["no space left", "checkpoint_0.ckpt"])
    assert crews and not temporary_files(tmp_path)


def test_sources_modified_while_workers_read_are_an_error(world: World, crews: list[int]) -> None:
    world.save(FULL)
    path = world.src / "rank_1" / "net-1_10.ckpt"
    other = path.read_bytes()
    world.save(tensors("other"))
    write = WrittenFile.write

    def changing(self: WrittenFile, offset: int, data: memoryview) -> None:
        in_place(path, other)
        write(self, offset, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "MIN_WRITERS_FOR_MAPS", 4)
        patch.setattr(WrittenFile, "write", changing)
        fails(1, *world.words("--jobs", "2"), texts=[path])
    assert crews and not list(world.dst.glob("rank_*/*"))


def test_a_failed_write_in_a_worker_names_the_file(world: World, crews: list[int]) -> None:
    world.save(FULL)

    def failing(self: WrittenFile, offset: int, data: memoryview) -> None:
        raise OSError(5, os.strerror(5))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "MIN_WRITERS_FOR_MAPS", 4)
        patch.setattr(WrittenFile, "write", failing)
        fails(1, *world.words("--jobs", "2"), texts=[world.dst / "rank_0" / "checkpoint_0.ckpt", "1 more file"])
    assert crews and not temporary_files(world.root)
    world.convert()
    same_ranks(world.found(), world.expected(FULL))


@pytest.mark.deep
@pytest.mark.parametrize("at", [1, 3, *((2, *range(4, 20)) if LONG else ())])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_ends_the_run_and_the_next_run_resumes(kind: str, at: int, tmp_path: Path) -> None:
    words = prepared(tmp_path, kind)
    process = start([*words, "--jobs", "3"], at)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 1 or (at > 3 and not process.returncode), output
    if process.returncode:
        assert "Traceback" not in output
        assert "checkpoint_" in output and "killed by signal 9" in output, output
    assert not temporary_files(tmp_path)
    done(*words)
    done("verify", words[2], "--src", words[1], *words[3:])


@pytest.mark.deep
@pytest.mark.parametrize(
    ("sent", "status"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
)
@pytest.mark.parametrize("kind", some_of(KINDS, 3))
def test_workers_end_with_their_parent_process(kind: str, sent: signal.Signals, status: int, tmp_path: Path) -> None:
    words = prepared(tmp_path, kind)
    for _ in range(10 if LONG else 1):
        process = start([*words, "--jobs", "3"], 0)
        until(lambda process=process: len(workers_of(process)) == 3)  # type: ignore[misc]
        workers = workers_of(process)
        time.sleep(random.uniform(0, 0.1))
        if sent == signal.SIGKILL:
            process.kill()
        else:
            # A terminal sends signals to workers, too.
            os.killpg(process.pid, sent)
        _, output = process.communicate(timeout=60)
        assert process.returncode == status and "Traceback" not in output, output
        until(lambda workers=workers: not any(map(is_alive, workers)))  # type: ignore[misc]
        if sent != signal.SIGKILL:
            assert not temporary_files(tmp_path)
    done(*words)
    assert not temporary_files(tmp_path)
    done("verify", words[2], "--src", words[1], *words[3:])


def test_a_process_with_other_threads_is_not_forked(world: World, crews: list[int]) -> None:
    world.save(FULL)
    ended = threading.Event()
    for name, copied in ((f"{OWN_THREAD}-one", True), ("another's", False)):
        ended.clear()
        thread = threading.Thread(target=ended.wait, name=name)
        thread.start()
        try:
            assert may_fork() == copied
            world.convert("--overwrite", "--jobs", "2")
        finally:
            ended.set()
            thread.join()
        assert crews == [2]


def serve(request: Any, descriptors: Sequence[int], tell: Notify) -> Any:
    for descriptor in descriptors:
        os.write(descriptor, str(request).encode())
        os.close(descriptor)
    if request == "unknown":
        raise CheckpointError("damaged", file="a", rank=3, hint="b")
    if request == "local":

        class OwnError(Exception):
            pass

        raise OwnError("said")
    if request == "die":
        os._exit(7)
    tell(("half", request))
    return request, os.getpid()


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2, 1, serve) as created:
        yield created


def test_a_worker_returns_results_and_reports_progress(crew: Crew) -> None:
    output: list[Any] = []
    large = "x" * 3_000_000
    assert crew.call(large, notify=output.append)[0] == large
    assert output == [("half", large)]
    pids = {crew.call(number)[1] for number in range(4)}
    assert len(pids) == 2 and os.getpid() not in pids


def test_a_worker_writes_to_files_opened_by_its_parent(crew: Crew, tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as one, open(tmp_path / "b", "wb") as other:
        crew.call("said", [one.fileno(), other.fileno()])
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["said", "said"]


def test_an_error_of_a_worker_keeps_its_type(crew: Crew) -> None:
    with pytest.raises(CheckpointError, match="damaged") as caught:
        crew.call("unknown")
    assert (caught.value.file, caught.value.rank, caught.value.hint) == ("a", 3, "b")
    with pytest.raises(RuntimeError, match="said"):
        crew.call("local")
    assert crew.call("on")[0] == "on"


def test_a_dead_worker_is_an_error_for_every_waiting_thread() -> None:
    with Crew(1, 1, serve) as crew:
        for _ in range(2):
            with pytest.raises(LostWorkerError, match="ended with status 7"):
                crew.call("die")


def test_an_unread_result_of_a_worker_is_never_returned_to_a_later_call() -> None:
    def failing(message: Any) -> None:
        raise ValueError(message)

    with Crew(1, 1, serve) as crew:
        with pytest.raises(ValueError, match="first"):
            crew.call("first", notify=failing)
        with pytest.raises(LostWorkerError):
            crew.call("second")


def test_a_limit_of_processes_reduces_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, remaining = os.fork, [1, 0]

    def limited() -> int:
        if not remaining.pop(0):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    with Crew(3, 1, serve) as crew:
        assert len({crew.call(number)[1] for number in range(3)}) == 1
    remaining.append(0)
    with pytest.raises(RetryableError, match="no worker process"):
        Crew(3, 1, serve)


def test_a_crew_leaves_no_process_behind() -> None:
    with Crew(3, 2, serve) as crew:
        pids = {crew.call(number)[1] for number in range(6)}
        assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_frozen_objects_of_the_program_stay_frozen() -> None:
    frozen: list[object] = []
    gc.freeze()
    try:
        with Crew(1, 1, serve) as crew:
            crew.call("said")
        # The collector lists all other objects.
        assert not any(listed is frozen for listed in gc.get_objects())
    finally:
        gc.unfreeze()
