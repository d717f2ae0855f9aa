"""Readers of the header of one checkpoint file, or of many concurrently on remote storage.

Ranks of one stage save the same tensors in the same shapes, so except for tensor contents their files are equal byte
for byte. Comparing these bytes is far cheaper than parsing them, and files of equal structure share one description,
so a thousand ranks take the memory of a few.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import operator
import os
from array import array
from collections.abc import Iterator, Mapping

from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.ckpt_index import CRC_MARK, TRAILER_SIZE, read_ckpt_index
from reshard.checkpoints.formats.dtypes import ARCHIVES, PT
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.errors import CheckpointError, DamagedCheckpointError, RetryableError
from reshard.storage import FileStatus, ReadableFile, costs_of, exists, read_each, read_range, reading
from reshard.storage.files import HEAD, kind_by_head, kind_of
from reshard.threads import ThreadLock, thread_pool

# Reading headers from network storage waits for round trips; more threads than CPUs help.
_IN_FLIGHT = 16

Header = CheckpointIndex | DamagedCheckpointError


def read_headers(handles: FileHandles, files: Mapping[int, str], holder: str = "rank") -> Iterator[tuple[int, Header]]:
    """Headers of files, or errors of damaged ones, by holder number in the given order.

    ``holder`` is the unit of the numbers in messages.
    """
    structures = KnownStructures(handles)

    def read(number: int) -> Header:
        path = files[number]
        try:
            return read_index(handles, path, structures)
        except DamagedCheckpointError as error:
            return error
        except CheckpointError as error:
            if exists(path):
                raise
            raise RetryableError(
                f"{path}: vanished while the checkpoint was read ({holder} {number})",
                file=path,
                rank=number,
                hint="keep the job that saves checkpoints from removing this step, then give the same command again",
            ) from error

    numbers = list(files)
    # The first file alone: files of equal structure are then only compared with it.
    for number in numbers[:1]:
        yield number, read(number)
    if len(numbers) < 2:
        return
    costs = costs_of(files[numbers[0]])
    if not costs.remote:
        for number in numbers[1:]:
            yield number, read(number)
        return
    with thread_pool(max(_IN_FLIGHT, costs.in_flight)) as pool:
        pending = [(number, pool.submit(read, number)) for number in numbers[1:]]
        try:
            for number, future in pending:
                yield number, future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_HINT = "pass a checkpoint that MindSpore saved: .ckpt or .safetensors"

FORMATS = {".ckpt": "ckpt", ".safetensors": "safetensors"}
"""Format by the ending of a file's name."""

ALL_FORMATS = (*FORMATS.values(), ARCHIVES, PT)
"""Formats of all written files; files of archives cannot be read without their metadata."""


def format_of(path: str) -> str:
    """``"ckpt"`` or ``"safetensors"``, by the file's ending; an error for others."""
    directory, name = os.path.split(path)
    format = FORMATS.get(os.path.splitext(name)[1])
    if format is None:
        if name.endswith((f".{ARCHIVES}", ".metadata")):
            raise CheckpointError(
                f"{path}: is a part of a distributed checkpoint of PyTorch",
                file=path,
                hint=f"give its directory: {directory or os.curdir}",
            )
        if name in ("model_optim_rng.pt", "distrib_optim.pt"):
            raise CheckpointError(
                f"{path}: is a part of one rank of a checkpoint of Megatron",
                file=path,
                hint=f"give the directory of all ranks: {os.path.dirname(os.path.dirname(os.path.abspath(path)))}",
            )
        kind = kind_of(path)
        if kind is not None:
            raise CheckpointError(f"{path}: is {_not_ours(kind)}", file=path, hint=_HINT)
        raise CheckpointError(
            f"{path}: is not named .ckpt or .safetensors",
            file=path,
            hint="pass a file of a checkpoint, or the directory of one",
        )
    return format


def _not_ours(kind: str) -> str:
    return f"{kind}; not a MindSpore checkpoint"


def read_index(handles: FileHandles, path: str, structures: KnownStructures | None = None) -> CheckpointIndex:
    """Read the headers of a checkpoint file; its structure is added to ``structures``.

    Raises:
        DamagedCheckpointError: the file is truncated or broken.
        CheckpointError: it cannot be read, is encrypted, or is not a checkpoint.
        RetryableError: reading failed in a way that may pass.
    """
    format = format_of(path)
    with reading(path), handles.borrow(path) as file:
        if not file.status().regular:
            raise CheckpointError(f"{path}: is not a file", file=path, hint="give a copy that is an ordinary file")
        size = file.size()
        index = None if structures is None else structures.find(file, format, size)
        if index is None:
            index = _read(file, format, size)
            if structures is not None:
                structures.add(file, index)
        return index


