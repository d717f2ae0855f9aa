"""A reader of a rule's operations: ``do = ["transpose", { concat = 1 }, { stack = "expert" }]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

from reshard.names.operations import Check, Copy, Join, Operation, Pad, Reshape, Stack, Transpose
from reshard.names.sizes import product
from reshard.storage.toml_tables import TomlFile, did_you_mean
from reshard.text.messages import quoted
from reshard.text.names import near_names
from reshard.text.products import Product

_MOST_DIMENSIONS = 16
_MOST_TENSORS = 4096
_ONE = "1"
# A part with the remaining elements.
_REST = "rest"


class RuleFile(TomlFile):
    """A file of rules of names."""

    def word(self, name: str, where: str) -> str:
        """A name that products and patterns may use."""
        if not name.replace("_", "a").isalnum() or not name.isascii() or name != name.lower() or name[0].isdigit():
            raise self.wrong(where, f"{quoted(name)} must be a name of small letters, digits and _")
        return name

    def product(self, value: Any, where: str) -> Product:
        """A product of sizes, or a number."""
        if type(value) is int and value >= 0:
            value = str(value)
        if not isinstance(value, str):
            raise self.wrong(where, f"{value!r} is not a product of sizes such as heads*head_dim")
        return self.parsed(product, [value], where)[0]

    def products(self, value: Any, where: str) -> tuple[Product, ...]:
        """One product or a list of them."""
        values = value if isinstance(value, list) else [value]
        if not values:
            raise self.wrong(where, "is empty")
        return tuple(self.product(each, where) for each in values)


class OperationReader:
    """Reads the operations of one rule.

    Args:
        file: the file, for messages.
        where: the rule, for messages.
        left: number of its names on the left.
        right: number of its names on the right.
        sizes: the names of sizes.
    """

    def __init__(self, file: RuleFile, where: str, left: int, right: int, sizes: set[str]) -> None:
        self._file = file
        self._where = where
        self._left = self._columns = left
        self._right = right
        self._sizes = sizes

    def operations(self, entries: Sequence[Any]) -> tuple[Operation, ...]:
        """The operations, each checked against the number of its operands.

        Raises:
            NamesError: an operation is unknown, or does not fit the number of tensors.
        """
        operations = tuple(map(self._operation, entries))
        if self._columns != self._right:
            results = f"{self._columns} tensor{'s' if self._columns > 1 else ''}"
            raise self._wrong(f"makes {results}, and to has {self._right} names: add or remove an operation")
        return operations

    def _operation(self, entry: Any) -> Operation:
        table = {entry: None} if isinstance(entry, str) else entry
        if not isinstance(table, dict) or not table:
            raise self._wrong(f'do: {entry!r} is not an operation such as "transpose" or {{ concat = 1 }}')
        kinds = [kind for kind in _OPERATIONS if kind in table]
        if not kinds:
            near = [near_name for key in table for near_name in near_names(str(key), _OPERATIONS)]
            suggestion = f". Did you mean {near[0]}?" if near else f"; known: {', '.join(_OPERATIONS)}"
            raise self._wrong(f"do: there is no operation {quoted(str(next(iter(table))))}{suggestion}")
        kind = kinds[0]
        read, keys = _OPERATIONS[kind]
        self._file.values(table, dict.fromkeys((kind, *keys), ("any", None)), f"{self._where}: do")
        operation = read(self, kind, table[kind], table)
        return operation.inverse() if kind in _INVERSES else operation

    def _wrong(self, problem: str) -> Exception:
        return self._file.wrong(self._where, problem)

    def _dimension(self, value: Any) -> int:
        """A dimension; 0 by default."""
        if value is None:
            return 0
        if type(value) is not int or not 0 <= value < _MOST_DIMENSIONS:
            raise self._wrong(f"do: {value!r} is not a dimension: they are numbered from 0")
        return value

    def _product(self, value: Any, default: Optional[str] = None) -> Product:
        """A product of known sizes."""
        expression = self._file.product(default if value is None else value, self._where)
        for name in expression.names:
            if name not in self._sizes:
                raise self._wrong(f"do: {name} is not a size{did_you_mean(name, self._sizes)}")
        return expression

    def _parts(self, value: Any, count: int) -> Optional[tuple[Optional[Product], ...]]:
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or value.count(_REST) > 1:
            raise self._wrong(f'do: parts must be a list of {count} sizes, one of which may be "{_REST}"')
        return tuple(None if part == _REST else self._product(part) for part in value)

    def _join(self, kind: str, dimension: Any, table: dict[str, Any]) -> Join:
        """A join of the current tensors, or the join whose inverse splits the current tensor."""
        inverse = kind in _INVERSES
        count = self._into(kind, table) if inverse else self._columns
        if inverse and self._columns != 1:
            raise self._wrong(f"do: {kind} takes one tensor, not {self._columns}")
        if count < 2:
            raise self._wrong(f"do: {kind} needs several tensors")
        self._columns = count if inverse else 1
        along = self._dimension(dimension)
        if kind in ("interleave", "deinterleave"):
            return Join(along, count, block=self._product(table.get("block"), _ONE))
        if kind in ("concat", "split"):
            return Join(along, count, self._parts(table.get("parts"), count))
        if count != 3:
            raise self._wrong(f"do: {kind} needs three tensors: q, k and v")
        heads = self._product(table.get("heads"), "heads")
        groups = self._product(table.get("groups"), "groups")
        size = table.get("size", "head_dim")
        rows = tuple(self._file.product(f"{each.text}*{size}", self._where) for each in (heads, groups, groups))
        for each in rows:
            self._product(each.text)
        return Join(along, count, rows, groups)

    def _into(self, kind: str, table: dict[str, Any]) -> int:
        """The number of results of a split: that of its parts, or of the names."""
        parts = table.get("parts")
        count = len(parts) if isinstance(parts, list) else table.get("into", self._right)
        if kind == "ungroup_qkv":
            return 3
        if type(count) is not int or not 1 <= count <= _MOST_TENSORS:
            raise self._wrong(f"do: {kind}: {count!r} is not a number of tensors")
        return count

    def _stack(self, kind: str, number: Any, table: dict[str, Any]) -> Stack:
        if not isinstance(number, str) or not number:
            raise self._wrong(f'do: {kind} needs a number such as "expert"')
        return Stack(number, self._dimension(table.get("dimension")), self._columns)

    def _transpose(self, kind: str, order: Any, table: dict[str, Any]) -> Transpose:
        if order is None:
            return Transpose()
        if not isinstance(order, list) or sorted(map(str, order)) != sorted(map(str, range(len(order)))):
            raise self._wrong(f"do: transpose = {order!r} is not an order of dimensions such as [1, 0]")
        return Transpose(tuple(order))

    def _reshape(self, kind: str, before: Any, table: dict[str, Any]) -> Reshape:
        if not isinstance(before, list) or not isinstance(table.get("to"), list):
            raise self._wrong(
                'do: reshape must be written { reshape = ["experts", "h", "w"], to = ["experts*h", "w"] }'
            )
        first, second = (
            tuple(self._file.product(each, self._where) for each in shape) for shape in (before, table["to"])
        )
        # In both directions, one shape must give the names in the other.
        names = [{name for one in side for name in one.names if name not in self._sizes} for side in (first, second)]
        if names[0] != names[1]:
            alone = ", ".join(sorted(names[0] ^ names[1]))
            raise self._wrong(f"do: reshape: {alone} is not a size and is in only one shape")
        return Reshape(first, second)

    def _check(self, kind: str, shape: Any, table: dict[str, Any]) -> Check:
        if not isinstance(shape, list):
            raise self._wrong('do: check must be written { check = ["heads*head_dim", "w"] }')
        return Check(tuple(self._file.product(each, self._where) for each in shape))

    def _pad(self, kind: str, dimension: Any, table: dict[str, Any]) -> Pad:
        for key in ("size", "multiple"):
            if key not in table:
                raise self._wrong(f"do: {kind} needs {key}")
        return Pad(self._dimension(dimension), self._product(table["size"]), self._product(table["multiple"]))

    def _copy(self, kind: str, value: Any, table: dict[str, Any]) -> Copy:
        if self._columns != 1 or self._right < 2:
            raise self._wrong("do: copy needs one tensor and several names in to")
        self._columns = self._right
        return Copy(self._right)

    def _take(self, kind: str, value: Any, table: dict[str, Any]) -> Copy:
        if self._columns < 2 or self._columns != self._left:
            raise self._wrong("do: take needs several tensors, all of them names in from")
        count, self._columns = self._columns, 1
        return Copy(count)


# Read as the operations that they undo.
_INVERSES = ("split", "deinterleave", "ungroup_qkv", "unstack", "unpad", "take")
# Per operation the method that reads it, and its further keys.
_OPERATIONS: dict[str, tuple[Callable[[OperationReader, str, Any, dict[str, Any]], Operation], tuple[str, ...]]] = {
    "concat": (OperationReader._join, ("parts",)),
    "split": (OperationReader._join, ("parts", "into")),
    "interleave": (OperationReader._join, ("block",)),
    "deinterleave": (OperationReader._join, ("block", "into")),
    "group_qkv": (OperationReader._join, ("heads", "groups", "size")),
    "ungroup_qkv": (OperationReader._join, ("heads", "groups", "size")),
    "stack": (OperationReader._stack, ("dimension",)),
    "unstack": (OperationReader._stack, ("dimension",)),
    "transpose": (OperationReader._transpose, ()),
    "reshape": (OperationReader._reshape, ("to",)),
    "check": (OperationReader._check, ()),
    "pad": (OperationReader._pad, ("size", "multiple")),
    "unpad": (OperationReader._pad, ("size", "multiple")),
    "take": (OperationReader._take, ()),
    "copy": (OperationReader._copy, ()),
}
