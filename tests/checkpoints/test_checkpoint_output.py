"""New checkpoint files: their segments make the files that MindSpore and the safetensors library write and read."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints import Data, Literal, OutputLayout, OutputTensor, can_hold, lay_out_ckpt, lay_out_safetensors
from reshard.errors import CheckpointError
from tests.checkpoint_writing import Source, ckpt_bytes, parts, random_arrays, text
from tests.checkpoints.test_ckpt_index import index_of
from tests.corpus import FIXTURES

FILES = FIXTURES / "ckpt_files"


def outputs(tensors: Mapping[str, Source]) -> tuple[list[OutputTensor], list[bytes]]:
    split = {name: parts(tensor) for name, tensor in tensors.items()}
    listing = [OutputTensor(name, dtype, tuple(dims), len(data)) for name, (dtype, dims, data) in split.items()]
    return listing, [data for _, _, data in split.values()]


def fill(layout: OutputLayout, contents: Sequence[bytes]) -> bytes:
    """Put the file together as a writer would, checking that segments follow each other."""
    out = bytearray()
    for segment in layout.segments():
        assert segment.offset == len(out)
        if isinstance(segment, Literal):
            assert segment.data
            out += segment.data
        else:
            assert segment.start < segment.stop
            out += contents[segment.tensor][segment.start : segment.stop]
    assert len(out) == layout.size
    return bytes(out)


def written(tensors: Mapping[str, Source], metadata: Mapping[str, str] | None = None) -> bytes:
    listing, contents = outputs(tensors)
    return fill(lay_out_safetensors(listing, metadata), contents)


# .ckpt


@pytest.mark.parametrize(
    "name", ["all_dtypes", "append_dict", "train_cell", "async", "choice_func", "big_slices", "remove_redundancy"]
)
def test_ckpt_output_equals_mindspores_byte_for_byte(name: str) -> None:
    path = FILES / f"{name}.ckpt"
    data = path.read_bytes()
    tensors = index_of(path).tensors.values()
    contents = [b"".join(data[offset : offset + size] for offset, size in t.extents) for t in tensors]
    layout = lay_out_ckpt([OutputTensor(t.name, t.dtype, t.dims, t.nbytes) for t in tensors])
    assert fill(layout, contents) == data


@pytest.mark.parametrize("limit", [8, 24, 1000])
def test_large_tensors_take_several_records(limit: int) -> None:
    tensors: dict[str, Source] = {**random_arrays(), "note": text("not divided"), "z": np.zeros((0, 3), "int8")}
    listing, contents = outputs(tensors)
    assert fill(lay_out_ckpt(listing, limit), contents) == ckpt_bytes(tensors, limit)


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_a_record_never_ends_inside_an_element(limit: int) -> None:
    listing = [OutputTensor("a", "Float32", (5, 9), 180), OutputTensor("b", "Unknown24", (7,), 21)]
    for segment in lay_out_ckpt(listing, limit).segments():
        if isinstance(segment, Data):
            size = 4 if segment.tensor == 0 else 3
            assert segment.start % size == 0 and segment.stop % size == 0
            assert segment.stop - segment.start <= max(limit, size)


def test_records_of_many_gibibytes_are_read_again(tmp_path: Path) -> None:
    listing = [
        OutputTensor("small", "Int8", (3,), 3),
        OutputTensor("large", "BFloat16", (5 << 20, 512), 5 << 30),
        OutputTensor("odd", "UInt8", ((1 << 30) + 5,), (1 << 30) + 5),
    ]
    layout = lay_out_ckpt(listing)
    path = tmp_path / "large.ckpt"
    places: dict[int, list[tuple[int, int]]] = {}
    with open(path, "wb") as file:
        for segment in layout.segments():
            if isinstance(segment, Literal):
                file.seek(segment.offset)
                file.write(segment.data)
            else:
                places.setdefault(segment.tensor, []).append((segment.offset, segment.stop - segment.start))
        file.truncate(layout.size)
    index = index_of(path)
    assert [len(extents) for extents in places.values()] == [1, 10, 3]
    assert max(size for extents in places.values() for _, size in extents) == 512 << 20
    for number, tensor in enumerate(listing):
        assert index.tensors[tensor.name].extents == tuple(places[number])
        assert index.tensors[tensor.name].dims == tensor.dims


# safetensors


def test_the_safetensors_library_reads_the_output(tmp_path: Path) -> None:
    arrays = {name: array for name, array in random_arrays().items() if array.dtype != np.complex64}
    arrays = {"名前": np.arange(3, dtype="float32"), 'quo"te\n': np.arange(2), "z": np.zeros((0, 3), "int8"), **arrays}
    data = written(arrays)
    loaded = safetensors.numpy.load(data)
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype and loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()
    (tmp_path / "x.safetensors").write_bytes(data)
    with safetensors.safe_open(str(tmp_path / "x.safetensors"), framework="np") as file:
        assert set(file.keys()) == set(arrays)
        assert file.metadata() == {"format": "ms", "remove_redundancy": "False"}


def test_int4_is_marked_and_dtypes_are_read_again(tmp_path: Path) -> None:
    tensors: dict[str, Source] = {
        "bf16": ("BFloat16", (2, 2), b"abcdefgh"),
        "int4": ("Int4", (4,), b"mnop"),
        "int8": ("Int8", (4,), b"qrst"),
        "e4m3": ("Float8E4M3FN", (3,), b"ijk"),
        "e5m2": ("Float8E5M2", (), b"l"),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(written(tensors))
    index = index_of(path)
    assert [(t.name, t.dtype, t.shape) for t in index.tensors.values()] == [
        (name, *parts(tensor)[:2]) for name, tensor in tensors.items()
    ]
    marks = {"format": "ms", "remove_redundancy": "False", "int4": "Int4"}
    assert index.metadata == marks
    path.write_bytes(written(tensors, {"format": "pt"}))
    assert index_of(path).metadata == {"format": "pt", "int4": "Int4"}


def header_of(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 8 == 0
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


NAMES_AND_SIZES = st.lists(
    st.tuples(st.sampled_from(["Int8", "Float16", "Float32", "Int64", "Bool", "BFloat16"]), st.integers(0, 5)),
    max_size=8,
)


@given(NAMES_AND_SIZES)
def test_data_is_aligned_and_in_the_given_order(tensors: list[tuple[str, int]]) -> None:
    widths = {"Int8": 1, "Bool": 1, "Float16": 2, "BFloat16": 2, "Float32": 4, "Int64": 8}
    named: dict[str, Source] = {
        f"t{9 - number}": (dtype, (size,), bytes(size * widths[dtype])) for number, (dtype, size) in enumerate(tensors)
    }
    data = written(named)
    header = header_of(data)
    header.pop("__metadata__")
    ends = list(itertools.accumulate(len(parts(tensor)[2]) for tensor in named.values()))
    as_given = all(
        not tensor[1][0] or start % widths[tensor[0]] == 0
        for start, tensor in zip([0, *ends], map(parts, named.values()))
    )
    if as_given:
        assert list(header) == list(named)
    position = 0
    for name, info in header.items():
        # MindSpore requires the header in the order of the data.
        assert info["data_offsets"][0] == position
        position = info["data_offsets"][1]
        assert info["data_offsets"][0] % widths[parts(named[name])[0]] == 0 or not parts(named[name])[1][0]
    assert set(safetensors.numpy.load(data)) == set(named) if not any(d == "BFloat16" for d, _ in tensors) else True


def test_a_scalar_recorded_as_0_is_a_scalar_in_safetensors() -> None:
    data = written({"x": ("Float32", (0,), b"abcd"), "y": ("Float32", (0,), b"")})
    header = header_of(data)
    assert (header["x"]["shape"], header["y"]["shape"]) == ([], [0])


@pytest.mark.parametrize("name", ["format", "remove_redundancy", "__metadata__"])
def test_names_that_collide_with_the_metadata_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        lay_out_safetensors([OutputTensor(name, "Int8", (), 1)])


# Both


@pytest.mark.parametrize(
    ("dtype", "ckpt", "safetensors_"),
    [
        ("Float32", True, True),
        ("BFloat16", True, True),
        ("Int4", True, True),
        ("Bool", True, True),
        ("str", True, False),
        ("Float8E4M3FN", False, True),
        ("Float8E5M2", False, True),
        ("MapTensor", False, False),
        ("Complex64", True, True),
        ("Complex128", True, False),
        ("Quaternion", True, False),
    ],
)
def test_each_format_accepts_its_dtypes_only(dtype: str, ckpt: bool, safetensors_: bool) -> None:
    assert can_hold("ckpt", dtype) == ckpt
    assert can_hold("safetensors", dtype) == safetensors_
    tensor = OutputTensor("layer.weight", dtype, (0,), 0)
    for contents, lay_out in ((ckpt, lay_out_ckpt), (safetensors_, lay_out_safetensors)):
        if contents:
            lay_out([tensor])
        else:
            with pytest.raises(CheckpointError, match=r"layer\.weight") as caught:
                lay_out([tensor])
            assert caught.value.parameter == "layer.weight"


@pytest.mark.parametrize("lay_out", [lay_out_ckpt, lay_out_safetensors])
def test_wrong_sizes_and_repeated_names_are_assertion_errors(lay_out: Any) -> None:
    with pytest.raises(ValueError):
        lay_out([OutputTensor("x", "Float32", (2,), 4)])
    with pytest.raises(ValueError):
        lay_out([OutputTensor("x", "Int8", (2,), 2), OutputTensor("x", "Int8", (2,), 2)])


def test_a_file_without_tensors_is_valid(tmp_path: Path) -> None:
    assert lay_out_ckpt([]).size == 0
    (tmp_path / "x.safetensors").write_bytes(written({}))
    assert index_of(tmp_path / "x.safetensors").tensors == {}
