"""Test parameters: a sample in the default suite, all in the long one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(values: Iterable[Any], one_of: int, first: int = 0) -> list[Any]:
    """Pytest parameters; all but one of each `one_of` are marked long.

    Args:
        values: single values, or tuples of several.
        one_of: the size of a group of which one value runs in the default suite.
        first: index of the first such value.
    """
    parameters = []
    for number, value in enumerate(values):
        marks = [] if number % one_of == first else [pytest.mark.long]
        parameters.append(
            pytest.param(*value, marks=marks) if isinstance(value, tuple) else pytest.param(value, marks=marks)
        )
    return parameters
