"""What a file is that is neither a checkpoint nor a strategy of MindSpore, by its first bytes."""

from __future__ import annotations

import contextlib
from typing import Optional

from reshard.storage import UnfitError, opened_regular

HEAD = 16
"""Bytes that `kind_by_head` needs."""

_ZIP = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
# Before 1.6, PyTorch wrote pickles one after the other, a number of its own first.
_PICKLE_VERSIONS = range(2, 6)
# What Git puts in the place of a large file that was not fetched.
_POINTER = b"version https://"


def kind_by_head(head: bytes) -> Optional[str]:
    """What a file is that begins so, or None where that is not known."""
    if head.startswith(_ZIP):
        return "a zip archive, as PyTorch saves"
    if head[:1] == b"\x80" and len(head) > 1 and head[1] in _PICKLE_VERSIONS:
        return "a Python pickle, as old versions of PyTorch save"
    if head.startswith(_POINTER):
        return "a Git LFS pointer, for which `git lfs pull` fetches the file itself"
    return None


def kind_of(path: str) -> Optional[str]:
    """What the file of a path is, or None where that is not known or cannot be read."""
    with contextlib.suppress(OSError, UnfitError), opened_regular(path) as file:
        return kind_by_head(file.read(0, HEAD))
    return None
