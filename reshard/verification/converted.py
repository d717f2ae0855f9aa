"""Comparison of converted checkpoints with their source.

Forms other than rank directories are read with their own reader, as by any loader: the target must have every tensor
of the source, with its type and shape, each slice equal to the source, and the layout of the target's strategy. It must
have no other tensors.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from reshard.checkpoints import CheckpointIndex, FileHandles, can_hold
from reshard.checkpoints.checkpoint import Checkpoint, StoredObject
from reshard.checkpoints.formats.archives import Archive
from reshard.checkpoints.formats.dtypes import INT4
from reshard.checkpoints.formats.pickles import read_pickle
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import DamagedCheckpointError, IncompleteSourceError, LayoutError
from reshard.forms.pytorch.form import COMMON, METADATA
from reshard.forms.registry import form_named
from reshard.storage import is_regular_file, read_range, read_small, reading
from reshard.strategies import Stage, Strategy
from reshard.text.messages import quoted, rank_ranges
from reshard.text.names import is_training_value
from reshard.verification.boxes import Box, LayoutValues, device_boxes, target_boxes, volume_of, whole_box
from reshard.verification.reading import Comparison, Difference, Reading, compare
from reshard.verification.stored import (
    Content,
    SliceSet,
    Source,
    StoredTensor,
    number_in,
    recorded_layout,
    stage_layout,
    value_content,
)


def compare_form(
    source: Source,
    target_files: Source,
    strategy: Strategy,
    directory: str,
    means: Reading,
    admit: Callable[[str], bool] = lambda name: True,
) -> list[Difference]:
    """Compare a checkpoint of any other form with its source, which has the names and types of the target.

    Returns:
        Every difference, by parameter.

    Raises:
        InputError: the source lacks compared slices, or does not fit its strategy.
        RetryableError: reading failed.
    """
    return _Files(source, target_files, strategy, directory, means, admit).run()


def layout_in(stage: Stage, content: Content, strategy: Strategy) -> LayoutValues:
    """The layout of a tensor in a target stage.

    Accumulated gradients have optimizer shards if the source's files have them. If the source's strategy records
    none, a target with a pipeline has none either: MindSpore's compiler records them there, but writes none.

    Raises:
        IncompleteSourceError: only missing files show whether the source has optimizer shards.
    """
    layout, shards = stage_layout(strategy, stage, content.name, content.shape), content.shards
    if shards.plain or (shards.unsharded and len(strategy.stages) > 1):
        return layout.unsharded()
    if shards.undecided and layout.shards > 1:
        raise IncompleteSourceError(
            f"{quoted(content.name)}: only files of {rank_ranges(shards.undecided)} show whether it has optimizer "
            "shards, and all of them are missing",
            parameter=content.name,
            hint="restore one of them",
        )
    return layout


class TargetComparison:
    """The comparison of numbered files with a source; in rank directories the number is the rank.

    Raises:
        CheckpointError: source files contain a requested entry that the reader skips.
    """

    def __init__(
        self,
        source: Source,
        indexes: Mapping[int, CheckpointIndex],
        strategy: Strategy,
        means: Reading,
        admit: Callable[[str], bool],
    ) -> None:
        self._source, self._indexes, self._new, self._means = source, indexes, strategy, means
        listed = None if strategy.is_none else frozenset(strategy.parameters)

        def converted(name: str) -> bool:
            return (listed is None or name in listed) and admit(name)

        source.check_read(converted)
        self._names = [*filter(converted, source.tensors)]
        self._value_files = {name: files for name, files in source.values.items() if admit(name)}
        self._differences: list[Difference] = []

    def run(self) -> list[Difference]:
        """Every difference, whole files first, then by parameter."""
        self._check_names()
        self._check_metadata()
        slices = [item for name in self._names for item in self._slices(self._source.tensors[name])]
        values = self._value_origins()
        copies = [*self._value_copies({key: origins[0] for key, origins in values.items()})]
        with self._means.counting(sum(item.nbytes for item in [*slices, *copies]), "verifying"):
            wrong = compare(slices, self._means)
            for name in wrong.stages:
                self._add("stages", name, "the source's pipeline stages hold different values of it")
            for (_, name), numbers in wrong.files.items():
                self._add("content", name, "differs from the source", numbers)
            self._compare_values(values)
        return sorted(self._differences, key=lambda item: (item.parameter or "", item.kind, item.ranks, item.files))

    def _add(self, kind: str, name: str | None, detail: str, numbers: Iterable[int] = ()) -> None:
        self._differences.append(Difference(kind, name, tuple(sorted(numbers)), detail))

    def _check_names(self) -> None:
        """Report names in the files that neither the source nor the strategies expect there."""
        raise NotImplementedError

    def _strange_metadata(self, number: int, index: CheckpointIndex) -> Iterable[str]:
        """Problems of a file's metadata."""
        raise NotImplementedError

    def _slices(self, content: Content) -> Iterator[Comparison]:
        """The slices of a tensor to compare by bytes. Reports all other problems."""
        raise NotImplementedError

    def _values(self) -> Iterator[tuple[str, int, Sequence[int]]]:
        """Per value and file, the source files of possible originals. Reports missing values."""
        raise NotImplementedError

    def _check_metadata(self) -> None:
        wrong: dict[str, list[int]] = defaultdict(list)
        for number, index in self._indexes.items():
            for text in self._strange_metadata(number, index):
                wrong[text].append(number)
        for text, numbers in wrong.items():
            self._add("file", None, text, numbers)

    @property
    def source_metadata(self) -> set[tuple[str, str]]:
        return {item for index in self._source.indexes.values() for item in index.metadata.items()}

    def _value_origins(self) -> dict[tuple[str, int], list[int]]:
        """Per value and file, the source files of possible originals with its type and shape."""
        fitting_origins: dict[tuple[str, int], list[int]] = {}
        for name, number, origins in self._values():
            problems = {origin: self._value_problem(name, number, origin) for origin in origins}
            fitting = [origin for origin, problem in problems.items() if problem is None]
            if fitting:
                fitting_origins[name, number] = fitting
            else:
                kind, detail = problems[origins[0]] or ("", "")
                self._add(kind, name, detail, [number])
        return fitting_origins

    def _value_problem(self, name: str, number: int, origin: int) -> tuple[str, str] | None:
        """The difference between the header of a file's value and the source's: kind and detail, or None."""
        mine, theirs = self._indexes[number].tensors[name], self._source.value(name, origin)
        if mine.header != theirs.header:
            kind = "shape" if mine.dtype == theirs.dtype else "type"
            return kind, f"is {mine.dtype} {list(mine.shape)}, but {theirs.dtype} {list(theirs.shape)} in the source"
        formats = {self._indexes[number].format, self._source.indexes[origin].format}
        if formats == {"ckpt"} and mine.dims != theirs.dims:
            return "shape", f"records dimensions {list(mine.dims)}, but {list(theirs.dims)} in the source"
        return None

    def _value_copies(self, origins: Mapping[tuple[str, int], int]) -> Iterator[Comparison]:
        numbers: dict[tuple[str, int], list[int]] = defaultdict(list)
        for (name, number), origin in origins.items():
            numbers[name, origin].append(number)
        for (name, origin), copies in numbers.items():
            content = value_content(self._source.indexes, name, origin)
            yield Comparison(content, SliceSet(0, {whole_box(content.shape): tuple(copies)}), self._indexes)

    def _compare_values(self, origins: Mapping[tuple[str, int], list[int]]) -> None:
        """Compare each copy with its possible origins, one after the other."""
        wrong: dict[str, list[int]] = defaultdict(list)
        counted = True
        while origins:
            mismatches = compare(
                self._value_copies({key: each[0] for key, each in origins.items()}), self._means, counted
            )
            differing = {(name, number) for (_, name), numbers in mismatches.files.items() for number in numbers}
            for name, number in differing:
                if len(origins[name, number]) == 1:
                    wrong[name].append(number)
            origins = {key: origins[key][1:] for key in differing if len(origins[key]) > 1}
            counted = False
        for name, numbers in wrong.items():
            self._add("content", name, "differs from the source", numbers)


