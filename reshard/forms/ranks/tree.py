"""Finding the checkpoint files of a source, by rank and step.

A source is a tree of rank directories (``rank_0/``, ``rank0/`` or ``0/``), one file, or a path with
``{rank}`` in it. Only names count: file times play no part, and no file is opened. `SourceTree.candidates`
lists the steps, newest first; `selection` checks their completeness.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from reshard.asked import Source
from reshard.checkpoints.formats.headers import FORMATS, format_of
from reshard.errors import CheckpointError, UsageError
from reshard.forms.ranks.naming import (
    RANK,
    UNIFIED_MAP,
    FileNames,
    PathMatch,
    Pattern,
    Step,
    fixed_directory,
    holds_fault_saves,
    match_paths,
    name_families,
    names_of,
    parse_stem,
)
from reshard.storage import (
    DirectoryEntry,
    absolute,
    directories_in,
    exists,
    for_each,
    is_directory,
    leads_to,
    names_in,
    reading,
    reading_error,
    real,
    store_of,
)
from reshard.text.messages import rank_ranges, some_names
from reshard.text.names import similar_path_hint

_RANK_DIRECTORY = re.compile(r"(rank_|rank|)([0-9]+)")
_FAULT_DIRECTORY = "(ckpt_dir)([0-9]+)"
_UNFINISHED = "_tmp"
_MOST_LISTED = 8
_MOST_STEPS = 20
_NAMED_RANK = re.compile(r"rank_?([0-9]{1,9})(?![0-9])")
_CHOOSE = "choose with --file-suffix TEXT (only files whose stem ends so) or --step"


class RankFile(NamedTuple):
    """One checkpoint file of one rank.

    Attributes:
        step: in its name, or None.
        naming: the name of its directory relative to the source, in pieces, with None for the rank's number.
        family: its name up to the step, as a pattern; equal in one series of saves.
        tail: the rest of its name, without the ending.
    """

    rank: int
    path: str
    step: Step | None
    naming: Pattern
    family: Pattern
    tail: str

    @property
    def series(self) -> tuple[Pattern, Pattern, bool]:
        """The key of files whose steps are comparable."""
        return self.naming, self.family, self.step is None

    @property
    def pattern(self) -> Pattern:
        """Its path relative to the source, without its ending, in pieces."""
        pieces: list[str | None] = [""]
        for piece in (*self.naming, *self.family, self.tail):
            if piece is None or pieces[-1] is None:
                pieces.append(piece)
            else:
                pieces[-1] += piece
        return tuple(pieces)


class StepFiles(NamedTuple):
    """The files of one step.

    Attributes:
        step: the step, or None for files without one in their names.
        files: path per rank that has a file of this step.
        notes: notes for the user, in whole sentences.
        root: the directory that names are relative to.
        parsed: the same files with their parsed names; empty if the user passed the files.
        damaged: the reason why a rank's file counts as absent, if known without reading it.
    """

    step: Step | None
    files: dict[int, str]
    notes: tuple[str, ...] = ()
    root: str = ""
    parsed: tuple[RankFile, ...] = ()
    damaged: Mapping[int, str] = {}

    @property
    def names(self) -> FileNames | None:
        """The template of their names; None if unknown."""
        if not self.parsed:
            return None
        paths = ((file, os.path.relpath(file.path, self.root or os.curdir)) for file in self.parsed)
        return names_of((file.rank, os.path.splitext(path)[0], file.pattern) for file, path in paths)


class SourceTree:
    """All checkpoint files of a source, by name; at least one.

    Attributes:
        root: the source as the user wrote it.
        single_file: whether the source is one file, an unsharded checkpoint.
        ranks: every rank with a directory or a checkpoint file, ascending, regardless of ``--file-suffix``.
        files: the files that match ``--file-suffix``, by rank and path.
        by_step: these files by step.
    """

    def __init__(self, root: str, single_file: bool, ranks: Iterable[int], files: Iterable[RankFile]) -> None:
        self.root = root
        self.single_file = single_file
        self.ranks = tuple(sorted(ranks))
        self.files = tuple(files)
        self.by_step: dict[Step | None, list[RankFile]] = {}
        for file in self.files:
            self.by_step.setdefault(file.step, []).append(file)

    @property
    def steps(self) -> tuple[Step | None, ...]:
        return tuple(sorted(self.by_step, key=_age))

    def candidates(self, step: str | None = None) -> Iterator[StepFiles]:
        """The steps, newest first, each with at most one file per rank; only one if it is named, as ``3_10``."""
        if step is not None and step != "latest":
            yield self.of_step(self.named(step))
            return
        self.check_comparable()
        # Lazily: an ambiguous older step does not matter if a newer one is complete.
        for number in self.steps:
            yield self.of_step(number)

    def newest(self, step: str | None = None) -> StepFiles:
        """The first of `candidates`: a tree has files."""
        return next(self.candidates(step))

    def named(self, text: str) -> Step:
        names = ["none in the name" if saved is None else str(saved) for saved in self.steps]
        saved_steps = f"its steps: {some_names(names, _MOST_STEPS)}"
        try:
            step = Step.parse(text)
        except UsageError as error:
            error.hint = f"{error.hint}; {saved_steps}"
            raise
        if step not in self.by_step:
            raise CheckpointError(f"{self.root}: has no files of step {step}; {saved_steps}", file=self.root)
        return step

    def of_step(self, step: Step | None) -> StepFiles:
        chosen: dict[int, RankFile] = {}
        for file in self.by_step[step]:
            earlier = chosen.setdefault(file.rank, file)
            if earlier is not file:
                raise self._ambiguous(earlier, file)
        files = {rank: file.path for rank, file in sorted(chosen.items())}
        notes = tuple(_differences(step, chosen.values()))
        if self.single_file:
            return StepFiles(step, files, (*notes, *_of_one_rank(self.root)))
        root = fixed_directory(self.root) if _is_pattern(self.root) else self.root
        return StepFiles(step, files, notes, root, tuple(chosen.values()))

    def check_comparable(self) -> None:
        """Refuse several series of saves, whose steps have no order."""
        newest: dict[tuple[Pattern, Pattern, bool], RankFile] = {}
        for file in sorted(self.files, key=lambda file: _age(file.step)):
            newest.setdefault(file.series, file)
        if len(newest) > 1 and len(self.steps) > 1:
            shown = [file.path for file in newest.values()][:_MOST_LISTED]
            raise CheckpointError(
                f"{self.root}: holds several series of checkpoints, whose steps cannot be compared; "
                "the newest of each:\n" + "\n".join(f"  {path}" for path in shown),
                file=self.root,
                hint=_CHOOSE,
            )

    def _ambiguous(self, first: RankFile, second: RankFile) -> CheckpointError:
        step = "without a step" if first.step is None else f"for step {first.step}"
        return CheckpointError(
            f"rank {first.rank} has two files {step}:\n  {first.path}\n  {second.path}",
            file=first.path,
            rank=first.rank,
            hint=f"{_CHOOSE}, or name the files, as in 'ckpt/rank_{{rank}}/*.ckpt'",
        )


def missing_hint(src: str) -> str | None:
    """What to do about a missing source: a similar path, or a model that is still at Hugging Face."""
    hint = similar_path_hint(src)
    if hint is None and re.fullmatch(r"[A-Z][\w.-]*/[A-Za-z][\w.-]*", src) and not exists(os.path.dirname(src)):
        hint = f"of a model at Hugging Face, download it first: hf download {src} --local-dir {os.path.basename(src)}"
    return hint


def find_checkpoints(source: str | Source) -> SourceTree:
    """Find the checkpoint files of a source, or at a path.

    Raises:
        CheckpointError: the source is missing, unreadable, or of an unsupported form.
        RetryableError: listing failed in a way that may pass.
    """
    read = Source(source) if isinstance(source, str) else source
    src, file_suffix = read.path, read.file_suffix
    try:
        if _is_pattern(src):
            _refuse_unfinished(fixed_directory(src))
            files = [
                match if path == match.path else match._replace(path=path, name=os.path.basename(path))
                for match in match_paths(src, _UNFINISHED)
                for path in _checkpoints(match.path)
            ]
            if not files:
                raise CheckpointError(
                    f"{src}: no checkpoint file matches",
                    file=src,
                    hint=similar_path_hint(src) or "{rank} matches a rank's number; * ? and [..] match anything else",
                )
            single = False
        elif not exists(src):
            wild = any(mark in src for mark in "*?[{")
            wildcards = "use wildcards with {rank} for a rank's number: 'run/rank_{rank}/*.ckpt'"
            hint = wildcards if wild else missing_hint(src) or "pass the directory or the file of a checkpoint"
            raise CheckpointError(f"{src}: does not exist", file=src, hint=hint)
        elif is_directory(src):
            files, single = _rank_directories(src), False
        else:
            _refuse_other_forms(src)
            if os.path.splitext(src)[1] not in FORMATS:
                from reshard.forms.ranks.other_tools import checkpoint_of_other_tool

                other = checkpoint_of_other_tool(src)
                if other is not None:
                    raise other
            format_of(src)
            files, single = [PathMatch(0, (), src, os.path.basename(src))], True
    except OSError as error:
        raise reading_error(error.filename or src, error) from error
    chosen = [entry for entry in files if file_suffix is None or _stem(entry.path).endswith(file_suffix)]
    if not chosen:
        raise CheckpointError(
            f"{src}: no file's name ends in {file_suffix!r} before .ckpt or .safetensors; "
            f"one of the files is {files[0].path}",
            file=src,
            hint="check --file-suffix",
        )
    ranks = {entry.rank for entry in files}
    if not single and RANK not in src:
        ranks |= _rank_numbers(src)
    return SourceTree(src, single, ranks, _rank_files(chosen))


def named_for_rank(name: str) -> bool:
    return _RANK_DIRECTORY.fullmatch(name) is not None


def find_rank(source: str | Source) -> SourceTree | None:
    """The checkpoint files of a single rank's directory, ``rank_3`` or ``ckpt_dir3``; None for others."""
    read = Source(source) if isinstance(source, str) else source
    directory, file_suffix = read.path, read.file_suffix
    name = os.path.basename(os.path.abspath(directory))
    match = _RANK_DIRECTORY.fullmatch(name) or re.fullmatch(_FAULT_DIRECTORY, name)
    if match is None or not is_directory(directory):
        return None
    rank = int(match[2])
    files = [file for file in _checkpoints(directory) if file_suffix is None or _stem(file).endswith(file_suffix)]
    listed_files = [PathMatch(rank, (), file, os.path.basename(file)) for file in files]
    return SourceTree(directory, False, (rank,), _rank_files(listed_files)) if listed_files else None


