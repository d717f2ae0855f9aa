"""Strategy files in protobuf and JSON, group_info files, which share the protobuf messages, and other kinds of files.

The first bytes identify most other kinds, so that a checkpoint of tens of GB is never read in full. A file with the
first bytes or the name of a strategy that cannot be parsed is damaged, which is an error. Any other file is an
`OtherFile`, which is skipped in a directory.

Message types are created at run time, in a separate descriptor pool and package: a process that imported
MindSpore has its messages registered under the usual names. Names are declared as bytes, with the same
encoding, so that this module reports invalid UTF-8.

Values of JSON are checked when they are read: any program may have written the file. Sections other than strategy
items and parameter layouts are skipped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from reshard.errors import StrategyError
from reshard.storage import UnfitError, opened_regular, read_range, reading
from reshard.storage.files import cipher_of, is_ckpt, kind_by_head
from reshard.storage.json_text import Fields, JsonError, integers, parse_json
from reshard.strategies.model import RecordedLayout, StrategyFile, StrategyItem
from reshard.text.messages import quoted
from reshard.text.names import similar_path_hint

# Real files have some ten KB per hundred parameters. Parsed JSON takes several times its size.
MAX_STRATEGY = 2**26
_MAX_GROUP_INFO = 2**23
_HEAD = 32

RECORD = ".made"
"""The ending of the record of a made strategy.

