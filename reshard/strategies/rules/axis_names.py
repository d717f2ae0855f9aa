"""Names of device axes: those of strategies that were made here, and those that follow from sizes that are said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from reshard.storage import UnfitError, read_small
from reshard.storage.json_text import JsonError, parse_json
from reshard.strategies.made_record import record_paths
from reshard.strategies.rules.placement import place
from reshard.strategies.rules.shown import Source, model_of, shown_weights
from reshard.strategies.rules.sizes import Sizes
from reshard.strategies.rules.toml_file import cut_of
from reshard.text.products import ExpressionError

AxisNames = Callable[[str, tuple[int, ...]], tuple[str, ...]]
"""The names of a device matrix's axes, of a parameter's layout; none where they are not known."""

_LARGEST = 1 << 26


def recorded_names(path: str) -> Optional[AxisNames]:
    """The names that are recorded beside a strategy that was made; None where there is no such record.

    Args:
        path: the strategy, as it was typed.
    """
    for record in record_paths(path):
        try:
            content = parse_json(read_small(record, _LARGEST))
            sizes = Sizes(tuple((str(name), int(size)) for name, size in content["sizes"].items()))
            names = {
                str(parameter): tuple(map(str, group["names"]))
                for group in content["axes"]
                for parameter in group["parameters"]
            }
        except (OSError, UnfitError, JsonError, KeyError, TypeError, ValueError, AttributeError):
            # Not ours, or of another version: names are only names.
            continue
        return lambda name, matrix: _fitting(names.get(name, ()), matrix, sizes)
    return None


def names_by_sizes(source: Source) -> AxisNames:
    """The names that follow from the sizes of a strategy's run, where they follow."""
    model = model_of(source, None)
    found: dict[tuple[str, tuple[int, ...]], Any] = {}
    for name, weight in shown_weights([source], model).items():
        for reading in weight.readings:
            placed = place(reading.matrix, reading.cuts, weight.tensor.shape, source.sizes, reading.nested, ())
            axes = tuple(axis.name for axis in placed.axes)
            # Of several ways of meaning it none is told.
            if found.setdefault((name, placed.device_matrix), axes) != axes:
                found[name, placed.device_matrix] = ()

    def names(name: str, matrix: tuple[int, ...]) -> tuple[str, ...]:
        weight = name if name in model.weights else name.partition(".")[2]
        axes: tuple[str, ...] = found.get((weight, matrix), ())
        return axes

    return names


def _fitting(names: tuple[str, ...], matrix: tuple[int, ...], sizes: Sizes) -> tuple[str, ...]:
    """The names, if their sizes are those of the matrix: else the record is of another strategy."""
    if len(names) != len(matrix):
        return ()
    try:
        counts = []
        for name in names:
            cut = cut_of(name)
            (factor,) = cut.factors
            counts.append(min(factor.whole(sizes), cut.most or factor.whole(sizes)))
    except (ExpressionError, ValueError):
        return ()
    return names if tuple(counts) == matrix else ()
