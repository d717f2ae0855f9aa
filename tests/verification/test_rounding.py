"""The casts of verification against exact arithmetic: to the nearest value, ties to even."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints.formats.dtypes import CAST_TO
from reshard.verification.operations import same_nans, words_as
from tests.execute.test_casts import FIELDS, PAIRS, WORDS, nearest, value_of


def check(bits: list[int], stored: str, dtype: str) -> None:
    created = words_as(np.array(bits, WORDS[stored]), stored, dtype).tolist()
    for before, after in zip(bits, created):
        value = value_of(before, stored)
        if value is None:
            assert value_of(after, dtype) is None, hex(before)
            assert before >> sum(FIELDS[stored]) == after >> sum(FIELDS[dtype]), hex(before)
        else:
            assert after == nearest(value, dtype), (hex(before), hex(after))


@pytest.mark.deep
@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
@given(data=st.data())
def test_naive_casts_round_to_the_nearest_value(stored: str, dtype: str, data: Any) -> None:
    size = 8 * np.dtype(WORDS[stored]).itemsize
    check(data.draw(st.lists(st.integers(0, (1 << size) - 1), min_size=1, max_size=50)), stored, dtype)


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_naive_casts_round_ties_to_even(stored: str, dtype: str) -> None:
    """Halfway between two neighbours of the target's type, one element of the source's before and after, ends too."""
    exponent_bits, mantissa_bits = FIELDS[dtype]
    infinite = ((1 << exponent_bits) - 1) << mantissa_bits
    around = [0, 1, 2, 3, 1 << mantissa_bits, infinite // 2, infinite - 2, infinite - 1]
    bits: list[int] = []
    for low in [*around, *(each | 1 << mantissa_bits for each in around)]:
        below = value_of(min(low, infinite - 1), dtype)[1]
        step = below - value_of(min(low, infinite - 1) - 1, dtype)[1] if low else value_of(1, dtype)[1]
        near = nearest((1, below + step / 2), stored)
        bits += [max(near + by, 0) for by in (-1, 0, 1)]
    sign = 1 << sum(FIELDS[stored])
    check([*bits, *(each | sign for each in bits if each < sign)], stored, dtype)


@pytest.mark.parametrize("dtype", CAST_TO)
def test_naive_casts_keep_nan(dtype: str) -> None:
    exponent_bits, mantissa_bits = FIELDS[dtype]
    infinite = ((1 << exponent_bits) - 1) << mantissa_bits
    sign = 1 << (exponent_bits + mantissa_bits)
    sizes = [0, 1, infinite - 1, infinite, infinite + 1, infinite + (1 << mantissa_bits) - 1]
    before = [size | top for size, top in itertools.product(sizes, (0, sign))]
    after = np.array(before, WORDS[dtype])
    same_nans(after, dtype)
    for one, other in zip(before, after.tolist()):
        assert one == other or value_of(one, dtype) is None
    assert len({int(bits) for bits in after if value_of(int(bits), dtype) is None}) == 1
