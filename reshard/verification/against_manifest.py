"""Whether a target directory is what its manifest says, without source or strategies."""

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
from reshard.forms.checkpoint2.names import parse_iteration
from reshard.forms.ranks import find_checkpoints
from reshard.forms.registry import RANKS
from reshard.records import FinishingRecord, Manifest, ManifestFile
from reshard.storage import is_directory, names_in, read_range, status_at
from reshard.verification.difference import Difference
from reshard.verification.library import library_differences
from reshard.verification.reading import Means
from reshard.verification.written import read_written

_BLOCK = 4 << 20
_TELLING = threading.Lock()


def compare_with_manifest(directory: str, manifest: Manifest, means: Means) -> list[Difference]:
    """What in a directory is not as its manifest says.

    Every file's size and everything in it but tensor contents is compared; contents too where the
    manifest has their checksum. What finishes a directory of another form than ranks is compared in full, and
    must say what the files hold.

    Args:
        directory: the manifest's directory.
        manifest: what it says.
        means: what may be used for reading.

    Returns:
        Every difference, by rank, or by file where the form has no ranks.

    Raises:
        RetryableError: reading failed in a way that may pass.
    """
    means.progress.begin(sum(file.size for file in manifest.files if file.crc32 is not None), "checking sums")
    block = max(4096, min(_BLOCK, means.max_memory // means.jobs))

    by_rank = manifest.plan.form == RANKS

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
        return found + list(_foreign(directory, manifest))
    found += [
        Difference("file", None, (), text, (file.file,))
        for file in manifest.finishing
        for text in _finishing_differences(os.path.join(directory, file.file), file)
    ]
    found += _foreign_of_form(directory, manifest)
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
    status = status_at(path)
    if status is None:
        yield f"{path} is missing"
        return
    if status.size != file.size:
        yield f"{path} has {status.size} bytes, not {file.size}"
        return
    # What archives hold is in the metadata, which is read when all files are there.
    if not path.endswith(f".{ARCHIVES}"):
        try:
            index = read_index(means.handles, path)
        except CheckpointError as error:
            yield error.message
            return
        if file.headers is not None and _header_digest(index, means.handles) != file.headers:
            yield f"{path}: names, types or shapes of its tensors are not what was written"
        yield from library_differences(index)
    if file.crc32 is not None:

        def tell(count: int) -> None:
            with _TELLING:
                means.progress.wrote(count)

        crc = crc_of_file(path, block, tell)
        if crc != int(file.crc32, 16):
            yield f"{path}: its checksum is {crc:08x}, not {file.crc32}"


def _finishing_differences(path: str, file: FinishingRecord) -> Iterator[str]:
    status = status_at(path)
    if status is None:
        yield f"{path} is missing"
    elif status.size != file.size:
        yield f"{path} has {status.size} bytes, not {file.size}"
    else:
        crc = crc_of_file(path)
        if crc != int(file.crc32, 16):
            yield f"{path}: its checksum is {crc:08x}, not {file.crc32}"


def _foreign_of_form(directory: str, manifest: Manifest) -> Iterator[Difference]:
    """Files of weights beside those of a form that the manifest does not know, and iterations beside its own."""
    known = {file.file for file in manifest.files}
    places = {os.path.dirname(name) for name in known}
    there = {place: os.path.join(directory, place) for place in places}
    beside = [
        os.path.join(place, name) for place, path in there.items() if is_directory(path) for name in names_in(path)
    ]
    others = {name for name in beside if name.endswith(".safetensors") and not os.path.basename(name).startswith(".")}
    iterations = {name for name in names_in(directory) if parse_iteration(name) is not None}
    for name in sorted([*others.difference(known), *iterations.difference(places)]):
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


def _foreign(directory: str, manifest: Manifest) -> Iterator[Difference]:
    """Checkpoints in rank directories that the manifest does not know."""
    known = {os.path.join(directory, file.file) for file in manifest.files}
    try:
        tree = find_checkpoints(directory)
    except CheckpointError:
        # None at all, or names that contradict each other: the known ones were looked at by name.
        return
    for candidate in tree.files:
        if candidate.path not in known:
            yield Difference("file", None, (candidate.rank,), f"{candidate.path} is not of this conversion")
