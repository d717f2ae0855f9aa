r"""Keys of alpha_pattern and rank_pattern, matched like PEFT, but with limited time and memory.

PEFT uses the first key for which ``re.match(rf"(.*\.)?({key})$", module)`` succeeds. With some keys, `re` takes
exponential time, or all memory. So another process matches, with limits of the system.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Optional

from reshard.text.wording import quoted

MAX_SECONDS = 20
"""Processor time for all keys and modules."""
MAX_MEMORY = 1 << 30
"""Bytes of memory of the process."""

# Writes a line for each key: the modules for which it is the first match, and whether it matches any module.
_PROGRAM = r"""
import json, re, resource, sys, warnings

warnings.simplefilter("ignore")
keys, modules, seconds, memory = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
unmatched = modules
for key in keys:
    try:
        expression = re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        sys.exit(f"it is not a regular expression: {error.msg}")
    matching = {module for module in unmatched if expression.match(module)}
    unmatched = [module for module in unmatched if module not in matching]
    used = bool(matching) or any(map(expression.match, modules))
    print(json.dumps([sorted(matching), used]), flush=True)
"""


class KeyPatternError(ValueError):
    """A key is not a regular expression, or takes too long."""


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
            KeyPatternError: a key is not a regular expression, or takes too long.
        """
        if not self._values:
            return []
        keys = [*self._values]
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([keys, [*modules], MAX_SECONDS, MAX_MEMORY]),
            capture_output=True,
            encoding="ascii",
            errors="replace",
            check=False,
        )
        lines = done.stdout.splitlines()
        if len(lines) < len(keys):
            error = done.stderr.splitlines()[-1:] or [f"it takes more than {MAX_SECONDS} s; simplify it"]
            raise KeyPatternError(f"{quoted(keys[len(lines)])} cannot be matched: {error[0]}")
        matches: dict[str, float] = {}
        unused = []
        for key, line in zip(keys, lines):
            matching, used = json.loads(line)
            matches.update(dict.fromkeys(matching, self._values[key]))
            if not used:
                unused.append(key)
        # If no expression matches, PEFT looks up the name itself.
        others = {module: self._values.get(module) for module in modules if module not in matches}
        self._values_of_modules = {**others, **matches}
        return [key for key in unused if key not in others]

    def value(self, module: str) -> Optional[float]:
        """The value of the first key that matches a module of `match`; None without a match."""
        return self._values_of_modules[module] if self._values else None
