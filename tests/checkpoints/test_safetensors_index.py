"""safetensors files: read as the library reads them, and refused where it refuses them."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from reshard.checkpoints import CheckpointIndex, FileHandles, read_index
from reshard.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint_writing import header_bytes, random_arrays, safetensors_bytes, write_safetensors, write_sparse

# Its dtypes are not compared.
deserialize: Any = safetensors.deserialize


def index_bytes(data: bytes, directory: Path) -> CheckpointIndex:
    path = directory / "made.safetensors"
    path.write_bytes(data)
    with FileHandles() as handles:
        return read_index(handles, str(path))


def contents(index: CheckpointIndex) -> dict[str, bytes]:
    data = Path(index.path).read_bytes()
    return {
        name: b"".join(data[offset : offset + size] for offset, size in tensor.extents)
        for name, tensor in index.tensors.items()
    }


def test_files_of_the_library_are_indexed(tmp_path: Path) -> None:
    arrays = {name: array for name, array in random_arrays().items() if array.dtype != np.complex64}
    arrays["empty"] = np.zeros((0, 3), "float32")
    index = index_bytes(safetensors.numpy.save(arrays, metadata={"format": "ms"}), tmp_path)
    actual = contents(index)
    assert set(actual) == set(arrays)
    for name, array in arrays.items():
        tensor = index.tensors[name]
        assert (tensor.shape, tensor.dims, tensor.item_size) == (array.shape, array.shape, array.itemsize)
        assert actual[name] == array.tobytes()
    assert index.metadata == {"format": "ms"} and index.crc is None


def test_dtypes_without_a_numpy_type_are_indexed(tmp_path: Path) -> None:
    tensors = {
        "bf16": ("BFloat16", (2, 2), b"abcdefgh"),
        "e4m3": ("Float8E4M3FN", (3,), b"ijk"),
        "e5m2": ("Float8E5M2", (), b"l"),
        "int4": ("Int4", (2, 2), b"mnop"),
        "int8": ("Int8", (2, 2), b"qrst"),
        "complex": ("Complex64", (1,), bytes(8)),
    }
    index = index_bytes(safetensors_bytes(tensors, {"format": "ms"}), tmp_path)
    assert {name: (t.dtype, t.shape) for name, t in index.tensors.items()} == {
        name: (dtype, dims) for name, (dtype, dims, _) in tensors.items()
    }
    assert contents(index) == {name: content for name, (_, _, content) in tensors.items()}


def test_tensors_are_in_the_order_of_their_offsets(tmp_path: Path) -> None:
    header = {
        "late": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
        "empty": {"dtype": "U8", "shape": [0], "data_offsets": [3, 3]},
        "early": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    }
    index = index_bytes(header_bytes(header) + b"abcde", tmp_path)
    assert list(index.tensors) == ["early", "empty", "late"]
    assert contents(index) == {"early": b"abc", "empty": b"", "late": b"de"}
    assert index.tensors["empty"].shape == (0,)


@pytest.mark.parametrize("header", ["{}      ", "{}", '{"__metadata__":{}}', '{"__metadata__":null}'])
def test_a_file_without_tensors_is_indexed(header: str, tmp_path: Path) -> None:
    assert index_bytes(header_bytes(header, pad=1), tmp_path).tensors == {}


def test_offsets_over_four_gibibytes_are_indexed(tmp_path: Path) -> None:
    size = 5 << 30
    header = {
        "big": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]},
        "last": {"dtype": "U8", "shape": [3], "data_offsets": [size, size + 3]},
    }
    path = write_sparse(tmp_path / "big.safetensors", [header_bytes(header), size, b"abc"])
    with FileHandles() as handles:
        index = read_index(handles, str(path))
    assert index.tensors["big"].nbytes == size
    assert index.tensors["last"].extents == ((path.stat().st_size - 3, 3),)


def test_the_crc_is_a_decimal_number(tmp_path: Path) -> None:
    tensors = {"a": np.arange(3)}
    assert index_bytes(safetensors_bytes(tensors, {"crc_num": "1630264724"}), tmp_path).crc == 1630264724
    for wrong in ("", "-3", "0x10", "many", "9" * 30):
        with pytest.raises(DamagedCheckpointError, match="crc_num"):
            index_bytes(safetensors_bytes(tensors, {"crc_num": wrong}), tmp_path)


A = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {**A, **changes}}


def pair(first: tuple[int, int], second: tuple[int, int]) -> dict[str, Any]:
    return {
        name: {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        for name, (start, stop) in (("a", first), ("b", second))
    }


MALFORMED = {
    "no bytes": b"",
    "seven bytes": bytes(7),
    "header length beyond the file": struct.pack("<Q", 100) + b"{}",
    "header length beyond the bound": struct.pack("<Q", 100_000_001) + b"{}" * 10,
    "huge header length": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header of no bytes": struct.pack("<Q", 0),
    "no JSON": header_bytes("{nothing}"),
    "header is a list": header_bytes("[]"),
    "header begins with a space": header_bytes(' {"a": 1}'),
    "not UTF-8": header_bytes(b'{"\xff": 1}'),
    "text after the header's object": header_bytes("{} {}"),
    "entry is a number": header_bytes({"a": 3}),
    "entry is nothing": header_bytes({"a": None}),
    "no dtype": header_bytes({"a": {"shape": [3], "data_offsets": [0, 3]}}) + b"abc",
    "no shape": header_bytes({"a": {"dtype": "U8", "data_offsets": [0, 3]}}) + b"abc",
    "no offsets": header_bytes({"a": {"dtype": "U8", "shape": [3]}}) + b"abc",
    "unknown dtype": header_bytes(entry(dtype="U7")) + b"abc",
    "dtype is a list": header_bytes(entry(dtype=["U8"])) + b"abc",
    "shape is a number": header_bytes(entry(shape=3)) + b"abc",
    "negative dimension": header_bytes(entry(shape=[-3])) + b"abc",
    "fractional dimension": header_bytes(entry(shape=[3.0])) + b"abc",
    "boolean dimension": header_bytes(entry(shape=[True, 3])) + b"abc",
    "dimensions overflow": header_bytes(entry(shape=[2**62, 2**62, 0])) + b"abc",
    "three offsets": header_bytes(entry(data_offsets=[0, 1, 3])) + b"abc",
    "offsets backwards": header_bytes(entry(data_offsets=[3, 0])) + b"abc",
    "negative offset": header_bytes(entry(data_offsets=[-3, 0])) + b"abc",
    "offset is no number": header_bytes(entry(data_offsets=["0", 3])) + b"abc",
    "size and shape differ": header_bytes(entry(shape=[2])) + b"abc",
    "hole at the front": header_bytes(entry(data_offsets=[1, 4])) + b"abcd",
    "hole between": header_bytes(pair((0, 2), (3, 5))) + b"abcde",
    "overlap": header_bytes(pair((0, 3), (2, 5))) + b"abcde",
    "same bytes twice": header_bytes(pair((0, 3), (0, 3))) + b"abc",
    "bytes too many": header_bytes(entry()) + b"abcd",
    "bytes too few": header_bytes(entry()) + b"ab",
    "metadata of numbers": header_bytes({"__metadata__": {"a": 1}, **entry()}) + b"abc",
    "metadata is a list": header_bytes({"__metadata__": [], **entry()}) + b"abc",
    "not a number": header_bytes('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,3]}}') + b"abc",
    "half a surrogate": header_bytes('{"\\ud800":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}') + b"abc",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_here_and_by_the_library(case: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError) as caught:
        index_bytes(MALFORMED[case], tmp_path)
    assert "made.safetensors" in str(caught.value)
    assert len(caught.value.message.splitlines()) == 1
    with pytest.raises(Exception):  # noqa: B017  the library's error has another type in each version
        deserialize(MALFORMED[case])


def test_a_key_that_occurs_twice_is_damage(tmp_path: Path) -> None:
    one = json.dumps(A)
    with pytest.raises(DamagedCheckpointError, match="lists 'a' twice"):
        index_bytes(header_bytes(f'{{"a":{one},"a":{one}}}') + b"abc", tmp_path)


def test_an_int4_mark_on_another_type_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="marked as Int4"):
        index_bytes(safetensors_bytes({"a": np.arange(3, dtype="int32")}, {"a": "Int4"}), tmp_path)


def test_dtypes_under_one_byte_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'a' has type F4") as caught:
        index_bytes(header_bytes({"a": {"dtype": "F4", "shape": [6], "data_offsets": [0, 3]}}) + b"abc", tmp_path)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    data = safetensors_bytes(random_arrays(), {"format": "ms"})
    for length in range(0, len(data), 3):
        with pytest.raises(DamagedCheckpointError):
            index_bytes(data[:length], tmp_path)


def test_random_damage_is_an_error_or_read_as_the_library_does(tmp_path: Path) -> None:
    # Not every version of the library reads complex numbers.
    arrays = {name: array for name, array in random_arrays().items() if array.dtype != np.complex64}
    original = safetensors_bytes(arrays, {"format": "ms"})
    (length,) = struct.unpack("<Q", original[:8])
    source = random.Random(3)
    read = 0
    for _ in range(1500):
        data = bytearray(original)
        data[source.randrange(8 + length)] = source.randrange(32, 127)
        try:
            index = index_bytes(bytes(data), tmp_path)
        except CheckpointError:
            continue
        read += 1
        theirs = {name: info["data"] for name, info in deserialize(bytes(data))}
        assert contents(index) == {name: bytes(content) for name, content in theirs.items()}
    assert read > 20


def test_only_the_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(1 << 20, "uint8")})
    total = []
    pread = os.pread

    def counted(fd: int, count: int, offset: int) -> bytes:
        data = pread(fd, count, offset)
        total.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    with FileHandles() as handles:
        read_index(handles, str(path))
    assert sum(total) == path.stat().st_size - (1 << 20) and len(total) == 2
