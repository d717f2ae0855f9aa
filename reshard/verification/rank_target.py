"""Whether rank directories are what the source makes of them.

What each rank's file has to hold follows from both strategies and the source; what it happens to hold plays no part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Callable, Optional, Union

from reshard.checkpoints import CheckpointIndex, FileHandles, KnownStructures, Tensor, can_hold, format_of
from reshard.checkpoints.formats.dtypes import INT4, NO_ARRAYS
from reshard.checkpoints.formats.headers import read_headers
from reshard.errors import DamagedCheckpointError, IncompleteSourceError, LayoutError
from reshard.strategies import Stage, Strategy
from reshard.text.wording import quoted, rank_ranges
from reshard.verification.boxes import Recorded, Shape, shape_of, target_boxes, volume_of, whole_box
from reshard.verification.difference import Difference, kind_of_tensor
from reshard.verification.edited import EditedSource
from reshard.verification.library import library_differences
from reshard.verification.reading import Comparison, Means, compare
from reshard.verification.stored import Content, Source, Stored, Way, by_box, recorded_layout
from reshard.verification.values import RecoveredValues, Values

AnySource = Union[Source, EditedSource]


def compare_ranks(
    source: AnySource,
    files: Mapping[int, str],
    target: Strategy,
    means: Means,
    *,
    ranks: Optional[Iterable[int]] = None,
    admit: Callable[[str], bool] = lambda name: True,
    recovered: bool = False,
) -> list[Difference]:
    """What of converted rank directories is not what the source makes of them.

    Args:
        source: the step that was converted, or what was made of it.
        files: files of the converted checkpoint, by rank; all that there are.
        target: their strategy.
        means: what may be used for reading.
        ranks: target ranks to look at; where None all of the strategy, and there must be no others.
        admit: which parameters were converted, by name.
        recovered: the target is what a recovery gives back (see `values.RecoveredValues`).

    Returns:
        Every difference, whole files first, then by parameter; none where the target is right.

    Raises:
        InputError: the source lacks what the target ranks need, or does not fit its strategy.
        RetryableError: reading failed.
    """
    wanted = sorted(range(target.device_count) if ranks is None else set(ranks))
    indexes, damaged = read_files({rank: files[rank] for rank in wanted if rank in files}, means.handles)
    comparison = _Comparison(source, indexes, target, wanted, means, admit, recovered)
    for rank in wanted:
        if rank not in files:
            comparison.add("file", None, [rank], "there is no file")
        elif rank in damaged:
            comparison.add("file", None, [rank], damaged[rank])
    found = comparison.run()
    for rank, index in indexes.items():
        found += [Difference("file", None, (rank,), text) for text in library_differences(index)]
    beyond = [rank for rank in sorted(files) if ranks is None and rank >= target.device_count]
    return [*(Difference("file", None, (rank,), f"{files[rank]} is not of this conversion") for rank in beyond), *found]


def read_files(files: Mapping[int, str], handles: FileHandles) -> tuple[dict[int, CheckpointIndex], dict[int, str]]:
    """What every rank's file holds, and why others are damaged.

    Raises:
        CheckpointError: a file is missing, unreadable or encrypted.
        RetryableError: reading failed.
    """
    indexes: dict[int, CheckpointIndex] = {}
    damaged: dict[int, str] = {}
    for rank, header in read_headers(handles, dict(sorted(files.items())), KnownStructures(handles)):
        if isinstance(header, DamagedCheckpointError):
            damaged[rank] = header.message
        else:
            indexes[rank] = header
    return indexes, damaged


def converted_names(
    source: AnySource, target: Strategy, admit: Callable[[str], bool]
) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """What is converted: names of tensors, and of values with the files that have them.

    Raises:
        CheckpointError: files hold something that should be, and nothing reads it.
    """
    left_out = set() if target.is_none else set(source.listed).difference(target.parameters)

    def converted(name: str) -> bool:
        return name not in left_out and admit(name)

    if isinstance(source, Source):
        source.check_read(converted)
    values = {name: files for name, files in source.values.items() if converted(name)}
    return [*filter(converted, source.tensors)], values


def layout_in(stage: Stage, content: Content, strategy: Strategy) -> Recorded:
    """How a target stage has to cut a tensor.

    Accumulated gradients are written the way the source stores them. Where the source cannot tell, because it records
    no shard, they are written without one if the target has a pipeline, where the compiler records but does not make
    it.

    Raises:
        IncompleteSourceError: whether optimizer shards are made only files tell that are not there.
    """
    if strategy.is_none:
        return Recorded((stage.device_count,), ((),) * len(content.shape))
    layout, shards = recorded_layout(stage.layouts[content.name]), content.shards
    if shards.plain or (shards.unrecorded and len(strategy.stages) > 1):
        return layout.unsharded()
    if shards.undecided and layout.shards > 1:
        raise IncompleteSourceError(
            f"{quoted(content.name)}: whether its optimizer shards are made only files of "
            f"{rank_ranges(shards.undecided)} tell, and none has it",
            parameter=content.name,
            hint="bring one of them back",
        )
    return layout


class _Comparison:
    def __init__(
        self,
        source: AnySource,
        indexes: Mapping[int, CheckpointIndex],
        target: Strategy,
        ranks: Sequence[int],
        means: Means,
        admit: Callable[[str], bool],
        recovered: bool,
    ) -> None:
        self._source, self._indexes, self._new = source, indexes, target
        self._tensors, values = converted_names(source, target, admit)
        self._converted = frozenset(self._tensors)
        self._values = (RecoveredValues if recovered else Values)(source, values, self._converted, target)
        self._means = means
        # Per stage the ranks to look at whose files can be read.
        self._present = {
            stage.number: [rank for rank in ranks if rank in stage.ranks and rank in indexes] for stage in target.stages
        }
        self._alike: dict[int, tuple[Mapping[str, Tensor], list[int]]] = {}
        for rank, index in indexes.items():
            self._alike.setdefault(id(index.tensors), (index.tensors, []))[1].append(rank)
        self._ways: dict[object, Way] = {}
        self._differences: list[Difference] = []

    def add(self, kind: str, name: Optional[str], ranks: Iterable[int], detail: str) -> None:
        """A difference."""
        self._differences.append(Difference(kind, name, tuple(sorted(ranks)), detail))

    def run(self) -> list[Difference]:
        """Every difference, whole files first, then by parameter."""
        self._check_names()
        self._check_metadata()
        slices = [*self._slices()]
        values = self._value_origins()
        total = sum(one.nbytes for one in slices)
        total += sum(one.nbytes for one in self._value_copies({key: found[0] for key, found in values.items()}))
        self._means.progress.begin(total, "verifying")
        try:
            wrong = compare(slices, self._means)
            for name in wrong.stages:
                self.add("stages", name, (), "the source's pipeline stages hold different values of it")
            for (_, name), ranks in wrong.files.items():
                self.add("content", name, ranks, "differs from the source")
            self._compare_values(values)
        finally:
            self._means.progress.end()
        return sorted(self._differences, key=lambda found: (found.parameter or "", found.kind, found.ranks))

    def _is_converted(self, name: str, stage: Stage) -> bool:
        """Whether a stage's ranks get slices of a parameter that the source lays out."""
        return name in self._converted and (self._new.is_none or name in stage.layouts)

    def _check_names(self) -> None:
        """Names in target files that nothing puts there."""
        extra: dict[str, list[int]] = defaultdict(list)
        for tensors, same in self._alike.values():
            for stage in self._new.stages:
                ranks = [rank for rank in same if rank in stage.ranks]
                for name in tensors if ranks else ():
                    if not self._is_converted(name, stage):
                        extra[name] += [rank for rank in ranks if not self._values.origins(name, rank)]
        for name, ranks in extra.items():
            if ranks:
                self.add("extra", name, ranks, "is in the file, but the source and the strategies do not put it there")

    def _check_metadata(self) -> None:
        """Metadata of target files that tell a reader something else than what is in them."""
        known = {item for index in self._source.indexes.values() for item in index.metadata.items()}
        wrong: dict[str, list[int]] = defaultdict(list)
        for rank, index in self._indexes.items():
            for text in strange_metadata(index, known, self._values.metadata(rank)):
                wrong[text].append(rank)
        for text, ranks in wrong.items():
            self.add("file", None, ranks, text)

    def _slices(self) -> Iterator[Comparison]:
        """The slices that ranks hold rightly cut; all else is told."""
        for name in self._tensors:
            content = self._source.tensors[name]
            for stage in self._new.stages:
                if self._is_converted(name, stage) and self._present[stage.number]:
                    yield from self._slices_in(stage, content)

    def _slices_in(self, stage: Stage, content: Content) -> Iterator[Comparison]:
        name = content.name
        sample = _sample(content)
        wrong: dict[tuple[str, str], list[int]] = defaultdict(list)
        right = []
        try:
            layout = layout_in(stage, content, self._new)
            boxes = target_boxes(layout, content.shape)
        except LayoutError as error:
            self.add("strategy", name, self._present[stage.number], error.message)
            return
        for rank in self._present[stage.number]:
            box, tensor = boxes[rank - stage.first_rank], self._indexes[rank].tensors.get(name)
            if tensor is None:
                # Sources and .ckpt files leave out empty slices.
                if volume_of(box) or not (self._values.keeps_files or self._indexes[rank].format == "ckpt"):
                    wrong["missing", "is not in the file"].append(rank)
            elif not tensor.same_type(sample):
                wrong["type", f"is {tensor.dtype}, but {content.dtype} {self._source.told_by}"].append(rank)
            elif tensor.shape != shape_of(box):
                wrong["shape", f"has shape {list(tensor.shape)}, not {list(shape_of(box))}"].append(rank)
            else:
                right.append(rank)
        for (kind, detail), ranks in wrong.items():
            self.add(kind, name, ranks, detail)
        key = (layout, content.shape, stage.number, tuple(right))
        if key not in self._ways:
            self._ways[key] = Way(stage.number, by_box(boxes, stage.first_rank, right))
        yield Comparison(content, self._ways[key], self._indexes, stage.number)

    def _value_origins(self) -> dict[tuple[str, int], list[int]]:
        """Per value and rank that holds it the source files of which it may be a copy; all else is told."""
        found: dict[tuple[str, int], list[int]] = {}
        for name in self._values.names:
            for rank, index in self._indexes.items():
                origins = self._values.origins(name, rank)
                tensor = index.tensors.get(name)
                if origins and tensor is None:
                    held = can_hold(format_of(index.path), self._source.value(name, origins[0]).dtype)
                    if held and self._values.is_needed(name, rank):
                        self.add("missing", name, [rank], "is not in the file")
                elif origins:
                    problems = {origin: self._problem(name, rank, origin) for origin in origins}
                    fitting = [origin for origin, problem in problems.items() if problem is None]
                    if fitting:
                        found[name, rank] = fitting
                    else:
                        self.add("type", name, [rank], problems[origins[0]] or "")
        return found

    def _problem(self, name: str, rank: int, origin: int) -> Optional[str]:
        """In what a rank's value is of another kind than the source's, content aside."""
        mine, theirs = self._indexes[rank].tensors[name], self._source.value(name, origin)
        if kind_of_tensor(mine) != kind_of_tensor(theirs):
            return f"is {mine.dtype} {list(mine.shape)}, but {theirs.dtype} {list(theirs.shape)} in the source"
        formats = {self._indexes[rank].format, self._source.indexes[origin].format}
        if formats == {"ckpt"} and mine.dims != theirs.dims:
            return f"records dimensions {list(mine.dims)}, but {list(theirs.dims)} in the source"
        return None

    def _value_copies(self, origins: Mapping[tuple[str, int], int]) -> Iterator[Comparison]:
        ranks: dict[tuple[str, int], list[int]] = defaultdict(list)
        for (name, rank), origin in origins.items():
            ranks[name, origin].append(rank)
        for (name, origin), found in ranks.items():
            content = value_content(self._source, name, origin)
            yield Comparison(content, Way(0, {whole_box(content.shape): tuple(found)}), self._indexes)

    def _compare_values(self, origins: Mapping[tuple[str, int], list[int]]) -> None:
        """Compare each rank's copy with the source's; where it may be one of several, with one after the other."""
        wrong: dict[str, list[int]] = defaultdict(list)
        told = True
        while origins:
            found = compare(self._value_copies({key: each[0] for key, each in origins.items()}), self._means, told)
            again = {
                (name, rank): origins[name, rank][1:] for (_, name), ranks in found.files.items() for rank in ranks
            }
            for (name, rank), others in again.items():
                if not others:
                    wrong[name].append(rank)
            origins, told = {key: others for key, others in again.items() if others}, False
        for name, ranks in wrong.items():
            self.add("content", name, ranks, "differs from the source")


