"""The JSON form of strategy files.

Every value is checked as it is taken, since any program may have written the file. Sections other
than strategy items and parameter layouts are of no concern here.
"""

from __future__ import annotations

import json
from typing import Any, Optional

from reshard.errors import StrategyError
from reshard.strategies.model import RecordedLayout, StrategyFile, StrategyItem
from reshard.wording import quoted

_AGAIN = "copy it again from where it was written, or have MindSpore write it again"
_SECTIONS = ("parallel_layout_item", "parallel_strategy_item")
_INT32 = 2**31
_UINT32 = 2**32
_INT64 = 2**63
# A parameter has about twenty. Every one may cost a hundred bytes when parsed.
_MOST_VALUES = 2**22


def parse_strategy(data: bytes, path: str) -> Optional[StrategyFile]:
    """The content of a strategy file, or None where it is JSON of another kind.

    Raises:
        StrategyError: the file is no valid JSON, or what it says is damaged.
    """
    content = _decoded(data, path)
    if not isinstance(content, dict) or not any(section in content for section in _SECTIONS):
        return None
    take = _Taker(path)
    items = []
    for node, item in take.section(content, "parallel_strategy_item"):
        where = f"strategy item {node}"
        strategies = take.entries(item, "parallel_strategy", where)
        items.append(
            StrategyItem(
                node,
                take.integer(item, "stage", where, 0, _UINT32),
                tuple(take.integers(entry, "parallel_strategy", where, 0, _UINT32) for entry in strategies),
            )
        )
    parameters = take.section(content, "parallel_layout_item")
    layouts = {name: _recorded(take, name, item) for name, item in parameters}
    current = 1
    if "current_stage" in content:
        current = take.integer(content, "current_stage", "the file", 0, _UINT32)
    return StrategyFile(path, "json", tuple(items), layouts, current)


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


def _recorded(take: _Taker, name: str, item: Any) -> RecordedLayout:
    where = f"parameter {quoted(name)}"
    maps = take.entries(item, "tensor_map", where)
    nested = any(isinstance(entry, list) for entry in maps)

    def optional(key: str) -> Optional[tuple[int, ...]]:
        return take.integers(item[key], key, where, -_INT64, _INT64) if key in item else None

    if nested:
        entries = (entry if isinstance(entry, list) else [entry] for entry in maps)
        tensor_maps = tuple(take.integers(entry, "tensor_map", where, -_INT32, _INT32) for entry in entries)
    else:
        tensor_maps = (take.integers(maps, "tensor_map", where, -_INT32, _INT32),)
    return RecordedLayout(
        device_matrix=take.integers(take.entries(item, "dev_matrix", where), "dev_matrix", where, 0, _UINT32),
        tensor_maps=tensor_maps,
        nested=nested,
        tensor_shape=optional("tensor_shape"),
        field=take.integer(item, "field", where, -_INT32, _INT32),
        shard_step=take.integer(item, "opt_weight_shard_step", where, -_INT32, _INT32),
        shard_size=take.integer(item, "opt_weight_shard_size", where, -_INT32, _INT32),
        split_sizes=optional("param_split_shape") or (),
        split_offsets=optional("indices_offset") or (),
    )


class _Taker:
    """Takes typed values out of parsed JSON, or says which one is not what it should be."""

    def __init__(self, path: str) -> None:
        self.path = path

    def fail(self, where: str, problem: str) -> StrategyError:
        return StrategyError(f"{self.path} is damaged: {where}: {problem}", file=self.path, hint=_AGAIN)

    def section(self, content: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
        section = content.get(key, {})
        if not isinstance(section, dict):
            raise self.fail(key, "is not an object")
        for name, item in section.items():
            if not isinstance(item, dict):
                raise self.fail(f"{key}, {quoted(name)}", "is not an object")
            if not name:
                raise self.fail(key, "holds an empty name")
        return list(section.items())

    def integer(self, item: dict[str, Any], key: str, where: str, low: int, end: int) -> int:
        return self._integer(item.get(key), key, where, low, end)

    def entries(self, item: dict[str, Any], key: str, where: str) -> list[Any]:
        value = item.get(key)
        if not isinstance(value, list):
            raise self.fail(where, f"{key} is missing" if key not in item else f"{key} is not a list")
        return value

    def integers(self, values: Any, key: str, where: str, low: int, end: int) -> tuple[int, ...]:
        if not isinstance(values, list):
            raise self.fail(where, f"{key} is not a list of numbers")
        return tuple(self._integer(value, key, where, low, end) for value in values)

    def _integer(self, value: Any, key: str, where: str, low: int, end: int) -> int:
        if value is None:
            raise self.fail(where, f"{key} is missing")
        # JSON's true is an int to Python.
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(where, f"{key} holds something that is not a whole number")
        if not low <= value < end:
            raise self.fail(where, f"{key} holds a number out of range")
        return value


def _decoded(data: bytes, path: str) -> Any:
    if data.count(b",") + data.count(b"[") + data.count(b"{") > _MOST_VALUES:
        raise StrategyError(f"{path} holds more values than any strategy file ({_MOST_VALUES})", file=path)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                raise StrategyError(f"{path} lists {quoted(name)} twice", file=path)
            # Half of a surrogate pair can be neither printed nor written again: it does not encode.
            name.encode()
            result[name] = value
        return result

    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique)
    except UnicodeError:
        raise StrategyError(f"{path} is damaged: its text is not valid UTF-8", file=path, hint=_AGAIN) from None
    except RecursionError:
        raise StrategyError(f"{path} is damaged: its JSON is nested too deeply", file=path, hint=_AGAIN) from None
    except ValueError as error:
        raise StrategyError(f"{path} is damaged: it is not valid JSON ({error})", file=path, hint=_AGAIN) from None
