"""Statistics and differences against NumPy's on whole arrays, for every type, layout and number of threads."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints.formats.elements import widen
from reshard.execute import Progress
from reshard.numbers import statistics, sweep
from reshard.numbers.difference import Differences, TensorPair, differences
from reshard.numbers.statistics import TensorStatistics, statistics_of
from reshard.numbers.widening import BYTES, ONE, floats, table
from tests.asking import open_checkpoint
from tests.layouts import examples, strategies
from tests.reference import Array
from tests.trees import (
    SAFETENSORS_NAMES,
    Value,
    cut_ranks,
    layout,
    single,
    write_checkpoint,
    write_strategy,
    write_tree,
)

MEMORY = 16 << 20
TYPES = [*SAFETENSORS_NAMES]
PLAIN = {"Float16": "<f2", "Float32": "<f4", "Float64": "<f8", "Complex64": "<c8", "Bool": "?"}


def values_of(value: Value) -> Array:
    """The elements of a tensor as NumPy computes with them, the obvious way."""
    dtype, array = value
    flat = np.ascontiguousarray(array).reshape(-1)
    if dtype == "BFloat16":
        return (flat.astype("<u4") << 16).view("<f4")
    if dtype in ("F8_E4M3", "F8_E5M2"):
        return np.array([float8(int(code), dtype) for code in flat])
    if dtype == "Int4":
        halves = [half - 16 if half > 7 else half for code in flat for half in (int(code) & 15, int(code) >> 4)]
        return np.array(halves, "<i8")
    if dtype in PLAIN:
        return flat.view(PLAIN[dtype])
    return flat.view(("<u" if dtype.startswith("U") else "<i") + str(flat.itemsize))


def float8(code: int, dtype: str) -> float:
    """An 8-bit float by its definition."""
    mantissa, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    sign = -1.0 if code & 128 else 1.0
    exponent, fraction = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
    if dtype == "F8_E4M3" and code & 127 == 127:
        return math.nan
    if dtype == "F8_E5M2" and exponent == 31:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)


def unsigned_zero(code: int, mantissa: int, bias: int) -> float:
    """A type without infinities and negative zero, whose place NaN takes."""
    if code == 128:
        return math.nan
    exponent, fraction = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
    size = (bool(exponent) + fraction / (1 << mantissa)) * 2.0 ** (max(exponent, 1) - bias)
    return -size if code & 128 else size


ONE_BYTE: dict[str, Callable[[int], float]] = {
    "Float8E4M3FN": lambda code: float8(code, "F8_E4M3"),
    "Float8E5M2": lambda code: float8(code, "F8_E5M2"),
    "Float8E4M3FNUZ": lambda code: unsigned_zero(code, 3, 8),
    "Float8E5M2FNUZ": lambda code: unsigned_zero(code, 2, 16),
    "Float8E8M0": lambda code: math.nan if code == 255 else 2.0 ** (code - 127),
}


@pytest.mark.parametrize("dtype", [name for name in BYTES if name.startswith("Float8")])
def test_8_bit_floats_have_the_numbers_of_their_definition(dtype: str) -> None:
    expected = np.array([ONE_BYTE[dtype](code) for code in range(256)])
    widened = widen(np.arange(256, dtype="u1"), dtype)
    for numbers in (widened, table(dtype)[:, 0]):
        assert np.array_equal(numbers, expected, equal_nan=True)
        assert (np.signbit(numbers) == np.signbit(expected))[~np.isnan(expected)].all()
    assert widened.dtype == np.float32


@pytest.mark.parametrize("dtype, first", [("Float16", "<f2"), ("BFloat16", "<u2")])
@pytest.mark.parametrize("finite", [True, False])
def test_16_bit_floats_are_widened_exactly(dtype: str, first: str, finite: bool) -> None:
    codes = np.arange(1 << 16, dtype="<u2")
    widest = 0x7C00 if dtype == "Float16" else 0x7F80
    if finite:
        codes = codes[codes & 0x7FFF < widest]
    numbers = codes.view(first).astype("<f4") if first == "<f2" else (codes.astype("<u4") << 16).view("<f4")
    for widened in (floats(codes.view(np.uint8), dtype), widen(codes, dtype)):
        assert np.array_equal(widened, numbers, equal_nan=True)
        assert np.array_equal(np.signbit(widened), np.signbit(numbers))


@st.composite
def contents(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> Value:
    """A tensor of any bytes, of which many are zero and some NaN or infinite."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    width = {"Complex64": 8}.get(dtype) or np.zeros(0, PLAIN.get(dtype, "u1")).itemsize
    width = {"BFloat16": 2, "Int16": 2, "UInt16": 2, "Int32": 4, "UInt32": 4, "Int64": 8, "UInt64": 8}.get(dtype, width)
    array = rng.integers(0, 256, (*shape, width), "u1").view(f"<u{width}")[..., 0]
    if dtype == "Bool":
        array = array & np.uint8(1)
    array = np.array(array)
    array[rng.random(shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
    return Value(dtype, array)


def magnitudes_of(value: Value) -> dict[int, int]:
    """The count of finite nonzero numbers for every power of two, number by number."""
    counts: Counter[int] = Counter()
    for number in values_of(value).tolist():
        size = abs(number)
        if size and math.isfinite(size):
            # Of an integer of 64 bits its Float64 counts, which may be the next power of two.
            counts[math.frexp(float(size))[1] - 1] += 1
    return counts


def check_magnitudes(row: TensorStatistics, value: Value) -> None:
    expected = magnitudes_of(value)
    if value.dtype == "Float64":
        # Numbers below its normal ones have all one exponent.
        small = sum(expected.pop(power) for power in [*expected] if power < 1 - ONE)
        expected.update({-ONE: small} if small else {})
    assert row.magnitudes is not None
    assert {int(at) - ONE: int(row.magnitudes[at]) for at in np.flatnonzero(row.magnitudes)} == expected


def check_statistics(row: TensorStatistics, value: Value) -> None:
    numbers = values_of(value)
    finite = numbers[np.isfinite(numbers)]
    assert row.shape == value.array.shape and row.count == numbers.size
    assert row.nan == np.isnan(numbers).sum() and row.inf == np.isinf(numbers).sum()
    with np.errstate(invalid="ignore"):
        assert row.zeros == (numbers == 0).sum()
    wide = finite.astype("c16" if finite.dtype.kind == "c" else "f8")
    if value.dtype == "Float64":
        with localcontext(Context(prec=80, Emin=-9999, Emax=9999)):
            norm = sum((Decimal(number) ** 2 for number in wide.tolist()), Decimal(0)).sqrt()
        assert row.norm == pytest.approx(float(norm), rel=1e-14)
    else:
        assert row.norm == pytest.approx(float(np.sqrt((np.abs(wide) ** 2).sum())), rel=1e-12)
    if not finite.size or finite.dtype.kind == "c":
        assert row.min is None and row.max is None and row.mean is None
        return
    assert (row.min, row.max) == (finite.min(), finite.max())
    largest = float(np.abs(wide).max())
    if finite.dtype.kind in "iu":
        assert row.mean == sum(finite.tolist()) / finite.size
    elif value.dtype == "Float64":
        exact = float(sum(map(Fraction, wide.tolist())) / finite.size)
        assert row.mean == pytest.approx(exact, rel=1e-14, abs=1e-24 * largest)
    else:
        assert row.mean == pytest.approx(math.fsum(wide) / finite.size, rel=1e-9, abs=1e-12 * largest)
    assert isinstance(row.min, float) is value.dtype.startswith(("Float", "BFloat", "F8"))


@pytest.mark.deep
@examples(40)
@given(st.data())
def test_statistics_equal_numpys_in_any_layout(data: st.DataObject) -> None:
    shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 24]), max_size=3).map(tuple)
    types = data.draw(st.permutations(TYPES))[:4]
    full = {f"t{number}": data.draw(contents(dtype, data.draw(shapes))) for number, dtype in enumerate(types)}
    strategy = data.draw(strategies(full), label="strategy")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_tree(root / "src", cut_ranks(strategy, full), "rank_{rank}/net.safetensors")
        old = write_strategy(root / "old", strategy)
        write_checkpoint(root / "whole" / "all.safetensors", full)
        with open_checkpoint(root / "src", src_strategy=old, jobs=data.draw(st.integers(1, 3))) as opened:
            counted = data.draw(st.booleans())
            rows = statistics_of(opened, MEMORY, Progress(), magnitudes=counted)
        assert [tensor.name for tensor in rows] == sorted(full)
        for tensor in rows:
            check_statistics(tensor, full[tensor.name])
            if counted:
                check_magnitudes(tensor, full[tensor.name])
        with open_checkpoint(root / "whole" / "all.safetensors", src_strategy="none") as opened:
            assert rows == statistics_of(opened, MEMORY, Progress())
        whole = open_checkpoint(root / "whole" / "all.safetensors", src_strategy="none")
        with whole as one, open_checkpoint(root / "src", src_strategy=old) as other:
            assert differences(one, other, MEMORY, Progress()).equal