_NUMBERED = re.compile(r"model-(\d{5,})-of-(\d{5,})\.safetensors")
_OPTIMIZER_FILE = re.compile(r"opt-\d{7}-\d{7}\.")
"""Names of files of optimizer state in Checkpoint 2.0, which have the training's values."""


class _Files(TargetComparison):
    def __init__(
        self,
        source: Source,
        target_files: Source,
        strategy: Strategy,
        directory: str,
        means: Reading,
        admit: Callable[[str], bool],
    ) -> None:
        super().__init__(source, target_files.indexes, strategy, means, admit)
        self._written, self._directory = target_files, directory
        self._form = form_named(target_files.checkpoint.form)
        self._cut = self._form.cut(target_files.checkpoint)
        # Weights without a layout are cut where tensors are; elsewhere they are copied like values.
        self._value_files = {
            name: files
            for name, files in self._value_files.items()
            if can_hold("safetensors", source.value(name, files[0]).dtype)
            and not (self._form.options.shards and name in source.tensors)
        }
        training = self._form.training
        if training is not None:
            # The training's values are numbers in records of the form, which are compared by themselves.
            self._value_files = {
                name: files for name, files in self._value_files.items() if not is_training_value(name)
            }
        self._counters = frozenset(() if training is None else training.counters)
        # Each loader refuses a "format" other than its own.
        self._format = "ms" if self._form.options.mindspore else "pt"
        self._known_metadata = {item for item in self.source_metadata if item[0] != "format"}

    def _add(self, kind: str, name: str | None, detail: str, numbers: Iterable[int] = ()) -> None:
        paths = self._written.checkpoint.files
        names = tuple(os.path.relpath(paths[number], self._directory) for number in sorted(numbers))
        self._differences.append(Difference(kind, name, (), detail, names))

    def _check_names(self) -> None:
        for name in self._written.holders.keys() - {*self._names, *self._value_files, *self._counters}:
            detail = "is not expected in this file by the source and the strategies"
            self._add("extra", name, detail, self._written.holders[name])
        paths = self._written.checkpoint.files
        common = os.path.join(self._written.checkpoint.place, COMMON)
        for name in self._counters & self._written.holders.keys() if is_regular_file(common) else ():
            others = [number for number in self._written.holders[name] if paths[number] != common]
            if others:
                self._add("extra", name, f"is a tensor, and a number in {COMMON}", others)
        numbered = (_NUMBERED.fullmatch(os.path.basename(path)) for path in paths.values())
        numbers = sorted((int(match[1]), int(match[2])) for match in numbered if match is not None)
        if numbers != [(at + 1, len(numbers)) for at in range(len(numbers))]:
            self._add("file", None, f"its {len(numbers)} files are not numbered in a row")

    def _strange_metadata(self, number: int, index: CheckpointIndex) -> Iterable[str]:
        if index.format != "safetensors":
            return
        allowed = {key: text for key, text in index.metadata.items() if key in self._form.options.metadata}
        yield from strange_metadata(index, self._known_metadata, allowed, self._format)
        if "format" not in index.metadata:
            yield f"its metadata has no 'format', which should be {self._format!r}"

    def _values(self) -> Iterator[tuple[str, int, Sequence[int]]]:
        expected, weights = self._file_of_values(), {*self._source.checkpoint.without_layout()}
        for name, files in self._value_files.items():
            numbers = self._written.holders.get(name, ())
            for number in numbers:
                yield name, number, files[:1]
            if not numbers:
                self._add("missing", name, "is in no file")
            elif expected is not None and expected not in numbers and name not in weights:
                self._add("missing", name, "is not in the file with the values", [expected])
            if len(numbers) > 1:
                self._add("extra", name, "is in several files, of which loaders read one", numbers)

    def _file_of_values(self) -> int | None:
        """The file with all values but weights: the first, of optimizer state if any; None where an index lists it."""
        if self._cut is None:
            return None
        paths = self._written.checkpoint.files
        state = [number for number, path in paths.items() if _OPTIMIZER_FILE.search(os.path.basename(path))]
        return min(state or paths, key=paths.__getitem__)

    def _slices(self, content: Content) -> Iterator[Comparison]:
        name, target_files = content.name, self._written
        numbers = target_files.holders.get(name)
        if numbers is None:
            self._add("missing", name, "is in no file")
            return
        headers = {number: target_files.value(name, number) for number in numbers}
        wrong = [number for number, tensor in headers.items() if tensor.dtype != content.dtype]
        if wrong:
            detail = f"is {headers[wrong[0]].dtype}, but {content.dtype} {self._source.origin}"
            self._add("type", name, detail, wrong)
            return
        laid_out, boxed = target_files.tensors.get(name), self._form.options.shards
        if laid_out is None and (self._cut is None or boxed):
            # In forms of whole tensors, a tensor of one element counts as a value.
            numbers = target_files.with_elements(name) if boxed else numbers
            wrong = [number for number in numbers if headers[number].shape != content.shape]
            if wrong:
                detail = f"has shape {list(headers[wrong[0]].shape)}, not {list(content.shape)}"
                self._add("shape", name, detail, wrong)
                return
            yield Comparison(content, SliceSet(0, {whole_box(content.shape): numbers}), target_files.indexes)
            return
        saved = None if self._cut is None else self._cut.saved_layout(name)
        if laid_out is None or (self._cut is not None and saved is None and not boxed):
            self._add("missing", name, "is in a file, but no metadata lists it", numbers)
            return
        assert isinstance(laid_out, StoredTensor)
        unlisted = set(numbers).difference(
            *(files for slices in laid_out.slice_sets for files in slices.files_of.values())
        )
        # Ranks without rows have chunks without elements.
        unlisted = {number for number in unlisted if headers[number].elements}
        if unlisted:
            self._add("extra", name, "is in the file, but no metadata lists it there", unlisted)
        if laid_out.shape != content.shape:
            self._add("shape", name, f"has shape {list(laid_out.shape)}, not {list(content.shape)}", numbers)
            return
        if not laid_out.is_whole():
            self._add("missing", name, "is incomplete: no file holds some of its slices")
        if saved is not None:
            layout = LayoutValues((len(saved.ranks),), ((),) * len(content.shape))
            layout = layout if saved.layout is None else recorded_layout(saved.layout)
            for detail in self._wrong_cut(content, device_boxes(layout, content.shape) or (), saved.ranks):
                self._add("strategy", name, detail)
        elif not self._new.is_none:
            boxes = {box for slices in laid_out.slice_sets for box, files in slices.files_of.items() if files}
            for detail in self._wrong_cut(content, [*boxes], None):
                self._add("strategy", name, detail, numbers)
        for slices in laid_out.slice_sets:
            yield Comparison(content, slices, target_files.indexes, slices.number)

    def _wrong_cut(self, content: Content, written: Sequence[Box], ranks: Sequence[int] | None) -> Iterator[str]:
        """Whether slices are those of no stage of the target's strategy, and of its ranks where these are recorded."""
        boxes: Sequence[Box] = ()
        for stage in self._new.stages:
            if not (self._new.is_none or content.name in stage.layouts):
                continue
            try:
                boxes = target_boxes(layout_in(stage, content, self._new), content.shape)
            except LayoutError as error:
                yield error.message
                return
            if ranks is None and {*filter(volume_of, boxes)} == {*filter(volume_of, written)}:
                return
            if ranks is not None and (*ranks, *written) == (*stage.ranks, *boxes):
                return
        found, expected = _cuts(written), _cuts(boxes)
        other = ", or not on its ranks" if found == expected else f": {found} slices per dimension, not {expected}"
        yield f"is not cut as by the target's strategy{other}"


