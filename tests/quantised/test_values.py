"""Codes and scales as numbers, against arithmetic on Python's own."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.execute.casts import Cast
from reshard.layout import shape_of
from reshard.quantised.values import CODES, E2M1, decode_codes, decode_scales, dequantise, scale_box
from tests.quantised.models import numbers


@pytest.mark.parametrize("code", CODES)
def test_every_code_stands_for_the_number_that_its_type_defines(code: str) -> None:
    expected = np.array([number for byte in range(256) for number in numbers(code, byte)], "f4")
    out = np.empty(len(expected), "f4")

    factor = decode_codes(np.arange(256, dtype="u1"), code, out)

    out *= factor
    np.testing.assert_array_equal(out, expected)
    ordinary = ~np.isnan(expected)
    assert (np.signbit(out) == np.signbit(expected))[ordinary].all()


@pytest.mark.parametrize("dtype", ["Float8E8M0", "UInt8"])
def test_every_exponent_stands_for_its_power_of_two(dtype: str) -> None:
    expected = [2.0 ** (exponent - 127) for exponent in range(255)] + [math.nan]

    np.testing.assert_array_equal(decode_scales(np.arange(256, dtype="u1"), dtype), np.array(expected, "f4"))


@pytest.mark.parametrize(("dtype", "numpy"), [("Float32", "f4"), ("Float16", "f2"), ("BFloat16", "f4")])
def test_floating_point_scales_keep_their_values(dtype: str, numpy: str) -> None:
    values = np.array([[0.5, 1.25], [-3.0, 2.0**-14]], numpy)
    words = (values.view("u4") >> 16).astype("u2") if dtype == "BFloat16" else values.view(f"u{values.itemsize}")

    np.testing.assert_array_equal(decode_scales(words, dtype), values.astype("f4"))


@given(data=st.data())
def test_any_box_of_any_tensor_is_each_element_times_its_own_scale(data: st.DataObject) -> None:
    code = data.draw(st.sampled_from(CODES))
    per_byte = 2 if code == E2M1 else 1
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    shape[-1] *= per_byte
    block = [data.draw(st.integers(1, size + 1)) for size in shape]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // per_byte), dtype="u1")
    whole = tuple((0, size) for size in shape)
    scales = rng.choice(np.array([0.5, 3.0, 2.0**-130, 2.0**90, 1e-3, 7.7], "f4"), shape_of(scale_box(whole, block)))
    offsets = rng.integers(-5, 5, scales.shape).astype("f4") if data.draw(st.booleans()) else None
    box = []
    for size in shape:
        low = data.draw(st.integers(0, size - 1))
        box.append((low, data.draw(st.integers(low + 1, size))))
    box[-1] = (box[-1][0] // per_byte * per_byte, -(-box[-1][1] // per_byte) * per_byte)
    taken = tuple(slice(low, high) for low, high in box)
    bytes_taken = (*taken[:-1], slice(box[-1][0] // per_byte, box[-1][1] // per_byte))
    scales_taken = tuple(slice(low, high) for low, high in scale_box(tuple(box), block))
    out = np.empty([high - low for low, high in box], "u4")

    dequantise(
        np.ascontiguousarray(codes[bytes_taken]),
        code,
        scales[scales_taken],
        block,
        tuple(box),
        out,
        lambda words, target: target.__setitem__(..., words),
        None if offsets is None else offsets[scales_taken],
    )

    for index in itertools.product(*(range(low, high) for low, high in box)):
        byte = codes[(*index[:-1], index[-1] // per_byte)]
        value = np.float32(numbers(code, int(byte))[index[-1] % per_byte])
        place = tuple(at // size for at, size in zip(index, block))
        with np.errstate(all="ignore"):
            expected = (value if offsets is None else value - offsets[place]) * scales[place]
        found = out[tuple(at - low for at, (low, _) in zip(index, box))].view("f4")
        np.testing.assert_array_equal(found, expected)


def test_the_product_is_rounded_once_to_the_type_asked_for() -> None:
    codes, scales = np.array([[0x38, 0x39, 0x7E, 0xFF]], "u1"), np.array([[1.0 + 2.0**-8]], "f4")
    out, overflowed = np.empty((1, 4), "u2"), []
    cast = Cast("Float32", "BFloat16", "w", lambda name, count: overflowed.append(count))

    dequantise(codes, "Float8E4M3FN", scales, (1, 4), ((0, 1), (0, 4)), out, cast.put)

    # 1 + 2**-8 is a tie, which goes to the even neighbour.
    assert (out.astype("u4") << 16).view("f4")[0, :3].tolist() == [1.0, 1.1328125, 450.0]
    assert (out[0, 3] & 0x7FFF) > 0x7F80
    assert not overflowed
