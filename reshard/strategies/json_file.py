"""The JSON form of strategy files.

Values are checked when they are read: any program may have written the file. Sections other
than strategy items and parameter layouts are skipped.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Optional

from reshard.errors import StrategyError
from reshard.storage.json_text import Fields, JsonError, integers, parse_json
from reshard.strategies.model import RecordedLayout, StrategyFile, StrategyItem
from reshard.text.messages import quoted

_AGAIN = "copy the original again, or have MindSpore write it again"
_STAGE, _ITEMS, _LAYOUTS = "current_stage", "parallel_strategy_item", "parallel_layout_item"
_INT32 = 2**31
_UINT32 = 2**32
_INT64 = 2**63


def parse_strategy(data: bytes, path: str) -> Optional[StrategyFile]:
    """The content of a strategy file, or None for JSON of another kind.

    Raises:
        StrategyError: the file is not valid JSON, or its values are damaged.
    """
    try:
        content = parse_json(data)
        if not isinstance(content, dict) or not content.keys() & {_ITEMS, _LAYOUTS}:
            return None
        return _strategy(Fields(content, "the file"), path)
    except JsonError as error:
        raise StrategyError(f"{path} is damaged: {error}", file=path, hint=_AGAIN) from error


def _strategy(content: Fields, path: str) -> StrategyFile:
    items = [_item(node, item) for node, item in content.members(_ITEMS)] if _ITEMS in content else []
    layouts: dict[str, RecordedLayout] = {}
    # Thousands of parameters share tens of layouts, and their names are those of checkpoints.
    distinct: dict[RecordedLayout, RecordedLayout] = {}
    for name, item in content.members(_LAYOUTS) if _LAYOUTS in content else ():
        recorded = _recorded(name, item)
        layouts[sys.intern(name)] = distinct.setdefault(recorded, recorded)
    current = content.integer(_STAGE, 0, _UINT32) if _STAGE in content else 1
    return StrategyFile(path, "json", tuple(items), layouts, current)


def _item(node: str, item: Fields) -> StrategyItem:
    return StrategyItem(
        node,
        item.integer("stage", 0, _UINT32),
        tuple(
            integers(entry, f"{quoted(node)}: parallel_strategy", 0, _UINT32)
            for entry in item.entries("parallel_strategy")
        ),
    )


def serialize_strategy(file: StrategyFile) -> bytes:
    """The bytes of a strategy file. Of several operators with one name, the last is written."""
    items = {
        item.node: {"stage": item.stage, "parallel_strategy": [list(inputs) for inputs in item.strategies]}
        for item in file.items
    }
    content = {
        _STAGE: file.current_stage,
        _ITEMS: items,
        _LAYOUTS: {name: _layout_item(recorded) for name, recorded in file.layouts.items()},
    }
    return json.dumps(content).encode()


def _layout_item(recorded: RecordedLayout) -> dict[str, Any]:
    maps = [list(entry) for entry in recorded.tensor_maps]
    item: dict[str, Any] = {
        "dev_matrix": list(recorded.device_matrix),
        "field": recorded.field,
        "opt_weight_shard_size": recorded.shard_size,
        "opt_weight_shard_step": recorded.shard_step,
        "tensor_map": maps if recorded.nested else maps[0] if maps else [],
    }
    # Unknown values are omitted: MindSpore reads the file without them.
    if recorded.tensor_shape is not None:
        item["tensor_shape"] = list(recorded.tensor_shape)
    if recorded.split_sizes:
        item["param_split_shape"] = list(recorded.split_sizes)
    if recorded.split_offsets:
        item["indices_offset"] = list(recorded.split_offsets)
    return item


def _recorded(name: str, item: Fields) -> RecordedLayout:
    maps = item.entries("tensor_map")
    nested = any(isinstance(entry, list) for entry in maps)
    label = f"parameter {quoted(name)}: tensor_map"

    def optional(key: str) -> Optional[tuple[int, ...]]:
        return item.integers(key, -_INT64, _INT64) if key in item else None

    if nested:
        entries = (entry if isinstance(entry, list) else [entry] for entry in maps)
        tensor_maps = tuple(integers(entry, label, -_INT32, _INT32) for entry in entries)
    else:
        tensor_maps = (integers(maps, label, -_INT32, _INT32),)
    return RecordedLayout(
        device_matrix=item.integers("dev_matrix", 0, _UINT32),
        tensor_maps=tensor_maps,
        nested=nested,
        tensor_shape=optional("tensor_shape"),
        field=item.integer("field", -_INT32, _INT32),
        shard_step=item.integer("opt_weight_shard_step", -_INT32, _INT32),
        shard_size=item.integer("opt_weight_shard_size", -_INT32, _INT32),
        split_sizes=optional("param_split_shape") or (),
        split_offsets=optional("indices_offset") or (),
    )
