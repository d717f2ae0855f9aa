"""Two trees to compare, without the command line."""

from __future__ import annotations

from pathlib import Path


class Quiet:
    """Adds up what was read."""

    def __init__(self) -> None:
        self.total = self.read = 0

    def begin(self, total: int, doing: str) -> None:
        self.total += total

    def wrote(self, count: int) -> None:
        self.read += count

    def end(self) -> None:
        pass


def files_of(root: Path) -> dict[int, str]:
    return {int(path.parent.name[len("rank_") :]): str(path) for path in root.glob("rank_*/*")}
