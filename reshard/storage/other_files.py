"""What a file is, by its first bytes."""

from __future__ import annotations

import contextlib
from typing import Optional

from reshard.storage import UnfitError, opened_regular

HEAD = 16
"""Bytes that `kind_by_head` needs."""

GCM = "AES-GCM"
"""The mode that authenticates what it encrypts."""

CIPHERS = {
    b"\xd8\x5e\x3a\x7f": GCM,
    b"\xd9\x5e\x3a\x7f": "AES-CBC",
    b"\xda\x5e\x3a\x7f": "SM4-CBC",
}
"""MindSpore's name of the mode that a `.ckpt` is encrypted in, by how it begins."""

MARK_SIZE = 4
"""Bytes that `cipher_of` needs."""

# The keys that begin the parts of a checkpoint's value: its tag, tensor or map tensor.
_VALUE_PARTS = (b"\x0a", b"\x12", b"\x1a")
_ZIP = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
# Before 1.6, PyTorch wrote pickles one after the other, a number of its own first.
_PICKLE_VERSIONS = range(2, 6)
# What Git puts in the place of a large file that was not fetched.
_POINTER = b"version https://"


def cipher_of(head: bytes) -> Optional[str]:
    """The mode that a `.ckpt` which begins so is encrypted in, or None."""
    return CIPHERS.get(head[:MARK_SIZE])


def is_ckpt(head: bytes) -> bool:
    """Whether a file that begins so is a `.ckpt` which is not encrypted; strategies have a number in that place."""
    # A message in field 1, whose length takes up to ten bytes, and in that a part of a value.
    length = next((position for position in range(1, 11) if head[position : position + 1] < b"\x80"), 10)
    return head[:1] == b"\x0a" and head[length + 1 : length + 2] in _VALUE_PARTS


def kind_by_head(head: bytes) -> Optional[str]:
    """What a file is that is of another program and begins so, or None where that is not known."""
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
