"""What a target directory may hold before anything is written into it.

Nothing is ever replaced that this conversion would not write itself, and no checkpoint of another
conversion may remain beside the new ones, where a training job would load the two as one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Union

from reshard.errors import RetryableError, TargetError, UsageError
from reshard.execute.writing import TEMPORARY_MARK

_RANK_DIRECTORY = re.compile(r"rank_?\d+|\d+")
_CHECKPOINT_ENDINGS = (".ckpt", ".safetensors")


class Destination:
    """A target directory.

    Args:
        path: the directory; it need not exist.
        names: names, relative to it, that a conversion with the same prefix, format and target
            strategy writes.
    """

    def __init__(self, path: str, names: Collection[str]) -> None:
        self.path = path
        self._names = frozenset(names)

    def check(self, writing: Collection[str], overwrite: bool, adding: bool) -> None:
        """Refuse what must not be replaced or mixed.

        Args:
            writing: names that this run writes, relative to the directory.
            overwrite: existing targets may be replaced.
            adding: this run adds to what a shell loop or job array writes, so other ranks may be there.

        Raises:
            TargetError: targets exist, or checkpoints of another conversion do.
        """
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise TargetError(f"{self.path} is not a directory", file=self.path, hint="choose another DST")
        present = self._checkpoints()
        ours = self._names if adding or not overwrite else frozenset(writing)
        foreign = [name for name in present if name not in ours]
        if foreign:
            raise TargetError(
                f"{self.path} holds checkpoints of another conversion: {_some(foreign)}",
                file=os.path.join(self.path, foreign[0]),
                hint="choose another DST, or remove them; they would be taken for ranks of the new checkpoint",
            )
        existing = [name for name in writing if os.path.lexists(os.path.join(self.path, name))]
        outside = [name for name in writing if not self._inside(os.path.dirname(os.path.join(self.path, name)))]
        if outside:
            raise TargetError(
                f"{os.path.join(self.path, outside[0])}: its directory is a link that leads elsewhere",
                file=outside[0],
                hint="remove the link, or choose another DST",
            )
        odd = [name for name in existing if not os.path.isfile(os.path.join(self.path, name))]
        if odd:
            raise TargetError(f"{os.path.join(self.path, odd[0])} is not a regular file", file=odd[0])
        if existing and not overwrite:
            raise TargetError(
                f"{self.path} already holds {_some(existing)}",
                file=os.path.join(self.path, existing[0]),
                hint="choose another DST, or replace them with --overwrite",
            )

    def _inside(self, directory: str) -> bool:
        """Whether a directory of this name is, or will be, where its name says."""
        wanted = os.path.join(os.path.realpath(self.path), os.path.relpath(directory, self.path))
        return os.path.realpath(directory) == os.path.normpath(wanted)

    def _checkpoints(self) -> list[str]:
        found = []
        try:
            entries = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RetryableError(f"{self.path}: cannot be read: {error.strerror}", file=self.path) from error
        for entry in entries:
            directory = os.path.join(self.path, entry)
            if not _RANK_DIRECTORY.fullmatch(entry) or not os.path.isdir(directory):
                continue
            for name in sorted(os.listdir(directory)):
                if name.endswith(_CHECKPOINT_ENDINGS) and TEMPORARY_MARK not in name:
                    found.append(os.path.join(entry, name))
        return found


def check_disjoint(src: Union[str, Mapping[int, str]], sources: Iterable[str], dst: str) -> None:
    """Refuse a source and a target of which one contains the other.

    Args:
        src: SRC as typed.
        sources: the source files.
        dst: target directory, or target file.

    Raises:
        UsageError: they overlap.
    """
    target = os.path.realpath(dst)
    if isinstance(src, str) and os.path.isdir(src):
        root = os.path.realpath(src)
        if _contains(root, target) or _contains(target, root):
            raise UsageError(
                f"SRC {src} and DST {dst} overlap", file=dst, hint="choose a DST outside the source's directories"
            )
    rank_directories = isinstance(src, str) and "{rank}" in os.path.dirname(src)
    for path in sources:
        real = os.path.realpath(path)
        if _contains(target, real):
            raise UsageError(f"source file {path} lies in DST {dst}", file=path, hint="choose another DST")
        if rank_directories and _contains(os.path.dirname(real), target):
            raise UsageError(f"DST {dst} lies beside source file {path}", file=path, hint="choose another DST")


def check_space(dst: str, needed: int) -> None:
    """Refuse to begin what cannot be finished.

    Raises:
        RetryableError: the file system has less free space than ``needed`` bytes.
    """
    existing = os.path.abspath(dst)
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    status = os.statvfs(existing)
    free = status.f_bavail * status.f_frsize
    # A file system that reports no blocks at all does not know.
    if status.f_blocks and needed > free:
        raise RetryableError(
            f"{dst}: {needed:,} bytes are needed, but its file system has {free:,} free",
            file=dst,
            hint="free some space or choose another DST",
        )


def _contains(directory: str, path: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
