"""What a plain conversion executes does not grow: a new form may add a module and 20 lines to it, nothing else."""

from __future__ import annotations

from tests.trunk import plain_conversion

# Lower them when they fall. `python -m tests.trunk --modules` shows where the lines are.
LINES, MODULES = 3_765, 71


def test_a_plain_conversion_executes_few_lines_and_modules() -> None:
    by_module = plain_conversion()
    assert sum(by_module.values()) <= LINES
    assert len(by_module) <= MODULES
