"""Whether a checkpoint of any form but rank directories is what its source makes of it.

It is read by its own form's reader, which knows of no plan: what this finds is what any reader will find. Every
tensor of the source must be there, of its type and shape, every copy of every slice of it with the source's
values; every value as well; and nothing else. What a form says of layouts must be what the target's strategy says.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Callable, Optional

from reshard.checkpoints import can_hold
from reshard.errors import LayoutError
from reshard.forms.checkpoint2 import Checkpoint2
from reshard.forms.chunks import ChunkedCheckpoint
from reshard.forms.full import FullWeights
from reshard.forms.registry import form_named
from reshard.strategies import Strategy
from reshard.text.wording import number_ranges
from reshard.verification.boxes import Box, device_boxes, target_boxes, whole_box
from reshard.verification.difference import Difference
from reshard.verification.rank_target import AnySource, converted_names, layout_in, strange_metadata, value_content
from reshard.verification.reading import Comparison, Means, compare
from reshard.verification.stored import Content, Source, Stored, Way, recorded_layout

"""What files say as ``format`` where that is not MindSpore's ``ms``: transformers refuses what is not its own."""


def compare_form(
    source: AnySource,
    written: Source,
    target: Strategy,
    directory: str,
    means: Means,
    admit: Callable[[str], bool] = lambda name: True,
) -> list[Difference]:
    """What of a checkpoint of a form is not what the source makes of it.

    Args:
        source: the step that was converted, or what was made of it.
        written: the converted checkpoint, all of it.
        target: how it was to be laid out; `none` in full.
        directory: where it is; names of files are relative to it.
        means: what may be used for reading.
        admit: which parameters were converted, by name.

    Returns:
        Every difference, by parameter; none where the checkpoint is right.

    Raises:
        InputError: the source lacks what is compared, or does not fit its strategy.
        RetryableError: reading failed.
    """
    return _Comparison(source, written, target, directory, means, admit).run()


