"""Casts against exact arithmetic: to the nearest value, ties to even."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints.formats.dtypes import CAST_TO, CASTABLE
from reshard.checkpoints.formats.elements import cast_words
from reshard.execute.casts import Cast, put

Words = npt.NDArray[Any]

# Bits of the exponent and of the mantissa.
FIELDS = {"Float64": (11, 52), "Float32": (8, 23), "Float16": (5, 10), "BFloat16": (8, 7)}
WORDS = {"Float64": "u8", "Float32": "u4", "Float16": "u2", "BFloat16": "u2"}
PAIRS = [(stored, dtype) for stored, dtype in itertools.product(CASTABLE, CAST_TO) if stored != dtype]


def value_of(bits: int, dtype: str) -> Any:
    """The number of a bit pattern: a fraction and a sign, an infinity, or None."""
    exponent_bits, mantissa_bits = FIELDS[dtype]
    sign = -1 if bits >> (exponent_bits + mantissa_bits) else 1
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == (1 << exponent_bits) - 1:
        return None if mantissa else (sign, "infinite")
    if exponent:
        return sign, Fraction((1 << mantissa_bits) + mantissa) * Fraction(2) ** (exponent - bias - mantissa_bits)
    return sign, Fraction(mantissa) * Fraction(2) ** (1 - bias - mantissa_bits)


def nearest(value: Any, dtype: str) -> int:
    """The bits of the nearest element of a type, found by bisection over all of them, ties to even."""
    exponent_bits, mantissa_bits = FIELDS[dtype]
    infinite = ((1 << exponent_bits) - 1) << mantissa_bits
    sign, size = value
    top = (0 if sign > 0 else 1) << (exponent_bits + mantissa_bits)
    if size == "infinite":
        return top | infinite
    low, high = 0, infinite
    while high - low > 1:
        middle = (low + high) // 2
        if value_of(middle, dtype)[1] <= size:
            low = middle
        else:
            high = middle
    below = value_of(low, dtype)[1]
    # Beyond the largest number, infinity counts as the next power of two.
    above = value_of(high, dtype)[1] if high < infinite else 2 * value_of(infinite - (1 << mantissa_bits), dtype)[1]
    nearer = (size - below) - (above - size)
    chosen = low if nearer < 0 or (nearer == 0 and low % 2 == 0) else high
    return top | chosen


def cast(bits: list[int], stored: str, dtype: str) -> list[int]:
    actual: list[int] = cast_words(np.array(bits, WORDS[stored]), stored, dtype).tolist()
    return actual


def check(bits: list[int], stored: str, dtype: str) -> None:
    for before, after in zip(bits, cast(bits, stored, dtype)):
        value = value_of(before, stored)
        if value is None:
            assert value_of(after, dtype) is None, hex(before)
        else:
            assert after == nearest(value, dtype), (hex(before), hex(after))


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
@given(data=st.data())
def test_casts_round_to_the_nearest_value(stored: str, dtype: str, data: Any) -> None:
    width = sum(FIELDS[stored]) + 1
    check(data.draw(st.lists(st.integers(0, (1 << width) - 1), min_size=1, max_size=20)), stored, dtype)


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_values_near_ties_are_rounded_once(stored: str, dtype: str) -> None:
    exponent_bits, mantissa_bits = FIELDS[dtype]
    bits = []
    for number in (0, 1, 2, (1 << mantissa_bits) - 1, 1 << mantissa_bits, 0x3C00, 0x3F80):
        for exponent in (0, 1, (1 << exponent_bits) // 2, (1 << exponent_bits) - 2):
            element = exponent << mantissa_bits | number % (1 << mantissa_bits)
            here = value_of(element, dtype)
            after = value_of(element + 1, dtype)
            if here is None or after is None or "infinite" in (here[1], after[1]):
                continue
            middle = (here[1] + after[1]) / 2
            near = nearest((1, middle), stored)
            bits += [max(near + step, 0) for step in (-2, -1, 0, 1, 2)]
    check(bits, stored, dtype)


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_nan_infinity_and_the_largest_value_survive_casts(stored: str, dtype: str) -> None:
    exponent_bits, mantissa_bits = FIELDS[stored]
    infinite = ((1 << exponent_bits) - 1) << mantissa_bits
    sign = 1 << (exponent_bits + mantissa_bits)
    none = [infinite | 1, infinite | (1 << (mantissa_bits - 1)), infinite | ((1 << mantissa_bits) - 1)]
    check([infinite, infinite | sign, *none, *(each | sign for each in none), infinite - 1, 0, sign, 1], stored, dtype)


@pytest.mark.parametrize("shape", [(300_000,), (700, 500), (3, 200, 400), (1, 1, 7)])
@pytest.mark.parametrize("transposed", [False, True])
def test_casts_by_blocks_equal_casts_by_element_and_count_overflows(shape: tuple[int, ...], transposed: bool) -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal(shape).astype("f4")
    flat = values.reshape(-1)
    flat[:7] = [1e38, -3e38, np.inf, np.nan, 65504, 65520, 3.4e38]
    output: list[tuple[str, int]] = []
    for dtype, overflows in (("BFloat16", 1), ("Float16", 4)):
        out = np.zeros(shape[::-1] if transposed else shape, "u2")
        view = out.transpose() if transposed else out
        output.clear()
        given_words, created = values.view("u4")[..., None], view[..., None]
        put(given_words, created, Cast("Float32", dtype, "w", lambda name, count: output.append((name, count))))
        np.testing.assert_array_equal(view, cast_words(values.view("u4"), "Float32", dtype))
        assert sum(count for _, count in output) == overflows
        assert {name for name, _ in output} == {"w"}


def doubles_of(words: Words, stored: str) -> Any:
    """Numbers as Float64, which has all of them; without ml_dtypes."""
    with np.errstate(invalid="ignore"):
        if stored == "BFloat16":
            return (words.astype("u4") << 16).view("f4").astype("f8")
        return words.view({"Float16": "f2", "Float32": "f4", "Float64": "f8"}[stored]).astype("f8")


def nearest_words(doubles: npt.NDArray[np.float64], dtype: str) -> Any:
    """The words of the nearest numbers of a two-byte type, ties to even, found in the list of all of its numbers."""
    exponent_bits, mantissa_bits = FIELDS[dtype]
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    sizes = doubles_of(np.arange(infinity, dtype="u2"), dtype)
    # Beyond the largest number, infinity counts as the next power of two.
    middles = (sizes + np.append(sizes[1:], 2 * sizes[infinity - (1 << mantissa_bits)])) / 2
    found = np.searchsorted(middles, np.abs(doubles))
    ties = (found < infinity) & (middles[np.minimum(found, infinity - 1)] == np.abs(doubles))
    return np.where(ties, found + found % 2, found) | np.signbit(doubles) << 15


@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_all_numbers_and_middles_of_two_byte_types_are_cast_to_the_nearest(stored: str, dtype: str) -> None:
    random = np.random.default_rng(0)
    if WORDS[stored] == "u2":
        words = np.arange(1 << 16, dtype="u2")
    else:
        sizes = [
            doubles_of(np.arange(0x7C00, dtype="u2"), "Float16"),
            doubles_of(np.arange(0x7F80, dtype="u2"), "BFloat16"),
        ]
        middles = [(each[1:] + each[:-1]) / 2 for each in sizes]
        float_type = "f4" if stored == "Float32" else "f8"
        with np.errstate(over="ignore", under="ignore"):
            exact = np.concatenate([*sizes, *middles, [65520, 3.4e38, 1e39, 1e-46, np.inf]]).astype(float_type)
            near = [np.nextafter(exact, np.array(end, float_type)) for end in (0, np.inf)]
        any_bits = random.integers(0, 256, (1 << 17) * exact.itemsize, dtype="u1").view(float_type)
        words = np.concatenate([exact, *near, -exact, *(-each for each in near), any_bits]).view(WORDS[stored])
    doubles = doubles_of(words, stored)
    out, overflowed = np.empty(len(words), WORDS[dtype]), []

    Cast(stored, dtype, "w", lambda name, count: overflowed.append(count)).put(words, out)

    cast_doubles, nan = doubles_of(out, dtype), np.isnan(doubles)
    np.testing.assert_array_equal(np.isnan(cast_doubles), nan)
    if WORDS[dtype] == "u2":
        np.testing.assert_array_equal(out[~nan], nearest_words(doubles[~nan], dtype))
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.testing.assert_array_equal(out[~nan], doubles[~nan].astype("f4").view("u4"))
    assert sum(overflowed) == np.count_nonzero(np.isinf(cast_doubles)) - np.count_nonzero(np.isinf(doubles))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("special", ["none", "few", "many"])
@pytest.mark.parametrize(("stored", "dtype"), PAIRS)
def test_blocks_of_any_bits_give_what_elements_give(stored: str, dtype: str, special: str, transposed: bool) -> None:
    """Numbers near 1, some or all of them replaced by any bits: NaN of any payload, infinities, subnormal numbers."""
    random = np.random.default_rng(0)
    shape = (301, 517)
    numbers = random.uniform(-2, 2, shape).view("u8")
    words = numbers if stored == "Float64" else cast_words(numbers, "Float64", stored)
    chosen = random.random(shape) < {"none": 0, "few": 0.01, "many": 1}[special]
    size = words.dtype.itemsize
    words[chosen] = random.integers(0, 256, (*shape, size), dtype=np.uint8).view(words.dtype)[..., 0][chosen]
    out = np.zeros(shape[::-1] if transposed else shape, WORDS[dtype])
    view = out.T if transposed else out
    overflows: list[int] = []

    put(words[..., None], view[..., None], Cast(stored, dtype, "w", lambda name, count: overflows.append(count)))

    expected = cast_words(words, stored, dtype)
    np.testing.assert_array_equal(view, expected)
    infinite = ((1 << FIELDS[dtype][0]) - 1) << FIELDS[dtype][1]
    infinite_before = ((1 << FIELDS[stored][0]) - 1) << FIELDS[stored][1]
    counts = [
        np.count_nonzero(array << array.dtype.type(1) == array.dtype.type(2 * bits))
        for array, bits in ((expected, infinite), (words, infinite_before))
    ]
    assert sum(overflows) == counts[0] - counts[1]
