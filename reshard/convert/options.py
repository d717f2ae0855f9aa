"""How a conversion is carried out."""

from __future__ import annotations

from typing import NamedTuple, Optional

from reshard.defaults import MAX_MEMORY


class Options(NamedTuple):
    """How a conversion is carried out; none of this changes the bytes written.

    Attributes:
        jobs: CPUs to keep busy.
        max_memory: bytes for all buffers together.
        io: ``auto``, which reads explicitly, ``mmap`` or ``pread``.
        crc: ``auto`` checks a source file's CRC where the whole file is read; ``never`` does not.
        check_replicas: ``auto`` compares samples of the source strategy's replicas, more of them with
            ``verify``; ``all`` compares everything, ``never`` nothing.
        checksum: ``crc32`` computes a checksum of every target file, and those in archives; ``none`` does not.
        overwrite: replace existing targets.
        adding: one of several runs that fill the same directory rank by rank.
        dry_run: plan and check everything, write nothing.
        share: index and count, where several runs divide the target ranks among them.
        lost_only: when recovering, write only ranks that are lost or damaged.
        verify: the caller verifies the result afterwards; it is recorded.
    """

    jobs: int
    max_memory: int = MAX_MEMORY
    io: str = "auto"
    crc: str = "auto"
    check_replicas: str = "auto"
    checksum: str = "none"
    overwrite: bool = False
    adding: bool = False
    dry_run: bool = False
    share: Optional[tuple[int, int]] = None
    lost_only: bool = False
    verify: bool = False
