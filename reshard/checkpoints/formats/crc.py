"""Comparing a checkpoint file with its recorded CRC."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.ckpt_index import TRAILER_SIZE
from reshard.checkpoints.formats.dtypes import INTEGERS, MAP_TENSOR
from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.errors import DamagedCheckpointError
from reshard.storage import ReadableFile, costs_of, fill, opened_regular, read_range, reading
from reshard.text.messages import plural, quoted
from reshard.threads import thread_pool

# MindSpore's CRC counts a 0-d integer of value N as N zero bytes, which it keeps in memory; so it cannot have written
# a larger N, which would take longer than some seconds here.
_MOST_ZEROS = 8 << 30

# Bytes that stay in a core's cache between reading them and computing their CRC.
_IN_CACHE = 256 << 10

# Bytes of archives that one thread checks: a file may have terabytes.
_PART_BYTES = 64 << 20


def check_crc(
    handles: FileHandles,
    index: CheckpointIndex,
    block_bytes: int = 8 << 20,
    on_block: Callable[[int], None] = lambda count: None,
) -> str | None:
    """Read a whole checkpoint file, or tensors of archives, and compare them with their CRCs.

    Args:
        handles: where to borrow the file from.
        index: the file's index; of archives, with the tensors to check.
        block_bytes: bytes to read at a time, and memory of the check.
        on_block: called after every block with its number of bytes; its exceptions end the check.

    Returns:
        The reason why no check is possible; None if the bytes agree with a CRC.

    Raises:
        DamagedCheckpointError: the CRC is wrong.
    """
    if not index.checkable and not index.archived:
        return "no CRC is recorded"
    with reading(index.path), handles.borrow(index.path) as file:
        if index.archived:
            from reshard.checkpoints.placed import PlacedFile

            assert isinstance(file, PlacedFile)
            # Half for a block, and half for what is read ahead.
            block_bytes = max(1, block_bytes // 2)
            remote = costs_of(index.path).remote
            file.check(index.tensors.values(), block_bytes if remote else min(block_bytes, _IN_CACHE), on_block)
            return None
        stream = _Stream(file, block_bytes, on_block)
        obstacle = _add_ckpt(stream, index) if index.format == "ckpt" else _add_safetensors(stream, index)
    if obstacle is None and stream.crc != index.crc:
        raise DamagedCheckpointError(
            f"{index.path}: is damaged: its CRC is {stream.crc:08x}, but {index.crc:08x} is recorded",
            file=index.path,
        )
    return obstacle


class CrcChecks(NamedTuple):
    """The results of checking several files, by path.

    Attributes:
        damaged: errors of files that do not match their CRC.
        unchecked: the reasons why CRCs of files could not be checked.
    """

    damaged: dict[str, DamagedCheckpointError]
    unchecked: dict[str, str]

    def notes(self) -> Iterator[str]:
        """A sentence for each reason, on its files."""
        for reason in sorted({*self.unchecked.values()}):
            paths = sorted(path for path in self.unchecked if self.unchecked[path] == reason)
            more = f" (likewise {plural(len(paths) - 1, 'other file')})" if paths[1:] else ""
            yield f"{paths[0]}: its CRC was not checked: {reason}{more}"


class _Cancelled(Exception):
    """Another check has failed."""


def check_crcs(
    handles: FileHandles,
    indexes: Iterable[CheckpointIndex],
    threads: int,
    block_bytes: int = 8 << 20,
    on_block: Callable[[int], None] = lambda count: None,
) -> CrcChecks:
    """Compare checkpoint files with their CRCs, if recorded.

    Args:
        handles: where to borrow the files from.
        indexes: the files' indexes.
        threads: files to read at a time.
        block_bytes: memory of each thread.
        on_block: called with the bytes read since the last call, by one thread at a time.
    """
    stop = threading.Event()
    progress_lock = threading.Lock()
    checks = CrcChecks({}, {})

    def report_progress(count: int) -> None:
        if stop.is_set():
            raise _Cancelled
        with progress_lock:
            on_block(count)

    def check(index: CheckpointIndex) -> None:
        try:
            report_progress(0)
            obstacle = check_crc(handles, index, block_bytes, report_progress)
        except _Cancelled:
            return
        except DamagedCheckpointError as error:
            checks.damaged[index.path] = error
            return
        if obstacle is not None:
            checks.unchecked[index.path] = obstacle

    with thread_pool(threads) as pool:
        try:
            for future in [pool.submit(check, part) for index in indexes for part in _parts(index)]:
                future.result()
        except BaseException:
            # Ctrl-C must not wait until terabytes are read.
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return checks


def _parts(index: CheckpointIndex) -> Iterator[CheckpointIndex]:
    """A file, or some of its archives in file order, to be checked by one thread."""
    if not index.archived:
        yield index
        return
    tensors: dict[str, Tensor] = {}
    nbytes = 0
    for name, tensor in sorted(index.tensors.items(), key=lambda item: item[1].extents):
        tensors[name] = tensor
        nbytes += tensor.nbytes
        if nbytes >= _PART_BYTES:
            yield index._replace(tensors=tensors)
            tensors, nbytes = {}, 0
    if tensors:
        yield index._replace(tensors=tensors)


def crc_of_file(path: str, block_bytes: int = 4 << 20, on_block: Callable[[int], None] = lambda count: None) -> int:
    """The CRC-32 of a whole file, read in blocks."""
    with reading(path), opened_regular(path) as file:
        stream = _Stream(file, block_bytes, on_block)
        stream.add_range(0, file.size())
    return stream.crc


def _add_ckpt(stream: _Stream, index: CheckpointIndex) -> str | None:
    if any(tensor.dtype == MAP_TENSOR for tensor in index.tensors.values()):
        return "its CRC does not cover map tensors"
    stream.add_range(0, index.size - TRAILER_SIZE)
    return None


def _add_safetensors(stream: _Stream, index: CheckpointIndex) -> str | None:
    zeros = {}
    for name, tensor in index.tensors.items():
        if tensor.shape == () and tensor.dtype in INTEGERS:
            zeros[name] = stream.integer(tensor)
            if not 0 <= zeros[name] <= _MOST_ZEROS:
                return f"its CRC counts {quoted(name)} as {zeros[name]} zero bytes, which cannot be checked"
    for name in sorted(index.tensors):
        stream.add(name.encode())
        if name in zeros:
            stream.add_zeros(zeros[name])
        else:
            for offset, size in index.tensors[name].extents:
                stream.add_range(offset, size)
    return None


class _Stream:
    """A running CRC over bytes, ranges of a file, and zeros.

    Attributes:
        crc: CRC-32 of all that was added.
    """

    def __init__(self, file: ReadableFile, block_bytes: int, on_block: Callable[[int], None]) -> None:
        self.crc = 0
        self._file = file
        self._buffer = memoryview(bytearray(block_bytes))
        self._on_block = on_block

    def add(self, data: bytes) -> None:
        self.crc = zlib.crc32(data, self.crc)

    def add_range(self, offset: int, size: int) -> None:
        while size:
            block = self._buffer[:size]
            fill(self._file, offset, block)
            self.crc = zlib.crc32(block, self.crc)
            self._on_block(len(block))
            offset += len(block)
            size -= len(block)

    def add_zeros(self, size: int) -> None:
        zeros = memoryview(bytes(min(size, 1 << 20)))
        while size:
            block = zeros[:size]
            self.crc = zlib.crc32(block, self.crc)
            self._on_block(0)
            size -= len(block)

    def integer(self, tensor: Tensor) -> int:
        ((offset, size),) = tensor.extents
        return int.from_bytes(read_range(self._file, offset, size), "little", signed=not tensor.dtype.startswith("U"))
