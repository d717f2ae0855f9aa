"""Whether a target directory matches its manifest, without source or strategies."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from reshard.checkpoints import CheckpointIndex, FileHandles, crc_of_file, read_index, reading_error
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.formats.dtypes import ARCHIVES
from reshard.checkpoints.placed import PlacedFile
from reshard.errors import CheckpointError
from reshard.forms.ranks import find_checkpoints
from reshard.forms.registry import form_named
from reshard.records import FinishingRecord, Manifest, ManifestFile
from reshard.storage import is_directory, names_in, read_range, status_at
from reshard.verification.difference import Difference
from reshard.verification.library import library_differences
from reshard.verification.reading import Means
from reshard.verification.sources import read_written

_BLOCK = 4 << 20
_PROGRESS = threading.Lock()


def compare_with_manifest(directory: str, manifest: Manifest, means: Means) -> list[Difference]:
    """Compare a directory with its manifest.

    Every file's size and headers are compared; contents too if the manifest has their checksum. For forms other than
    rank directories, the index and other metadata are compared in full, and must agree with the files.

    Args:
        directory: the manifest's directory.
        manifest: the manifest, or a part of it.
        means: files, threads and memory.

    Returns:
        Every difference, by rank, or by file if the form has no ranks.

    Raises:
        RetryableError: reading failed.
    """
    means.progress.begin(sum(file.size for file in manifest.files if file.crc32 is not None), "checking sums")
    block = max(4096, min(_BLOCK, means.max_memory // means.jobs))
    by_rank = form_named(manifest.plan.form).options.by_rank

    def compare(file: ManifestFile) -> list[Difference]:
        path = os.path.join(directory, file.file)
        ranks, files = ((file.rank,), ()) if by_rank else ((), (file.file,))
        return [Difference("file", None, ranks, text, files) for text in _differences(path, file, means, block)]

    try:
        with ThreadPoolExecutor(means.jobs) as pool:
            found = [difference for some in pool.map(compare, manifest.files) for difference in some]
    finally:
        means.progress.end()
    if by_rank:
        return [*found, *_foreign_ranks(directory, manifest)]
    found += [
        Difference("file", None, (), text, (file.file,))
        for file in manifest.finishing
        for text in _finishing_differences(os.path.join(directory, file.file), file)
    ]
    for name in manifest.beside:
        # Users may edit these files.
        if status_at(os.path.join(directory, name)) is None:
            found.append(Difference("file", None, (), f"{os.path.join(directory, name)} is missing", (name,)))
    found += _foreign_files(directory, manifest)
    if not found:
        names = [file.file for file in manifest.files]
        written, found = read_written(directory, manifest.plan.form, means.handles, names)
        if written is not None:
            found += _archives(written.checkpoint, means.handles)
    return found


def _archives(checkpoint: Checkpoint, handles: FileHandles) -> Iterator[Difference]:
    """Files in which archives do not hold the tensors that the metadata lists."""
    paths = {index.path for index in checkpoint.indexes.values() if index.format == ARCHIVES}
    for path in sorted(paths):
        try:
            with handles.borrow(path) as file:
                if isinstance(file, PlacedFile):
                    file.locate_all()
        except OSError as error:
            raise reading_error(path, error) from error
        except CheckpointError as error:
            yield Difference("file", None, (), error.message, (os.path.relpath(path, checkpoint.place),))


def _differences(path: str, file: ManifestFile, means: Means, block: int) -> Iterator[str]:
    wrong = _size_differences(path, file.size)
    if wrong:
        yield from wrong
        return
    # What archives hold is in the metadata, which is read when all files are there.
    if not path.endswith(f".{ARCHIVES}"):
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
    """Files of weights and steps that the manifest does not list, next to its own."""
    known = {file.file for file in manifest.files}
    places = {os.path.dirname(name) for name in known}
    paths = {place: os.path.join(directory, place) for place in places}
    beside = [
        os.path.join(place, name) for place, path in paths.items() if is_directory(path) for name in names_in(path)
    ]
    others = {name for name in beside if name.endswith(".safetensors") and not os.path.basename(name).startswith(".")}
    steps = {os.path.relpath(step.path, directory) for step in form_named(manifest.plan.form).steps(directory)}
    for name in sorted([*others.difference(known), *steps.difference(places)]):
        yield Difference("file", None, (), f"{os.path.join(directory, name)} is not of this conversion", (name,))


def _header_digest(index: CheckpointIndex, handles: FileHandles) -> str:
    """A digest of all bytes that are not tensor contents, in file order; see `records.header_digest`."""
    hashed = hashlib.sha256()
    position = 0
    try:
        with handles.borrow(index.path) as file:
            for offset, size in itertools.chain(index.extents(), [(index.size, 0)]):
                hashed.update(read_range(file, position, offset - position))
                position = offset + size
    except OSError as error:
        raise reading_error(index.path, error) from error
    return hashed.hexdigest()[:16]


def _foreign_ranks(directory: str, manifest: Manifest) -> Iterator[Difference]:
    """Checkpoints in rank directories that the manifest does not list."""
    known = {os.path.join(directory, file.file) for file in manifest.files}
    try:
        tree = find_checkpoints(directory)
    except CheckpointError:
        # No checkpoints, or names that contradict each other: the listed files were compared by path.
        return
    for candidate in tree.files:
        if candidate.path not in known:
            yield Difference("file", None, (candidate.rank,), f"{candidate.path} is not of this conversion")