class _Comparison:
    def __init__(
        self,
        source: AnySource,
        written: Source,
        target: Strategy,
        directory: str,
        means: Means,
        admit: Callable[[str], bool],
    ) -> None:
        self._source, self._written, self._new = source, written, target
        self._directory, self._means = directory, means
        self._differences: list[Difference] = []
        # The files that hold an entry, by name.
        self._there: dict[str, list[int]] = defaultdict(list)
        for number, index in sorted(written.indexes.items()):
            for name in index.tensors:
                self._there[name].append(number)
        self._tensors, values = converted_names(source, target, admit)
        self._values = {
            name: value_content(source, name, files[0])
            for name, files in values.items()
            if can_hold("safetensors", source.value(name, files[0]).dtype)
        }

    def run(self) -> list[Difference]:
        """Every difference, whole files first, then by parameter."""
        for name in self._there.keys() - {*self._tensors, *self._values}:
            self._add(
                "extra", name, "is there, but the source and the strategies do not put it there", self._there[name]
            )
        self._check_metadata()
        expected: list[Content] = [*(self._source.tensors[name] for name in self._tensors), *self._values.values()]
        comparisons = [comparison for content in expected for comparison in self._copies(content)]
        self._means.progress.begin(sum(one.nbytes for one in comparisons), "verifying")
        try:
            wrong = compare(comparisons, self._means)
        finally:
            self._means.progress.end()
        for name in wrong.stages:
            self._add("stages", name, "the source's pipeline stages hold different values of it")
        for (_, name), files in wrong.files.items():
            self._add("content", name, "differs from the source", files)
        return sorted(self._differences, key=lambda found: (found.parameter or "", found.kind, found.files))

    def _add(self, kind: str, name: Optional[str], detail: str, files: Iterable[int] = ()) -> None:
        paths = self._written.checkpoint.files
        names = tuple(os.path.relpath(paths[number], self._directory) for number in sorted(files))
        self._differences.append(Difference(kind, name, (), detail, names))

    def _copies(self, content: Content) -> Iterator[Comparison]:
        """What has to be compared of a tensor that is there as it should be; all else is told."""
        name, written, checkpoint = content.name, self._written, self._written.checkpoint
        numbers = self._there.get(name)
        if numbers is None:
            self._add("missing", name, "is in no file")
            return
        held = {number: written.value(name, number) for number in numbers}
        wrong = [number for number, tensor in held.items() if tensor.dtype != content.dtype]
        if wrong:
            told = held[wrong[0]].dtype
            self._add("type", name, f"is {told}, but {content.dtype} {self._source.told_by}", wrong)
            return
        # Full weights do not tell a tensor of one element, whole wherever it is, from a value.
        laid_out = None if name in self._values else written.tensors.get(name)
        if laid_out is None and (name in self._values or isinstance(checkpoint, (FullWeights, ChunkedCheckpoint))):
            odd = [number for number, tensor in held.items() if tensor.shape != content.shape]
            if odd:
                told = f"has shape {list(held[odd[0]].shape)}, not {list(content.shape)}"
                self._add("shape", name, told, odd)
                return
            yield Comparison(content, Way(0, {whole_box(content.shape): tuple(numbers)}), written.indexes)
            return
        if laid_out is None or (isinstance(checkpoint, Checkpoint2) and name not in (checkpoint.listed or {name})):
            self._add("missing", name, "is in a file, but nothing says that it is", numbers)
            return
        assert isinstance(laid_out, Stored)
        listed = {file for way in laid_out.ways for files in way.held.values() for file in files}
        # Chunks without elements are there for ranks that have no rows.
        unlisted = {number for number in set(numbers) - listed if held[number].elements}
        if unlisted:
            self._add("extra", name, "is in the file, but nothing says that it is", unlisted)
        if laid_out.shape != content.shape:
            self._add("shape", name, f"has shape {list(laid_out.shape)}, not {list(content.shape)}", numbers)
            return
        if not laid_out.is_whole():
            self._add("missing", name, "is not whole: slices are in no file")
        for detail in self._wrong_layout(content):
            self._add("strategy", name, detail)
        for way in laid_out.ways:
            yield Comparison(content, way, written.indexes, way.number)

    def _wrong_layout(self, content: Content) -> Iterator[str]:
        """In what a recorded layout is not that of the target's strategy."""
        checkpoint = self._written.checkpoint
        if not isinstance(checkpoint, Checkpoint2):
            return
        placement = checkpoint.placements[content.name]
        stages = [stage for stage in self._new.stages if self._new.is_none or content.name in stage.layouts]
        stage = stages[0]
        try:
            boxes = target_boxes(layout_in(stage, content, self._new), content.shape)
        except LayoutError as error:
            yield error.message
            return
        if placement.ranks != tuple(stage.ranks):
            yield f"is laid out over ranks {number_ranges(placement.ranks)}, not {number_ranges(stage.ranks)}"
            return
        whole = (whole_box(content.shape),) * len(placement.ranks)
        recorded = placement.layout
        there = whole if recorded is None else device_boxes(recorded_layout(recorded), content.shape) or ()
        if there != boxes:
            cuts, wanted = _cuts(there), _cuts(boxes)
            if cuts != wanted:
                yield f"is cut into {cuts} slices per dimension, not {wanted}"
            else:
                yield "has its slices on other ranks than the target's strategy gives them to"

    def _check_metadata(self) -> None:
        """Metadata of files that tell a reader something else than what is in them."""
        options = form_named(self._written.checkpoint.form).options
        format = "ms" if options.mindspore else "pt"
        known = {item for index in self._source.indexes.values() for item in index.metadata.items()}
        known -= {item for item in known if item[0] == "format"}
        wrong: dict[str, list[int]] = defaultdict(list)
        for number, index in self._written.indexes.items():
            if index.format != "safetensors":
                continue
            own = {key: text for key, text in index.metadata.items() if key in options.metadata}
            for text in strange_metadata(index, known, own, format):
                wrong[text].append(number)
            if "format" not in index.metadata:
                wrong[f"its metadata do not say {format!r} for 'format'"].append(number)
        for text, numbers in wrong.items():
            self._add("file", None, text, numbers)


def _cuts(boxes: Sequence[Box]) -> list[int]:
    """How many slices boxes make of each dimension."""
    return [len(set(intervals)) for intervals in zip(*boxes)]
