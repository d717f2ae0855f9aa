"""Objects' paths, ``s3://bucket/key``, and what objects record of themselves."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from reshard.errors import UsageError

_SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
# Neither is a place of its own in a store that knows no directories.
_NO_NAMES = ("", ".", "..")
_LONGEST_KEY = 1024
# When a file was written, in seconds, as other programs say it, too.
_MODIFIED = "mtime"
_SECONDS = re.compile(r"([0-9]{1,10})(?:\.([0-9]{1,18}))?")
_SECOND = 1_000_000_000
WRITE = "reshard-write"
"""Which upload an object is of: no two of ours have the same."""
RUN = "reshard-run"
"""Which conversion of which sources it is of."""


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
        bucket, _, key = path[len(_SCHEME) :].partition("/")
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


def metadata_of(modified: int, run: str = "") -> dict[str, str]:
    """Metadata of an object that is written now.

    Args:
        modified: the time, in nanoseconds.
        run: which conversion of which sources it is of, if it is of one.
    """
    found = {_MODIFIED: f"{modified // _SECOND}.{modified % _SECOND:09d}", WRITE: os.urandom(8).hex()}
    return {**found, RUN: run} if run else found


def metadata_now() -> dict[str, str]:
    """Likewise, for this moment."""
    return metadata_of(time.time_ns())


def modified_at(uploaded: datetime, metadata: Mapping[str, str]) -> int:
    """When an object was written, in nanoseconds: as it says, or when it was uploaded, as stores round that.

    Args:
        uploaded: by the service.
        metadata: of the object, by name in lower case.
    """
    said = _SECONDS.fullmatch(metadata.get(_MODIFIED, ""))
    if said is None:
        return round(uploaded.timestamp()) * _SECOND
    return int(said[1]) * _SECOND + int((said[2] or "")[:9].ljust(9, "0"))
