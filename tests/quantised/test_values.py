"""Codes and scales as numbers, against Python's arithmetic."""

from __future__ import annotations

import ctypes
import itertools
import math
import platform

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints.formats.dtypes import CAST_TO
from reshard.checkpoints.formats.elements import cast_words
from reshard.layout import shape_of
from reshard.quantised.values import (
    CODES,
    E2M1,
    FLOAT8,
    INT4,
    INT8,
    MAX_TABLES,
    MEMORY_PER_BYTE,
    Words,
    decode_scales,
    dequantise,
    factors_of,
    multiply,
    numbers_of,
    scale_box,
    tables_of,
    tables_of_exponents,
)
from tests.quantised.models import numbers


def as_floats(words: Words, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BFloat16":
        return (words.astype("u4") << 16).view("f4")
    return words.view("f4" if dtype == "Float32" else "f2").astype("f4")


MEMORY = np.empty(1 << 16, "u1")

# Bits of the mantissa, and the least and the largest exponent.
FIELDS = {"Float32": (23, -126, 127), "Float16": (10, -14, 15), "BFloat16": (7, -126, 127)}


def rounded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float64]:
    """The nearest numbers of a type, ties to even, as multiples of the spacing at that size."""
    mantissa, least, largest = FIELDS[dtype]
    doubles = values.astype("f8")
    apart = np.ldexp(1.0, np.maximum(np.frexp(doubles)[1] - 1, least) - mantissa)
    nearest = np.rint(doubles / apart) * apart
    infinite = np.abs(nearest) >= 2.0 ** (largest + 1)
    result: npt.NDArray[np.float64] = np.where(infinite, np.copysign(np.inf, doubles), nearest)
    return result


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_the_value_of_its_dtype(code: str) -> None:
    expected = np.array([numbers(code, byte) for byte in range(256)], "f4")

    np.testing.assert_array_equal(numbers_of(code), expected)
    ordinary = ~np.isnan(expected)
    assert (np.signbit(numbers_of(code)) == np.signbit(expected))[ordinary].all()


@pytest.mark.parametrize("dtype", ["Float8E8M0", "UInt8"])
def test_every_exponent_is_its_power_of_two(dtype: str) -> None:
    expected = [2.0 ** (exponent - 127) for exponent in range(255)] + [math.nan]

    np.testing.assert_array_equal(decode_scales(np.arange(256, dtype="u1"), dtype), np.array(expected, "f4"))


@pytest.mark.parametrize(("dtype", "numpy"), [("Float32", "f4"), ("Float16", "f2"), ("BFloat16", "f4")])
def test_floating_point_scales_keep_their_values(dtype: str, numpy: str) -> None:
    values = np.array([[0.5, 1.25], [-3.0, 2.0**-14]], numpy)
    words = (values.view("u4") >> 16).astype("u2") if dtype == "BFloat16" else values.view(f"u{values.itemsize}")

    np.testing.assert_array_equal(decode_scales(words, dtype), values.astype("f4"))


