"""Values without a layout, copied unchanged to the target's files.

`global_step`, `learning_rate`, text and the like are usually the same in every file. They come from
the lowest source rank that has them; where copies differ, a warning names them. A few belong to a
rank (`cur_rank`, the state of random generators): a target rank gets those of the source rank with its own
number, if that exists. Where only the format changes, all entries belong to their rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.checkpoints import FileHandles, Tensor
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError, InputError
from reshard.forms import DEFAULT_FORM
from reshard.forms.registry import counted_as
from reshard.forms.request import Means, Request
from reshard.forms.target import TargetForm
from reshard.storage import read_range, reading
from reshard.text.messages import Report, as_pattern, listing, plural, quoted, rank_ranges
from reshard.text.names import OTHER, belongs_to_rank, kind_of, trained

_BLOCK = 1 << 20


CopiedValue = tuple[int, Tensor]
"""The source file that a value comes from, and the value."""


class CopiedValues:
    """The copied values of a conversion.

    Attributes:
        names: all copied names, sorted.
        differing: names whose copies differ though they do not belong to a rank, with the files that differ from
            the lowest.
    """

    def __init__(self, request: Request, source: Checkpoint, files: TargetForm, means: Means) -> None:
        # Every file gets exactly the entries of the source file with its number.
        self._as_cut = request.source.is_as_cut
        self._source = source
        self._files = files
        # Then tensors without a layout may be slices.
        self._sliced = request.source.device_count > 1
        self._handles = means.handles
        laid_out_by_none = (
            name for name in source.without_layout() if not any(name in section.layouts for section in files.sections)
        )
        self.names = sorted(name for name in (*source.values(), *laid_out_by_none) if request.filters.admit(name))
        # Where the target's strategy lists a value, only sections that list it get it.
        self._sections = {
            name: frozenset(section.number for section in files.sections if name in section.layouts)
            for name in self.names
        }
        self.differing = {name: others for name in self.names for others in [self._differing(name)] if others}
        # Of rank files these are slices, most likely; text is none, and one element only if it is trained.
        all_names = source.names() if self.differing else frozenset()
        weights = trained(all_names)
        self._slices = [
            name
            for name, tensor in self.examples()
            if name in self.differing and source.form == DEFAULT_FORM
            if kind_of(name, tensor.elements, all_names) != OTHER and (tensor.elements > 1 or name in weights)
        ]

    def examples(self) -> Iterator[tuple[str, Tensor]]:
        """Every copied name with its tensor in the lowest file that has it."""
        for name in self.names:
            yield name, self._source.indexes[self._source.holders(name)[0]].tensors[name]

    def of(self, file: int) -> list[CopiedValue]:
        if self._as_cut:
            tensors = self._source.indexes[file].tensors
            return [(file, tensors[name]) for name in self.names if name in tensors]
        section = self._files.section_of(file).number
        values = []
        for name in self.names:
            if self._sections[name] and section not in self._sections[name]:
                continue
            if not self._files.takes_value(name, file):
                continue
            holders = self._source.holders(name)
            from_own_rank = self._files.by_rank and belongs_to_rank(name) and file in holders
            holder = file if from_own_rank else holders[0]
            values.append((holder, self._source.indexes[holder].tensors[name]))
        return values

    def problems(self) -> Iterator[InputError]:
        """Values with a target layout and no source layout; slices that no layout places."""
        if self._slices:
            holder = self._source.holders(self._slices[0])[0]
            yield CheckpointError(
                f"is the source strategy of another network? It does not list {plural(len(self._slices), 'tensor')} "
                "that ranks hold in different versions: " + listing(self._slices),
                file=self._source.files[holder],
                rank=holder,
                parameter=self._slices[0],
                hint="pass the strategy that this checkpoint was saved with, or leave them out with --exclude",
            )
        for name in self.names:
            holder = self._source.holders(name)[0]
            tensor = self._source.indexes[holder].tensors[name]
            for section in self._files.sections:
                layout = section.layouts.get(name)
                if layout is None:
                    continue
                # Entries of several files may be slices, even if equal; a single element is none.
                sliced = self._sliced and tensor.nbytes > tensor.item_size
                other_shape = layout.recorded_shape not in (None, tensor.shape)
                if layout.slice_count > 1 or sliced or name in self.differing or other_shape:
                    path = self._source.files[holder]
                    yield CheckpointError(
                        f"{quoted(name)}: the target strategy has a layout for it, the source strategy has none "
                        f"(file {path})",
                        file=path,
                        rank=holder,
                        parameter=name,
                        hint=f"pass a source strategy that lists it, or leave it out with --exclude {as_pattern(name)}",
                    )
                    break

    def _differing(self, name: str) -> tuple[int, ...]:
        """Files whose copy differs from that of the lowest; none for values that belong to a rank."""
        if self._as_cut or belongs_to_rank(name):
            return ()
        holders = self._source.holders(name)
        return tuple(
            holder for holder in holders[1:] if not same_value(self._source, self._handles, name, holders[0], holder)
        )

    def warn_of_differing(self, report: Report) -> None:
        """Warn of values whose copies differ, grouped by files."""
        alike: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for name, ranks in self.differing.items():
            if name in self._slices:
                continue
            alike.setdefault((self._source.holders(name)[0], ranks), []).append(name)
        for (lowest, ranks), names in alike.items():
            differ = "differs" if len(names) == 1 else "differ"
            source, target = counted_as(self._source.form), counted_as(self._files.name)
            report.warn(
                listing(names)
                + f" on {rank_ranges(ranks, source)} {differ} from {source} {lowest}'s, which every target {target} "
                f"gets ({self._source.files[lowest]})"
            )


def same_value(source: Checkpoint, handles: FileHandles, name: str, first_file: int, second_file: int) -> bool:
    """Whether two files of a source hold the same bytes of a tensor, of the same type and shape.

    Raises:
        ReshardError: a file cannot be read.
    """
    first, second = source.indexes[first_file].tensors[name], source.indexes[second_file].tensors[name]
    if first.header != second.header:
        return False
    blocks = zip(_blocks(source.files[first_file], handles, first), _blocks(source.files[second_file], handles, second))
    return all(mine == theirs for mine, theirs in blocks)


def _blocks(path: str, handles: FileHandles, tensor: Tensor) -> Iterator[bytes]:
    """A tensor's bytes in blocks of one size, so that tensors of other extents can be compared."""
    pending = b""
    for offset, length in tensor.extents:
        position = 0
        while position < length:
            with reading(path), handles.borrow(path) as file:
                block = read_range(file, offset + position, min(_BLOCK - len(pending), length - position))
            position += len(block)
            pending += block
            if len(pending) == _BLOCK:
                yield pending
                pending = b""
    if pending:
        yield pending
