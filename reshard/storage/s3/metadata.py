"""What objects say of themselves."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from datetime import datetime

# When a file was written, in seconds, as other programs say it, too.
_MODIFIED = "mtime"
_SECONDS = re.compile(r"([0-9]{1,10})(?:\.([0-9]{1,18}))?")
_SECOND = 1_000_000_000
WRITE = "reshard-write"
"""Which upload an object is of: no two of ours have the same."""
RUN = "reshard-run"
"""Which conversion of which sources it is of."""


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
