"""The plan of a conversion: the parts of each target file.

`planner.make_plan` makes it and finds every problem before anything is written; it never changes. A run passes
the numbers of the files that it writes. `Plan.target_file` makes the parts of one file, because those of all files
may exceed the memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.checkpoints import CheckpointIndex, OutputLayout, lay_out_copy
from reshard.checkpoints.checkpoint import Addition, Checkpoint, EditedCheckpoint
from reshard.errors import IncompleteSourceError
from reshard.forms.registry import counted_as
from reshard.forms.request import Request
from reshard.forms.target import Cut, Cuts, Section, TargetForm
from reshard.layout import Box, shape_of, volume_of
from reshard.plan.pieces import (
    ALL_LINKED,
    GroupLimits,
    Order,
    Piece,
    StoredSlice,
    TargetFile,
    TargetTensor,
    TargetTensors,
    TensorKind,
    linked_files,
    order_of,
    splits_rows,
)
from reshard.plan.replicas import ReplicaChoice, choose
from reshard.plan.values import CopiedValue
from reshard.text.messages import quoted
from reshard.threads import cached_property


class Sorted(NamedTuple):
    """The source's tensors by their treatment, each list sorted by name.

    Attributes:
        resharded: in source and target.
        excluded: in the source, skipped by the filters.
        left_out: only in the source.
        missing: in the target strategy, but in no source file.
        copied: without a layout; copied unchanged.
        unholdable: in the files, but the target format has no type for them (text in safetensors).
    """

    resharded: list[str]
    excluded: list[str]
    left_out: list[str]
    missing: list[str]
    copied: list[str]
    unholdable: list[str]


class Plan:
    """A planned conversion.

    Args:
        values: returns the copied values of a file.
        treatment: the source's tensors by their treatment.
        choice: the replicas to read; None where strategies alone do not determine them.

    Attributes:
        requested: requested target files, ascending.
        sections: the sections of these files.
    """

    def __init__(
        self,
        request: Request,
        checkpoint: Checkpoint,
        form: TargetForm,
        values: Callable[[int], list[CopiedValue]],
        treatment: Sorted,
        choice: ReplicaChoice | None,
    ) -> None:
        self.request = request
        self.checkpoint = checkpoint
        self.form = form
        self.sorted = treatment
        self.requested = requested_files(request, form)
        self.sections = sections_of(form, self.requested)
        self._values = values
        self._cuts = Cuts()
        self._choice = choice
        self._kinds: dict[int, Sequence[TensorKind]] = {}
        self._needs: dict[int, tuple[int, ...]] = {}
        self._last_order: tuple[object, Order] | None = None
        self._resharded = frozenset(treatment.resharded)
        self._unholdable = frozenset(treatment.unholdable)
        self._edited = isinstance(checkpoint, EditedCheckpoint)
        form.planned(self.layout_of)

    def path(self, file: int) -> str:
        if self.request.asked.target.is_file:
            return self.request.dst
        name = f"{self.form.names.of(file)}.{self.form.format}"
        return os.path.join(self.request.dst, name)

    def known_names(self) -> frozenset[str]:
        """Names of parameters, which distinguish optimizer state from weights."""
        return frozenset(self.checkpoint.names()).union(self.request.target.parameters)

    def groups(
        self, files: Sequence[int], limits: GroupLimits = ALL_LINKED, names: Collection[str] | None = None
    ) -> Iterator[list[TargetFile]]:
        """The parts of some target files, a group at a time; a group's files are written together.

        Args:
            files: numbers of the files, ascending.
            names: only these tensors, without copied values; by default everything.
        """
        converted = [file for file in files if self.form.copied_file(file) is None]
        for members in self.reading_groups(converted, limits):
            yield [self.target_file(file, names) for file in members]
        if names is None and len(converted) < len(files):
            for file in sorted(set(files).difference(converted)):
                yield [self.target_file(file)]

    def reading_groups(self, files: Sequence[int], limits: GroupLimits = ALL_LINKED) -> Iterator[tuple[int, ...]]:
        """Some of the target files, ascending, in groups that read the same rows."""
        for section in self.sections:
            cuts = {kind.cut.number: kind.cut for kind in self.kinds_of(section)}.values()
            for members in self.by_names(section, files).values():
                for linked in linked_files(members, section, cuts):
                    together = (
                        limits.most
                        if len(linked) <= limits.in_flight
                        else limits.together(len(linked), *self._shared_bytes(section, linked))
                    )
                    for start in range(0, len(linked), together):
                        yield tuple(linked[start : start + together])

    def by_names(self, section: Section, files: Sequence[int]) -> dict[frozenset[str] | None, list[int]]:
        """The files of a section among some files, by the names of their tensors; None for all names of the section."""
        alike: dict[frozenset[str] | None, list[int]] = {}
        for file in in_section(section, files):
            alike.setdefault(self.form.names_in(file), []).append(file)
        return alike

    def _shared_bytes(self, section: Section, files: Sequence[int]) -> tuple[int, int]:
        """Bytes of the tensors of which target files share rows, and of all their tensors."""
        shared = nbytes = 0
        for kind in self.kinds_of(section):
            count = sum(self.slice_bytes(kind, section, files).values()) * kind.count(self.form.names_in(files[0]))
            nbytes += count
            shared += count if splits_rows(kind.cut) else 0
        return shared, nbytes

    def names_of(self, section: Section) -> list[str]:
        return sorted(self._resharded.intersection(section.layouts))

    def cut_of(self, name: str, section: Section) -> Cut:
        return self._cuts.of(self.checkpoint.tensors[name], section)

    def kinds_of(self, section: Section) -> Sequence[TensorKind]:
        if section.number not in self._kinds:
            kinds: dict[tuple[object, ...], TensorKind] = {}
            for name in self.names_of(section):
                tensor = self.checkpoint.tensors[name]
                cut = self._cuts.of(tensor, section)
                present = self.checkpoint.present(tensor)
                types = tuple(source.dtype for source in tensor.stored)
                key = (cut.number, tensor.dtype, tensor.item_size, present, types)
                if key not in kinds:
                    kinds[key] = TensorKind(cut, present, tensor.item_size, [])
                kinds[key].tensors.append(tensor)
            self._kinds[section.number] = tuple(kinds.values())
        return self._kinds[section.number]

    def copies(self, kind: TensorKind, file: int) -> list[list[tuple[int, Box]]]:
        """Per piece of a target file's slice of a kind, every source file that holds it, with its stored box."""
        cut, copies = kind.cut, []
        position = self.form.section_of(file).position(file)
        for cell in cut.overlap.cells(cut.slice_of(position)):
            if cell.slices:
                first = cut.firsts[cell.source_number]
                holders = kind.holders(cell)
                copies.append([(one, cut.shardings[i].stored_box(cell.slices[i - first])) for one, i in holders])
        return copies

    def values_of(self, file: int) -> list[CopiedValue]:
        """The copied values of a target file, except types that its format lacks."""
        return [value for value in self._values(file) if value[1].name not in self._unholdable]

    def data_bytes(self, files: Iterable[int]) -> dict[int, int]:
        """Bytes of tensor contents in each of some target files; for one copied whole, its size."""
        total = {}
        assembled = []
        for file in files:
            taken_over = self.form.copied_file(file)
            if taken_over is None:
                assembled.append(file)
                total[file] = sum(value.nbytes for _, value in self.values_of(file))
            else:
                total[file] = self.checkpoint.indexes[taken_over].size
        for section in self.sections:
            files_here = in_section(section, assembled)
            for kind in self.kinds_of(section):
                for file, nbytes in self.slice_bytes(kind, section, files_here).items():
                    total[file] += nbytes * kind.count(self.form.names_in(file))
        return total

    def slice_bytes(self, kind: TensorKind, section: Section, files: Iterable[int]) -> dict[int, int]:
        """Bytes of a kind's slice of one tensor, for each of some files of a section."""
        return {file: volume_of(kind.box_of(section.position(file))) * kind.item_size for file in files}

    def file_bytes(self, files: Iterable[int]) -> dict[int, int]:
        """Size of each of some target files."""
        copied = {file: self.form.copied_file(file) for file in files}
        return {
            file: self.layout_of(file).size if holder is None else self.checkpoint.indexes[holder].size
            for file, holder in copied.items()
        }

    def target_file(self, file: int, names: Collection[str] | None = None) -> TargetFile:
        """The parts of one target file.

        Args:
            names: only these tensors, without copied values; by default everything.
        """
        taken_over = self.form.copied_file(file)
        if taken_over is not None:
            index = self.checkpoint.indexes[taken_over]
            box = ((0, index.size),)
            source = StoredSlice(index.path, taken_over, box, box)
            content = TargetTensor(index.path, 1, box, (Piece(source, box),) if index.size else ())
            return TargetFile(file, self.path(file), lay_out_copy(index.size), (content,), frozenset([index.path]))
        section = self.form.section_of(file)
        leader = self._leaders[file]
        base = [self._base(leader)] + ([self._base(file)] if file != leader else [])
        inside = _intersection(self.form.names_in(file), names)
        kinds = [kind for kind in self.kinds_of(section) if inside is None or kind.count(inside)]
        examples = [self._example(file, leader, kind, base) for kind in kinds]
        values = self.values_of(file) if names is None else []
        tensors = []
        for holder, stored in values:
            box = ((0, stored.nbytes),)
            piece = Piece(StoredSlice(self.checkpoint.files[holder], holder, stored.extents, box), box)
            tensors.append(TargetTensor(stored.name, 1, box, (piece,) if stored.nbytes else ()))
        names_in_file, numbers, layout = self._order_of(file, kinds, values, inside)
        holders = {piece.source.rank for example in examples for piece in example.pieces}
        holders.update(holder for holder, _ in values)
        return TargetFile(
            file,
            self.path(file),
            layout,
            TargetTensors(names_in_file, numbers, examples, tensors, self.stored, self._added),
            self._paths_of_added(names_in_file).union(self.checkpoint.files[holder] for holder in holders),
        )

    def layout_of(self, file: int) -> OutputLayout:
        """The layout of any target file, requested or not, that is not copied whole."""
        inside = self.form.names_in(file)
        kinds = self.kinds_of(self.form.section_of(file))
        kinds = [kind for kind in kinds if inside is None or kind.count(inside)]
        return self._order_of(file, kinds, self.values_of(file), inside)[2]

    def _order_of(
        self, file: int, kinds: Sequence[TensorKind], values: Sequence[CopiedValue], inside: Collection[str] | None
    ) -> Order:
        """The order of a file of these tensors; the next file of the same ones shares it."""
        section = self.form.section_of(file)
        boxes = [kind.box_of(section.position(file)) for kind in kinds]
        tensors = [value for _, value in values]
        key = (
            section.number,
            tuple(boxes if self.form.boxed else map(shape_of, boxes)),
            tuple((tensor.name, tensor.dtype, tensor.dims, tensor.nbytes) for tensor in tensors),
            None if inside is None else frozenset(inside),
        )
        # Several threads plan files: another may replace the attribute at any moment.
        last = self._last_order
        if last is None or last[0] != key:
            last = self._last_order = key, order_of(self.form, kinds, boxes, tensors, inside)
        return last[1]

    def _paths_of_added(self, names: Iterable[str]) -> frozenset[str]:
        if self.request.edits.additions is None:
            return frozenset()
        tensors = self.checkpoint.tensors
        added = (tensors[name].added for name in names if name in tensors)
        return frozenset().union(*(each.paths for each in added if each is not None))

    def files_read(self, files: Sequence[int]) -> tuple[list[CheckpointIndex], list[CheckpointIndex]]:
        """Source files with checksums that some target files read: those read whole, and those read in part.

        In archives every tensor has a checksum: the lists have them with the tensors that are read whole, and in part.
        Without checksums in the source, the parts of the target files are not made.
        """
        return self.files_of(tensor for group in self.groups(files) for target in group for tensor in target.tensors)

    def files_of(self, tensors: Iterable[TargetTensor]) -> tuple[list[CheckpointIndex], list[CheckpointIndex]]:
        """The same for some tensors of target files."""
        recorded = [index for index in self.checkpoint.indexes.values() if index.checkable or index.archived]
        if not recorded:
            return [], []
        paths = {index.path for index in recorded}
        # Bytes by elements: of equal ones, which several tensors use, once.
        used: dict[tuple[str, tuple[tuple[int, int], ...]], dict[object, int]] = {}
        for target in tensors:
            for piece in target.pieces:
                if piece.source.path in paths:
                    nbytes = piece.volume * piece.stored_size(target.item_size)
                    used.setdefault((piece.source.path, piece.source.extents), {})[piece.elements] = nbytes
        # Copied values are compared over all files, so all of them are read.
        copied = set(self.sorted.copied) | self._unholdable
        read = {path for path, _ in used}
        whole: list[CheckpointIndex] = []
        partly: list[CheckpointIndex] = []
        for index in recorded:
            read_whole = {
                name: tensor
                for name, tensor in index.tensors.items()
                if name in copied
                or tensor.nbytes == 0
                or sum(used.get((index.path, tensor.extents), {}).values()) >= tensor.nbytes
            }
            if index.archived:
                whole.append(index._replace(tensors=read_whole))
                rest = {name: tensor for name, tensor in index.tensors.items() if name not in read_whole}
                in_part = {name: tensor for name, tensor in rest.items() if (index.path, tensor.extents) in used}
                partly += [index._replace(tensors=in_part)] if in_part else []
            elif index.path in read:
                (whole if len(read_whole) == len(index.tensors) else partly).append(index)
        return whole, partly

    @cached_property
    def _leaders(self) -> Mapping[int, int]:
        """The file whose replicas each target file prefers, because they read the same rows.

        It depends on the requested files only, so that every part of a run reads the source files that were
        checked for the whole run.
        """
        converted = [file for file in self.requested if self.form.copied_file(file) is None]
        return {file: members[0] for members in self.reading_groups(converted) for file in members}

    def _base(self, file: int) -> tuple[int, ...]:
        """The source files that a target file prefers."""
        if self._choice is not None:
            try:
                return self._choice.ranks(file, self.checkpoint.indexes)
            except IncompleteSourceError:
                # A listed parameter may be in no file; all parameters in the files are complete.
                return ()
        chosen = self._needs.get(file)
        if chosen is None:
            section = self.form.section_of(file)
            position = section.position(file)
            names = self.form.names_in(file)
            needs = {
                tuple(dict.fromkeys(holder for holder, _ in kind.holders(cell))): None
                for kind in self.kinds_of(section)
                if kind.count(names)
                for cell in kind.cut.overlap.cells(kind.cut.slice_of(position))
            }
            chosen = self._needs[file] = choose([need for need in needs if need], self._turn(file))
        return chosen

    def _turn(self, file: int) -> int:
        """A file's place among the files with the same needs."""
        if self._choice is not None:
            return self._choice.turn(file)
        return self.form.section_of(file).position(file)

    def _example(self, file: int, leader: int, kind: TensorKind, base: Sequence[Sequence[int]]) -> TargetTensor:
        """The target slice of a kind of tensor, without name and extents."""
        cut, example = kind.cut, kind.tensors[0]
        position = self.form.section_of(file).position(file)
        turn = self._turn(leader)
        types = [None if source.dtype == example.dtype else source.dtype for source in example.sources]
        pieces = []
        padded = False
        for cell in cut.overlap.cells(cut.slice_of(position)):
            if not cell.slices:
                padded = True
                continue
            holders = kind.holders(cell)
            if not holders:
                name = example.name
                raise IncompleteSourceError(
                    f"a slice of {quoted(name)} for target {counted_as(self.form.name)} {file} is in no readable file",
                    rank=file,
                    parameter=name,
                )
            for chosen in base:
                preferred = [holder for holder in holders if holder[0] in chosen]
                if preferred:
                    holder, index = preferred[(cut.number + turn) % len(preferred)]
                    break
            else:
                holder, index = holders[turn % len(holders)]
            source = cell.source_number
            number = cell.slices[index - cut.firsts[source]]
            slice_box = cut.shardings[index].stored_box(number)
            stored = StoredSlice(self.checkpoint.files[holder], holder, (), slice_box)
            pieces.append(Piece(stored, cell.box, cell.region, types[source]))
        cast = None if types == [None] * len(types) else example.dtype
        return TargetTensor("", kind.item_size, kind.box_of(position), tuple(pieces), cast, padded)

    @property
    def _added(self) -> Callable[[str], Addition | None] | None:
        """The addition to a tensor by name; None without one."""
        return (lambda name: self.checkpoint.tensors[name].added) if self._edited else None

    def stored(self, name: str, source: int, holder: int, box: Box) -> StoredSlice:
        """The slice of a tensor's source in a file."""
        tensor = self.checkpoint.tensors[name].sources[source] if self._edited else None
        decoding = None if tensor is None else tensor.decoding
        in_file = name if tensor is None else tensor.name_in_files
        extents = self.checkpoint.indexes[holder].tensors[in_file].extents
        return StoredSlice(self.checkpoint.files[holder], holder, extents, box, decoding)


def requested_files(request: Request, form: TargetForm) -> tuple[int, ...]:
    return tuple(range(form.count)) if request.asked.files is None else request.asked.files


def sections_of(form: TargetForm, files: Sequence[int]) -> list[Section]:
    """The sections that some files are in, in order."""
    return [section for section in form.sections if in_section(section, files)]


def in_section(section: Section, files: Sequence[int]) -> Sequence[int]:
    return [file for file in files if file in section.files]


def _intersection(first: frozenset[str] | None, second: Collection[str] | None) -> Collection[str] | None:
    """The intersection of two collections; None is everything."""
    if first is None:
        return second
    return first if second is None else first.intersection(second)