@given(data=st.data())
def test_any_box_equals_elements_times_their_scales(data: st.DataObject) -> None:
    code = data.draw(st.sampled_from(sorted(CODES)))
    per_byte = 2 if code in (E2M1, INT4) else 1
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    shape[-1] *= per_byte
    block = [data.draw(st.integers(1, size + 1)) for size in shape]
    # Scales do not change within a byte.
    block[-1] += block[-1] % per_byte
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // per_byte), dtype="u1")
    whole = tuple((0, size) for size in shape)
    sizes = data.draw(st.lists(st.sampled_from([0.5, 3.0, 2.0**-130, 2.0**90, 1e-3, 7.7]), min_size=1))
    scales = rng.choice(np.array(sizes, "f4"), shape_of(scale_box(whole, block)))
    offsets = rng.integers(-5, 5, scales.shape).astype("f4") if data.draw(st.booleans()) else None
    box = []
    for size in shape:
        low = data.draw(st.integers(0, size - 1))
        box.append((low, data.draw(st.integers(low + 1, size))))
    box[-1] = (box[-1][0] // per_byte * per_byte, -(-box[-1][1] // per_byte) * per_byte)
    dtype = data.draw(st.sampled_from(CAST_TO))
    selected = tuple(slice(low, high) for low, high in box)
    bytes_taken = (*selected[:-1], slice(box[-1][0] // per_byte, box[-1][1] // per_byte))
    scales_taken = tuple(slice(low, high) for low, high in scale_box(tuple(box), block))
    out = np.empty([high - low for low, high in box], "u4" if dtype == "Float32" else "u2")
    taken = codes[bytes_taken].reshape(-1)
    if data.draw(st.booleans()):
        # At the end of the memory of the elements, where they are read.
        room = out.reshape(-1).view("u1")[-taken.size :]
        room[...] = taken
        taken = room
    # Memory for a few rows or for all.
    row_bytes = (box[-1][1] - box[-1][0]) // per_byte * MEMORY_PER_BYTE
    memory = np.empty(row_bytes * data.draw(st.integers(1, 9)), "u1")
    factors = None if offsets is not None else factors_of(code, scales[scales_taken], dtype)
    if factors is not None and data.draw(st.booleans()):
        multiply(taken, code, factors, dtype, block, tuple(box), out.reshape(-1), memory)
        overflowed = 0
    else:
        tables = tables_of(code, scales[scales_taken], dtype, None if offsets is None else offsets[scales_taken])
        table_numbers = np.arange(scales[scales_taken].size).reshape(scales[scales_taken].shape)
        overflowed = dequantise(taken, tables, table_numbers, block, tuple(box), out.reshape(-1), memory)

    infinite, results = 0, as_floats(out, dtype)
    for index in itertools.product(*(range(low, high) for low, high in box)):
        byte = codes[(*index[:-1], index[-1] // per_byte)]
        value = np.float32(numbers(code, int(byte))[index[-1] % per_byte])
        place = tuple(at // size for at, size in zip(index, block))
        with np.errstate(all="ignore"):
            expected = float(rounded((value if offsets is None else value - offsets[place]) * scales[place], dtype))
        result = float(results[tuple(at - low for at, (low, _) in zip(index, box))])
        assert result == expected or (math.isnan(result) and math.isnan(expected))
        assert math.copysign(1, result) == math.copysign(1, expected) or math.isnan(expected)
        infinite += math.isinf(expected) and not math.isinf(value)
    assert overflowed == infinite


@pytest.mark.deep
@pytest.mark.parametrize("columns", [64, 100, 640, 4096, 4224])
@pytest.mark.parametrize("memory_size", [1 << 16, 1 << 20])
@pytest.mark.parametrize("block", [(128, 128), (1, 32), (1000, 128)])
def test_boxes_of_many_rows_equal_elements_times_their_scales(
    columns: int, memory_size: int, block: tuple[int, int]
) -> None:
    rng = np.random.default_rng(columns)
    # Neither the first nor the last block is whole.
    box = ((37, 301), (0, columns))
    codes = rng.integers(0, 256, (264, columns), dtype="u1")
    (first, last), (_, across) = scale_box(box, block)
    scales = rng.uniform(1e-4, 1e-3, (last - first, across)).astype("f4")
    rows, places = np.arange(*box[0]) // block[0] - first, np.arange(columns) // block[1]
    values = numbers_of("Float8E4M3FN")[codes, 0] * scales[rows][:, places]
    expected = cast_words(values.view("u4"), "Float32", "BFloat16")
    memory = np.empty(memory_size, "u1")
    factors = factors_of("Float8E4M3FN", scales, "BFloat16")
    assert factors is not None
    multiplied, looked_up = np.empty(codes.size, "u2"), np.empty(codes.size, "u2")

    multiply(codes.reshape(-1), "Float8E4M3FN", factors, "BFloat16", block, box, multiplied, memory)

    np.testing.assert_array_equal(as_floats(multiplied, "BFloat16"), as_floats(expected.reshape(-1), "BFloat16"))
    if scales.size <= MAX_TABLES:
        tables = tables_of("Float8E4M3FN", scales, "BFloat16")
        numbers_of_tables = np.arange(scales.size).reshape(scales.shape)
        dequantise(codes.reshape(-1), tables, numbers_of_tables, block, box, looked_up, memory)
        np.testing.assert_array_equal(looked_up, expected.reshape(-1))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", CAST_TO)
@pytest.mark.parametrize("scale", ["Float8E8M0", "BFloat16"])
def test_every_code_times_every_small_scale_is_exact(code: str, dtype: str, scale: str) -> None:
    words = np.arange(255, dtype="u1") if scale == "Float8E8M0" else np.arange(1, 0x7F80, 61, dtype="u2")
    for first in range(0, len(words), MAX_TABLES):
        check_every_code(code, dtype, scale, words[first : first + MAX_TABLES])


def check_every_code(code: str, dtype: str, scale: str, words: Words) -> None:
    scales = decode_scales(words, scale)
    codes = np.tile(np.arange(256, dtype="u1"), (len(scales), 1))
    block = (1, 256 * numbers_of(code).shape[1])
    out = np.empty((len(scales), block[1]), "u4" if dtype == "Float32" else "u2")
    if scale == "Float8E8M0":
        tables, table_numbers = tables_of_exponents(code, dtype), words
    else:
        tables, table_numbers = tables_of(code, scales, dtype), np.arange(len(scales))

    box = ((0, len(scales)), (0, block[1]))
    overflowed = dequantise(codes.reshape(-1), tables, table_numbers[:, None], block, box, out.reshape(-1), MEMORY)

    values = np.array([numbers(code, byte) for byte in range(256)], "f4").reshape(1, -1)
    with np.errstate(all="ignore"):
        products = values * scales[:, None]
    expected = rounded(products, dtype)
    np.testing.assert_array_equal(as_floats(out, dtype), expected)
    ordinary = ~np.isnan(expected)
    assert (np.signbit(as_floats(out, dtype)) == np.signbit(expected))[ordinary].all()
    assert overflowed == np.count_nonzero(np.isinf(expected) & ~np.isinf(values))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        *itertools.product([*FLOAT8, "Int8"], ["Float32", "BFloat16"]),
        *itertools.product([INT4, INT8], CAST_TO),
    ],
)
def test_vector_arithmetic_has_the_bits_of_the_tables(code: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    words = np.concatenate(
        [
            np.arange(1, 0x7F80, 61) << 16,
            np.arange(1, 0xFF) << 23,
            # Around the least normal numbers, where digits are lost.
            np.arange(0x400000, 0x1800000, 0x4000),
            rng.integers(1, 0x7F800000, 4000),
        ]
    )
    columns = numbers_of(code).size
    codes, box = np.arange(256, dtype="u1"), ((0, 1), (0, columns))
    out = np.empty(columns, "u4" if dtype == "Float32" else "u2")
    multiplied = 0
    for scale in words.astype("u4").view("f4"):
        scales = np.array([[scale]])
        factors = factors_of(code, scales, dtype)
        tables = tables_of(code, scales, dtype)
        # Tables where elements overflow, and for the largest scales.
        assert factors is not None or tables.overflowing.any() or scale > 2.0**7
        if factors is not None:
            assert not tables.overflowing.any()
            multiply(codes, code, factors, dtype, (1, columns), box, out, MEMORY)
            np.testing.assert_array_equal(out, tables.words.view(out.dtype))
            multiplied += 1
    assert multiplied > len(words) // 3


def test_a_processor_without_subnormal_numbers_gives_the_same_results() -> None:
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        pytest.skip("the processor's mode is set for x86-64 and glibc only")
    libm = ctypes.CDLL("libm.so.6")
    usual, flushing = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    for environment in (usual, flushing):
        libm.fegetenv(environment)
    # Flush to zero, and denormals are zero, in MXCSR.
    flushing[7] |= 0x8040
    libm.fesetenv(flushing)
    try:
        factors = factors_of("Float8E4M3FN", np.ones((1, 1), "f4"), "BFloat16")
    finally:
        libm.fesetenv(usual)

    assert factors is None
