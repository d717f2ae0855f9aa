"""Paths of objects, ``s3://bucket/key``, and the metadata of objects."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from reshard.errors import UsageError

_SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
# Other programs may resolve these names, which no object store does.
_NO_NAMES = ("", ".", "..")
_MAX_KEY_LENGTH = 1024
# Metadata with the time of writing in seconds; other programs use this key, too.
_MODIFIED = "mtime"
_SECONDS = re.compile(r"([0-9]{1,10})(?:\.([0-9]{1,18}))?")
_SECOND = 1_000_000_000


class Address(NamedTuple):
    """The place of an object, or of a directory of objects.

    Attributes:
        bucket: name of the bucket.
        key: key of the object, or the common beginning of a directory's keys, without a trailing slash; empty for all.
    """

    bucket: str
    key: str

    @classmethod
    def parse(cls, path: str) -> Address:
        """The address of a path.

        Raises:
            UsageError: no object can have this path.
        """
        bucket, _, key = path[len(_SCHEME) :].partition("/")
        key = key.rstrip("/")
        if not _BUCKET.fullmatch(bucket):
            raise UsageError(
                f"{path}: {f'{bucket!r} is no name of a bucket' if bucket else 'names no bucket'}",
                file=path,
                hint="an object's path is s3://bucket/prefix; a bucket's name has two letters or more",
            )
        names = key.split("/") if key else []
        if any(name in _NO_NAMES or "\0" in name for name in names):
            raise UsageError(
                f"{path}: holds an empty name, '.' or '..'",
                file=path,
                hint="write the key as it is: s3://bucket/prefix/name",
            )
        if len(key.encode(errors="surrogateescape")) > _MAX_KEY_LENGTH:
            raise UsageError(f"{path[:300]}...: is too long for a key", file=path, hint="give a shorter one")
        return cls(bucket, key)

    @property
    def prefix(self) -> str:
        """The common beginning of all keys in this directory."""
        return f"{self.key}/" if self.key else ""


def number_of(*parts: str) -> int:
    """A number below 2**63 that identifies texts."""
    digest = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def metadata_of(modified: int) -> dict[str, str]:
    """Metadata for an object that is written at a time in nanoseconds."""
    return {_MODIFIED: f"{modified // _SECOND}.{modified % _SECOND:09d}"}


def modified_at(uploaded: datetime, metadata: Mapping[str, str]) -> int:
    """The time of writing of an object, in nanoseconds: its metadata's, or else the rounded time of its upload.

    Args:
        uploaded: time of the upload, from the service.
        metadata: metadata of the object, by lower-case name.
    """
    seconds = _SECONDS.fullmatch(metadata.get(_MODIFIED, ""))
    if seconds is None:
        return round(uploaded.timestamp()) * _SECOND
    return int(seconds[1]) * _SECOND + int((seconds[2] or "")[:9].ljust(9, "0"))
