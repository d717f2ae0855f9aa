"""The page's data on two checkpoints: what `diff` computes, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.inspection.checkpoint import Inspected
from reshard.numbers.difference import Differences, TensorPair
from reshard.numbers.sweep import location_of
from reshard.numbers.widening import doubles
from reshard.opened import LazyTensor, OpenedCheckpoint
from reshard.strategies import Strategy
from reshard.text.names import kind_of
from reshard.view.page import Table, by_parts, cluster_of, names_data, page_data, repeats, state_words, title_of

EQUAL, DIFFERS, OTHER, ONLY_A, ONLY_B = range(5)
"""What the page says of a tensor."""


def compared_data(
    opened: tuple[OpenedCheckpoint, OpenedCheckpoint],
    inspected: tuple[Inspected, Inspected],
    strategies: tuple[Strategy | None, Strategy | None],
    found: Differences | None,
) -> dict[str, Any]:
    """The page's data on two checkpoints.

    Args:
        opened: A, with the names and types that were asked for, and B.
        inspected: both, as they are.
        strategies: those of rank files.
        found: differences in values; None if only names, types and shapes are compared.
    """
    a, b = opened
    data = page_data(inspected[0], [], strategies[0])
    known = dict(zip(_names(data), zip(data["parameters"]["type"], data["parameters"]["layout"])))
    types, rows = Table(), [list(type_) for type_ in data["types"]]
    for row in rows:
        types.number(str(row), row)
    pairs = {} if found is None else {pair.name: pair for pair in found.pairs}
    names = by_parts({*a, *b})
    columns: dict[str, list[int]] = {"type": [], "layout": []}
    results, differing, other_types, other_shapes = [], [], {}, {}
    for place, name in enumerate(names):
        tensor, other = a[name] if name in a else b[name], b.get(name)
        type_, layout = known.get(name, (None, -1)) if name in a else (None, -1)
        row = [tensor.dtype_name, [list(tensor.shape)], tensor.nbytes, tensor.nbytes, 1, _kind(name, tensor, names)]
        if type_ is not None and rows[type_][0] == tensor.dtype_name and _shapes(rows[type_]) == row[1]:
            row = rows[type_]
        columns["type"].append(types.number(str(row), row))
        columns["layout"].append(layout)
        results.append(_result(name, a, b, pairs.get(name)))
        if other is not None and name in a:
            if other.dtype_name != tensor.dtype_name:
                other_types[place] = other.dtype_name
            if other.shape != tensor.shape:
                other_shapes[place] = list(other.shape)
            if name in pairs and not pairs[name].identical:
                differing.append([place, tensor.size, *_numbers(pairs[name], tensor, other)])
    sides = zip(inspected, strategies, opened)
    return {
        **data,
        "title": " and ".join(title_of(each.path) for each in inspected),
        "types": types.values,
        "names": names_data(names),
        "parameters": columns,
        "structures": None,
        "compared": {
            "titles": [title_of(each.path) for each in inspected],
            "values": found is not None,
            "result": repeats(results),
            "differing": differing,
            "types": other_types,
            "shapes": other_shapes,
            "sides": [_side(each, strategy, checkpoint) for each, strategy, checkpoint in sides],
        },
    }


def _names(data: Mapping[str, Any]) -> list[str]:
    names: list[str] = []
    runs = data["names"]["shared"]
    shared = (each for each, count in zip(runs[::2], runs[1::2]) for _ in range(count))
    for same, rest in zip(shared, data["names"]["rest"]):
        names.append(".".join([*(names[-1].split(".")[:same] if same else []), rest]))
    return names


def _shapes(row: Sequence[Any]) -> list[list[int]]:
    return [list(shape) for shape in row[1]]


def _kind(name: str, tensor: LazyTensor, names: Sequence[str]) -> str:
    return kind_of(name, tensor.size, frozenset(names))


def _result(name: str, a: OpenedCheckpoint, b: OpenedCheckpoint, pair: TensorPair | None) -> int:
    if name not in a or name not in b:
        return ONLY_A if name in a else ONLY_B
    if a[name].shape != b[name].shape or a[name].dtype_name != b[name].dtype_name:
        return OTHER
    return EQUAL if pair is None or pair.identical else DIFFERS


def _numbers(pair: TensorPair, a: LazyTensor, b: LazyTensor) -> list[Any]:
    """Elements that differ, relative and absolute difference, index, and value and place in A and in B."""
    if pair.at is None:
        return [pair.differing, pair.max_rel, pair.max_abs, None]
    number = int(np.ravel_multi_index(pair.at, pair.shape)) if pair.shape else 0
    sides: list[Any] = []
    for tensor in (a, b):
        place = location_of(tensor.target, number)
        raw = np.ascontiguousarray(tensor[pair.at]).reshape(-1).view(np.uint8)
        sides += [_plain(doubles(raw, tensor.dtype_name)[0]), "" if place.file is None else place.file]
    return [pair.differing, pair.max_rel, pair.max_abs, list(pair.at), *sides]


def _plain(value: Any) -> float | str:
    return float(value) if np.isrealobj(value) and np.isfinite(value) else str(value)


def _side(inspected: Inspected, strategy: Strategy | None, checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    files = inspected.shown.with_missing()
    return {
        "path": inspected.path,
        "form": inspected.form.options.title,
        "step": checkpoint.step,
        "cluster": cluster_of(strategy),
        "files": f"{len(files)} {inspected.form.options.unit}{'' if len(files) == 1 else 's'}",
        "bytes": inspected.shown.nbytes,
        "state": state_words(inspected),
        "numbers": [file.number for file in files],
        "paths": [file.path for file in files],
        "sizes": repeats(file.nbytes for file in files),
        "states": repeats(file.state for file in files),
    }