def _rank_directories(src: str) -> list[PathMatch]:
    _refuse_other_forms(src)
    _refuse_unfinished(src)
    files = []
    directories = directories_in(src)
    matches = [match for match in map(_RANK_DIRECTORY.fullmatch, directories) if match is not None]
    paths = [os.path.join(src, match[0]) for match in matches]
    with reading(src):
        for match, path, entries in zip(matches, paths, for_each(lambda path: store_of(path).entries(path), paths)):
            naming = (match[1], None, os.sep)
            files += [
                PathMatch(int(match[2]), naming, os.path.join(path, name), name) for name in _checkpoint_names(entries)
            ]
    if not files:
        from reshard.forms.ranks.other_tools import nothing_found

        raise nothing_found(
            src,
            [match[0] for match in matches],
            [os.path.basename(path) for path in _checkpoints(src)],
            named_for_rank(os.path.basename(absolute(src))),
        )
    return files


def skipped_directories(src: str) -> tuple[list[str], list[str]]:
    """Unfinished directories, and saves at a fault, which are sources themselves, beside the rank directories."""
    pattern = _is_pattern(src)
    directory = fixed_directory(src) if pattern else src
    names = directories_in(directory or os.curdir)
    unfinished = [os.path.join(directory, name) for name in names if name.endswith(_UNFINISHED)]
    saves = [] if pattern else [os.path.join(directory, name) for name in names if holds_fault_saves(name)]
    return unfinished, saves


