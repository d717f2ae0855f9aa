"""Checkpoint 2.0 as a form: its names, roots and iterations."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError
from reshard.forms.form import Form, FormOptions, Layouts, RecordedCut, SavedStep
from reshard.forms.request import Means, Request
from reshard.forms.tracker import TRACKER, Iteration, IterationNames, read_tracker, saved_steps
from reshard.storage import UnfitError, is_directory, is_regular_file, names_in, opened_regular, read_json, reading
from reshard.text.messages import Report, quoted, some_names

if TYPE_CHECKING:
    from reshard.forms.checkpoint2.checkpoint import Checkpoint2
    from reshard.forms.target import TargetForm


class Checkpoint2Form(Form):
    """Checkpoint 2.0."""

    name = "checkpoint2"
    options = FormOptions(title="MindSpore Checkpoint 2.0", layouts=Layouts.RECORDED, steps=True, prefix=True)

    def recognise(self, src: str, names: Sequence[str]) -> bool:
        return TRACKER in names or _is_iteration(src, names) or bool(_iterations_in(src, names))

    def read(self, request: Request, means: Means) -> Checkpoint2:
        from reshard.forms.checkpoint2.checkpoint import read_checkpoint2

        return read_checkpoint2(request, means)

    def cut(self, checkpoint: Checkpoint) -> RecordedCut:
        return cast("Checkpoint2", checkpoint)

    def target(self, checkpoint: Checkpoint, request: Request, means: Means) -> TargetForm:
        from reshard.forms.checkpoint2.written_files import target_files

        return target_files(checkpoint, request, means)

    def marks(self, files: Sequence[str]) -> list[str]:
        iteration = files[0].rpartition("/")[0]
        return [f"{iteration}/{METADATA}", f"{iteration}/{COMMON}", TRACKER]

    def check_written(self, directory: str, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        place = os.path.relpath(checkpoint.place, directory)
        number = ITERATIONS.number(place)
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
        return saved_steps(src, find_iterations(src))


_HEAD = 4096
_LARGEST_COMMON = 1 << 20
_SECTION = re.compile(rb'\s*\{\s*"(state_dict_metadata|storage_data)"')


def find_iterations(root: str) -> list[Iteration]:
    """The iterations of a root, oldest first."""
    return _iterations_in(root, names_in(root))


def choose(path: str, step: str, report: Report) -> list[Iteration]:
    """The candidate iterations for a step, in order of preference; the first complete one is read.

    Args:
        path: a root, or the directory of an iteration.
        step: the requested iteration; ``latest`` for the one in the tracker.
        report: gets notes on skipped iterations.

    Raises:
        UsageError: ``step`` is not a number, or another number than the directory's.
        CheckpointError: the iteration does not exist.
    """
    names = names_in(path)
    if _is_iteration(path, names):
        return [ITERATIONS.of_directory(path, step, report)]
    iterations = _iterations_in(path, names)
    if not iterations:
        from reshard.forms.ranks.other_tools import checkpoint_of_other_tool, hint_of_checkpoints_below

        raise checkpoint_of_other_tool(path) or CheckpointError(
            f"{path}: holds no {ITERATIONS.prefix}* directory",
            file=path,
            hint=hint_of_checkpoints_below(path) or "a root of Checkpoint 2.0 has one for each saved iteration",
        )
    chosen = ITERATIONS.choose(path, iterations, step, report)
    if chosen is not None:
        return [chosen]
    report.warn(
        f"{os.path.join(path, TRACKER)} is missing, so it is unknown which iterations are finished: "
        "the newest complete one is read"
    )
    return [*reversed(iterations)]


def read_common(directory: str) -> dict[str, Any]:
    """The content of common.json; empty without the file."""
    path = os.path.join(directory, COMMON)
    hint = "copy it again from the original; or remove it, without epoch and step"
    return read_json(path, _LARGEST_COMMON, hint=hint) or {}


def _iterations_in(root: str, names: Sequence[str]) -> list[Iteration]:
    return [iteration for iteration in ITERATIONS.in_root(root, names) if is_directory(iteration.path)]


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


METADATA = "metadata.json"
COMMON = "common.json"
ADAPTER = "mindformers_adapter_config.json"

MODEL, OPTIMIZER = "model", "opt"

ITERATIONS = IterationNames("iteration_", 8)
_FILE = re.compile(r"(?:(.+)-)?(model|opt)-([0-9]{7})-([0-9]{7})\.safetensors", re.DOTALL)
# Python's repr of a tuple of a name and a tuple of one number.
_KEY = re.compile(r"""\((?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"), \((0|[1-9][0-9]{0,17}),\)\)""", re.DOTALL)


class FileName(NamedTuple):
    """The parts of a tensor file's name.

    Attributes:
        prefix: the name of the run; None without one.
        kind: `MODEL` or `OPTIMIZER`.
        number: of the rank that wrote it, or, in a de-duplicated save, of the file.
        total: files of this kind.
    """

    prefix: str | None
    kind: str
    number: int
    total: int

    @property
    def series(self) -> tuple[str | None, int]:
        """The key of files of one kind and one save."""
        return self.prefix, self.total


def parse_file_name(name: str) -> FileName | None:
    """The parts of a file's name; None if it is not a tensor file of Checkpoint 2.0."""
    match = _FILE.fullmatch(name)
    return None if match is None else FileName(match[1], match[2], int(match[3]), int(match[4]))


def file_order(name: str) -> tuple[bool, str]:
    """Sorts model files first, then optimizer files, each by name."""
    parsed = parse_file_name(name)
    return parsed is not None and parsed.kind == OPTIMIZER, name


def parse_key(key: str) -> tuple[str, int] | None:
    """Name and slice number of a key such as ``('layers.0.weight', (1,))``; None if it is no repr of such a tuple."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    name = match[1] if match[1] is not None else match[2]
    if "\\" in name:
        try:
            with warnings.catch_warnings():
                # Of an escape that is none.
                warnings.simplefilter("error")
                name, _ = ast.literal_eval(key)
            name.encode()
        except (SyntaxError, ValueError):
            # Half of a surrogate pair cannot be encoded.
            return None
    return name, int(match[3])
