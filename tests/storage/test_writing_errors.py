"""Exit statuses of errors: 3 for missing rights and read-only disks, 1 for transient ones."""

from __future__ import annotations

import errno
import os

import pytest

from reshard.storage import local
from tests.running import Argument, fails
from tests.small import SOURCE, World, tensors
from tests.trees import write_strategy

LASTING = (errno.EACCES, errno.EPERM, errno.EROFS)
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


@pytest.mark.parametrize("number", [*LASTING, *PASSING])
@pytest.mark.parametrize("command", ["transform-dir", "get", "merge-pipeline", "view"])
def test_the_exit_status_distinguishes_retryable_write_errors(
    command: str, number: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(tensors())
    shown = world.root / "place"
    stages = write_strategy(world.root / "stages" / "stage", SOURCE).parent
    commands: dict[str, list[Argument]] = {
        "transform-dir": [*world.words()[:2], shown, *world.words()[3:]],
        "get": ["get", world.src, "w", "--strategy", world.old, "-o", shown / "w.npy"],
        "merge-pipeline": ["merge-pipeline", stages, shown / "merged.ckpt"],
        "view": ["view", world.src, "-o", shown / "page.html"],
    }

    def create(directory: str, directory_fd: object = None) -> tuple[int, str]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local, "create_temporary", create)
    fails(3 if number in LASTING else 1, *commands[command], texts=[shown, os.strerror(number)])


@pytest.mark.parametrize("form", ["dcp", "hyper-parallel", "hf-sharded"])
def test_a_full_disk_is_reported_by_file_where_files_are_no_ranks(
    form: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(tensors())

    def create(directory: str, directory_fd: object = None) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local, "create_temporary", create)
    words: list[Argument] = ["convert", world.src, world.dst, "--src-strategy", world.old, "--to", form, "--shards", 2]
    error = fails(1, *words, texts=["no space left", world.dst, "df -i"]).err
    assert "(rank" not in error


def test_a_maximum_file_size_is_explained(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(tensors())

    def pwrite(*_: object) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "pwrite", pwrite)
    fails(1, *world.words(), texts=["File too large", "ulimit -f"])


@pytest.mark.parametrize("number", [*LASTING[:2], *PASSING[2:]])
def test_the_exit_status_distinguishes_retryable_read_errors(
    number: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(tensors())
    path = world.src / "rank_1" / "net-1_10.ckpt"
    plain = os.open

    def failing(name: object, *more: object, **options: object) -> int:
        if str(name) == str(path):
            raise OSError(number, os.strerror(number), str(name))
        return plain(name, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", failing)
    fails(3 if number in LASTING else 1, *world.words(), texts=["rank_1"])
