"""Whether a checkpoint of any form but rank directories is what its source makes of it.

It is read by its own form's reader, which knows of no plan: what this finds is what any reader will find. Every
tensor of the source must be there, of its type and shape, every copy of every slice of it with the source's
values; every value as well; and nothing else. What a form says of layouts must be what the target's strategy says.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Callable, Optional

import numpy as np

from reshard.checkpoints import can_hold
from reshard.errors import LayoutError
from reshard.forms.checkpoint2 import Checkpoint2
from reshard.forms.full import HUGGINGFACE, FullWeights
from reshard.layout import whole
from reshard.strategies import Stage, Strategy
from reshard.text.wording import number_ranges
from reshard.verification.compare import strange_metadata
from reshard.verification.completeness import Lost, converted_part, refuse
from reshard.verification.contents import Contents, Copies
from reshard.verification.difference import Difference
from reshard.verification.forms import FormTree
from reshard.verification.parameter import Holding, Parameter, shared
from reshard.verification.reading import Means, batches
from reshard.verification.tree import Tree

_FORMATS = {HUGGINGFACE: "pt"}
"""What files say as ``format`` where that is not MindSpore's ``ms``: transformers refuses what is not its own."""


def compare_with_form(
    tree: Tree,
    source: Strategy,
    written: FormTree,
    target: Strategy,
    directory: str,
    means: Means,
    admit: Optional[Callable[[str], bool]] = None,
) -> list[Difference]:
    """What of a checkpoint of a form is not what the source makes of it.

    Args:
        tree: all files and names of the step that was converted.
        source: their strategy.
        written: the converted checkpoint, all of it.
        target: how it was to be laid out; `none` in full.
        directory: where it is; names of files are relative to it.
        means: what may be used for reading.
        admit: which parameters were converted, by name; all where None.

    Returns:
        Every difference, by parameter; none where the checkpoint is right.

    Raises:
        IncompleteSourceError: the source lacks what is compared.
        InputError: the source does not fit its strategy.
        RetryableError: reading failed.
    """
    tree, never_found = converted_part(tree, source, target, range(target.device_count), admit)
    comparison = _Comparison(tree, written, target, directory, means)
    return comparison.run(never_found)


