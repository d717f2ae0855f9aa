"""Selection of parameters by name: ``--include`` and ``--exclude``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from reshard.text.globs import Globs


@dataclass(frozen=True)
class Filters:
    """Patterns that select the parameters to write; they never decide the step."""

    include: Sequence[str] = field(default=())
    exclude: Sequence[str] = field(default=())

    def admit(self, name: str) -> bool:
        """Whether a parameter of this name is written: exclusion wins."""
        if self.exclude and self._excluded.match(name):
            return False
        return not self.include or self._included.match(name)

    @cached_property
    def _included(self) -> Globs:
        return Globs(self.include)

    @cached_property
    def _excluded(self) -> Globs:
        return Globs(self.exclude)
