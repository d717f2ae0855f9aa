"""The kind of a file, by its first bytes."""

from __future__ import annotations

import contextlib
from typing import Optional

from reshard.storage import UnfitError, opened_regular

HEAD = 16
"""Bytes that `kind_by_head` needs."""

CIPHERS = {
    b"\xd8\x5e\x3a\x7f": "AES-GCM",
    b"\xd9\x5e\x3a\x7f": "AES-CBC",
    b"\xda\x5e\x3a\x7f": "SM4-CBC",
}
"""MindSpore's name of a `.ckpt`'s encryption mode, by its first bytes."""

MARK_SIZE = 4
"""Bytes that `cipher_of` needs."""

# Keys of the fields of a checkpoint's value: tag, tensor or map tensor.
_VALUE_PARTS = (b"\x0a", b"\x12", b"\x1a")
_ZIP = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
# Before 1.6, PyTorch wrote several pickles in a row; the first is a magic number.
_PICKLE_VERSIONS = range(2, 6)
# A Git LFS pointer, in the place of a large file that was not fetched.
_POINTER = b"version https://"


def cipher_of(head: bytes) -> Optional[str]:
    """The encryption mode of a `.ckpt` with this head, or None."""
    return CIPHERS.get(head[:MARK_SIZE])


def is_ckpt(head: bytes) -> bool:
    """Whether this head is of an unencrypted `.ckpt`; strategies have a number in its place."""
    # A message in field 1, whose length takes up to ten bytes; in it, a field of a value.
    length = next((position for position in range(1, 11) if head[position : position + 1] < b"\x80"), 10)
    return head[:1] == b"\x0a" and head[length + 1 : length + 2] in _VALUE_PARTS


def kind_by_head(head: bytes) -> Optional[str]:
    """The kind of another program's file with this head; None if unknown."""
    if head.startswith(_ZIP):
        return "a zip archive, as PyTorch saves"
    if head[:1] == b"\x80" and len(head) > 1 and head[1] in _PICKLE_VERSIONS:
        return "a Python pickle, as old versions of PyTorch save"
    if head.startswith(_POINTER):
        return "a Git LFS pointer, for which `git lfs pull` fetches the file itself"
    return None


def kind_of(path: str) -> Optional[str]:
    """The kind of the file at a path; None if unknown or unreadable."""
    with contextlib.suppress(OSError, UnfitError), opened_regular(path) as file:
        return kind_by_head(file.read(0, HEAD))
    return None
