"""Whole files of a checkpoint: their recorded CRCs, the safetensors library's reading of them, and a manifest."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

from reshard import asked
from reshard.checkpoints import CheckpointIndex, FileHandles, read_index, unchecked
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.formats.crc import check_crcs, crc_of_file
from reshard.checkpoints.formats.dtypes import ARCHIVES, PT
from reshard.checkpoints.placed import PlacedFile
from reshard.errors import CheckpointError, InputError, RetryableError
from reshard.forms.form import ReadRequest
from reshard.forms.ranks.tree import find_checkpoints
from reshard.forms.registry import form_named
from reshard.records import DoneRecord, FinishingRecord, Manifest
from reshard.storage import (
    UnfitError,
    is_directory,
    names_in,
    opened_regular,
    read_range,
    reading,
    status_at,
    storage_of,
)
from reshard.strategies import Strategy
from reshard.text.messages import Report, one_line, plural, quoted, some_names
from reshard.threads import thread_pool
from reshard.verification.reading import Difference, Means
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


_MIN_BLOCK, _MAX_BLOCK = 4 << 10, 8 << 20


class RecordedCrcs:
    """Compares files with the CRCs that they record; reads each file once."""

    def __init__(self, means: Means, report: Report) -> None:
        self._means = means
        self._report = report
        self._checked: set[object] = set()

    def damaged(self, indexes: Iterable[CheckpointIndex]) -> dict[str, str]:
        """The damage of files, by path, for damaged files that were not checked before."""
        new = unchecked(indexes, self._checked)
        if not new:
            return {}
        means = self._means
        threads = means.jobs * storage_of(new[0].path).in_flight
        block = max(_MIN_BLOCK, min(_MAX_BLOCK, means.max_memory // threads))
        with means.counting(sum(index.check_bytes for index in new), "checking CRCs"):
            checks = check_crcs(means.handles, new, threads, block, means.progress.wrote)
        for note in checks.notes():
            self._report.note(note)
        return {path: error.message for path, error in checks.damaged.items()}


def read_sound(
    read: Callable[[Mapping[str, str]], Source],
    crcs: RecordedCrcs | None,
    report: Report,
    damage: Mapping[str, str] = MappingProxyType({}),
) -> Source:
    """Read a step without the files that do not match their recorded CRC.

    Only files to read are checked: of several replicas the lowest rank's. If it is damaged, the next replica
    replaces it and is checked.

    Args:
        read: reads a step; its argument is the damage of files, by path.
        crcs: checks CRCs; None for no check.
        report: gets warnings about damaged files.
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
                report.warn(f"{damaged[path]}; rank {rank} counts as absent at {checkpoint.label}")
        new_damage = {} if crcs is None else crcs.damaged(files_read(source))
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
        checkpoint = form_named(form).read(ReadRequest(asked.Source(directory), handles, Report()))
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


_BLOCK = 4 << 20
_PROGRESS = threading.Lock()