def strange_metadata(
    index: CheckpointIndex, copied: Collection[tuple[str, str]], allowed: Mapping[str, str], format: str = "ms"
) -> Iterator[str]:
    """Metadata of a safetensors file that is neither right, nor allowed, nor copied from a source file."""
    for key, text in index.metadata.items():
        tensor = index.tensors.get(key)
        correct = {"format": format, "remove_redundancy": "False"}.get(key)
        if correct is None and tensor is not None and tensor.dtype == INT4:
            correct = INT4
        # The source's remove_redundancy does not count: the target has every slice.
        same_as_source = allowed.get(key) == text or (key != "remove_redundancy" and (key, text) in copied)
        if text != correct and key != "crc_num" and not same_as_source:
            expected = "nothing" if correct is None else repr(correct)
            yield f"its metadata has {text!r} for {key!r}, not {expected}"


def _cuts(boxes: Sequence[Box]) -> list[int]:
    """The number of slices per dimension."""
    return [len(set(intervals)) for intervals in zip(*boxes)]


_BLOCK = 1 << 20


def object_differences(
    expected: Mapping[str, StoredObject | None], target: Checkpoint, handles: FileHandles, but: str = ""
) -> Iterator[Difference]:
    """Every object that differs, is missing, or is not expected.

    Args:
        expected: the source's by name; None for an empty one.
        target: the written checkpoint.
        handles: open files.
        but: the name of an object that is not compared.

    Raises:
        ReshardError: an object cannot be read, or the source's is damaged.
    """
    for name in sorted({*expected, *target.objects} - {but}):
        written = target.objects.get(name)
        files = () if written is None else (os.path.relpath(written.path, target.place),)
        if written is None:
            yield Difference("missing", name, (), "is an object that was to be written, and in no file")
        elif name not in expected:
            yield Difference("extra", name, (), "is an object that was not to be written", files)
        else:
            stored = expected[name]
            original = None if stored is None else _read(stored, handles)
            try:
                found = _read(written, handles)
                same = read_pickle(found[1], lambda _: True) == [None] if original is None else _same(original, found)
            except DamagedCheckpointError as error:
                yield Difference("file", None, (), error.message, files)
                continue
            if not same:
                yield Difference("content", name, (), "differs from the source", files)


