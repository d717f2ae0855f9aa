"""Mappings with very many names, whose values are created on demand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

V = TypeVar("V")


class ByName(Mapping[str, V]):
    """Values by name; only the names are in memory.

    Args:
        names: all names, in order.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
