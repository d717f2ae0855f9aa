"""Parameters of which the default suite takes some and the long one all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(values: Iterable[Any], one_of: int, first: int = 0) -> list[Any]:
    """Values, of which all but one of so many run with `make test-all` only.

    Args:
        values: single values, or tuples of several.
        one_of: how many there are to one that runs always.
        first: number of the first that does.
    """
    found = []
    for number, value in enumerate(values):
        marks = [] if number % one_of == first else [pytest.mark.long]
        found.append(
            pytest.param(*value, marks=marks) if isinstance(value, tuple) else pytest.param(value, marks=marks)
        )
    return found