def _is_pattern(src: str) -> bool:
    """Whether a source is a path with ``{rank}`` in it; False for an existing directory or file of that name."""
    return RANK in src and not exists(src)


def _of_one_rank(file: str) -> Iterator[str]:
    """A note for a file, taken for a whole checkpoint, whose directory is one of several ranks."""
    directory = os.path.dirname(absolute(file))
    place = os.path.dirname(directory)
    if _RANK_DIRECTORY.fullmatch(os.path.basename(directory)) and len(_rank_numbers(place)) > 1:
        yield (
            f"{file}: is the file of one of several ranks, and is read as a whole checkpoint; if ranks hold slices, "
            f"pass {place} with its strategy"
        )


def _rank_numbers(src: str) -> set[int]:
    """Ranks that have a directory, with or without checkpoints."""
    matches = (_RANK_DIRECTORY.fullmatch(name) for name in directories_in(src))
    return {int(match[2]) for match in matches if match is not None}


def _refuse_unfinished(directory: str) -> None:
    places = (absolute(directory), real(directory))
    if any(os.path.basename(path).endswith(_UNFINISHED) for path in places):
        raise CheckpointError(
            f"{directory}: was never finished: its name ends in {_UNFINISHED}",
            file=directory,
            hint="take another checkpoint",
        )