def _read(stored: StoredObject, handles: FileHandles) -> tuple[bytes, bytes, bool]:
    """The bytes of an object, those of its pickle, and whether it holds nothing else, such as tensors."""
    with reading(stored.path), contextlib.closing(handles.open_file(stored.path)) as file:
        data = read_range(file, stored.offset, stored.length)
        if not stored.archived:
            return data, data, True
        archive = Archive(file, stored.offset, stored.length)
        archive.check(memoryview(bytearray(_BLOCK)))
        return data, archive.pickle(), "data/0" not in archive


def _same(first: tuple[bytes, bytes, bool], second: tuple[bytes, bytes, bool]) -> bool:
    return first[0] == second[0] or (first[1] == second[1] and first[2] and second[2])


def record_differences(target: Checkpoint) -> Iterator[Difference]:
    """Records of hyper-parallel's tensors that its loader needs otherwise than our reader."""
    path = os.path.join(target.place, METADATA)
    with reading(path):
        metadata = read_pickle(read_small(path, sys.maxsize), lambda name: True)
    if metadata.fields.get("planner_data") == {}:
        yield Difference("file", None, (), "has an empty planner_data, where hyper-parallel has none", (METADATA,))
    for index, record in metadata.fields["storage_data"].items():
        name, found = index.fields["fqn"], [record.fields.get(key) for key in ("offset", "length", "tensor_key")]
        if name not in target.objects and found != [0, -1, name]:
            yield Difference("file", name, (), f"is recorded at {found}, not at [0, -1, {name!r}]", (METADATA,))


