"""Legacy trees of Megatron, read a second time: the boxes of the model's tensors that files hold, and whose state.

Boxes follow from `rank_parts`. State of a plain optimizer follows from the order of parameters and the settings of its
groups. Flat buffers of a distributed one have the masters where the form's reader found them, since these are compared
with the weights (see `end_to_end`), and the moments where the masters are.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from reshard.checkpoints import CheckpointIndex, FileHandles
from reshard.checkpoints.formats.archives import Archive, Elements, is_tensor, plain_tensor
from reshard.checkpoints.formats.dtypes import ARCHIVES, ITEM_SIZES
from reshard.checkpoints.placed import PlacedFile, Placement, Stored
from reshard.errors import CheckpointError
from reshard.forms.megatron.form import MODEL_FILE, RANK_DIRECTORY
from reshard.forms.recorded import Chunk, ChunkedCheckpoint, ChunkedTensor, chunked_checkpoint
from reshard.storage import reading
from reshard.strategies import Strategy
from reshard.text.messages import quoted
from reshard.verification.boxes import Shape
from reshard.verification.common_states import common_in, groups_of, opened, stored_file
from reshard.verification.rank_parts import EMBEDDING, Group, Part, RankFile, parts_of
from reshard.verification.stored import Content, Source, StoredTensor, stored_source

OUTPUT = "output_layer.weight"
_STEP, _STATE, _MASTERS = "global_step", "optimizer.state.", "optimizer.state.param."
_HALF, _BUFFER = ("Float16", "BFloat16"), re.compile(r"(.*\.)?(expert_bias|local_tokens_per_expert)")
_NAMES = {"master_param": "param"}


def is_parameter(name: str) -> bool:
    """Whether the optimizer has a tensor of a model."""
    return not _BUFFER.fullmatch(name)


def is_decayed(name: str, shape: Shape) -> bool:
    return len(shape) > 1 and not name.endswith(".bias")


_Place = tuple[str, Part, Elements]
"""A file, a box of a tensor, and where its elements are."""

_Flat = Mapping[str, Elements]
"""The flat buffers of some parameters, by kind."""


class _Tree:
    """Parts of tensors in the files of a tree."""

    def __init__(self) -> None:
        self.stored: dict[str, list[tuple[Stored, Elements]]] = defaultdict(list)
        self.chunks: dict[str, list[tuple[str, int, Part]]] = defaultdict(list)

    def add(self, path: str, key: str, part: Part, elements: Elements) -> None:
        """Add a part of a tensor; ``elements`` are those of the tensor of a rank that the part is in."""
        first, strides = part.first, part.strides
        if not elements.in_order:

            def place(flat: int) -> int:
                return int(np.dot(np.unravel_index(flat, elements.shape), elements.strides))

            first, last = place(part.first), sum((size - 1) * step for size, step in zip(part.sizes, part.strides))
            strides = tuple(
                place(part.first + step) - first if size > 1 else 0 for size, step in zip(part.sizes, part.strides)
            )
            if place(part.first + last) != first + sum((size - 1) * step for size, step in zip(part.sizes, strides)):
                # Strides in memory that are none of the box: the place is unknown.
                return
        at = elements._replace(
            shape=part.sizes, strides=strides, offset=elements.offset + first * ITEM_SIZES[elements.dtype]
        )
        self.chunks[key].append((path, len(self.stored[path]), part))
        self.stored[path].append((Stored(key, elements.dtype, part.sizes), at))

    def shape(self, key: str) -> Shape | None:
        """The shape of a tensor; None where its boxes, of which equal ones are replicas, are not all of it."""
        boxes = {(part.start, part.sizes) for _, _, part in self.chunks[key]}
        shape = tuple(map(max, zip(*(map(sum, zip(start, sizes)) for start, sizes in boxes))))
        return shape if sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape) else None


def read_tree(source: Source, handles: FileHandles) -> Source:
    """A tree, as the form reads it, with places that are computed here.

    Raises:
        CheckpointError: the place of a tensor is unknown.
    """
    checkpoint = source.checkpoint
    assert isinstance(checkpoint, ChunkedCheckpoint)
    paths = sorted({index.path for index in source.indexes.values()})
    sizes = {index.path: index.size for index in source.indexes.values()}
    ranks, tree = ranks_of(paths, handles), _Tree()
    for rank, parts in parts_of(ranks):
        tied = rank.args.get("untie_embeddings_and_output_weights") is False
        for (chunk, name), of_name in parts.items():
            for part in of_name:
                part = part._replace(key=EMBEDDING) if tied and part.key == OUTPUT else part
                tree.add(rank.path, part.key, part, rank.models[chunk][name])
        for chunk, name, kind, elements in _states(rank):
            for part in parts.get((chunk, name), ()):
                key = EMBEDDING if tied and part.key == OUTPUT else part.key
                tree.add(rank.path, f"{_STATE}{kind}.{key}", part, elements)
    masters = {
        name[len(_MASTERS) :]: [*_elements(content, handles)]
        for name, content in source.tensors.items()
        if name.startswith(_MASTERS) and name not in tree.chunks
    }
    buffers = {path: _buffers(path, handles) for places in masters.values() for path in {path for path, *_ in places}}
    for key, places in masters.items():
        _add_flat(tree, key, places, buffers)
    ignored = checkpoint.faults.keys()
    shapes = {key: tree.shape(key) for key in tree.chunks}
    unknown = sorted(name for name in source.tensors if shapes.get(name) is None)
    if unknown:
        problem = f"where the parts of {quoted(unknown[0])} belong is not known to the verification"
        raise CheckpointError(f"{checkpoint.place}: {problem}", file=checkpoint.place, parameter=unknown[0])
    steps = {step for rank in ranks for step in rank.steps}
    own: dict[str, Stored] = {}
    if len(steps) == 1 and _STEP not in ignored:
        path = ranks[0].path
        own[path] = Stored(_STEP, "Int32", (1,), data=np.array([*steps], "<i4").tobytes())
        tree.chunks[_STEP] = [(path, len(tree.stored[path]), Part(_STEP, (0,), (1,), 0, (1,)))]
        shapes[_STEP] = (1,)
    entries = []
    for path in paths:
        stored, values = tree.stored[path], [own[path]] if path in own else []
        placement = Placement(path, [*(each for each, _ in stored), *values], [elements for _, elements in stored])
        handles.place(path, placement)
        entries.append([*placement.tensors()])
    numbers = {path: number for number, path in enumerate(paths)}
    tensors = []
    for key, shape in shapes.items():
        if shape is not None and key not in ignored:
            chunks = [
                Chunk(part.start, part.sizes, numbers[path], entries[numbers[path]][at])
                for path, at, part in tree.chunks[key]
            ]
            dtype = next(chunk.stored.dtype for chunk in chunks if chunk.stored is not None)
            tensors.append(ChunkedTensor(key, dtype, shape, chunks))
    headers = [CheckpointIndex(path, ARCHIVES, sizes[path], {}, archived=True) for path in paths]
    laid_out = chunked_checkpoint(checkpoint.form, checkpoint.place, headers, tensors, checkpoint.faults, "")
    laid_out = replace(laid_out, step=checkpoint.step, label=checkpoint.label, tied=checkpoint.tied)
    return stored_source(laid_out, Strategy.none())


def _elements(content: Content, handles: FileHandles) -> Iterator[_Place]:
    """Per slice its file, itself as all of a tensor, and where its elements are."""
    assert isinstance(content, StoredTensor)
    for slices in content.slice_sets:
        for box, files in slices.files_of.items():
            for file in files:
                index = content.indexes[file]
                with reading(index.path), handles.borrow(index.path) as opened_file:
                    assert isinstance(opened_file, PlacedFile)
                    elements = opened_file.located(index.tensors[content.stored_name].extents[0][0])
                start, sizes = (tuple(at) for at in zip(*((low, high - low) for low, high in box)))
                strides = tuple(math.prod(sizes[dimension + 1 :]) for dimension in range(len(sizes)))
                yield index.path, Part(content.name, start, sizes, 0, strides), elements


def _states(rank: RankFile) -> Iterator[tuple[int, str, str, Elements]]:
    """Chunk and name of a parameter, a kind of state, and its elements; of groups that fit their parameters."""
    groups = [group for optimizer in rank.optimizers for group in optimizer]
    for group, members in zip(groups, members_of(rank)):
        halves = [each for each in members if rank.models[each[0]][each[1]].dtype in _HALF]
        if len(members) == len(group.moments) and len(halves) == len(group.masters):
            found = [(each, kind, at) for each, of in zip(members, group.moments) for kind, at in of.items()]
            found += [(each, "param", at) for each, at in zip(halves, group.masters)]
            for (chunk, name), kind, elements in found:
                if elements.shape == rank.models[chunk][name].shape:
                    yield chunk, name, kind, elements


def members_of(rank: RankFile) -> list[list[tuple[int, str]]]:
    """Per group the chunks and names of its parameters, by the settings in which groups differ."""
    groups = [group.settings for optimizer in rank.optimizers for group in optimizer]
    parameters = [(at, name) for at, model in enumerate(rank.models) for name in model if is_parameter(name)]

    def belongs(chunk: int, name: str, group: Mapping[str, Any]) -> bool:
        settings = {
            "wd_mult": is_decayed(name, rank.models[chunk][name].shape),
            "is_expert_parallel": ".experts." in name,
            "is_decoupled_lr": name in (EMBEDDING, OUTPUT),
        }
        return all(
            bool(group.get(key)) == value
            for key, value in settings.items()
            if len({bool(each.get(key)) for each in groups}) > 1
        )

    return [[each for each in parameters if belongs(*each, group)] for group in groups]


def _add_flat(tree: _Tree, key: str, places: Iterable[_Place], buffers: Mapping[str, Iterable[_Flat]]) -> None:
    """Add a master in flat buffers, and the moments at the same places of theirs."""
    for path, part, elements in places:
        for buffer in buffers[path]:
            master = buffer.get("param")
            if master is None or master.entry != elements.entry:
                continue
            first = (elements.offset - master.offset) // ITEM_SIZES[master.dtype]
            for kind, flat in buffer.items():
                offset = flat.offset + first * ITEM_SIZES[flat.dtype]
                at = flat._replace(shape=elements.shape, strides=elements.strides, offset=offset)
                tree.add(path, f"{_STATE}{kind}.{key}", part, at)


def _buffers(path: str, handles: FileHandles) -> list[_Flat]:
    """The flat buffers in a file, by kind."""
    stored = stored_file(path)
    assert stored is not None
    with opened(stored, handles) as (state, archive, _):
        optimizers = [each or {} for each in (state if isinstance(state, list) else [state])]
        numbered = [each for of in optimizers for number, each in of.items() if type(number) is int]
        return [dict(_tensors(tensors, archive)) for each in numbered for tensors in each.values()]


def _tensors(values: Mapping[str, Any], archive: Archive) -> Iterator[tuple[str, Elements]]:
    for kind, value in values.items():
        if kind not in ("step", "numel_unpadded") and is_tensor(plain_tensor(value)):
            yield _NAMES.get(kind, kind), archive.tensor(value)


def _groups(optimizer: Mapping[str, Any], archive: Archive) -> Iterator[Group]:
    """The groups of a plain optimizer; none of others."""
    inner, groups = optimizer.get("optimizer", optimizer), groups_of(optimizer)
    states = (inner.get("state") if isinstance(inner, dict) else None) or {}
    masters = optimizer.get("fp32_from_fp16_params") or optimizer.get("fp32_from_fp16") or itertools.repeat(())
    for group, of_group in zip(groups, masters) if states else ():
        moments = [dict(_tensors(states[number], archive)) for number in group["params"]]
        yield Group(group, moments, [*map(archive.tensor, of_group)])


def ranks_of(paths: Collection[str], handles: FileHandles) -> list[RankFile]:
    """The files of ranks among some."""
    ranks = []
    for path in paths:
        directory, name = os.path.split(path)
        match = RANK_DIRECTORY.fullmatch(os.path.basename(directory))
        stored = stored_file(path) if match is not None and name == MODEL_FILE else None
        if match is None or stored is None:
            continue
        with opened(stored, handles) as (state, archive, file):
            common = common_in(state, archive, file)
            keys = [*filter(re.compile("model[0-9]*").fullmatch, state)]
            models = [
                {
                    name: archive.tensor(value)
                    for name, value in state[key].items()
                    if not name.endswith("_extra_state") and is_tensor(plain_tensor(value))
                }
                for key in sorted(keys, key=lambda key: (len(key), key))
            ]
            optimizers = [[*_groups(optimizer, archive)] for optimizer in common.optimizers]
        numbers = tuple(int(number) for number in match.groups() if number is not None)
        ranks.append(RankFile(path, numbers, common.args, [*state], models, common.steps, optimizers))
    return ranks