def value_content(source: AnySource, name: str, file: int) -> Stored:
    """A file's copy of a value as a tensor that is nothing but itself."""
    tensor = source.value(name, file)
    shape: Shape = (tensor.nbytes,) if tensor.dtype in NO_ARRAYS else tensor.shape
    item_size = 1 if tensor.dtype in NO_ARRAYS else tensor.item_size
    way = Way(0, {whole_box(shape): (file,)})
    return Stored(name, name, tensor.dtype, item_size, shape, (way,), source.indexes)


def _sample(content: Content) -> Tensor:
    """A tensor as a file would hold an element of it."""
    return Tensor(content.name, content.dtype, (1,), (1,), ((0, content.item_size),), content.item_size)


def strange_metadata(
    index: CheckpointIndex, known: Collection[tuple[str, str]], allowed: Mapping[str, str], format: str = "ms"
) -> Iterator[str]:
    """What in the metadata of a safetensors file neither holds for it nor is in the source, nor is allowed anyway.

    Args:
        index: the file.
        known: what the source's metadata say.
        allowed: what they may say anyway.
        format: what they say of the framework that the file is for.
    """
    for key, text in index.metadata.items():
        tensor = index.tensors.get(key)
        right = {"format": format, "remove_redundancy": "False"}.get(key)
        if right is None and tensor is not None and tensor.dtype == INT4:
            right = INT4
        # Every slice is there, whatever the source says; other entries may be the source's.
        same_as_source = allowed.get(key) == text or (key != "remove_redundancy" and (key, text) in known)
        if text != right and key != "crc_num" and not same_as_source:
            told = "nothing" if right is None else repr(right)
            yield f"its metadata say {text!r} for {key!r}, not {told}"
