"""The trunk does not grow: a new form may add a module and 20 lines to a plain conversion, nothing else."""

from __future__ import annotations

from tests.trunk import hooks_of_forms, largest_circle, plain_conversion

# Lower them when they fall. `python -m tests.trunk --names` shows where the lines, classes and imports are.
# Pythons differ by a few lines.
LINES, MODULES, CLASSES = 3_520, 67, 108
CIRCLE = 7
HOOKS = 12


def test_a_plain_conversion_executes_few_lines_modules_and_classes() -> None:
    by_module, classes = plain_conversion()
    assert sum(by_module.values()) <= LINES
    assert len(by_module) <= MODULES
    assert len(classes) <= CLASSES


def test_few_modules_import_each_other() -> None:
    circle = largest_circle()
    assert len(circle) <= CIRCLE, sorted(circle)


def test_the_protocol_of_forms_stays_small() -> None:
    assert len(hooks_of_forms()) <= HOOKS
