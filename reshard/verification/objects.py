"""A checkpoint's contents beside tensors, compared with the source: pickled objects and the state of the training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Callable

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, StoredObject
from reshard.checkpoints.formats.archives import Archive
from reshard.errors import DamagedCheckpointError
from reshard.storage import read_range, reading
from reshard.verification.boxes import whole_box
from reshard.verification.difference import Difference
from reshard.verification.stored import Source, value_content

_BLOCK = 1 << 20


def object_differences(
    source: Checkpoint, target: Checkpoint, admit: Callable[[str], bool], handles: FileHandles
) -> Iterator[Difference]:
    """Every object that differs, or that only one of two checkpoints has.

    Args:
        source: the converted checkpoint.
        target: the written one, of a form that holds objects.
        admit: whether an object was converted, by name.
        handles: open files.

    Raises:
        ReshardError: an object cannot be read, or the source's is damaged.
    """
    expected = {name: stored for name, stored in source.objects.items() if admit(name)}
    for name in sorted({*expected, *target.objects}):
        written = target.objects.get(name)
        files = () if written is None else (os.path.relpath(written.path, target.place),)
        if written is None:
            yield Difference("missing", name, (), "is an object of the source, and in no file")
        elif name not in expected:
            yield Difference("extra", name, (), "is an object that the source lacks", files)
        else:
            original = _read(expected[name], handles)
            try:
                same = _same(original, _read(written, handles))
            except DamagedCheckpointError as error:
                yield Difference("file", None, (), error.message, files)
                continue
            if not same:
                yield Difference("content", name, (), "differs from the source", files)


def _read(stored: StoredObject, handles: FileHandles) -> tuple[bytes, bytes, bool]:
    """The bytes of an object, those of its pickle, and whether it holds nothing else, such as tensors."""
    with reading(stored.path), contextlib.closing(handles.open_file(stored.path)) as file:
        data = read_range(file, stored.offset, stored.length)
        if not stored.archived:
            return data, data, True
        archive = Archive(file, stored.offset, stored.length)
        archive.check(memoryview(bytearray(_BLOCK)))
        return data, archive.pickle(), "data/0" not in archive


def _same(first: tuple[bytes, bytes, bool], second: tuple[bytes, bytes, bool]) -> bool:
    return first[0] == second[0] or (first[1] == second[1] and first[2] and second[2])


def training_differences(source: Checkpoint, target: Source, handles: FileHandles) -> Iterator[Difference]:
    """Every number in the target's metadata of the training that is another one in the source's.

    A source without such metadata has values, which were compared with the target's.
    """
    for name, recorded in target.checkpoint.training.items():
        expected = source.training.get(name)
        if not source.training and name in target.values:
            value = value_content(target.indexes, name, target.values[name][0])
            if value.dtype.startswith(("Int", "UInt")):
                data = value.read(whole_box(value.shape), handles).tobytes()
                expected = int.from_bytes(data, "little", signed=value.dtype.startswith("Int"))
        if None not in (recorded, expected) and recorded != expected:
            detail = f"is {recorded!r} in the metadata of the training, and {expected!r} {target.origin}"
            yield Difference("content", name, (), detail)
