"""The page's data on two checkpoints: what `diff` computes, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard.inspection.checkpoint import Inspected, Problem
from reshard.numbers.difference import Differences, TensorPair
from reshard.numbers.sweep import location_of
from reshard.numbers.widening import doubles
from reshard.opened import LazyTensor, OpenedCheckpoint
from reshard.strategies import Strategy
from reshard.text.messages import byte_size, plural
from reshard.text.names import kind_of
from reshard.view.page import (
    Entries,
    by_parts,
    cluster_of,
    described,
    files_data,
    names_data,
    recorded_strategy,
    repeats,
    state_words,
    title_of,
)

EQUAL, DIFFERS, OTHER, ONLY_A, ONLY_B = range(5)
"""The result for a tensor; `OTHER`: another type or shape."""

_WORDS = [
    ("equal", "Equal in bytes"),
    ("differs", "Differs"),
    ("other type", "Other type or shape"),
    ("only in A", "Only in A"),
    ("only in B", "Only in B"),
]
"""Each result in a row and as a title."""

_UNREAD = ("same shape", "Same type and shape")
"""`EQUAL` from headers alone."""


def compared_data(
    opened: tuple[OpenedCheckpoint, OpenedCheckpoint],
    inspected: tuple[Inspected, Inspected],
    strategies: tuple[Strategy | None, Strategy | None],
    found: Differences | None,
    problems: Sequence[Problem] = (),
) -> dict[str, Any]:
    """The page's data on two checkpoints.

    Args:
        opened: A, with the names and types that were asked for, and B.
        inspected: both, as they are.
        strategies: those of rank files.
        found: differences in values; None if only names, types and shapes are compared.
        problems: of the comparison.
    """
    a, b = opened
    cuts = [strategy or recorded_strategy(each) for each, strategy in zip(inspected, strategies)]
    entries = Entries(inspected[0], cuts[0])
    known = dict(zip(entries.names, zip(entries.columns["type"], entries.columns["layout"])))
    pairs = {} if found is None else {pair.name: pair for pair in found.pairs}
    all_names = {*a, *b}
    names = by_parts(all_names)
    columns: dict[str, list[int]] = {"type": [], "layout": []}
    results, differing, other_types, other_shapes = [], [], {}, {}
    for place, name in enumerate(names):
        one, other = a.get(name), b.get(name)
        tensor = a[name] if one is not None else b[name]
        type_, layout = known.get(name, (None, -1)) if one is not None else (None, -1)
        if type_ is None or entries.types.values[type_][:2] != (tensor.dtype_name, (tensor.shape,)):
            kind = kind_of(name, tensor.size, all_names)
            row = (tensor.dtype_name, (tensor.shape,), tensor.nbytes, tensor.nbytes, 1, kind)
            type_ = entries.types.number(row)
        columns["type"].append(type_)
        columns["layout"].append(layout)
        results.append(_result(one, other, pairs.get(name)))
        if one is not None and other is not None:
            if other.dtype_name != one.dtype_name:
                other_types[place] = other.dtype_name
            if other.shape != one.shape:
                other_shapes[place] = list(other.shape)
            if name in pairs and not pairs[name].identical:
                differing.append([place, one.size, *_numbers(pairs[name], one, other)])
    return {
        **described(inspected[0], problems, cuts[0], entries),
        "titles": [title_of(each.path) for each in inspected],
        "names": names_data(names),
        "parameters": columns,
        "structures": None,
        "compared": {
            "values": found is not None,
            "results": _WORDS if found is not None else [_UNREAD, *_WORDS[1:]],
            "result": repeats(results),
            "differing": differing,
            "types": other_types,
            "shapes": other_shapes,
            "sides": [_side(each, cut, checkpoint) for each, cut, checkpoint in zip(inspected, cuts, opened)],
        },
    }


def _result(a: LazyTensor | None, b: LazyTensor | None, pair: TensorPair | None) -> int:
    if a is None or b is None:
        return ONLY_A if b is None else ONLY_B
    if a.shape != b.shape or a.dtype_name != b.dtype_name:
        return OTHER
    return EQUAL if pair is None or pair.identical else DIFFERS


def _numbers(pair: TensorPair, a: LazyTensor, b: LazyTensor) -> list[Any]:
    """Elements that differ, relative and absolute difference and its place, and what is NaN or Inf and its place."""
    bad = None if pair.first_nonfinite is None else pair.first_nonfinite[0].index
    places = [None if at is None else _place(at, a, b) for at in (pair.at if pair.at != bad else None, bad)]
    return [pair.differing, _plain(pair.max_rel), _plain(pair.max_abs), places[0], pair.nonfinite_words, places[1]]


def _place(at: tuple[int, ...], a: LazyTensor, b: LazyTensor) -> list[Any]:
    """An index, and the value and the file of its element in A and in B."""
    number = int(np.ravel_multi_index(at, a.shape)) if a.shape else 0
    sides: list[Any] = []
    for tensor in (a, b):
        place = location_of(tensor.target, number)
        raw = np.ascontiguousarray(tensor[at]).reshape(-1).view(np.uint8)
        sides += [_plain(doubles(raw, tensor.dtype_name)[0]), "" if place.file is None else place.file]
    return [list(at), *sides]


def _plain(value: Any) -> float | str:
    """A number as JSON has it; NaN and infinite ones are texts."""
    return float(value) if np.isrealobj(value) and np.isfinite(value) else str(value).replace("nan", "NaN")


def _side(inspected: Inspected, strategy: Strategy | None, checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    """One of both: cells of the table in the page's head, and its files."""
    files, cluster = inspected.shown.with_missing(), cluster_of(strategy)
    about = [
        inspected.form.options.title,
        "" if checkpoint.step is None else f"step {checkpoint.step}",
        "" if cluster is None else cluster["words"],
        plural(len(files), inspected.form.options.unit),
        byte_size(inspected.shown.nbytes),
        state_words(inspected),
    ]
    return {
        "path": inspected.path,
        "about": about,
        "files": {**files_data(files), "path": [file.path for file in files]},
    }
