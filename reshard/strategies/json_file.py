"""The JSON form of strategy files.

Values are checked when they are read: any program may have written the file. Sections other
than strategy items and parameter layouts are skipped.
"""

from __future__ import annotations

import codecs
import io
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

from reshard.errors import StrategyError
from reshard.storage.json_text import Fields, JsonError, JsonStream, integers
from reshard.strategies.model import RecordedLayout, StrategyFile, StrategyItem
from reshard.text.wording import quoted

_AGAIN = "copy the original again, or have MindSpore write it again"
# A table with hand-made slices has a number per slice, and may have a hundred thousand slices.
_MAX_ITEM_LENGTH = 1 << 22
_WINDOW = 1 << 18
_INT32 = 2**31
_UINT32 = 2**32
_INT64 = 2**63


def parse_strategy(data: bytes, path: str) -> Optional[StrategyFile]:
    """The content of a strategy file, or None for JSON of another kind.

    Raises:
        StrategyError: the file is not valid JSON, or its values are damaged.
    """
    try:
        return _StrategyJson(data).file(path)
    except JsonError as error:
        raise StrategyError(f"{path} is damaged: {error}", file=path, hint=_AGAIN) from error


class _StrategyJson:
    """A file that is read item by item: only layouts are kept in memory."""

    def __init__(self, data: bytes) -> None:
        text = io.BytesIO(data.removeprefix(codecs.BOM_UTF8))
        self._stream = JsonStream(partial(text.read, _WINDOW), _MAX_ITEM_LENGTH)
        self._items: list[StrategyItem] = []
        self._layouts: dict[str, RecordedLayout] = {}
        self._distinct: dict[RecordedLayout, RecordedLayout] = {}

    def file(self, path: str) -> Optional[StrategyFile]:
        """The strategy; None for a file of another kind."""
        stream = self._stream
        if stream.peek() != "{":
            stream.skip()
            stream.end()
            return None
        sections = {"parallel_strategy_item": self._item, "parallel_layout_item": self._layout}
        is_strategy = False
        current = 1
        for key in stream.members():
            if key in sections:
                is_strategy = True
                self._section(key, sections[key])
            elif key == "current_stage":
                current = Fields({key: stream.value()}, "the file").integer(key, 0, _UINT32)
            else:
                stream.skip()
        stream.end()
        return StrategyFile(path, "json", tuple(self._items), self._layouts, current) if is_strategy else None

    def _section(self, key: str, take: Callable[[str, Fields], None]) -> None:
        if self._stream.peek() != "{":
            raise JsonError(f"{key} is not an object")
        for name in self._stream.members():
            if not name:
                raise JsonError(f"{key} contains an empty name")
            take(name, Fields(self._stream.value(), f"{key}, {quoted(name)}"))

    def _item(self, node: str, item: Fields) -> None:
        strategies = item.entries("parallel_strategy")
        self._items.append(
            StrategyItem(
                node,
                item.integer("stage", 0, _UINT32),
                tuple(integers(entry, f"{quoted(node)}: parallel_strategy", 0, _UINT32) for entry in strategies),
            )
        )

    def _layout(self, name: str, item: Fields) -> None:
        recorded = _recorded(name, item)
        # Thousands of parameters share tens of layouts, and their names are those of checkpoints.
        self._layouts[sys.intern(name)] = self._distinct.setdefault(recorded, recorded)


def serialize_strategy(file: StrategyFile) -> bytes:
    """The bytes of a strategy file. Of several operators with one name, the last is written."""
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
