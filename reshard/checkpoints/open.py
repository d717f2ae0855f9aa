"""Reading a checkpoint file's index, in the format that its ending names."""

from __future__ import annotations

import os
import stat
from typing import Optional

from reshard.checkpoints.alike import KnownStructures
from reshard.checkpoints.ckpt_index import read_ckpt_index
from reshard.checkpoints.files import FileHandles, reading_error
from reshard.checkpoints.safetensors_index import read_safetensors_index
from reshard.checkpoints.tensors import CheckpointIndex
from reshard.errors import CheckpointError

FORMATS = {".ckpt": "ckpt", ".safetensors": "safetensors"}
"""Format by the ending of a file's name."""


def format_of(path: str) -> str:
    """``"ckpt"`` or ``"safetensors"``, by the file's ending.

    Raises:
        CheckpointError: the ending is neither.
    """
    found = FORMATS.get(os.path.splitext(path)[1])
    if found is None:
        raise CheckpointError(
            f"{path}: is no checkpoint file by its name",
            file=path,
            hint="checkpoint files end in .ckpt or .safetensors",
        )
    return found


def read_index(handles: FileHandles, path: str, known: Optional[KnownStructures] = None) -> CheckpointIndex:
    """Read what a checkpoint file holds; contents are not read.

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
    read = read_ckpt_index if format == "ckpt" else read_safetensors_index
    try:
        with handles.borrow(path) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: is not a file", file=path, hint="give a copy that is an ordinary file")
            if known is None:
                return read(fd, path, status.st_size)
            index = known.find(fd, path, format, status.st_size)
            if index is None:
                index = read(fd, path, status.st_size)
                known.add(fd, index)
            return index
    except OSError as error:
        raise reading_error(path, error) from error
