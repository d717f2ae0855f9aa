"""Which parameters are written, by name: ``--include`` and ``--exclude``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate

from reshard.errors import UsageError


@dataclass(frozen=True)
class Filters:
    """Which parameters are written; they never decide which step is taken."""

    include: Sequence[str] = field(default=())
    exclude: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        """Refuse patterns that cannot be read, before anything else is done."""
        for pattern in (*self.include, *self.exclude):
            try:
                re.compile(translate(pattern))
            except re.error as error:
                # Older Pythons cannot read every set that a shell can.
                raise UsageError(f"{pattern!r} is no pattern of names: {error}") from error

    def admit(self, name: str) -> bool:
        """Whether a parameter of this name is written: exclusion wins."""
        if any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return False
        return not self.include or any(fnmatchcase(name, pattern) for pattern in self.include)
