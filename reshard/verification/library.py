"""A second opinion of files of safetensors: that of the library with which loaders open them.

Whoever writes files and reads them back with code of his own may misunderstand the format twice in the same way.
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
from reshard.text.wording import one_line, plural, quoted, some_names

# Bytes in which a file says how long its header is.
_LENGTH = 8
# Types that every version of the library knows; said once more, so that a mistake in what the writer goes by is seen.
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
    """In what the safetensors library finds something else in a file, or refuses it; a line each.

    Args:
        index: what the file holds, as it is read here; other files than of safetensors are passed over, and so are
            those with types that not every version of the library knows.
    """
    tensors = index.tensors
    if index.format != "safetensors" or not all(tensor.dtype in _TYPES for tensor in tensors.values()):
        return
    # Loaded only here: nothing else at run time needs it.
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
        told = some_names([quoted(name) for name in wrong], 3)
        yield f"{index.path}: the safetensors library finds {plural(len(wrong), 'tensor')} otherwise: {told}"


@contextlib.contextmanager
def _on_disk(path: str) -> Iterator[str]:
    """A file that the library can open: of an object one of its size, with its header and nothing else.

    Raises:
        UnfitError: it is no object of its own.
        RetryableError: the file cannot be written.
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
                # Takes no room: nothing is written there.
                file.truncate(size)
        except OSError as error:
            raise RetryableError(
                f"{directory}: cannot be written: {error.strerror or error}",
                file=directory,
                hint="set TMPDIR to a directory with some room; the header of what is verified is put there",
            ) from error
        yield name
