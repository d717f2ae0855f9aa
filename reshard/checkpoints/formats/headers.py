"""Readers of the header of one checkpoint file, or of many concurrently on remote storage."""

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

# Reading headers from network storage waits for round trips; more threads than CPUs help.
_IN_FLIGHT = 16

Header = Union[CheckpointIndex, DamagedCheckpointError]


def read_headers(
    handles: FileHandles, files: Mapping[int, str], structures: KnownStructures, holder: str = "rank"
) -> Iterator[tuple[int, Header]]:
    """Headers of files, or errors of damaged ones, by holder number in the given order.

    Args:
        handles: where to borrow the files from.
        files: path by holder number.
        structures: structures of files read before; these files' are added.
        holder: the unit of the numbers in messages.

    Raises:
        CheckpointError: a file cannot be read, is encrypted, or is not a checkpoint.
        RetryableError: reading failed in a way that may pass, or a file vanished.
    """

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
    storage = storage_of(files[numbers[0]])
    if not storage.remote:
        for number in numbers[1:]:
            yield number, read(number)
        return
    with ThreadPoolExecutor(max(_IN_FLIGHT, storage.in_flight)) as pool:
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

ALL_FORMATS = (*FORMATS.values(), ARCHIVES)
"""Formats of all written files; files of archives cannot be read without their metadata."""


def format_of(path: str) -> str:
    """``"ckpt"`` or ``"safetensors"``, by the file's ending.

    Raises:
        CheckpointError: the ending is neither.
    """
    format = FORMATS.get(os.path.splitext(path)[1])
    if format is None:
        kind = kind_of(path)
        if kind is not None:
            raise CheckpointError(f"{path}: is {_not_ours(kind)}", file=path, hint=_HINT)
        raise CheckpointError(
            f"{path}: is no checkpoint file by its name",
            file=path,
            hint="checkpoint files end in .ckpt or .safetensors",
        )
    return format


def _not_ours(kind: str) -> str:
    return f"{kind}; not a MindSpore checkpoint"


def read_index(handles: FileHandles, path: str, structures: Optional[KnownStructures] = None) -> CheckpointIndex:
    """Read the headers of a checkpoint file.

    Args:
        handles: where to borrow the file from.
        path: the file.
        structures: structures of files read before; this file's is added.

    Raises:
        DamagedCheckpointError: the file is truncated or broken.
        CheckpointError: it cannot be read, is encrypted, or is not a checkpoint.
        RetryableError: reading failed in a way that may pass.
    """
    format = format_of(path)
    try:
        with handles.borrow(path) as file:
            if not file.status().regular:
                raise CheckpointError(f"{path}: is not a file", file=path, hint="give a copy that is an ordinary file")
            size = file.size()
            index = None if structures is None else structures.find(file, format, size)
            if index is None:
                index = _read(file, format, size)
                if structures is not None:
                    structures.add(file, index)
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
            error.message += f" (after decryption with {file.cipher}: damaged, or the key is wrong)"
        kind = kind_by_head(file.read(0, HEAD))
        if kind is None:
            raise
        raise DamagedCheckpointError(f"{path}: is {_not_ours(kind)}", file=path, hint=_HINT) from error
