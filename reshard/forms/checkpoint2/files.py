"""The tensor files of an iteration: selection, numbers and contents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Optional

from reshard.checkpoints.files import FileHandles, reading_error
from reshard.checkpoints.formats.alike import KnownStructures
from reshard.checkpoints.formats.headers import read_headers
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.forms.checkpoint2.iterations import METADATA, file_order, parse_file_name
from reshard.storage import leads_to, store_of
from reshard.text.report import Report
from reshard.text.wording import plural, some_names

_ENDING = ".safetensors"


class IterationFiles:
    """The tensor files of an iteration, their headers read.

    Args:
        directory: of the iteration.
        listed: names of the files in metadata.json; None without it.
        handles: where to borrow the files from.
        report: gets notes on skipped files.
        damaged: files that count as absent, and why, by path.

    Attributes:
        names: the listed or existing files, in the order of their holder numbers.
        numbers: holder number by name.
        paths: of the files that can be read, by holder number.
        indexes: their headers.
        absent: why the others cannot be read, by name; each text names the path.

    Raises:
        CheckpointError: without metadata.json, the files are not those of a single rank; or a file
            cannot be read at all.
        RetryableError: reading failed in a way that may pass.
    """

    def __init__(
        self,
        directory: str,
        listed: Optional[Sequence[str]],
        handles: FileHandles,
        report: Report,
        damaged: Mapping[str, str],
    ) -> None:
        there = _tensor_files(directory)
        chosen = _of_single_rank(directory, there) if listed is None else _counting(directory, listed, there, report)
        self.names = sorted(chosen, key=file_order)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.absent: dict[str, str] = {}
        paths: dict[int, str] = {}
        for number, name in enumerate(self.names):
            path = os.path.join(directory, name)
            if path in damaged:
                self.absent[name] = damaged[path]
            elif name in there:
                paths[number] = path
            else:
                self.absent[name] = f"{path}: does not exist"
        self.indexes: dict[int, CheckpointIndex] = {}
        for number, header in read_headers(handles, paths, KnownStructures(handles), "file"):
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
    found = set()
    try:
        for entry in store_of(directory).entries(directory):
            if entry.name.endswith(_ENDING) and not entry.name.startswith(".") and leads_to(entry.is_file):
                found.add(entry.name)
    except OSError as error:
        raise reading_error(directory, error) from error
    return found


def _of_single_rank(directory: str, there: set[str]) -> set[str]:
    """The files of a save that needs no metadata.json."""
    said = {name: parse_file_name(name) for name in there}
    series = {name.series for name in said.values() if name is not None}
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
        prefixes = some_names(sorted(name for name, parsed in said.items() if parsed is not None))
        raise CheckpointError(
            f"{directory}: holds files of several saves ({prefixes}), and no {METADATA} that lists the right ones",
            file=directory,
            hint="move the other files to another directory",
        )
    return {name for name, parsed in said.items() if parsed is not None}


def _counting(directory: str, listed: Sequence[str], there: set[str], report: Report) -> set[str]:
    """The listed files, and unlisted ones of the same save."""
    parsed = [parse_file_name(name) for name in listed]
    series = {(said.kind, said.series) for said in parsed if said is not None}
    kinds = {kind for kind, _ in series}
    any_kind = {of_kind for _, of_kind in series}
    chosen = set(listed)
    others = []
    for name in sorted(there - chosen):
        said = parse_file_name(name)
        if said is not None and (
            (said.kind, said.series) in series or (said.kind not in kinds and said.series in any_kind)
        ):
            chosen.add(name)
        else:
            others.append(name)
    if others:
        report.warn(
            f"{directory}: {METADATA} names no file of the same kind as {some_names(others)}, which "
            f"{'is' if len(others) == 1 else 'are'} skipped"
        )
    return chosen
