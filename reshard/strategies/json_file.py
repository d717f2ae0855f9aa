"""The JSON form of strategy files.

Every value is checked as it is taken, since any program may have written the file. Sections other
than strategy items and parameter layouts are of no concern here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Optional

from reshard.errors import StrategyError
from reshard.storage.json_text import Fields, JsonError, integers, parse_json
from reshard.strategies.model import RecordedLayout, StrategyFile, StrategyItem
from reshard.wording import quoted

_AGAIN = "copy it again from where it was written, or have MindSpore write it again"
_SECTIONS = ("parallel_layout_item", "parallel_strategy_item")
_INT32 = 2**31
_UINT32 = 2**32
_INT64 = 2**63


def parse_strategy(data: bytes, path: str) -> Optional[StrategyFile]:
    """The content of a strategy file, or None where it is JSON of another kind.

    Raises:
        StrategyError: the file is no valid JSON, or what it says is damaged.
    """
    try:
        content = parse_json(data)
        if not isinstance(content, dict) or not any(section in content for section in _SECTIONS):
            return None
        return _file(Fields(content, "the file"), path)
    except JsonError as error:
        raise StrategyError(f"{path} is damaged: {error}", file=path, hint=_AGAIN) from error


def _file(content: Fields, path: str) -> StrategyFile:
    items = []
    for node, item in _section(content, "parallel_strategy_item"):
        strategies = item.entries("parallel_strategy")
        items.append(
            StrategyItem(
                node,
                item.integer("stage", 0, _UINT32),
                tuple(integers(entry, f"{quoted(node)}: parallel_strategy", 0, _UINT32) for entry in strategies),
            )
        )
    layouts = {name: _recorded(name, item) for name, item in _section(content, "parallel_layout_item")}
    current = content.integer("current_stage", 0, _UINT32) if "current_stage" in content else 1
    return StrategyFile(path, "json", tuple(items), layouts, current)


def _section(content: Fields, key: str) -> Iterable[tuple[str, Fields]]:
    return content.members(key) if key in content else ()


def serialize_strategy(file: StrategyFile) -> bytes:
    """The bytes of a strategy file. Of operators of the same name, the last one stays."""
    items = {
        item.node: {"stage": item.stage, "parallel_strategy": [list(inputs) for inputs in item.strategies]}
        for item in file.items
    }
    content = {
        "current_stage": file.current_stage,
        "parallel_strategy_item": items,
        "parallel_layout_item": {name: _layout_item(recorded) for name, recorded in file.layouts.items()},
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
    # What is not known is left out: MindSpore reads the file without it.
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
    what = f"parameter {quoted(name)}: tensor_map"

    def optional(key: str) -> Optional[tuple[int, ...]]:
        return item.integers(key, -_INT64, _INT64) if key in item else None

    if nested:
        entries = (entry if isinstance(entry, list) else [entry] for entry in maps)
        tensor_maps = tuple(integers(entry, what, -_INT32, _INT32) for entry in entries)
    else:
        tensor_maps = (integers(maps, what, -_INT32, _INT32),)
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
