r"""Keys of alpha_pattern and rank_pattern, matched like PEFT.

PEFT uses the first key for which ``re.match(rf"(.*\.)?({key})$", module)`` succeeds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Optional

from reshard.text.messages import quoted


class KeyPatternError(ValueError):
    """A key is not a regular expression."""


class KeyPatterns:
    """The values of alpha_pattern or rank_pattern.

    Args:
        values: by key, in the order of the file.
    """

    def __init__(self, values: Optional[Mapping[str, float]] = None) -> None:
        self._values = dict(values or {})
        self._values_of_modules: dict[str, Optional[float]] = {}

    def match(self, modules: Sequence[str]) -> list[str]:
        """Match all keys with modules, so that `value` returns theirs; returns the keys without a matching module.

        Raises:
            KeyPatternError: a key is not a regular expression.
        """
        if not self._values:
            return []
        matches: dict[str, float] = {}
        unused = []
        for key, value in self._values.items():
            try:
                expression = re.compile(rf"(.*\.)?({key})$")
            except (re.error, RecursionError, OverflowError) as error:
                raise KeyPatternError(
                    f"{quoted(key)} cannot be matched: it is not a regular expression: {error}"
                ) from error
            matching = list(filter(expression.match, modules))
            if not matching:
                unused.append(key)
            for module in matching:
                matches.setdefault(module, value)
        # If no expression matches, PEFT looks up the name itself.
        others = {module: self._values.get(module) for module in modules if module not in matches}
        self._values_of_modules = {**others, **matches}
        return [key for key in unused if key not in others]

    def value(self, module: str) -> Optional[float]:
        """The value of the first key that matches a module of `match`; None without a match."""
        return self._values_of_modules[module] if self._values else None