def _read(file: ReadableFile, format: str, size: int) -> CheckpointIndex:
    try:
        if format == "ckpt":
            return read_ckpt_index(file, size)
        # Loaded only here: most source files are .ckpt.
        from reshard.checkpoints.formats.safetensors_index import read_safetensors_index

        return read_safetensors_index(file, size)
    except DamagedCheckpointError as error:
        path = file.path
        kind = kind_by_head(file.read(0, HEAD))
        if kind is None:
            raise
        raise DamagedCheckpointError(f"{path}: is {_not_ours(kind)}", file=path, hint=_HINT) from error


# Maximum structures to compare a file with; in a de-duplicated save every file has its own.
_MOST_STRUCTURES = 16
# Gaps up to this size are cheaper to read than to skip; and the limit of one read.
_NEAR = 32 << 10
_MOST_AT_ONCE = 1 << 20


class _Structure:
    """The structure of one file; its headers are read again for the first comparison."""

    def __init__(self, example: CheckpointIndex, status: FileStatus) -> None:
        self.example = example
        self._status = status
        self._gaps: list[tuple[int, int, array[int], array[int]]] = []
        self._digests: list[bytes] | None = None

    def digests(self, handles: FileHandles) -> list[bytes]:
        """Digests of all bytes but tensor contents, a read each."""
        if self._digests is None:
            with handles.borrow(self.example.path) as file:
                status = file.status()
                if (status.inode, status.modified) != (self._status.inode, self._status.modified):
                    raise OSError(errno.ESTALE, "changed since it was parsed")
                self._gaps = list(_gaps(self.example, max(_NEAR, costs_of(self.example.path).worth_skipping)))
                self._digests = list(self.digests_of(file))
        return self._digests

    def digests_of(self, file: ReadableFile) -> Iterator[bytes]:
        """Those of the same bytes of another file of this size, after `digests`."""
        contents = read_each(file, [(offset, length) for offset, length, _, _ in self._gaps])
        for data, (_, _, starts, sizes) in zip(contents, self._gaps):
            parts = b"".join(data[start : start + size] for start, size in zip(starts, sizes))
            yield hashlib.blake2b(parts, digest_size=32).digest()


class KnownStructures:
    """The structures of files read before, by format and size; thread-safe."""

    def __init__(self, handles: FileHandles) -> None:
        self._handles = handles
        self._lock = ThreadLock()
        self._known: dict[tuple[str, int], list[_Structure]] = {}

    def find(self, file: ReadableFile, format: str, size: int) -> CheckpointIndex | None:
        """The index of a file with a known structure, or None."""
        with self._lock:
            structures = tuple(self._known.get((format, size), ()))
        for structure in structures:
            try:
                # Only the first thread reads the example; all others need the result.
                with self._lock:
                    expected = structure.digests(self._handles)
            except (OSError, RetryableError):
                # The example vanished: parse this file instead. The example's reader reports that error.
                continue
            if not all(map(operator.eq, structure.digests_of(file), expected)):
                continue
            example = structure.example
            crc = example.crc
            if crc is not None and format == "ckpt":
                trailer = read_range(file, size - TRAILER_SIZE, TRAILER_SIZE)
                if not trailer.startswith(CRC_MARK):
                    continue
                crc = int.from_bytes(trailer[len(CRC_MARK) :], "big")
            return CheckpointIndex(file.path, format, size, example.tensors, crc, example.metadata)
        return None

    def add(self, file: ReadableFile, index: CheckpointIndex) -> None:
        structure = _Structure(index, file.status())
        with self._lock:
            structures = self._known.setdefault((index.format, index.size), [])
            structures.insert(0, structure)
            del structures[_MOST_STRUCTURES:]


def _gaps(index: CheckpointIndex, near: int) -> Iterator[tuple[int, int, array[int], array[int]]]:
    """Reads that cover all bytes but tensor contents: offset and length, starts and sizes of the parts in it.

    A read includes gaps of up to ``near`` bytes.
    """
    first = last = 0
    starts, sizes = array("Q"), array("Q")
    for start, stop in _between(index):
        if starts and not (start - last <= near and stop - first <= _MOST_AT_ONCE):
            yield first, last - first, starts, sizes
            starts, sizes = array("Q"), array("Q")
        if not starts:
            first = start
        starts.append(start - first)
        sizes.append(stop - start)
        last = stop
    if starts:
        yield first, last - first, starts, sizes


def _between(index: CheckpointIndex) -> Iterator[tuple[int, int]]:
    """Ranges without tensor contents, in pieces of limited size."""
    end = index.size - (TRAILER_SIZE if index.crc is not None and index.format == "ckpt" else 0)
    position = 0
    for offset, size in itertools.chain(index.extents(), [(end, 0)]):
        for start in range(position, offset, _MOST_AT_ONCE):
            yield start, min(start + _MOST_AT_ONCE, offset)
        position = offset + size
