"""Checkpoint 2.0 as a form."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, cast

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError, InputError, UsageError
from reshard.forms.form import Description, Form, FormOptions, Layouts, ReadRequest, SavedCut, SavedStep, WriteRequest
from reshard.forms.ranks.tree import checkpoint_of_other_tool, hint_of_checkpoints_below
from reshard.forms.tracker import (
    HOW_TO_CHOOSE,
    TRACKER,
    parse_iteration_number,
    read_tracker,
    saved_steps,
    warn_of_newer,
)
from reshard.storage import (
    UnfitError,
    absolute,
    caches_listings,
    is_directory,
    is_regular_file,
    names_in,
    opened_regular,
    read_json,
    reading,
)
from reshard.strategies import Strategy
from reshard.text.messages import Report, listing, plural, quoted, some_names

if TYPE_CHECKING:
    from reshard.forms.checkpoint2.checkpoint import Checkpoint2
    from reshard.forms.target import TargetForm


class Checkpoint2Form(Form):
    """Checkpoint 2.0."""

    name = "checkpoint2"
    options = FormOptions(title="Checkpoint 2.0", layouts=Layouts.RECORDED, steps=True, prefix=True)

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        return is_directory(src) and recognise(src, names)

    @caches_listings
    def read(self, request: ReadRequest) -> Checkpoint2:
        from reshard.forms.checkpoint2.checkpoint import read_checkpoint2

        return read_checkpoint2(request)

    def strategy_of(self, checkpoint: Checkpoint) -> Strategy:
        from reshard.forms.checkpoint2.checkpoint import strategy_of

        return strategy_of(cast("Checkpoint2", checkpoint))

    def saved_cut(self, checkpoint: Checkpoint, name: str) -> Optional[SavedCut]:
        """As metadata.json records it; without that file, by the placement of whole tensors."""
        saved = cast("Checkpoint2", checkpoint)
        return saved.placements.get(name) if saved.metadata_names is None or name in saved.metadata_names else None

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        from reshard.forms.checkpoint2.written_files import target_files

        return target_files(self.name, checkpoint, request)

    def marks(self, files: Sequence[str]) -> list[str]:
        iteration = files[0].rpartition("/")[0]
        return [f"{iteration}/{METADATA}", f"{iteration}/{COMMON}", TRACKER]

    def check_written(self, directory: str, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        place = os.path.relpath(checkpoint.place, directory)
        number = parse_iteration(place)
        tracked = read_tracker(directory)
        if tracked is None:
            yield TRACKER, "is missing: it marks the iteration as complete"
        elif tracked != number:
            yield TRACKER, f"names iteration {tracked}, not {number}"
        if not is_regular_file(os.path.join(checkpoint.place, COMMON)):
            yield os.path.join(place, COMMON), "is missing"
        healed = [
            name
            for name, placement in cast("Checkpoint2", checkpoint).placements.items()
            if placement.misnumbered or placement.outside or placement.recorded != placement.readable
        ]
        if healed:
            examples = some_names([quoted(name) for name in healed], 3)
            yield os.path.join(place, METADATA), f"lacks the files of {examples}"

    def check_step(self, src: str, step: str) -> None:
        if step != "latest":
            choose(src, step, Report())

    def steps(self, src: str) -> list[SavedStep]:
        return saved_steps(src, ((number, path) for number, path in find_iterations(src) if number is not None))

    def describe(self, checkpoint: Checkpoint) -> Description:
        saved = cast("Checkpoint2", checkpoint)
        incomplete: Optional[InputError] = None
        try:
            saved.check()
        except InputError as error:
            incomplete = error
        unplaced = None
        if saved.unplaced:
            names = listing(sorted(saved.unplaced))
            unplaced = f"{plural(len(saved.unplaced), 'tensor')} of unknown layout left out: {names}"
        return Description(
            {name: len(placement.ranks) for name, placement in saved.placements.items()},
            {name: lost.slices for name, lost in saved.lost.items()},
            incomplete,
            unplaced,
        )


_HEAD = 4096
_LARGEST_COMMON = 1 << 20
_SECTION = re.compile(rb'\s*\{\s*"(state_dict_metadata|storage_data)"')


class Iteration(NamedTuple):
    """The directory of one iteration.

    Attributes:
        number: of the iteration; None if the directory's name does not contain it.
        path: the directory.
    """

    number: Optional[int]
    path: str

    @property
    def label(self) -> str:
        return "the checkpoint" if self.number is None else f"iteration {self.number}"


class IterationChoice(NamedTuple):
    """Candidate iterations.

    Attributes:
        iterations: in order of preference; the first complete one is read.
        settled: only the first may be read.
    """

    iterations: list[Iteration]
    settled: bool


def recognise(path: str, names: Optional[Sequence[str]] = None) -> bool:
    """Whether a directory is a root of Checkpoint 2.0 or holds one iteration."""
    if not is_directory(path):
        return False
    names = names_in(path) if names is None else names
    return TRACKER in names or _is_iteration(path, names) or any(_iterations_in(path, names))


def find_iterations(root: str) -> list[Iteration]:
    """The iterations of a root, oldest first."""
    return sorted(_iterations_in(root, names_in(root)))


def choose(path: str, step: str, report: Report) -> IterationChoice:
    """The candidate iterations for a step.

    Args:
        path: a root, or the directory of an iteration.
        step: the requested iteration; ``latest`` for the one in the tracker.
        report: gets notes on skipped iterations.

    Raises:
        UsageError: ``step`` is not a number, or another number than the directory's.
        CheckpointError: the iteration does not exist.
        RetryableError: reading failed in a way that may pass.
    """
    requested = parse_iteration_number(step)
    names = names_in(path)
    if _is_iteration(path, names):
        return IterationChoice([_from_directory(path, requested, report)], True)
    iterations = find_iterations(path)
    if not iterations:
        raise checkpoint_of_other_tool(path) or CheckpointError(
            f"{path}: holds no {iteration_name(0)[:-8]}* directory",
            file=path,
            hint=hint_of_checkpoints_below(path) or "a root of Checkpoint 2.0 has one for each saved iteration",
        )
    tracked = read_tracker(path)
    if requested is not None:
        chosen = _numbered(iterations, requested, f"--step {requested}: {path} holds no {iteration_name(requested)}")
        _warn_of_unfinished(chosen, tracked, report)
        return IterationChoice([chosen], True)
    if tracked is None:
        report.warn(
            f"{os.path.join(path, TRACKER)} is missing, so it is unknown which iterations are finished: "
            "the newest complete one is read"
        )
        return IterationChoice(iterations[::-1], False)
    message = f"{os.path.join(path, TRACKER)} names iteration {tracked}, but {path} holds no {iteration_name(tracked)}"
    chosen = _numbered(iterations, tracked, message)
    warn_of_newer(path, [iteration.number or 0 for iteration in iterations], tracked, report)
    return IterationChoice([chosen], True)


def read_common(directory: str) -> dict[str, Any]:
    """The content of common.json; empty without the file."""
    path = os.path.join(directory, COMMON)
    hint = "copy it again from the original; or remove it, without epoch and step"
    return read_json(path, _LARGEST_COMMON, hint=hint) or {}


def _iterations_in(root: str, names: Sequence[str]) -> Iterator[Iteration]:
    for name in names:
        number = parse_iteration(name)
        path = os.path.join(root, name)
        if number is not None and is_directory(path):
            yield Iteration(number, path)


def _is_iteration(path: str, names: Sequence[str]) -> bool:
    """Whether a directory holds the files of an iteration, finished or not."""
    if METADATA in names and _begins_as_metadata(os.path.join(path, METADATA)):
        return True
    return any(parse_file_name(name) for name in names)


def _begins_as_metadata(path: str) -> bool:
    """Whether a file begins as a metadata.json of Checkpoint 2.0; other programs use that name too."""
    with reading(path), contextlib.suppress(FileNotFoundError, UnfitError), opened_regular(path) as file:
        return _SECTION.match(file.read(0, _HEAD)) is not None
    return False


def _numbered(iterations: list[Iteration], number: int, message: str) -> Iteration:
    for iteration in iterations:
        if iteration.number == number:
            return iteration
    existing = some_names([str(iteration.number) for iteration in reversed(iterations)])
    raise CheckpointError(message, hint=f"{HOW_TO_CHOOSE}; its iterations: {existing}")


def _from_directory(path: str, requested: Optional[int], report: Report) -> Iteration:
    directory = absolute(path)
    number = parse_iteration(os.path.basename(directory))
    if requested is not None and requested != number:
        raise UsageError(
            f"--step {requested}: {path} is the directory of one checkpoint, and not named {iteration_name(requested)}",
            hint="leave out --step, or give the directory above",
        )
    iteration = Iteration(number, path)
    if number is not None:
        _warn_of_unfinished(iteration, read_tracker(os.path.dirname(directory)), report)
    return iteration


def _warn_of_unfinished(chosen: Iteration, tracked: Optional[int], report: Report) -> None:
    if tracked is not None and chosen.number is not None and chosen.number > tracked:
        report.warn(
            f"{chosen.path}: {TRACKER} beside it names iteration {tracked} as the last finished one: this one may have "
            "been cut short while it was saved"
        )


METADATA = "metadata.json"
COMMON = "common.json"
ADAPTER = "mindformers_adapter_config.json"

MODEL, OPTIMIZER = "model", "opt"

_ITERATION = re.compile(r"iteration_([0-9]{8,18})")
_FILE = re.compile(r"(?:(.+)-)?(model|opt)-([0-9]{7})-([0-9]{7})\.safetensors", re.DOTALL)
# Python's repr of a tuple of a name and a tuple of one number.
_KEY = re.compile(r"""\((?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"), \((0|[1-9][0-9]{0,17}),\)\)""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:([\\'\"nrt])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|.)", re.DOTALL)
_SINGLE = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "r": "\r", "t": "\t"}
_LARGEST_CHARACTER = 0x10FFFF