"""The form whose iterations `iteration_differences` compares."""

_TENSOR_FILE = re.compile(r"(?:(.+)-)?(model|opt)-(\d{7})-(\d{7})\.safetensors", re.DOTALL)
_COUNTERS = ("Int32", "Int64", "UInt32", "UInt64")


def is_iteration(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a numbered iteration in numbered files, such as those of Checkpoint 2.0."""
    options = form_named(checkpoint.form).options
    return options.prefix and not options.by_rank


def iteration_differences(
    source: Checkpoint, target: Checkpoint, prefix: str | None, handles: FileHandles
) -> Iterator[Difference]:
    """Differences of an iteration of Checkpoint 2.0 in common.json, its number, and the names of its files.

    Numbers that the source does not record may be anything: users add them.

    Args:
        source: the source, without edits.
        target: the iteration.
        prefix: as asked for, `DEFAULT_PREFIX` for none; None if unknown.
        handles: open files.
    """
    expected = source.training or _training_in_values(source, handles)
    for name in ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size"):
        recorded, number = target.training.get(name), expected.get(name)
        if number is not None and number != recorded:
            yield Difference("content", name, (), f"is {recorded!r} in the metadata of the training, not {number!r}")
    step = source.step if is_iteration(source) else expected.get("global_step")
    if target.step != str(step or 0):
        yield Difference("file", None, (), f"is iteration {target.step}, not {step or 0}")
    files: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for path in target.files.values():
        match = _TENSOR_FILE.fullmatch(os.path.basename(path))
        if match is not None:
            files[match[2]].append((match[1] or "", int(match[3]), int(match[4])))
    for kind, found in files.items():
        before = found[0][0] if prefix is None else "" if prefix == DEFAULT_PREFIX else prefix.rstrip("-")
        if sorted(found) != [(before, number, len(found)) for number in range(len(found))]:
            yield Difference("file", None, (), f"the names of {kind} files are not those of {len(found)} in a row")


def _training_in_values(source: Checkpoint, handles: FileHandles) -> Mapping[str, int]:
    """Counters of a training by their names in common.json: of values, else of the step in the names of files."""
    named = re.fullmatch(r"(\d+)_(\d+)", source.step or "")
    numbers = {} if named is None else {"epoch_num": int(named[1]), "step_num": int(named[2])}
    for name in ("global_step", "epoch_num", "step_num"):
        for file in source.holders(name)[:1]:
            value = value_content(source.indexes, name, file)
            if value.dtype in _COUNTERS and volume_of(whole_box(value.shape)) == 1:
                numbers[name] = number_in(value, handles)
    for name, other in (("global_step", "step_num"), ("step_num", "global_step")):
        if other in numbers:
            numbers.setdefault(name, numbers[other])
    return {name: number for name, number in numbers.items() if number >= 0}
