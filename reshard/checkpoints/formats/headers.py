"""Reading the header of a checkpoint file, or of many at a time where every request takes a round trip."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Optional, Union

from reshard.checkpoints.files import FileHandles, reading_error
from reshard.checkpoints.formats.alike import KnownStructures
from reshard.checkpoints.formats.ckpt_index import read_ckpt_index
from reshard.checkpoints.formats.dtypes import ARCHIVES
from reshard.checkpoints.formats.safetensors_index import read_safetensors_index
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.errors import CheckpointError, DamagedCheckpointError, RetryableError
from reshard.storage import ReadableFile, exists, storage_of
from reshard.storage.other_files import GCM, HEAD, kind_by_head, kind_of

# Reading headers from network storage is waiting, whatever the number of CPUs.
_IN_FLIGHT = 16

Header = Union[CheckpointIndex, DamagedCheckpointError]


def read_headers(
    handles: FileHandles, files: Mapping[int, str], known: KnownStructures, holder: str = "rank"
) -> Iterator[tuple[int, Header]]:
    """Headers of files, or errors of damaged ones, by holder number in the given order.

    Args:
        handles: where to borrow the files from.
        files: path by holder number.
        known: structures of files read before; these files' are added.
        holder: the unit of the numbers in messages.

    Raises:
        CheckpointError: a file cannot be read, is encrypted, or is no checkpoint.
        RetryableError: reading failed in a way that may pass, or a file vanished.
    """

    def read(number: int) -> Header:
        path = files[number]
        try:
            return read_index(handles, path, known)
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
    # The first file is read alone: files of equal structure are only compared with it.
    for number in numbers[:1]:
        yield number, read(number)
    if len(numbers) < 2:
        return
    storage = storage_of(files[numbers[0]])
    if not storage.remote:
        for number in numbers[1:]:
            yield number, read(number)
        return
    with ThreadPoolExecutor(max(_IN_FLIGHT, storage.in_flight)) as pool:
        coming = [(number, pool.submit(read, number)) for number in numbers[1:]]
        try:
            for number, future in coming:
                yield number, future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_WANTED = "give a checkpoint that MindSpore saved: .ckpt or .safetensors"

FORMATS = {".ckpt": "ckpt", ".safetensors": "safetensors"}
"""Format by the ending of a file's name."""

ALL_FORMATS = (*FORMATS.values(), ARCHIVES)
"""Formats of all files that are written; those of archives cannot be read without their metadata."""


def format_of(path: str) -> str:
    """``"ckpt"`` or ``"safetensors"``, by the file's ending.

    Raises:
        CheckpointError: the ending is neither.
    """
    found = FORMATS.get(os.path.splitext(path)[1])
    if found is None:
        kind = kind_of(path)
        if kind is not None:
            raise CheckpointError(f"{path}: is {_not_ours(kind)}", file=path, hint=_WANTED)
        raise CheckpointError(
            f"{path}: is no checkpoint file by its name",
            file=path,
            hint="checkpoint files end in .ckpt or .safetensors",
        )
    return found


def _not_ours(kind: str) -> str:
    return f"{kind}; not a MindSpore checkpoint"


def read_index(handles: FileHandles, path: str, known: Optional[KnownStructures] = None) -> CheckpointIndex:
    """Read the headers of a checkpoint file.

    Args:
        handles: where to borrow the file from.
        path: the file.
        known: structures of files read before; this file's is added.

    Raises:
        DamagedCheckpointError: the file is truncated or broken.
        CheckpointError: it cannot be read, is encrypted, or is no checkpoint.
        RetryableError: reading failed in a way that may pass.
    """
    format = format_of(path)
    try:
        with handles.borrow(path) as file:
            if not file.status().regular:
                raise CheckpointError(f"{path}: is not a file", file=path, hint="give a copy that is an ordinary file")
            size = file.size()
            index = None if known is None else known.find(file, format, size)
            if index is None:
                index = _read(file, format, size)
                if known is not None:
                    known.add(file, index)
            index.cipher = file.cipher
            return index
    except OSError as error:
        raise reading_error(path, error) from error


def _read(file: ReadableFile, format: str, size: int) -> CheckpointIndex:
    try:
        return (read_ckpt_index if format == "ckpt" else read_safetensors_index)(file, size)
    except DamagedCheckpointError as error:
        path = file.path
        if file.cipher not in (None, GCM):
            error.message += f" (after decryption with {file.cipher}, of which nothing tells damage from a wrong key)"
        kind = kind_by_head(file.read(0, HEAD))
        if kind is None:
            raise
        raise DamagedCheckpointError(f"{path}: is {_not_ours(kind)}", file=path, hint=_WANTED) from error
