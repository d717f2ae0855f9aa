"""A check of .safetensors files with the library that loaders use.

This package's own writer and reader could share a misunderstanding of the format.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Iterator

from reshard.checkpoints import CheckpointIndex
from reshard.errors import RetryableError
from reshard.storage import UnfitError, opened_regular, read_range
from reshard.text.messages import one_line, plural, quoted, some_names

# Bytes of the header length at the beginning of a file.
_LENGTH = 8
# Types that every version of the library reads. The table is independent, to find mistakes in the writer's.
_TYPES = {
    "Bool": "BOOL",
    "Int4": "I8",
    "Int8": "I8",
    "UInt8": "U8",
    "Int16": "I16",
    "UInt16": "U16",
    "Int32": "I32",
    "UInt32": "U32",
    "Int64": "I64",
    "UInt64": "U64",
    "Float16": "F16",
    "BFloat16": "BF16",
    "Float32": "F32",
    "Float64": "F64",
}


def library_differences(index: CheckpointIndex) -> Iterator[str]:
    """Differences between the safetensors library's reading of a file and ours, or its refusal; a line each.

    Args:
        index: the header in our reading. Files of another format, or with types that some versions of the library
            refuse, are skipped.
    """
    tensors = index.tensors
    if index.format != "safetensors" or not all(tensor.dtype in _TYPES for tensor in tensors.values()):
        return
    # Imported only here: no other command needs it.
    from safetensors import SafetensorError, safe_open

    try:
        with _on_disk(index.path) as path, safe_open(path, "np") as file:
            names = set(file.keys())
            wrong = sorted(names.symmetric_difference(tensors))
            for name in sorted(names.intersection(tensors)):
                entry, tensor = file.get_slice(name), tensors[name]
                if (entry.get_dtype(), tuple(entry.get_shape())) != (_TYPES[tensor.dtype], tensor.dims):
                    wrong.append(name)
    except (SafetensorError, OSError, UnfitError) as error:
        yield f"{index.path}: the safetensors library does not open it: {one_line(str(error))}"
        return
    if wrong:
        names_shown = some_names([quoted(name) for name in wrong], 3)
        yield f"{index.path}: the safetensors library reads {plural(len(wrong), 'tensor')} differently: {names_shown}"


@contextlib.contextmanager
def _on_disk(path: str) -> Iterator[str]:
    """A file that the library can open; for an object, a sparse file of its size with its header.

    Raises:
        UnfitError: the path is not a regular file or object.
        RetryableError: the sparse file cannot be written.
        OSError: the object cannot be read.
    """
    with opened_regular(path) as source:
        if source.descriptor is not None:
            yield path
            return
        size = source.size()
        (length,) = struct.unpack("<Q", read_range(source, 0, _LENGTH))
        header = read_range(source, 0, _LENGTH + min(length, size - _LENGTH))
    with tempfile.TemporaryDirectory() as directory:
        name = os.path.join(directory, "header.safetensors")
        try:
            with open(name, "wb") as file:
                file.write(header)
                # Sparse: takes no disk space.
                file.truncate(size)
        except OSError as error:
            raise RetryableError(
                f"{directory}: cannot be written: {error.strerror or error}",
                file=directory,
                hint="set TMPDIR to a directory with free space, for the headers of the verified files",
            ) from error
        yield name
