"""A converted checkpoint compared with its manifest, without its source."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from reshard.checkpoints import FileHandles, read_index
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.formats.crc import crc_of_file
from reshard.checkpoints.formats.dtypes import ARCHIVES, PT
from reshard.checkpoints.placed import PlacedFile
from reshard.errors import CheckpointError
from reshard.forms.ranks.tree import find_checkpoints
from reshard.forms.registry import form_named
from reshard.records import DoneRecord, Manifest
from reshard.records.ledger import stored_header_digest
from reshard.storage import is_directory, names_in, reading, status_at
from reshard.threads import thread_pool
from reshard.verification.files import library_differences, read_written
from reshard.verification.reading import Difference, Reading

_BLOCK = 4 << 20
_PROGRESS = threading.Lock()


def compare_with_manifest(directory: str, manifest: Manifest, means: Reading) -> list[Difference]:
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
    for finishing in manifest.finishing:
        path = os.path.join(directory, finishing.file)
        wrong = _size_differences(path, finishing.size)
        wrong = wrong or _crc_differences(path, crc_of_file(path), finishing.crc32)
        differences += [Difference("file", None, (), text, (finishing.file,)) for text in wrong]
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


def _differences(path: str, file: DoneRecord, means: Reading, block: int) -> Iterator[str]:
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
        if file.headers is not None and stored_header_digest(index, means.handles) != file.headers:
            yield f"{path}: names, types or shapes of its tensors differ from those written"
        yield from library_differences(index)
    if file.crc32 is not None:

        def count_read(count: int) -> None:
            with _PROGRESS:
                means.progress.wrote(count)

        yield from _crc_differences(path, crc_of_file(path, block, count_read), file.crc32)


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
