"""Temporary files: their owner, their removal, and names that survive a crash."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reshard.storage import local
from tests.corpus import ROOT
from tests.running import Argument, done
from tests.small import World, tensors

LEFT = """
import os, signal, sys
from reshard.storage import local
print(local.create_temporary(sys.argv[1])[1], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_get_removes_temporary_files_of_killed_runs(world: World) -> None:
    world.save(tensors())
    path = world.root / "made"
    path.mkdir()
    output = subprocess.run([sys.executable, "-c", LEFT, str(path)], capture_output=True, text=True, check=False).stdout
    assert Path(output.strip()).exists()
    done("get", world.src, "w", "--strategy", world.old, "-o", path / "w.npy")
    assert [path.name for path in path.iterdir()] == ["w.npy"]


@pytest.mark.parametrize("form", ["ranks", "huggingface", "checkpoint2"])
def test_a_directory_is_flushed_after_each_rename(form: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of index and manifest, too: a crash after the end loses nothing."""
    world.save(tensors())
    waiting: dict[tuple[int, int], str] = {}
    rename, fsync = os.rename, os.fsync

    def place(of: Any) -> tuple[int, int]:
        status = os.stat(of)
        return status.st_dev, status.st_ino

    def renamed(source: str, target: str) -> None:
        rename(source, target)
        waiting[place(os.path.dirname(target))] = target

    def flushed(fd: int) -> None:
        fsync(fd)
        waiting.pop(place(fd), None)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "fsync", flushed)
    strategy: list[Argument] = [] if form == "huggingface" else ["--dst-strategy", world.new]
    done("convert", world.src, world.dst, "--src-strategy", world.old, "--to", form, *strategy)
    assert not waiting


_FORKS = """
import os, sys
from reshard import signals
from reshard.storage import local

_, path = local.create_temporary(sys.argv[1])
child = os.fork()
if not child:
    local.create_temporary(sys.argv[1])
    signals.leave(0)
os.waitpid(child, 0)
assert os.listdir(sys.argv[1]) == [os.path.basename(path)]
signals.leave(0)
"""


def test_a_file_in_the_place_of_a_directory_may_be_gone_before_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(path: str, **_: object) -> None:
        raise FileExistsError(errno.EEXIST, "File exists", path)

    monkeypatch.setattr(os, "makedirs", taken)
    with pytest.raises(NotADirectoryError):
        local.make_directory("gone/meanwhile")


def test_the_end_of_a_forked_child_leaves_its_parents_files_alone(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _FORKS, tmp_path], check=True, cwd=ROOT)
    assert not list(tmp_path.iterdir())
