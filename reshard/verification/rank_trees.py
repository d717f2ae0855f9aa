"""Legacy trees of Megatron as sources: where the tensors of each rank belong is computed here a second time.

The boxes that a file holds of the model's tensors (see `rank_parts`) have to hold, in the checkpoint that was read,
what the file holds. Moments have to lie where the masters lie, which are compared with the weights (see `end_to_end`).
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from reshard.checkpoints.formats.archives import Archive, Elements, is_tensor, plain_tensor
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.placed import PlacedFile
from reshard.forms.megatron.common import is_named
from reshard.forms.recorded import ChunkedCheckpoint
from reshard.storage import ReadableFile, read_range, reading
from reshard.text.messages import Report, listing, plural
from reshard.verification.boxes import Box, Shape, volume_of, whole_box
from reshard.verification.rank_parts import EMBEDDING, Cell, RankFile, cells_of
from reshard.verification.reading import Difference, Means, Task, run_tasks
from reshard.verification.stored import Content, Source, StoredTensor, Words, value_content, words_of

_DIRECTORY = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_BLOCK = 1 << 20
_OPTIMIZER, _STEP = "optimizer.", "global_step"
_NUMBERS = {"Float32": "<f4", "Float64": "<f8", "Int32": "<i4", "Int64": "<i8"}
_HALF, _BUFFER = ("Float16", "BFloat16"), re.compile(r"\.(expert_bias|local_tokens_per_expert)$")
_STATE, _MASTERS = "optimizer.state.", "optimizer.state.param."
_OUTPUT = "output_layer.weight"


def misplaced(source: Source, used: Collection[str], means: Means, report: Report) -> list[Difference]:
    """Weights of a legacy tree that are not what its files hold, and moments of other weights than their masters.

    Args:
        source: the tree as it was read.
        used: names of tensors that are compared.
        means: files, threads and memory.
        report: gets a warning that lists weights without a known place.
    """
    ranks = _ranks(source, means)
    strayed = [*_strayed(source, used, ranks, means), *_other_step(source, used, ranks, means)]
    weights = {name for name in source.tensors if name in used and not name.startswith(_OPTIMIZER)}
    if not weights:
        return strayed
    assert isinstance(source.checkpoint, ChunkedCheckpoint)
    tied = (equal for equal in source.checkpoint.tied_tensors() if equal.representative.name.endswith(EMBEDDING))
    absent = {copy.name for equal in tied for copy in equal.copies if copy.name.endswith(_OUTPUT)}
    absent.update(source.checkpoint.faults)
    wrong: dict[str, str] = {}
    # Of replicas, the first one is read.
    cells: dict[tuple[str, tuple[int, ...]], tuple[str, Elements, Cell]] = {}
    for rank, elements, cell in cells_of(ranks):
        if cell.key in weights:
            cells.setdefault((cell.key, cell.start), (rank.path, elements, cell))
        kinds = ("exp_avg.", "exp_avg_sq.", "param.")[: 2 + (elements.dtype in _HALF)]
        states = [f"{_STATE}{kind}{cell.key}" for kind in kinds if rank.saved and not _BUFFER.search(cell.key)]
        for key in {cell.key, *states}.difference(source.tensors, absent):
            wrong[key] = f"was not read, and the files of {os.path.dirname(rank.path)} hold it"
    boxes: dict[str, list[Box]] = defaultdict(list)
    for path, elements, cell in cells.values():
        boxes[cell.key].append(cell.box(cell.rows, cell.columns))
        if elements.dtype != source.tensors[cell.key].dtype:
            wrong[cell.key] = f"was read as another type than {path} has"
    unknown = [*weights.difference(boxes)]
    for key, of_key in boxes.items():
        shape = source.tensors[key].shape
        if tuple(max(stop for _, stop in each) for each in zip(*of_key)) != shape:
            wrong[key] = "has another shape in the source than its files give it"
        elif sum(map(volume_of, of_key)) != math.prod(shape):
            unknown.append(key)
    means.read.update(path for path, *_ in cells.values())
    tasks = (
        task
        for path, elements, cell in cells.values()
        if cell.key not in wrong
        for task in _tasks(path, elements, cell, source.tensors[cell.key], means)
    )
    different: dict[str, str] = {}
    run_tasks(tasks, means, different.update, counted=False)
    wrong.update((key, f"was read otherwise than {path} holds it") for key, path in different.items())
    unknown = sorted({*unknown}.difference(wrong))
    if unknown:
        count = plural(len(unknown), "tensor")
        report.warn(f"{source.checkpoint.place}: the place of {count} is not proved: {listing(unknown)}")
    return strayed + [Difference("content", key, (), detail) for key, detail in sorted(wrong.items())]


def _strayed(source: Source, used: Collection[str], ranks: Sequence[RankFile], means: Means) -> Iterator[Difference]:
    """Moments that do not lie where the masters lie, which are compared with the weights."""
    parameters = {rank.path: rank.parameters for rank in ranks}
    for name in sorted(source.tensors):
        master = source.tensors.get(_MASTERS + name.split(".", 3)[-1])
        if name not in used or not name.startswith(_STATE) or name.startswith(_MASTERS) or master is None:
            continue
        places, expected = (_places(each, parameters, means) for each in (source.tensors[name], master))
        if places != expected:
            yield Difference("content", name, (), "was read from other places than the master of its weight")


def _places(content: Content, parameters: Mapping[str, Mapping[int, Shape]], means: Means) -> dict[object, object]:
    """Per box in a file the parameter that its storage has state of, the first element there, shape and strides."""
    assert isinstance(content, StoredTensor)
    places: dict[object, object] = {}
    boxes = ((box, file) for slices in content.slice_sets for box, files in slices.files_of.items() for file in files)
    for box, file in boxes:
        index = content.indexes[file]
        with reading(index.path), means.handles.borrow(index.path) as opened:
            assert isinstance(opened, PlacedFile)
            elements = opened.located(index.tensors[content.stored_name].extents[0][0])
        first = (elements.offset - elements.entry.offset) // ITEM_SIZES[elements.dtype]
        strides = tuple(stride for size, stride in zip(elements.shape, elements.strides) if size > 1)
        parameter = parameters.get(index.path, {}).get(elements.entry.offset)
        places[index.path, box] = parameter, first, elements.shape, strides
    return places


def _other_step(source: Source, used: Collection[str], ranks: Sequence[RankFile], means: Means) -> Iterator[Difference]:
    """The step of the training, if another one is in the files than was read."""
    assert isinstance(source.checkpoint, ChunkedCheckpoint)
    steps = {step for rank in ranks for step in rank.steps}
    if len(steps) != 1 or _STEP in source.checkpoint.faults:
        return
    (step,) = steps
    if _STEP not in source.values:
        yield Difference("content", _STEP, (), f"was not read, and files hold {step}")
        return
    value = value_content(source.indexes, _STEP, source.values[_STEP][0])
    read = int.from_bytes(value.read(whole_box(value.shape), means.handles).tobytes(), "little")
    if read != step:
        yield Difference("content", _STEP, (), f"was read as {read}, and files hold {step}")


def _of_optimizers(optimizer: Any, archive: Archive, file: ReadableFile) -> tuple[set[int], dict[int, tuple[int, ...]]]:
    """Steps of optimizers, and which parameter each storage of plain ones has state of."""
    steps: set[int] = set()
    parameters: dict[int, tuple[int, ...]] = {}
    several = [*optimizer.values()] if isinstance(optimizer, dict) and 0 in optimizer else optimizer
    for at, each in enumerate(several if isinstance(several, list) else [several]):
        each = each if isinstance(each, dict) else {}
        inner = each.get("optimizer", each)
        groups = inner.get("param_groups") or [] if isinstance(inner, dict) else []
        steps.update(int(group["step"]) for group in groups if type(group.get("step")) in (int, float))
        states = inner.get("state") or {} if isinstance(inner, dict) else {}
        for state in [*states.values()][:1]:
            value = plain_tensor(state.get("step"))
            elements = archive.tensor(value) if is_tensor(value) else None
            if elements is not None and elements.dtype in _NUMBERS:
                data = read_range(file, elements.offset, ITEM_SIZES[elements.dtype])
                steps.add(int(np.frombuffer(data, _NUMBERS[elements.dtype], 1)[0]))
        masters = each.get("fp32_from_fp16_params") or each.get("fp32_from_fp16") or [[]] * len(groups)
        for group, of_group in zip(groups, masters):
            numbers = group.get("params") or []
            # With others among them, it is not known here which parameters have masters.
            for number, master in zip(numbers, of_group) if len(numbers) == len(of_group) else ():
                moments = [value for key, value in states[number].items() if key.startswith("exp_avg")]
                parameters.update((archive.tensor(value).entry.offset, (at, number)) for value in [master, *moments])
    return steps, parameters


def _ranks(source: Source, means: Means) -> list[RankFile]:
    """The files that were read."""
    ranks = []
    for path in sorted(index.path for index in source.indexes.values()):
        match = _DIRECTORY.fullmatch(os.path.basename(os.path.dirname(path)))
        if match is None or not os.path.basename(path).startswith("model"):
            continue
        with reading(path), means.handles.borrow(path) as opened:
            file = opened.stored if isinstance(opened, PlacedFile) else opened
            archive = Archive(file, 0, file.size())
            state = archive.pickled(is_named)
            models = [state[key] for key in sorted(filter(re.compile("model[0-9]*").fullmatch, state), key=_in_order)]
            tensors = [
                {
                    name: archive.tensor(value)
                    for name, value in model.items()
                    if not name.endswith("_extra_state") and is_tensor(plain_tensor(value))
                }
                for model in models
            ]
            steps, parameters = _of_optimizers(state.get("optimizer"), archive, file)
        numbers = tuple(int(number) for number in match.groups() if number is not None)
        saved = bool(state.get("optimizer"))
        ranks.append(RankFile(path, numbers, state["args"].fields, tensors, steps, parameters, saved))
    return ranks


def _in_order(name: str) -> tuple[int, str]:
    return len(name), name


def _tasks(path: str, elements: Elements, cell: Cell, content: Content, means: Means) -> Iterator[Task]:
    """Comparisons of a cell, a few of its box's rows at a time."""
    item, most = ITEM_SIZES[elements.dtype], min(_BLOCK, means.max_memory // 16)
    (first, stop), whole = (cell.columns, cell.rows) if cell.turned else (cell.rows, cell.columns)
    step = max(1, most // ((whole[1] - whole[0]) * item))
    for start in range(first, stop, step):
        part = (start, min(start + step, stop))
        tile = (whole, part) if cell.turned else (part, whole)
        nbytes = 2 * (part[1] - part[0]) * (whole[1] - whole[0]) * item
        yield Task(nbytes, _compared, (path, elements, cell, tile, content, means))


def _compared(
    path: str,
    elements: Elements,
    cell: Cell,
    tile: tuple[tuple[int, int], tuple[int, int]],
    content: Content,
    means: Means,
) -> dict[str, str]:
    """The file by the key if they differ."""
    held = _held(path, elements, cell.width, tile, means)
    read = content.read(cell.box(*tile), means.handles)
    same = np.array_equal((held.T if cell.turned else held).reshape(read.shape), read)
    return {} if same else {cell.key: path}


def _held(
    path: str, elements: Elements, width: int, tile: tuple[tuple[int, int], tuple[int, int]], means: Means
) -> Words:
    """Some rows and columns of a tensor in a file."""
    dtype = np.dtype(words_of(ITEM_SIZES[elements.dtype]))
    (top, bottom), (left, right) = tile
    strides = [stride * dtype.itemsize for stride in elements.strides]
    with reading(path), means.handles.borrow(path) as opened:
        file = opened.stored if isinstance(opened, PlacedFile) else opened

        def read(first: int, stop: int) -> Words:
            data = read_range(file, elements.offset + first * dtype.itemsize, (stop - first) * dtype.itemsize)
            return np.frombuffer(data, dtype, stop - first)

        if not elements.in_order:
            # Such tensors are rare: they are read as a whole.
            last = sum((size - 1) * stride for size, stride in zip(elements.shape, elements.strides))
            tensor = np.lib.stride_tricks.as_strided(read(0, last + 1), elements.shape, strides)
            return tensor.reshape(-1, width)[top:bottom, left:right]
        if 4 * (right - left) >= width:
            return read(top * width, bottom * width).reshape(-1, width)[:, left:right]
        return np.stack([read(row * width + left, row * width + right) for row in range(top, bottom)])