@pytest.mark.deep
@pytest.mark.parametrize(
    "numbers",
    [
        [1e200, 1.0],
        [1e-200, 0.0],
        [5e-324, -5e-324, 1e-310],
        [1.7e308, 1.7e308, -1.7e308],
        [1e16, 1.0, -1e16],
        [1e300, 1e-300],
        [0.0, -0.0],
        *([[1.7e308] * 70_000 + [-1.7e308] * 130_000]),
    ],
)
def test_sums_of_float64_neither_overflow_nor_underflow(numbers: list[float], tmp_path: Path) -> None:
    full = {"w": Value("Float64", np.array(numbers).view("<u8"))}
    write_checkpoint(tmp_path / "all.safetensors", full)
    with open_checkpoint(tmp_path / "all.safetensors", src_strategy="none") as opened:
        (rows,) = statistics_of(opened, MEMORY, Progress())
    check_statistics(rows, full["w"])


@pytest.mark.parametrize("dtype", ["Int64", "UInt64"])
def test_means_of_integers_of_64_bits_are_exact(dtype: str, tmp_path: Path) -> None:
    most = (1 << 64) - 1 if dtype == "UInt64" else (1 << 63) - 1
    numbers = [most, most - 1, 0, 1, 1 << 53, (1 << 53) + 1] + ([] if dtype == "UInt64" else [-most - 1, -most])
    full = {"w": Value(dtype, np.array(numbers, dtype.lower()).view("<u8"))}
    write_checkpoint(tmp_path / "all.safetensors", full)
    with open_checkpoint(tmp_path / "all.safetensors", src_strategy="none") as opened:
        (rows,) = statistics_of(opened, MEMORY, Progress())
    check_statistics(rows, full["w"])


