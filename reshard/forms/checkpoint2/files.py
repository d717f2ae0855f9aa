"""The tensor files of an iteration: selection, numbers and contents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Optional

from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.headers import read_headers
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.forms.checkpoint2.iterations import METADATA, file_order, parse_file_name
from reshard.storage import leads_to, reading, store_of
from reshard.text.messages import Report, plural, some_names

_ENDING = ".safetensors"


class IterationFiles:
    """The tensor files of an iteration, their headers read.

    Args:
        directory: of the iteration.
        metadata_files: names of the files in metadata.json; None without it.
        handles: where to borrow the files from.
        report: gets notes on skipped files.
        damaged: per path of a file that counts as absent, the reason.

    Attributes:
        names: the listed or existing files, in the order of their holder numbers.
        numbers: holder number by name.
        paths: of the files that can be read, by holder number.
        indexes: their headers.
        absent: the reason why each other file cannot be read, by name; names the path.

    Raises:
        CheckpointError: without metadata.json, the files are of several ranks or saves; or a file cannot be read.
        RetryableError: reading failed in a way that may pass.
    """

    def __init__(
        self,
        directory: str,
        metadata_files: Optional[Sequence[str]],
        handles: FileHandles,
        report: Report,
        damaged: Mapping[str, str],
    ) -> None:
        existing = _tensor_files(directory)
        chosen = (
            _of_single_rank(directory, existing)
            if metadata_files is None
            else _of_same_save(directory, metadata_files, existing, report)
        )
        self.names = sorted(chosen, key=file_order)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.absent: dict[str, str] = {}
        paths: dict[int, str] = {}
        for number, name in enumerate(self.names):
            path = os.path.join(directory, name)
            if path in damaged:
                self.absent[name] = damaged[path]
            elif name in existing:
                paths[number] = path
            else:
                self.absent[name] = f"{path}: does not exist"
        self.indexes: dict[int, CheckpointIndex] = {}
        for number, header in read_headers(handles, paths, "file"):
            if isinstance(header, DamagedCheckpointError):
                self.absent[self.names[number]] = header.message
            else:
                self.indexes[number] = header
        self.paths = {number: paths[number] for number in self.indexes}
        if self.absent:
            missing = [why for _, why in sorted(self.absent.items())]
            report.warn(f"{plural(len(missing), 'file')} of {directory} cannot be read: " + some_names(missing, 3))


def _tensor_files(directory: str) -> set[str]:
    """Names of the .safetensors files in a directory, including links."""
    with reading(directory):
        return {
            entry.name
            for entry in store_of(directory).entries(directory)
            if entry.name.endswith(_ENDING) and not entry.name.startswith(".") and leads_to(entry.is_file)
        }


def _of_single_rank(directory: str, existing: set[str]) -> set[str]:
    """The files of a single rank's save, which needs no metadata.json."""
    parsed_names = {name: parse_file_name(name) for name in existing}
    series = {name.series for name in parsed_names.values() if name is not None}
    if not series:
        raise CheckpointError(f"{directory}: holds neither {METADATA} nor files of Checkpoint 2.0", file=directory)
    if any(total != 1 for _, total in series):
        ranks = max(total for _, total in series)
        raise CheckpointError(
            f"{directory}: {METADATA} is missing, and by their names the files are of {ranks} ranks: it is unknown "
            "how tensors are cut",
            file=directory,
            hint="the save was not finished, or not copied whole: bring the file back, or take another iteration",
        )
    if len(series) > 1:
        prefixes = some_names(sorted(name for name, parsed in parsed_names.items() if parsed is not None))
        raise CheckpointError(
            f"{directory}: holds files of several saves ({prefixes}), and no {METADATA} that lists the right ones",
            file=directory,
            hint="move the other files to another directory",
        )
    return {name for name, parsed in parsed_names.items() if parsed is not None}


def _of_same_save(directory: str, metadata_files: Sequence[str], existing: set[str], report: Report) -> set[str]:
    """The listed files, and unlisted ones of the same save."""
    series = {(parsed.kind, parsed.series) for parsed in map(parse_file_name, metadata_files) if parsed is not None}
    kinds = {kind for kind, _ in series}
    any_kind = {of_kind for _, of_kind in series}
    chosen = set(metadata_files)
    unrelated = []
    for name in sorted(existing - chosen):
        file_name = parse_file_name(name)
        if file_name is not None and (
            (file_name.kind, file_name.series) in series
            or (file_name.kind not in kinds and file_name.series in any_kind)
        ):
            chosen.add(name)
        else:
            unrelated.append(name)
    if unrelated:
        report.warn(
            f"{directory}: {METADATA} names no file of the same kind as {some_names(unrelated)}, which "
            f"{'is' if len(unrelated) == 1 else 'are'} skipped"
        )
    return chosen