The file is JSON, but is not named so: MindSpore refuses to merge a directory with both .ckpt and .json files."""

ENDINGS = (".ckpt", ".json")


CHECKPOINT = "a checkpoint"
"""The kind of a file that is one."""

# What is typed in place of a strategy.
_NUMBERS = r"[0-9]+|auto|((tp|pp|ep|dp|mp|cp)=?[0-9]+[,x]?)+"
_NUMBER_HINT = (
    "a strategy is a file or a directory, not a number of devices or sizes: reshard strategy derive makes one for "
    "others; --shards N is for PyTorch's forms"
)


class OtherFile(NamedTuple):
    """A file that is not a strategy: its kind in words, None if unknown; the content of a group_info file."""

    kind: str | None = None
    content: bytes = b""


def read_content(path: str) -> bytes | OtherFile:
    """The content of a file that may be a strategy."""
    with reading(path, StrategyError):
        try:
            with opened_regular(path) as file:
                size = file.size()
                head = read_range(file, 0, min(size, _HEAD))
                kind = _kind_by_head(head, size)
                content = b""
                if size <= (MAX_STRATEGY if kind is None else _MAX_GROUP_INFO if kind == CHECKPOINT else 0):
                    content = read_range(file, 0, size)
        except UnfitError as error:
            return OtherFile(str(error).replace("is ", "", 1))
        except FileNotFoundError as error:
            problem = f"{path}: no file or directory has this name"
            hint = _NUMBER_HINT if re.fullmatch(_NUMBERS, path) else similar_path_hint(path)
            raise StrategyError(problem, file=path, hint=hint) from error
    # Groups of ranks look like values of a checkpoint.
    if kind == CHECKPOINT and content and parse_group_map(content, path) is not None:
        return OtherFile("a group_info file", content)
    if kind is not None:
        return OtherFile(kind)
    if size <= MAX_STRATEGY:
        return content
    if _must_be_strategy(path, head):
        raise StrategyError(
            f"{path} is larger than any strategy file ({MAX_STRATEGY >> 20} MiB)",
            file=path,
            hint="pass a strategy file, not a checkpoint",
        )
    return OtherFile("too large for a strategy")


def parse(path: str, data: bytes) -> StrategyFile | OtherFile:
    """The strategy in the bytes of a file.

    Raises:
        StrategyError: it is damaged.
    """
    if not data:
        if path.endswith(ENDINGS):
            raise StrategyError(f"{path} is empty", file=path, hint="write it again, or remove it")
        return OtherFile("empty")
    if data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return parse_json_strategy(data, path) or OtherFile("JSON without parameter layouts")
    strategy = parse_protobuf(data, path)
    if strategy is not None:
        return strategy
    if _must_be_strategy(path, data):
        raise StrategyError(
            f"{path} is damaged: it cannot be read as a strategy file",
            file=path,
            hint="it may be truncated, or not a strategy at all; write it again, or remove it",
        )
    return OtherFile()


def read_strategy_file(path: str) -> StrategyFile:
    """One strategy file, protobuf or JSON.

    Raises:
        StrategyError: it is missing, damaged, or something else.
        RetryableError: reading failed.
    """
    data = read_content(path)
    file = data if isinstance(data, OtherFile) else parse(path, data)
    if isinstance(file, OtherFile):
        detail = "" if file.kind is None else f": it is {file.kind}"
        raise StrategyError(
            f"{path} is not a strategy file{detail}",
            file=path,
            hint="pass a strategy file, a directory of strategy files, or none for an unsharded checkpoint",
        )
    return file


def _must_be_strategy(path: str, data: bytes) -> bool:
    # MindSpore writes field 1, current_stage, first.
    return data[:1] == b"\x08" or ("strategy" in os.path.basename(path) and path.endswith(ENDINGS))


def _kind_by_head(head: bytes, size: int) -> str | None:
    if cipher_of(head) is not None:
        return "an encrypted checkpoint"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return "a safetensors file"
    return CHECKPOINT if is_ckpt(head) else kind_by_head(head)


class GroupInfo(NamedTuple):
    """The content of one rank's group_info file.

    Attributes:
        file: its path.
        restore_ranks: ranks with the same checkpoint as this rank; a lower bound, empty
            if unknown.
        groups: communication groups, name and ranks, in file order; names may repeat.
    """

    file: str
    restore_ranks: tuple[int, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]


def read_group_info(path: str) -> GroupInfo:
    """Read a group_info file.

    Raises:
        StrategyError: missing, not readable, or not a group_info file.
        RetryableError: reading failed.
    """
    content = read_content(path)
    data, kind = (content.content, content.kind) if isinstance(content, OtherFile) else (content, None)
    # Items of a strategy have the same structure as rank lists.
    if parse_protobuf(data, path) is not None:
        kind = "a strategy file"
    elif data:
        groups = parse_group_map(data, path)
        if groups is not None:
            return GroupInfo(path, *groups)
    elif kind is None:
        kind = "empty"
    raise StrategyError(
        f"{path} is not a group_info file" + (f": it is {kind}" if kind else ""),
        file=path,
        hint="pass the complete file that MindSpore wrote where GROUP_INFO_FILE pointed",
    )


# Field: name, number, type; "*" marks a repeated field, all others are required.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "ParallelStrategy": (("dim", 1, "uint32*"),),
    "DevMatrix": (("dim", 1, "uint32*"),),
    "TensorMap": (("dim", 1, "int32*"),),
    "ParamSplitShape": (("dim", 1, "int64*"),),
    "IndicesOffset": (("dim", 1, "int64*"),),
    "ParallelGroupRanks": (("dim", 1, "uint32*"),),
    "ParallelStrategys": (("stage", 1, "uint32"), ("parallel_strategy", 2, "ParallelStrategy*")),
    "ParallelStrategyItem": (("node_name", 1, "bytes"), ("parallel_strategys", 2, "ParallelStrategys")),
    "ParallelLayouts": (
        ("dev_matrix", 1, "DevMatrix*"),
        ("tensor_map", 2, "TensorMap*"),
        ("param_split_shape", 3, "ParamSplitShape*"),
        ("indices_offset", 4, "IndicesOffset*"),
        ("field", 5, "int32"),
        ("opt_weight_shard_step", 6, "int32"),
        ("opt_weight_shard_size", 7, "int32"),
    ),
    "ParallelLayoutItem": (("param_name", 1, "bytes"), ("parallel_layouts", 2, "ParallelLayouts")),
    "ParallelStrategyMap": (
        ("current_stage", 1, "uint32"),
        ("parallel_strategy_item", 2, "ParallelStrategyItem*"),
        ("parallel_layout_item", 3, "ParallelLayoutItem*"),
    ),
    "ParallelGroupItem": (("group_name", 1, "bytes"), ("parallel_group_ranks", 2, "ParallelGroupRanks")),
    "ParallelGroupMap": (
        ("parallel_group_item", 1, "ParallelGroupItem*"),
        ("ckpt_restore_rank_list", 2, "ParallelGroupRanks"),
    ),
}
_PACKAGE = "reshard.strategies"
Ranks = tuple[int, ...]

_AGAIN = "copy the original again, or have MindSpore write it again"
_STAGE, _ITEMS, _LAYOUTS = "current_stage", "parallel_strategy_item", "parallel_layout_item"
_INT32 = 2**31
_UINT32 = 2**32
_INT64 = 2**63


def parse_protobuf(data: bytes, path: str) -> StrategyFile | None:
    """The content of a strategy file, or None for bytes that are not its message.

    Raises:
        StrategyError: its values are damaged.
    """
    message = _parsed("ParallelStrategyMap", data)
    if message is None:
        return None
    # Thousands of operators and parameters share tens of strategies and layouts.
    strategys: dict[bytes, tuple[int, tuple[Ranks, ...]]] = {}
    items = []
    for item in message.parallel_strategy_item:
        stored = item.parallel_strategys
        key = stored.SerializeToString()
        known = strategys.get(key)
        if known is None:
            known = strategys[key] = stored.stage, tuple(tuple(entry.dim) for entry in stored.parallel_strategy)
        items.append(StrategyItem(_text(item.node_name, path), *known))
    distinct: dict[bytes, RecordedLayout] = {}
    layouts: dict[str, RecordedLayout] = {}
    for item in message.parallel_layout_item:
        # Checkpoints and other strategies have the same names.
        name = sys.intern(_text(item.param_name, path))
        if name in layouts:
            raise StrategyError(f"{path} lists parameter {quoted(name)} twice", file=path, parameter=name)
        key = item.parallel_layouts.SerializeToString()
        recorded = distinct.get(key)
        if recorded is None:
            recorded = distinct[key] = _recorded(item.parallel_layouts, path, name)
        layouts[name] = recorded
    return StrategyFile(path, "protobuf", tuple(items), layouts, message.current_stage)


def protobuf_bytes(file: StrategyFile) -> bytes:
    """The bytes of a strategy file, which MindSpore reads as its own.

    Raises:
        StrategyError: a number does not fit its field.
    """
    message = _message_class("ParallelStrategyMap")(current_stage=file.current_stage)
    name = ""
    try:
        for item in file.items:
            name = item.node
            added = message.parallel_strategy_item.add(node_name=item.node.encode())
            added.parallel_strategys.stage = item.stage
            for strategy in item.strategies:
                added.parallel_strategys.parallel_strategy.add(dim=strategy)
        for name, recorded in file.layouts.items():
            layouts = message.parallel_layout_item.add(param_name=name.encode()).parallel_layouts
            layouts.dev_matrix.add(dim=recorded.device_matrix)
            for entry in recorded.tensor_maps:
                layouts.tensor_map.add(dim=entry)
            if recorded.nested and len(recorded.tensor_maps) == 1:
                # A single map would be read as a flat one.
                layouts.tensor_map.add()
            layouts.param_split_shape.add(dim=recorded.split_sizes)
            layouts.indices_offset.add(dim=recorded.split_offsets)
            layouts.field = recorded.field
            layouts.opt_weight_shard_step = recorded.shard_step
            layouts.opt_weight_shard_size = recorded.shard_size
    except ValueError as error:
        raise StrategyError(f"{quoted(name)} cannot be written to {file.path}: {error}", file=file.path) from error
    return bytes(message.SerializeToString(deterministic=True))


def parse_group_map(data: bytes, path: str) -> tuple[Ranks, tuple[tuple[str, Ranks], ...]] | None:
    """The restore list and the named groups of a group_info file, or None for other bytes.

    Raises:
        StrategyError: a group's name is damaged.
    """
    message = _parsed("ParallelGroupMap", data)
    if message is None:
        return None
    groups = [
        (_text(item.group_name, path), tuple(item.parallel_group_ranks.dim)) for item in message.parallel_group_item
    ]
    return tuple(message.ckpt_restore_rank_list.dim), tuple(groups)


def _recorded(layouts: Any, path: str, name: str) -> RecordedLayout:
    def only(entries: Sequence[Any], label: str) -> Ranks:
        if len(entries) > 1:
            problem = f"{path}: parameter {quoted(name)} has {len(entries)} {label} entries"
            raise StrategyError(problem, file=path, parameter=name)
        return tuple(entries[0].dim) if entries else ()

    return RecordedLayout(
        device_matrix=only(layouts.dev_matrix, "dev_matrix"),
        tensor_maps=tuple(tuple(entry.dim) for entry in layouts.tensor_map),
        nested=len(layouts.tensor_map) > 1,
        field=layouts.field,
        shard_step=layouts.opt_weight_shard_step,
        shard_size=layouts.opt_weight_shard_size,
        split_sizes=only(layouts.param_split_shape, "param_split_shape"),
        split_offsets=only(layouts.indices_offset, "indices_offset"),
    )


def _text(name: bytes, path: str) -> str:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        problem = f"{path} is damaged: it contains a name that is not UTF-8: {name!r}"
        raise StrategyError(problem, file=path) from None
    if not text:
        raise StrategyError(f"{path} is damaged: it contains an empty name", file=path)
    return text


def _parsed(name: str, data: bytes) -> Any:
    """The message; None for bytes that are not one, or that lack a required field."""
    from google.protobuf.message import DecodeError

    message = _message_class(name)()
    try:
        message.ParseFromString(data)
    except (DecodeError, ValueError, RuntimeError, SystemError):
        # protobuf 3.20 reports some damage as SystemError.
        return None
    return message if message.IsInitialized() else None


@cache
def _message_class(name: str) -> Any:
    from google.protobuf import message_factory

    descriptor = _pool().FindMessageTypeByName(f"{_PACKAGE}.{name}")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    older: Any = message_factory
    return older.MessageFactory(_pool()).GetPrototype(descriptor)


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="reshard.proto", package=_PACKAGE, syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, declared in fields:
            kind = declared.rstrip("*")
            label = field_type.LABEL_REPEATED if declared.endswith("*") else field_type.LABEL_REQUIRED
            added = described.field.add(name=name, number=number, label=label)
            if kind in _MESSAGES:
                added.type, added.type_name = field_type.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                added.type = getattr(field_type, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def parse_json_strategy(data: bytes, path: str) -> StrategyFile | None:
    """The content of a strategy file, or None for JSON of another kind.

    Raises:
        StrategyError: the file is not valid JSON, or its values are damaged.
    """
    try:
        content = parse_json(data)
        if not isinstance(content, dict) or not content.keys() & {_ITEMS, _LAYOUTS}:
            return None
        return _json_strategy(Fields(content, "the file"), path)
    except JsonError as error:
        raise StrategyError(f"{path} is damaged: {error}", file=path, hint=_AGAIN) from error


def _json_strategy(content: Fields, path: str) -> StrategyFile:
    items = [_item(node, item) for node, item in content.members(_ITEMS)] if _ITEMS in content else []
    layouts: dict[str, RecordedLayout] = {}
    # Thousands of parameters share tens of layouts, and their names are those of checkpoints.
    distinct: dict[RecordedLayout, RecordedLayout] = {}
    for name, item in content.members(_LAYOUTS) if _LAYOUTS in content else ():
        recorded = _json_layout(name, item)
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


def json_bytes(file: StrategyFile) -> bytes:
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


def _json_layout(name: str, item: Fields) -> RecordedLayout:
    maps = item.entries("tensor_map")
    nested = any(isinstance(entry, list) for entry in maps)
    label = f"parameter {quoted(name)}: tensor_map"

    def optional(key: str) -> tuple[int, ...] | None:
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
