"""Readers of the compared checkpoints.

Conversions share this code for step, completeness and damaged files: a mistake in it shows as a refusal, or as a
difference in the compared bytes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Callable, NamedTuple, Optional

from reshard.checkpoints import CheckpointIndex, FileHandles, unchecked
from reshard.checkpoints.formats.crc import check_crcs
from reshard.errors import InputError
from reshard.forms.form import ReadRequest
from reshard.forms.ranks.checkpoint import read_some_ranks
from reshard.forms.ranks.tree import StepFiles
from reshard.forms.registry import form_named
from reshard.storage import storage_of
from reshard.strategies import Strategy
from reshard.text.globs import Filters
from reshard.text.messages import Report
from reshard.verification.difference import Difference
from reshard.verification.library import library_differences
from reshard.verification.reading import Means
from reshard.verification.stored import StoredSource

if TYPE_CHECKING:
    from reshard.plan.edits import Edits

_MIN_BLOCK, _MAX_BLOCK = 4 << 10, 8 << 20


class CheckpointPlace(NamedTuple):
    """The place of a checkpoint.

    Attributes:
        path: tree, file or `{rank}` path, or the directory of another form.
        form: its form.
        strategy: strategy of rank directories; `none` if the form records the layouts.
        step: the step; ``latest`` for the newest complete one.
        file_suffix: only files whose stem ends so.
        without_ranks: ranks that count as lost.
    """

    path: str
    form: str
    strategy: Strategy
    step: str = "latest"
    file_suffix: Optional[str] = None
    without_ranks: tuple[int, ...] = ()


def reader_of(
    place: CheckpointPlace,
    handles: FileHandles,
    report: Report,
    *,
    target: Optional[Strategy] = None,
    ranks: Optional[Sequence[int]] = None,
    filters: Optional[Filters] = None,
    files: Optional[Collection[int]] = None,
    incomplete: bool = False,
    edits: Optional[Edits] = None,
) -> Callable[[Mapping[str, str]], StoredSource]:
    """A function that reads the step. Its argument is the damage of files, by path.

    It raises an InputError if the step is incomplete or contradicts itself, and a RetryableError if reading
    failed.

    Args:
        place: the checkpoint.
        handles: open files.
        report: gets warnings about damaged files and a note on the step.
        target: strategy of the converted checkpoint; None if all of the source is needed.
        ranks: compared target ranks; None for all.
        filters: filters of compared parameters.
        files: numbers of the files to read, for forms other than rank directories; None for all.
        incomplete: whether lost slices are allowed; for forms other than rank directories.
        edits: the names and types that decide which tensors of rank directories are needed.
    """
    form, filter_names = form_named(place.form), Filters() if filters is None else filters
    target = Strategy.none() if target is None else target
    strategy_names = None if target.is_none else frozenset(target.parameters)

    def is_needed(name: str) -> bool:
        if files is not None or incomplete:
            return False
        if edits is not None:
            return any(new is None or filter_names.admit(new) for new in edits.possible_names(name))
        return filter_names.admit(name) and (strategy_names is None or name in strategy_names)

    request = ReadRequest(
        place.path,
        handles,
        report,
        place.step,
        required=is_needed,
        source=place.strategy,
        target=target,
        ranks=ranks,
        filters=filter_names,
        file_suffix=place.file_suffix,
        without_ranks=place.without_ranks,
        edit=None if edits is None else edits.step_editor(target),
    )

    def read(damaged: Mapping[str, str]) -> StoredSource:
        checkpoint = form.read(request._replace(damaged=damaged))
        for rank, path in checkpoint.files.items() if form.options.by_rank else ():
            if path in damaged:
                report.warn(f"{damaged[path]}; rank {rank} counts as absent at {checkpoint.label}")
        return StoredSource(checkpoint, place.strategy, files)

    return read


def read_written(
    directory: str, form: str, handles: FileHandles, files: Optional[Collection[str]] = None
) -> tuple[Optional[StoredSource], list[Difference]]:
    """Read a converted checkpoint of any form except rank directories.

    Readers tolerate known defects of other writers. Files written here have none, so every tolerated defect is a
    difference.

    Args:
        directory: its directory.
        form: its form.
        handles: open files.
        files: its files, relative to the directory; None for all files in it.

    Returns:
        The checkpoint, or None if its reader refuses it; and the differences of whole files.

    Raises:
        RetryableError: reading failed.
    """
    try:
        checkpoint = form_named(form).read(ReadRequest(directory, handles, Report()))
        source = StoredSource(checkpoint, Strategy.none())
        problems = form_named(form).check_written(directory, checkpoint)
        differences = [Difference("file", None, (), text, (name,)) for name, text in problems]
    except InputError as error:
        return None, [Difference("file", None, (), error.message)]
    indexes = {os.path.relpath(index.path, directory): index for index in checkpoint.indexes.values()}
    for name, index in indexes.items():
        differences += [Difference("file", None, (), text, (name,)) for text in library_differences(index)]
    read_paths = {os.path.relpath(path, directory) for path in checkpoint.files.values()}
    if files is not None:
        unread, foreign = sorted(set(files) - read_paths), sorted(read_paths.difference(files))
        if unread:
            differences.append(Difference("file", None, (), "the form's reader skips it", (*unread,)))
        if foreign:
            differences.append(
                Difference("file", None, (), "is not of this conversion, but loaders read it", (*foreign,))
            )
    return source, differences


class RecordedCrcs:
    """Compares files with the CRCs that they record; reads each file once.

    Args:
        means: files, threads and memory.
        report: gets notes on CRCs that cannot be checked.
    """

    def __init__(self, means: Means, report: Report) -> None:
        self._means = means
        self._report = report
        self._checked: set[object] = set()

    def damaged(self, indexes: Iterable[CheckpointIndex]) -> dict[str, str]:
        """The damage of files, by path, for damaged files that were not checked before.

        Raises:
            ReshardError: a file cannot be read.
        """
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
    read: Callable[[Mapping[str, str]], StoredSource],
    crcs: Optional[RecordedCrcs],
    damage: Mapping[str, str] = MappingProxyType({}),
    all_files: bool = False,
) -> StoredSource:
    """Read a step without the files that do not match their recorded CRC.

    Only files to read are checked: of several replicas the lowest rank's. If it is damaged, the next replica
    replaces it and is checked.

    Args:
        read: reads a step; its argument is the damage of files, by path.
        crcs: checks CRCs; None if only `known` files are damaged.
        damage: damage that is already known, by path.
        all_files: the contents of all files will be read.

    Raises:
        ReshardError: as `read`, or a file cannot be read.
    """
    damaged = dict(damage)
    while True:
        source = read(damaged)
        new_damage = {} if crcs is None else crcs.damaged(source.indexes.values() if all_files else source.files_read)
        if not new_damage:
            return source
        damaged.update(new_damage)


def read_ranks(
    files: Mapping[int, str],
    strategy: Strategy,
    handles: FileHandles,
    report: Report,
    crcs: Optional[RecordedCrcs],
    admit: Callable[[str], bool],
    all_files: bool = False,
) -> tuple[StoredSource, dict[str, InputError]]:
    """Read some ranks' files of one step, complete or not, without the files that do not match their recorded CRC.

    Args:
        files: by rank.
        strategy: the strategy that they were saved with.
        handles: the files to read from.
        report: gets warnings.
        crcs: see `read_sound`.
        admit: which parameters are needed.
        all_files: see `read_sound`.

    Returns:
        The checkpoint, and the problem of each parameter that contradicts the strategy; see `read_some_ranks`.
    """
    problems: dict[str, InputError] = {}

    def read(damaged: Mapping[str, str]) -> StoredSource:
        damaged_ranks = {rank: damaged[path] for rank, path in files.items() if path in damaged}
        step_files = StepFiles(None, dict(files), damaged=damaged_ranks)
        checkpoint, contradicting = read_some_ranks(step_files, strategy, handles, report, admit)
        problems.clear()
        problems.update(contradicting)
        return StoredSource(checkpoint, strategy)

    return read_sound(read, crcs, all_files=all_files), problems
