"""Counts of opened files and of reads."""

from __future__ import annotations

from collections import Counter

import pytest

from reshard.checkpoints import FileHandles
from reshard.execute import reader
from reshard.storage import LocalFile, OpenFile, fill


def count_opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts, by path, from now to the end of the test."""
    counted: Counter[str] = Counter()
    open_file = FileHandles.open_file

    def counting(self: FileHandles, path: str) -> OpenFile:
        counted[path] += 1
        return open_file(self, path)

    monkeypatch.setattr(FileHandles, "open_file", counting)
    return counted


def reads_of_local_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each read asks for, from now to the end of the test."""
    counts: list[int] = []
    read = LocalFile.read

    def counting(self: LocalFile, offset: int, count: int) -> bytes:
        counts.append(count)
        return read(self, offset, count)

    monkeypatch.setattr(LocalFile, "read", counting)
    return counts


def reads_into_buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each explicit read of elements in this process, from now to the end of the test."""
    counts: list[int] = []

    def counting(file: OpenFile, offset: int, out: memoryview, rank: int) -> None:
        counts.append(len(out))
        fill(file, offset, out, rank)

    monkeypatch.setattr(reader, "fill", counting)
    return counts