def large(root: Path, kind: str = "Float32") -> dict[str, Value]:
    """A tensor of several blocks and chunks, with odd sizes."""
    rng = np.random.default_rng(5)
    numbers = rng.standard_normal((1037, 1031)).astype("f4")
    numbers[5, 7], numbers[900, 1], numbers[1036, 1030] = np.nan, -np.inf, 0
    bits = numbers.view("<u4") if kind == "Float32" else (numbers.view("<u4") >> 16).astype("<u2")
    return {"w": Value(kind, bits)}


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["Float32", "BFloat16"])
def test_sums_are_bitwise_equal_in_any_layout_with_any_threads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "CHUNK_ELEMENTS", 300_000)
    full = large(tmp_path, kind)
    write_checkpoint(tmp_path / "whole.ckpt", full)
    strategy = single({"w": layout([1031], [-1, 0])})
    write_tree(tmp_path / "src", cut_ranks(strategy, full), "rank_{rank}/net.ckpt")
    old = write_strategy(tmp_path / "old", strategy)
    actual = []
    for source, saved, jobs in ((tmp_path / "whole.ckpt", "none", 1), (tmp_path / "whole.ckpt", "none", 3),
                                (tmp_path / "src", old, 2)):  # fmt: skip
        with open_checkpoint(source, src_strategy=saved, jobs=jobs) as opened:
            actual += statistics_of(opened, MEMORY, Progress())
    assert actual[0] == actual[1] == actual[2]
    check_statistics(actual[0], full["w"])