def compare_with_manifest(directory: str, manifest: Manifest, means: Means) -> list[Difference]:
    """Compare a directory with its manifest.

    Compares every file's size and headers, and its contents if the manifest has their checksum. For forms other than
    rank directories, the index and other metadata must also agree with the files.

    Returns:
        Every difference, by rank, or by file if the form has no ranks.

    Raises:
        RetryableError: reading failed.
    """
    block = max(4096, min(_BLOCK, means.max_memory // means.jobs))
    by_rank = form_named(manifest.record.form).options.by_rank

    def compare(file: DoneRecord) -> list[Difference]:
        path = os.path.join(directory, file.file)
        ranks, files = ((file.rank,), ()) if by_rank else ((), (file.file,))
        return [Difference("file", None, ranks, text, files) for text in _differences(path, file, means, block)]

    nbytes = sum(file.size for file in manifest.files if file.crc32 is not None)
    with means.counting(nbytes, "checking sums"), thread_pool(means.jobs) as pool:
        differences = [difference for some in pool.map(compare, manifest.files) for difference in some]
    if by_rank:
        return [*differences, *_foreign_ranks(directory, manifest)]
    differences += [
        Difference("file", None, (), text, (file.file,))
        for file in manifest.finishing
        for text in _finishing_differences(os.path.join(directory, file.file), file)
    ]
    for name in manifest.beside:
        # Only their existence is checked: users may edit these files.
        if status_at(os.path.join(directory, name)) is None:
            differences.append(Difference("file", None, (), f"{os.path.join(directory, name)} is missing", (name,)))
    differences += _foreign_files(directory, manifest)
    if not differences:
        names = [file.file for file in manifest.files]
        checkpoint, differences = read_written(directory, manifest.record.form, means.handles, names)
        if checkpoint is not None:
            differences += _archives(checkpoint.checkpoint, means.handles)
    return differences


def _archives(checkpoint: Checkpoint, handles: FileHandles) -> Iterator[Difference]:
    """Files whose archives lack tensors of the metadata."""
    paths = {index.path for index in checkpoint.indexes.values() if index.format == ARCHIVES}
    for path in sorted(paths):
        try:
            with reading(path), handles.borrow(path) as file:
                if isinstance(file, PlacedFile):
                    file.locate_all()
        except CheckpointError as error:
            yield Difference("file", None, (), error.message, (os.path.relpath(path, checkpoint.place),))


def _differences(path: str, file: DoneRecord, means: Means, block: int) -> Iterator[str]:
    wrong = _size_differences(path, file.size)
    if wrong:
        yield from wrong
        return
    # Archives have no header of their own; `_archives` compares them with the metadata.
    if not path.endswith((f".{ARCHIVES}", f".{PT}")):
        try:
            index = read_index(means.handles, path)
        except CheckpointError as error:
            yield error.message
            return
        if file.headers is not None and _header_digest(index, means.handles) != file.headers:
            yield f"{path}: names, types or shapes of its tensors differ from those written"
        yield from library_differences(index)
    if file.crc32 is not None:

        def count_read(count: int) -> None:
            with _PROGRESS:
                means.progress.wrote(count)

        yield from _crc_differences(path, crc_of_file(path, block, count_read), file.crc32)


def _finishing_differences(path: str, file: FinishingRecord) -> Iterator[str]:
    yield from _size_differences(path, file.size) or _crc_differences(path, crc_of_file(path), file.crc32)


def _size_differences(path: str, size: int) -> list[str]:
    status = status_at(path)
    if status is None:
        return [f"{path} is missing"]
    return [] if status.size == size else [f"{path} has {status.size} bytes, not {size}"]


def _crc_differences(path: str, crc: int, recorded: str) -> list[str]:
    return [] if crc == int(recorded, 16) else [f"{path}: its checksum is {crc:08x}, not {recorded}"]


def _foreign_files(directory: str, manifest: Manifest) -> Iterator[Difference]:
    """Weights and steps beside the manifest's files that it does not list."""
    recorded = {file.file for file in manifest.files}
    places = {os.path.dirname(name) for name in recorded}
    paths = {place: os.path.join(directory, place) for place in places}
    neighbours = [
        os.path.join(place, name) for place, path in paths.items() if is_directory(path) for name in names_in(path)
    ]
    weights = {
        name for name in neighbours if name.endswith(".safetensors") and not os.path.basename(name).startswith(".")
    }
    steps = {os.path.relpath(step.path, directory) for step in form_named(manifest.record.form).steps(directory)}
    # A step may have a directory for every rank.
    steps -= {part for place in places for part in (place, os.path.dirname(place))}
    for name in sorted([*weights.difference(recorded), *steps]):
        yield Difference("file", None, (), f"{os.path.join(directory, name)} is not of this conversion", (name,))


def _header_digest(index: CheckpointIndex, handles: FileHandles) -> str:
    """A digest of all bytes that are not tensor contents, in file order; see `records.header_digest`."""
    hashed = hashlib.sha256()
    position = 0
    with reading(index.path), handles.borrow(index.path) as file:
        for offset, size in itertools.chain(index.extents(), [(index.size, 0)]):
            hashed.update(read_range(file, position, offset - position))
            position = offset + size
    return hashed.hexdigest()[:16]


def _foreign_ranks(directory: str, manifest: Manifest) -> Iterator[Difference]:
    """Checkpoints in rank directories that the manifest does not list."""
    recorded = {os.path.join(directory, file.file) for file in manifest.files}
    try:
        tree = find_checkpoints(directory)
    except CheckpointError:
        # No checkpoints, or contradicting names: the recorded files were already compared by path.
        return
    for candidate in tree.files:
        if candidate.path not in recorded:
            yield Difference("file", None, (candidate.rank,), f"{candidate.path} is not of this conversion")
