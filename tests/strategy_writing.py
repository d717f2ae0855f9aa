"""Strategy and group_info files as MindSpore writes them, from plain data, for tests.

A layout is a mapping with the keys ``dev_matrix`` and ``tensor_map`` (flat, or one list per
dimension), and where they matter ``step``, ``size``, ``field``, ``shape`` (JSON only), ``sizes``
and ``offsets`` of a table split by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.wire import field

Layouts = Mapping[str, Mapping[str, Any]]


def layout(dev_matrix: Sequence[int], tensor_map: Sequence[Any], **more: Any) -> dict[str, Any]:
    return {"dev_matrix": list(dev_matrix), "tensor_map": list(tensor_map), **more}


def numbers(values: Sequence[int]) -> bytes:
    return b"".join(field(1, value) for value in values)


def layout_message(fields: Mapping[str, Any]) -> bytes:
    maps = fields["tensor_map"]
    maps = maps if any(isinstance(entry, list) for entry in maps) else [maps]
    return (
        field(1, numbers(fields["dev_matrix"]))
        + b"".join(field(2, numbers(entry)) for entry in maps)
        + field(3, numbers(fields.get("sizes", [])))
        + field(4, numbers(fields.get("offsets", [])))
        + field(5, fields.get("field", 0))
        + field(6, fields.get("step", 0))
        + field(7, fields.get("size", 0))
    )


def protobuf(layouts: Layouts, item_stages: Sequence[int] = (0,)) -> bytes:
    """A strategy file; one strategy item for each of `item_stages`."""
    out = field(1, 1)
    for number in item_stages:
        strategies = field(1, number) + field(2, numbers([2, 1]))
        out += field(2, field(1, f"MatMul-{number}") + field(2, strategies))
    for name, fields in layouts.items():
        out += field(3, field(1, name) + field(2, layout_message(fields)))
    return out


def json_content(layouts: Layouts, item_stages: Sequence[int] = (0,)) -> dict[str, Any]:
    """What the JSON file of a strategy holds."""
    items = {f"MatMul-{number}": {"stage": number, "parallel_strategy": [[2, 1]]} for number in item_stages}
    fields = {}
    for name, one in layouts.items():
        fields[name] = {
            "dev_matrix": one["dev_matrix"],
            "tensor_map": one["tensor_map"],
            "field": one.get("field", 0),
            "opt_weight_shard_step": one.get("step", 0),
            "opt_weight_shard_size": one.get("size", 0),
        }
        renamed = {"shape": "tensor_shape", "sizes": "param_split_shape", "offsets": "indices_offset"}
        fields[name].update({theirs: one[ours] for ours, theirs in renamed.items() if ours in one})
    return {"current_stage": 1, "parallel_layout_item": fields, "parallel_strategy_item": items}


def write_strategy(path: Path, stage: int, layouts: Layouts, item_stages: Sequence[int] | None = None) -> Path:
    """Write one file, as JSON where its name ends so; items of `stage` alone unless told otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stages = (stage,) if item_stages is None else item_stages
    if path.suffix == ".json":
        path.write_text(json.dumps(json_content(layouts, stages)))
    else:
        path.write_bytes(protobuf(layouts, stages))
    return path


def write_merged(path: Path, stages: Mapping[int, Layouts]) -> Path:
    """Write a merged file, stages in the order given."""
    named = {f"{number}-{name}": fields for number, layouts in stages.items() for name, fields in layouts.items()}
    return write_strategy(path, 0, named, list(stages))


def group_info(restore_ranks: Sequence[int], groups: Sequence[tuple[str, Sequence[int]]] = ()) -> bytes:
    out = b"".join(field(1, field(1, name) + field(2, numbers(ranks))) for name, ranks in groups)
    return out + field(2, numbers(restore_ranks))