def _checkpoints(path: str) -> Iterator[str]:
    """The checkpoint files directly in a directory, by name; or the path itself, if it is a checkpoint file."""
    if not is_directory(path):
        if os.path.splitext(path)[1] in FORMATS:
            yield path
        return
    with reading(path):
        names = _checkpoint_names(store_of(path).entries(path))
    for name in names:
        yield os.path.join(path, name)


def _checkpoint_names(entries: Iterable[DirectoryEntry]) -> list[str]:
    return sorted(
        entry.name
        for entry in entries
        if not entry.name.startswith(".") and os.path.splitext(entry.name)[1] in FORMATS and leads_to(entry.is_file)
    )


def _rank_files(files: Iterable[PathMatch]) -> Iterator[RankFile]:
    parsed = [(entry, *_parsed(entry)) for entry in sorted(files, key=lambda entry: (entry.rank, entry.path))]
    families = name_families({(entry.rank, start) for entry, start, _, _ in parsed})
    for entry, start, step, tail in parsed:
        yield RankFile(entry.rank, entry.path, step, entry.naming, families[entry.rank, start], tail)


def _parsed(entry: PathMatch) -> tuple[str, Step | None, str]:
    """A file's name up to its step, with the rank's numbers marked; the step; the rest."""
    stem = _stem(entry.path)
    prefix, step = parse_stem(stem)
    marked, as_marked = parse_stem(os.path.splitext(entry.name)[0])
    if as_marked != step:
        # A number in the step is not the rank's.
        marked = prefix
    if step is None:
        return marked, step, ""
    return f"{marked}-", step, stem[len(prefix) + 1 :]


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _age(step: Step | None) -> tuple[bool, int, int]:
    return (True, 0, 0) if step is None else (False, -step.epoch, -step.step)


def _differences(step: Step | None, files: Iterable[RankFile]) -> Iterator[str]:
    """Warnings if the files of one step seem to be of several saves."""
    subject = "the files" if step is None else f"the files of step {step}"
    by_series: dict[object, list[RankFile]] = defaultdict(list)
    by_format: dict[object, list[RankFile]] = defaultdict(list)
    named = {file: _NAMED_RANK.search(os.path.basename(file.path)) for file in files}
    numbers = {file: int(match[1]) for file, match in named.items() if match is not None}
    # One rank's file may have been copied to all others, under its name.
    several = len(set(numbers.values())) > 1
    misplaced = {file: file.path for file, number in numbers.items() if several and number != file.rank}
    if misplaced:
        ranks, examples = (
            rank_ranges([file.rank for file in misplaced]),
            some_names([*misplaced.values()], _MOST_LISTED),
        )
        yield f"{subject} of {ranks} have names of other ranks, as if directories were exchanged: {examples}"
    for file in named:
        if file not in misplaced:
            by_series[file.series].append(file)
        by_format[format_of(file.path)].append(file)
    for groups, difference in ((by_series, "names"), (by_format, "formats")):
        if len(groups) > 1:
            examples = ", ".join(group[0].path for group in list(groups.values())[:_MOST_LISTED])
            yield f"{subject} have different {difference} on different ranks, as if of different runs: {examples}"


_OTHER_FORMS = (
    (
        r"latest_checkpointed_iteration\.txt|iteration_[0-9]+|.*-(model|opt)-[0-9]{7}-[0-9]{7}\.safetensors",
        "of a Checkpoint 2.0 directory",
    ),
    (
        rf"{UNIFIED_MAP}|(part[0-9]+|hyper_param|model-[0-9]{{5}}-of-[0-9]{{5}})\.safetensors",
        "of unified (full) weights",
    ),
)


def _refuse_other_forms(src: str) -> None:
    names = names_in(src) if is_directory(src) else [os.path.basename(src)]
    for expression, title in _OTHER_FORMS:
        if any(re.fullmatch(expression, name) for name in names):
            raise CheckpointError(
                f"{src}: is {title}, not a tree of ranks",
                file=src,
                hint="pass the whole directory to `reshard convert`, without --src-strategy",
            )