@examples(60)
@given(st.data())
def test_magnitude_counts_equal_those_number_by_number(data: st.DataObject) -> None:
    """Of every type, with numbers of any bits beside ordinary ones and those below the normal ones."""
    dtype = data.draw(st.sampled_from(TYPES), label="dtype")
    shape = (data.draw(st.sampled_from([0, 1, 2, 3, 255, 256, 1001])),)
    value = data.draw(contents(dtype, shape))
    array = value.array
    if dtype in ("Float16", "BFloat16", "Float32", "Float64"):
        mantissa = {"Float16": 10, "BFloat16": 7, "Float32": 23, "Float64": 52}[dtype]
        below = array & array.dtype.type((1 << mantissa) - 1)
        most = np.random.default_rng(data.draw(st.integers(0, 99))).random(shape)
        array = np.where(most < data.draw(st.sampled_from([0.0, 0.5, 1.0])), below, array).astype(array.dtype)
    value = Value(dtype, array)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        # Tensors of several parts and blocks, which are computed with by the same threads one after the other.
        patch.setattr(sweep, "CHUNK_ELEMENTS", data.draw(st.sampled_from([100, 1 << 23])))
        patch.setattr(statistics, "AT_ONCE", data.draw(st.sampled_from([1, 7, 1 << 16])))
        path = Path(directory) / "all.safetensors"
        write_checkpoint(path, {"a": value, "b": value})
        with open_checkpoint(path, src_strategy="none", jobs=2) as opened:
            for tensor in statistics_of(opened, MEMORY, Progress(), magnitudes=True):
                check_magnitudes(tensor, value)


@pytest.mark.parametrize("dtype", ["Float16", "BFloat16", "Float32"])
def test_magnitudes_of_many_numbers_equal_numpys(dtype: str, tmp_path: Path) -> None:
    """An odd number of elements over one block, with NaN and infinity at any place."""
    rng = np.random.default_rng(7)
    size = (1 << 18) * 2 + 77_777
    numbers = (rng.standard_normal(size) * 10.0 ** rng.integers(-50, 37, size)).astype("f4")
    numbers[rng.random(size) < 0.01] = 0
    numbers[200_000:200_100], numbers[-1] = np.nan, np.inf
    bits = numbers.view("<u4") if dtype == "Float32" else (numbers.view("<u4") >> 16).astype("<u2")
    if dtype == "Float16":
        bits = rng.integers(0, 1 << 16, size, "<u2")
    value = Value(dtype, bits)
    write_checkpoint(tmp_path / "w.safetensors", {"w": value})
    with open_checkpoint(tmp_path / "w.safetensors", src_strategy="none") as opened:
        (rows,) = statistics_of(opened, MEMORY, Progress(), magnitudes=True)
    finite = np.abs(values_of(value).astype("f8"))
    finite = finite[np.isfinite(finite) & (finite > 0)]
    powers, counts = np.unique(np.frexp(finite)[1] - 1, return_counts=True)
    assert rows.magnitudes is not None
    assert np.array_equal(np.flatnonzero(rows.magnitudes) - ONE, powers)
    assert np.array_equal(rows.magnitudes[rows.magnitudes > 0], counts)


def compared(root: Path, one: dict[str, Value], other: dict[str, Value]) -> Differences:
    write_checkpoint(root / "a.safetensors", one)
    write_checkpoint(root / "b.safetensors", other)
    opened = [open_checkpoint(root / name, src_strategy="none") for name in ("a.safetensors", "b.safetensors")]
    with opened[0] as a, opened[1] as b:
        return differences(a, b, MEMORY, Progress())


