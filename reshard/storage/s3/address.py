"""Paths in object stores: ``s3://bucket/key``."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from reshard.errors import UsageError
from reshard.storage.store import OBJECTS

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
# Neither is a place of its own in a store that knows no directories.
_NO_NAMES = ("", ".", "..")
_LONGEST_KEY = 1024


class Address(NamedTuple):
    """Where an object lies, or all those whose keys begin so.

    Attributes:
        bucket: name of the bucket.
        key: of the object, or what the keys of a directory begin with, without a slash in the end; empty for all.
    """

    bucket: str
    key: str

    @classmethod
    def parse(cls, path: str) -> Address:
        """The address that a path says.

        Raises:
            UsageError: no object can have it.
        """
        bucket, _, key = path[len(OBJECTS) :].partition("/")
        key = key.rstrip("/")
        if not _BUCKET.fullmatch(bucket):
            raise UsageError(f"{path}: names no bucket", file=path, hint="an object's path is s3://bucket/prefix")
        names = key.split("/") if key else []
        if any(name in _NO_NAMES or "\0" in name for name in names):
            raise UsageError(
                f"{path}: holds an empty name, '.' or '..'",
                file=path,
                hint="write the key as it is: s3://bucket/prefix/name",
            )
        if len(key.encode(errors="surrogateescape")) > _LONGEST_KEY:
            raise UsageError(f"{path[:300]}...: is too long for a key", file=path, hint="give a shorter one")
        return cls(bucket, key)

    @property
    def prefix(self) -> str:
        """What all keys in this directory begin with."""
        return f"{self.key}/" if self.key else ""


def number_of(*parts: str) -> int:
    """A number below 2**63 that tells texts apart."""
    digest = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") >> 1
