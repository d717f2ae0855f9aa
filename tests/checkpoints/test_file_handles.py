"""Open files: each opened once, at most a limit at a time, never closed during a read."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from reshard.checkpoints import FileHandles
from reshard.errors import CheckpointError, RetryableError
from reshard.storage import ReadableFile, reading_error
from tests.counting import count_opened


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    for number in range(6):
        (tmp_path / f"{number}").write_bytes(b"%d" % number)
    return [str(tmp_path / f"{number}") for number in range(6)]


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def descriptor(file: ReadableFile) -> int:
    assert file.descriptor is not None
    return file.descriptor


def test_the_least_recently_used_file_is_closed_first(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = count_opened(monkeypatch)
    with FileHandles(limit=2) as handles:
        for path in (paths[0], paths[1], paths[0], paths[2], paths[0]):
            with handles.borrow(path):
                pass
        assert opened == dict.fromkeys(paths[:3], 1)
        with handles.borrow(paths[1]):
            pass
        assert opened == {**dict.fromkeys(paths[:3], 1), paths[1]: 2}


@pytest.mark.parametrize("same_size", [True, False])
def test_a_replaced_file_is_an_error_when_reopened(paths: list[str], tmp_path: Path, same_size: bool) -> None:
    with FileHandles(limit=1) as handles:
        for path in paths[:2]:
            with handles.borrow(path):
                pass
        (tmp_path / "new").write_bytes(b"x" if same_size else b"other")
        os.utime(tmp_path / "new", ns=(1, 1))
        os.replace(tmp_path / "new", paths[0])
        with pytest.raises(OSError, match="replaced or changed") as caught, handles.borrow(paths[0]):
            pass
        assert isinstance(reading_error(paths[0], caught.value), RetryableError)


def test_open_files_stay_within_the_limit(paths: list[str]) -> None:
    handles = FileHandles(limit=2)
    fds = []
    for path in paths:
        with handles.borrow(path) as file:
            fds.append((path, descriptor(file)))
    still = [path for path, fd in fds if is_open(fd) and os.readlink(f"/proc/self/fd/{fd}") == path]
    assert still == paths[-2:]
    handles.close()
    assert not any(is_open(fd) and os.readlink(f"/proc/self/fd/{fd}") in paths for _, fd in fds)


def test_a_descriptor_in_use_is_never_closed(paths: list[str]) -> None:
    with FileHandles(limit=1) as handles, handles.borrow(paths[0]) as first:
        for path in paths[1:]:
            with handles.borrow(path) as file:
                assert first.read(0, 1) == b"0" and file.descriptor != first.descriptor
        handles.close()
        assert first.read(0, 1) == b"0"
        with handles.borrow(paths[0]) as again:
            assert again == first


def test_a_failed_open_leaves_no_descriptor(paths: list[str], tmp_path: Path) -> None:
    with FileHandles() as handles:
        with pytest.raises(FileNotFoundError), handles.borrow(str(tmp_path / "none")):
            pass
        (tmp_path / "none").write_bytes(b"now")
        with handles.borrow(str(tmp_path / "none")) as file:
            assert file.read(0, 3) == b"now"
        assert handles.seen == 1


def test_handles_are_closed_when_the_process_has_no_free_descriptor(
    paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = FileHandles(limit=10)
    fds = {}
    for path in paths[:3]:
        with handles.borrow(path) as file:
            fds[path] = descriptor(file)
    real = os.open

    def scarce(path: str, flags: int) -> int:
        if any(is_open(fd) for fd in fds.values()):
            raise OSError(errno.EMFILE, "too many open files")
        return real(path, flags)

    monkeypatch.setattr(os, "open", scarce)
    with handles.borrow(paths[4]) as file:
        assert file.read(0, 1) == b"4"
    handles.close()


def test_threads_share_handles(paths: list[str]) -> None:
    failures: list[object] = []
    with FileHandles(limit=2) as handles:

        def work(seed: int) -> None:
            for turn in range(400):
                path = paths[(seed * 7 + turn * 5) % len(paths)]
                with handles.borrow(path) as file:
                    data = file.read(0, 1)
                    if data != os.path.basename(path).encode():
                        failures.append((path, data))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR])
def test_permanent_errors_are_input_errors(number: int) -> None:
    error = reading_error("x.ckpt", OSError(number, "why"))
    assert isinstance(error, CheckpointError) and str(error).startswith("x.ckpt: ")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENFILE])
def test_transient_errors_are_retryable(number: int) -> None:
    error = reading_error("x.ckpt", OSError(number, "why"))
    assert isinstance(error, RetryableError) and "why" in str(error)


def test_changes_of_a_file_are_detected_by_opening_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems answer `stat` from memory for up to a minute, and ask the server when a file is opened."""
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"before")
    with FileHandles() as handles:
        with handles.borrow(str(path)):
            pass
        handles.close()
        remembered = os.stat(path)
        path.write_bytes(b"after!")
        monkeypatch.setattr(os, "stat", lambda *_, **__: remembered)
        with pytest.raises(RetryableError, match="replaced or changed"):
            handles.check_unchanged([str(path)])