def check_difference(pair: TensorPair, one: Value, other: Value) -> None:
    """The pair against NumPy, in numbers wide enough for all types."""
    a, b = (values_of(value) for value in (one, other))
    same_bits = one.dtype == other.dtype and one.array.tobytes() == other.array.tobytes()
    assert pair.identical is same_bits
    nan = np.isnan(a) != np.isnan(b)
    both = ~np.isnan(a) & ~np.isnan(b)
    whole = a.dtype.kind in "iub" and b.dtype.kind in "iub"
    wide: Any = object if whole else "c16" if "c" in a.dtype.kind + b.dtype.kind else "f8"
    left, right = (array[both].astype(wide) for array in (a, b))
    if whole:
        left, right = (np.array([int(number) for number in side], object) for side in (left, right))
    with np.errstate(all="ignore"):
        distance = np.where(left == right, 0, np.abs(left - right)).astype("f8") if left.size else np.zeros(0)
        if not whole:
            finite = np.isfinite(left) & np.isfinite(right)
            distance[finite] = np.minimum(distance[finite], np.finfo("f8").max)
        scale = np.maximum(np.abs(left), np.abs(right)).astype("f8")
        relative = np.where(distance == 0, 0, np.where(np.isinf(distance), np.inf, distance / scale))
    assert pair.nan == ((nan & np.isnan(a)).sum(), (nan & np.isnan(b)).sum())
    assert pair.differing == nan.sum() + (distance > 0).sum()
    assert pair.max_abs == pytest.approx(distance.max(initial=0.0), rel=1e-12)
    assert pair.max_rel == pytest.approx(relative.max(initial=0.0), rel=1e-12)
    if pair.differing:
        assert pair.at is not None
        packed = 2 if one.dtype == "Int4" else 1
        places = np.flatnonzero(both)[distance == distance.max(initial=0.0)] if pair.max_abs else np.flatnonzero(nan)
        first = int(places[0]) // packed
        assert pair.at == tuple(int(at) for at in np.unravel_index(first, one.array.shape))
    else:
        assert pair.at is None


@examples(80)
@given(st.data())
def test_differences_equal_numpys(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(5,), (3, 4), (2, 0), (), (7, 9)]))
    dtype = data.draw(st.sampled_from(TYPES), label="dtype")
    one = data.draw(contents(dtype, shape))
    others = [dtype, dtype, *(kind for kind in ("Float32", "BFloat16", "Float16", "Int32") if dtype != "Int4")]
    kind = data.draw(st.sampled_from(others), label="other")
    other = data.draw(contents(kind, shape))
    if kind == dtype:
        # The same but for some elements.
        keep = np.random.default_rng(data.draw(st.integers(0, 99))).random(shape) < 0.7
        other = Value(kind, np.where(keep, one.array, other.array).astype(one.array.dtype))
    with tempfile.TemporaryDirectory() as directory:
        outcome = compared(Path(directory), {"w": one}, {"w": other})
    assert not outcome.only_a and not outcome.only_b and not outcome.shapes
    check_difference(outcome.pairs[0], one, other)


def test_finite_numbers_do_not_differ_infinitely(tmp_path: Path) -> None:
    one, other = (Value("Float64", np.array([1, sign * 1.7e308])) for sign in (1, -1))
    (pair,) = compared(tmp_path, {"w": one}, {"w": other}).pairs
    assert (pair.max_abs, pair.at, pair.first_nonfinite) == (np.finfo("f8").max, (1,), None) and pair.max_rel > 1


def test_a_difference_in_a_large_tensor_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "CHUNK_ELEMENTS", 300_000)
    one = large(tmp_path)["w"]
    array = one.array.copy()
    array.view("<f4")[700, 11] += 0.5
    array.view("<f4")[800, 12] -= 0.25
    outcome = compared(tmp_path, {"w": one}, {"w": Value("Float32", array)})
    (pair,) = outcome.differing
    check_difference(pair, one, Value("Float32", array))
    assert pair.at == (700, 11) and pair.differing == 2


def test_only_differing_blocks_are_subtracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = large(tmp_path)["w"]
    compares: list[int] = []
    from reshard.numbers import difference

    compare = difference._compare

    def counting(actual: Any, first: int, *raws: Any) -> None:
        compares.append(first)
        compare(actual, first, *raws)

    monkeypatch.setattr(difference, "_compare", counting)
    assert compared(tmp_path, {"w": one}, {"w": one}).equal and not compares
    array = one.array.copy()
    array[0, 0] += 1
    assert not compared(tmp_path, {"w": one}, {"w": Value("Float32", array)}).equal and compares == [0]
