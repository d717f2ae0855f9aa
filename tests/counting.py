"""Counts of opened source files."""

from __future__ import annotations

from collections import Counter

import pytest

from reshard.checkpoints import FileHandles
from reshard.storage import OpenFile


def count_opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts, by path, from now to the end of the test."""
    counted: Counter[str] = Counter()
    open_file = FileHandles.open_file

    def counting(self: FileHandles, path: str) -> OpenFile:
        counted[path] += 1
        return open_file(self, path)

    monkeypatch.setattr(FileHandles, "open_file", counting)
    return counted