class _Comparison:
    def __init__(self, source: Tree, written: FormTree, target: Strategy, directory: str, means: Means) -> None:
        self._source, self._written, self._new = source, written, target
        self._directory, self._means = directory, means
        self._contents = Contents(source, written.tree, means)
        self._differences: list[Difference] = []
        # The files that hold an entry, by name.
        self._there: dict[str, list[int]] = defaultdict(list)
        for number, index in sorted(written.checkpoint.indexes.items()):
            for name in index.tensors:
                self._there[name].append(number)
        self._values = {
            name: self._as_parameter(name, ranks[:1], source)
            for name, ranks in source.outside.items()
            if can_hold("safetensors", source.tensor(name, ranks[0]).dtype)
        }

    def run(self, never_found: Collection[Lost]) -> list[Difference]:
        """Every difference, whole files first, then by parameter.

        Args:
            never_found: parameters that no source file holds though an absent rank may have held them.

        Raises:
            IncompleteSourceError: the target holds one, so that the source cannot tell whether it is right.
        """
        refuse(item for item in never_found if item.parameter in self._there)
        for name, _, detail in never_found:
            self._add("missing", name, f"is in no file, and in the source {detail}")
        expected = {**self._source.parameters, **self._values}
        for name in self._there.keys() - expected.keys():
            self._add(
                "extra", name, "is there, but the source and the strategies do not put it there", self._there[name]
            )
        self._check_metadata()
        copies = {name: self._copies(parameter) for name, parameter in expected.items()}
        parts = {name: sum(len(one.slice.holders) for one in found) for name, found in copies.items()}
        self._means.progress.begin(self._bytes_to_read(copies.values()), "verifying")
        try:
            for names in batches(copies, lambda name: parts[name] + self._slices(expected[name])):
                self._contents.compare([one for name in names for one in copies[name]])
        finally:
            self._means.progress.end()
        for found in self._contents.differences:
            files = self._names({self._written.files[rank] for rank in found.ranks})
            self._differences.append(found._replace(ranks=(), files=files))
        return sorted(self._differences, key=lambda found: (found.parameter or "", found.kind, found.files))

    def _names(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """Names of files, relative to the directory."""
        files = self._written.checkpoint.files
        return tuple(os.path.relpath(files[number], self._directory) for number in sorted(numbers))

    def _add(self, kind: str, name: Optional[str], detail: str, files: Iterable[int] = ()) -> None:
        self._differences.append(Difference(kind, name, (), detail, self._names(files)))

    def _slices(self, parameter: Parameter) -> int:
        return sum(holding.layout.slice_count for holding in parameter.holdings)

    def _bytes_to_read(self, copies: Iterable[list[Copies]]) -> int:
        total = 0
        for found in copies:
            for parameter, held, _ in found:
                total += sum(self._written.tree.tensor(parameter.name, rank).nbytes for rank in held.holders)
            for parameter in {id(one.parameter): one.parameter for one in found if not one.alone}.values():
                total += sum(part.nbytes for _, part in self._contents.stored(parameter))
        return total

    def _as_parameter(self, name: str, ranks: Iterable[int], tree: Tree) -> Parameter:
        """A value as a parameter that some files hold whole."""
        holders = tuple(ranks)
        tensor = tree.tensor(name, holders[0])
        layout = shared(whole(len(tensor.shape)))
        holdings = tuple(Holding(Stage(0, rank, 1, {}), layout, (rank,)) for rank in holders)
        return Parameter(name, tensor.dtype, tensor.shape, holdings)

    def _copies(self, parameter: Parameter) -> list[Copies]:
        """What has to be compared of a tensor that is there as it should be; all else is told."""
        name, tree = parameter.name, self._written.tree
        numbers = self._there.get(name)
        if numbers is None:
            self._add("missing", name, "is in no file")
            return []
        sample = self._source.sample(parameter)
        wrong = [number for number in numbers if not tree.tensor(name, number).same_type(sample)]
        if wrong:
            told = tree.tensor(name, wrong[0]).dtype
            self._add("type", name, f"is {told}, but {sample.dtype} {self._source.told_by}", wrong)
            return []
        laid_out = tree.parameters.get(name)
        checkpoint = self._written.checkpoint
        # Full weights do not tell a tensor of one element, whole wherever it is, from a value.
        if name in self._values or (laid_out is None and isinstance(checkpoint, FullWeights)):
            odd = [number for number in numbers if tree.tensor(name, number).shape != parameter.shape]
            if odd:
                shape = list(tree.tensor(name, odd[0]).shape)
                self._add("shape", name, f"has shape {shape}, not {list(parameter.shape)}", odd)
                return []
            found = self._as_parameter(name, numbers, tree)
            return [Copies(parameter, held, True) for held in found.slices]
        if laid_out is None or (isinstance(checkpoint, Checkpoint2) and name not in (checkpoint.listed or {name})):
            self._add("missing", name, "is in a file, but nothing says that it is", numbers)
            return []
        unlisted = set(numbers) - {self._written.files[rank] for rank in laid_out.holders}
        if unlisted:
            self._add("extra", name, "is in the file, but nothing says that it is", unlisted)
        if laid_out.shape != parameter.shape:
            self._add("shape", name, f"has shape {list(laid_out.shape)}, not {list(parameter.shape)}", numbers)
            return []
        for detail in self._wrong_layout(parameter):
            self._add("strategy", name, detail)
        alone = not parameter.cells.of_one_stage
        return [Copies(parameter, held, alone) for held in laid_out.slices]

    def _wrong_layout(self, parameter: Parameter) -> Iterator[str]:
        """In what a recorded layout is not that of the target's strategy."""
        checkpoint = self._written.checkpoint
        if not isinstance(checkpoint, Checkpoint2):
            return
        placement = checkpoint.placements[parameter.name]
        if self._new.is_none:
            stage, recorded = self._new.stages[0], whole(len(parameter.shape))
        else:
            stage = next(stage for stage in self._new.stages if parameter.name in stage.layouts)
            recorded = stage.layouts[parameter.name]
        try:
            layout = parameter.target_layout(recorded, len(self._new.stages) > 1)
        except LayoutError as error:
            yield error.message
            return
        if placement.ranks != tuple(stage.ranks):
            yield f"is laid out over ranks {number_ranges(placement.ranks)}, not {number_ranges(stage.ranks)}"
            return
        cuts = placement.grid.cuts
        if cuts != layout.cuts:
            yield f"is cut into {list(cuts)} slices per dimension, not {list(layout.cuts)}"
        elif placement.layout is not None and not np.array_equal(placement.layout.slice_of_rank, layout.slice_of_rank):
            yield "has its slices on other ranks than the target's strategy gives them to"

    def _check_metadata(self) -> None:
        """Metadata of files that tell a reader something else than what is in them."""
        format = _FORMATS.get(self._written.checkpoint.form, "ms")
        known = {item for index in self._source.indexes.values() for item in index.metadata.items()}
        known -= {item for item in known if item[0] == "format"}
        wrong: dict[str, list[int]] = defaultdict(list)
        for number, index in self._written.checkpoint.indexes.items():
            for text in strange_metadata(index, known, {}, format):
                wrong[text].append(number)
            if "format" not in index.metadata:
                wrong[f"its metadata do not say {format!r} for 'format'"].append(number)
        for text, numbers in wrong.items():
            self._add("file", None, text, numbers)
