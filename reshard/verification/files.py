"""Whole files of a checkpoint: their recorded CRCs, and the safetensors library's reading of them."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType

from reshard import asked
from reshard.checkpoints import CheckpointIndex, FileHandles
from reshard.errors import InputError, RetryableError
from reshard.forms.registry import form_named
from reshard.forms.request import Means, Request
from reshard.storage import UnfitError, opened_regular, read_range
from reshard.strategies import Strategy
from reshard.text.messages import Report, one_line, plural, quoted, some_names
from reshard.verification.reading import Difference, Reading
from reshard.verification.stored import Source, files_read, stored_source

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


def read_sound(
    read: Callable[[Mapping[str, str]], Source],
    means: Reading,
    damage: Mapping[str, str] = MappingProxyType({}),
) -> Source:
    """Read a step without the files that do not match their recorded CRC.

    Only files to read are checked: of several replicas the lowest rank's. If it is damaged, the next replica
    replaces it and is checked.

    Args:
        read: reads a step; its argument is the damage of files, by path.
        means: files, report, threads and memory.
        damage: damage that is already known, by path.

    Raises:
        ReshardError: as `read`, or a file cannot be read.
    """
    damaged = dict(damage)
    while True:
        source = read(damaged)
        checkpoint = source.checkpoint
        for rank, path in checkpoint.files.items() if form_named(checkpoint.form).options.by_rank else ():
            if path in damaged:
                means.report.warn(f"{damaged[path]}; rank {rank} counts as absent at {checkpoint.label}")
        new_damage = means.damaged(files_read(source)) if means.crc else {}
        if not new_damage:
            return source
        damaged.update(new_damage)


def read_written(
    directory: str, form: str, handles: FileHandles, files: Collection[str] | None = None
) -> tuple[Source | None, list[Difference]]:
    """Read a converted checkpoint of any form except rank directories; ``files`` are relative to the directory.

    Readers tolerate known defects of other writers. Files written here have none, so every tolerated defect is a
    difference.

    Returns:
        The checkpoint, or None if its reader refuses it; and the differences of whole files.

    Raises:
        RetryableError: reading failed.
    """
    try:
        checkpoint = form_named(form).read(
            Request.of_source(asked.Source(directory), form_named(form)), Means(handles, Report())
        )
        source = stored_source(checkpoint, Strategy.none())
        problems = form_named(form).check_written(directory, checkpoint)
        differences = [Difference("file", None, (), text, (name,)) for name, text in problems]
    except InputError as error:
        return None, [Difference("file", None, (), error.message)]
    indexes = {os.path.relpath(index.path, directory): index for index in checkpoint.indexes.values()}
    for name, index in indexes.items():
        differences += [Difference("file", None, (), text, (name,)) for text in library_differences(index)]
    read_paths = {os.path.relpath(path, directory) for path in checkpoint.files.values()}
    if files is not None:
        marks = form_named(form).marks(sorted(files))
        unread, foreign = sorted(set(files) - read_paths), sorted(read_paths.difference(files, marks))
        if unread:
            differences.append(Difference("file", None, (), "the form's reader skips it", (*unread,)))
        if foreign:
            differences.append(
                Difference("file", None, (), "is not of this conversion, but loaders read it", (*foreign,))
            )
    return source, differences