class FileName(NamedTuple):
    """The parts of a tensor file's name.

    Attributes:
        prefix: the name of the run; None without one.
        kind: `MODEL` or `OPTIMIZER`.
        number: of the rank that wrote it, or, in a de-duplicated save, of the file.
        total: files of this kind.
    """

    prefix: Optional[str]
    kind: str
    number: int
    total: int

    @property
    def series(self) -> tuple[Optional[str], int]:
        """The key of files of one kind and one save."""
        return self.prefix, self.total


def parse_file_name(name: str) -> Optional[FileName]:
    """The parts of a file's name; None if it is not a tensor file of Checkpoint 2.0."""
    match = _FILE.fullmatch(name)
    return None if match is None else FileName(match[1], match[2], int(match[3]), int(match[4]))


def file_order(name: str) -> tuple[bool, str]:
    """Sorts model files first, then optimizer files, each by name."""
    parsed = parse_file_name(name)
    return parsed is not None and parsed.kind == OPTIMIZER, name


def iteration_name(number: int) -> str:
    return f"iteration_{number:08d}"


def parse_iteration(name: str) -> Optional[int]:
    """The number of an iteration's directory; None for a name that MindFormers does not find."""
    match = _ITERATION.fullmatch(name)
    if match is None or iteration_name(int(match[1])) != name:
        return None
    return int(match[1])


def parse_key(key: str) -> Optional[tuple[str, int]]:
    """Name and slice number of a key such as ``('layers.0.weight', (1,))``.

    The text is parsed, never evaluated; None if it is not the repr of such a tuple.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    name = match[1] if match[1] is not None else match[2]
    if "\\" in name:
        unescaped = _unescaped(name)
        if unescaped is None:
            return None
        name = unescaped
    return name, int(match[3])


def _unescaped(body: str) -> Optional[str]:
    pieces = []
    position = 0
    for match in _ESCAPE.finditer(body):
        digits = match[2] or match[3] or match[4]
        if match[1] is not None:
            character = _SINGLE[match[1]]
        elif digits is not None and int(digits, 16) <= _LARGEST_CHARACTER:
            character = chr(int(digits, 16))
        else:
            return None
        pieces += [body[position : match.start()], character]
        position = match.end()
    name = "".join([*pieces, body[position:]])
    try:
        name.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair.
        return None
    return name
