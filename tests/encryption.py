"""Encrypting checkpoint files as MindSpore does, in blocks of any size; for tests."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEY = b"0123456789abcdef"
"""The key of the files in `fixtures/ckpt_files`."""

MARKS = {"AES-GCM": 0x7F3A5ED8, "AES-CBC": 0x7F3A5ED9, "SM4-CBC": 0x7F3A5EDA}
MODES = tuple(MARKS)
BLOCK = 64 << 20


def encrypted(data: bytes, mode: str, key: bytes = KEY, block: int = BLOCK, salt: str = "") -> bytes:
    """What MindSpore would write for these bytes, if its blocks were of that many bytes."""
    return b"".join(
        encrypted_block(data[start : start + block], mode, key, hashlib.md5(f"{salt}{start}".encode()).digest())
        for start in range(0, len(data), block)
    )


def encrypted_block(data: bytes, mode: str, key: bytes, iv: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    algorithm = (algorithms.SM4 if mode == "SM4-CBC" else algorithms.AES)(key)
    how: Any = modes.GCM(iv[:12]) if mode == "AES-GCM" else modes.CBC(iv)
    encryptor = Cipher(algorithm, how).encryptor()
    if mode != "AES-GCM":
        padding = 16 - len(data) % 16
        data += bytes([padding]) * padding
    text = encryptor.update(data) + encryptor.finalize()
    tag = encryptor.tag if mode == "AES-GCM" else b""
    rest = struct.pack("<I", len(iv)) + iv + struct.pack("<I", len(text)) + text
    return struct.pack("<I", MARKS[mode]) + tag + struct.pack("<I", len(rest)) + rest


def encrypt_file(path: Path, mode: str, key: bytes = KEY, block: int = BLOCK) -> None:
    """Replace a file by its encrypted content."""
    path.write_bytes(encrypted(path.read_bytes(), mode, key, block, str(path)))


def encrypt_tree(root: Path, how: str | Mapping[int, str], block: int = BLOCK) -> None:
    """Encrypt the files of a rank tree, all in one mode, or those of some ranks each in its own."""
    for path in root.glob("rank_*/*.ckpt"):
        mode = how if isinstance(how, str) else how.get(int(path.parent.name.partition("_")[2]))
        if mode is not None:
            encrypt_file(path, mode, block=block)
