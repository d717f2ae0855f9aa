"""`.ckpt` files: the index lists the contents that MindSpore wrote, and damage is an error."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.checkpoints import CheckpointIndex, FileHandles, read_index
from reshard.errors import CheckpointError, DamagedCheckpointError, EncryptedCheckpointError
from tests.checkpoint_writing import (
    ckpt_bytes,
    map_record,
    random_arrays,
    record,
    sparse_record,
    tensor_message,
    trailer,
    write_ckpt,
    write_sparse,
)
from tests.corpus import FIXTURES
from tests.wire import field

FILES = FIXTURES / "ckpt_files"
EXPECTED: dict[str, Any] = json.loads((FILES / "expected.json").read_text(encoding="utf-8"))["files"]
PYTHON_VALUES: dict[type, Callable[[Any], bytes]] = {
    int: lambda value: np.array(value, "<i8").tobytes(),
    float: lambda value: np.array(value, "<f4").tobytes(),
    bool: lambda value: np.array(value, "?").tobytes(),
    str: lambda value: value.encode("utf-32-le"),
}


def index_of(path: Path) -> CheckpointIndex:
    with FileHandles() as handles:
        return read_index(handles, str(path))


def index_bytes(data: bytes, directory: Path) -> CheckpointIndex:
    path = directory / "made.ckpt"
    path.write_bytes(data)
    return index_of(path)


def contents(index: CheckpointIndex) -> dict[str, bytes]:
    data = Path(index.path).read_bytes()
    actual = {}
    for name, tensor in index.tensors.items():
        actual[name] = b"".join(data[offset : offset + size] for offset, size in tensor.extents)
        assert len(actual[name]) == tensor.nbytes
    return actual


# What MindSpore wrote.


@pytest.mark.parametrize(
    "name", [name for name in EXPECTED if not EXPECTED[name].get("encrypted") and (FILES / name).exists()]
)
def test_files_of_mindspore_are_indexed(name: str) -> None:
    index = index_of(FILES / name)
    actual = contents(index)
    assert index.size == EXPECTED[name]["size"]
    expected = EXPECTED[name]["params"]
    if name == "empty_dim.ckpt":
        # MindSpore leaves out tensors of size zero.
        expected = [entry for entry in expected if entry["name"] != "z"]
    assert set(index.tensors) == {entry["name"] for entry in expected}
    if name.endswith(".ckpt"):
        assert list(index.tensors) == [entry["name"] for entry in expected]
    for entry in expected:
        tensor = index.tensors[entry["name"]]
        if "python_value" in entry:
            value = entry["python_value"]
            assert tensor.shape == ()
            assert actual[tensor.name] == PYTHON_VALUES[type(value)](value)
            assert tensor.dtype == {int: "Int64", float: "Float32", bool: "Bool", str: "str"}[type(value)]
        else:
            assert (list(tensor.shape), tensor.dtype) == (entry["shape"], entry["dtype"])
            assert tensor.nbytes == entry["nbytes"]
            assert hashlib.sha256(actual[tensor.name]).hexdigest() == entry["sha256"]
    assert (index.crc is not None) == EXPECTED[name].get("crc", False)


def test_a_parameter_in_several_records_has_several_extents() -> None:
    tensors = index_of(FILES / "chunked.ckpt").tensors
    assert len(tensors["big"].extents) > 1
    assert sum(size for _, size in tensors["big"].extents) == tensors["big"].nbytes == 4000
    assert len(tensors["int8.weight"].extents) == 1


@pytest.mark.parametrize(("name", "cipher"), [("encrypted_gcm.ckpt", "AES-GCM"), ("encrypted_cbc.ckpt", "AES-CBC")])
def test_encrypted_files_are_refused_and_the_cipher_is_named(name: str, cipher: str) -> None:
    with pytest.raises(EncryptedCheckpointError) as caught:
        index_of(FILES / name)
    assert cipher in str(caught.value) and str(FILES / name) in str(caught.value)


def test_sm4_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(EncryptedCheckpointError, match="SM4-CBC"):
        index_bytes(b"\xda\x5e\x3a\x7f" + bytes(100) + b"crc_num" + bytes(10), tmp_path)


# Shapes and types.


def test_every_dtype_and_number_of_dimensions_is_indexed(tmp_path: Path) -> None:
    arrays = random_arrays()
    index = index_of(write_ckpt(tmp_path / "a.ckpt", arrays))
    actual = contents(index)
    assert list(index.tensors) == list(arrays)
    for name, array in arrays.items():
        tensor = index.tensors[name]
        assert tensor.shape == array.shape == tensor.dims
        assert tensor.item_size == array.itemsize
        assert actual[name] == array.tobytes()


@pytest.mark.parametrize(
    ("dtype", "dims", "content", "shape", "item_size"),
    [
        ("Float32", (), b"abcd", (), 4),
        ("Float32", (0,), b"abcd", (), 4),
        ("Float32", (0,), b"", (0,), 4),
        ("Float32", (0, 3), b"", (0, 3), 4),
        ("BFloat16", (2, 3), bytes(12), (2, 3), 2),
        ("Int4", (5,), bytes(5), (5,), 1),
        ("Complex128", (2,), bytes(32), (2,), 16),
        ("HiFloat8", (3,), bytes(3), (3,), 1),
        ("str", (0,), "text".encode("utf-32-le"), (), 16),
        ("str", (0,), bytes(4), (), 4),
    ],
)
def test_dims_and_dtypes_are_parsed(
    dtype: str, dims: tuple[int, ...], content: bytes, shape: tuple[int, ...], item_size: int, tmp_path: Path
) -> None:
    tensor = index_bytes(record("x", dtype, dims, content), tmp_path).tensors["x"]
    assert (tensor.dtype, tensor.dims, tensor.shape, tensor.nbytes) == (dtype, dims, shape, len(content))
    assert tensor.item_size == item_size


def test_a_map_tensor_is_named_and_has_no_shape(tmp_path: Path) -> None:
    keys, values = np.arange(3, dtype="int32"), np.ones((3, 4), "float32")
    data = record("a", "Int8", (1,), b"1")
    for part in range(2):
        data += map_record("table", [keys + part, values, keys])
    tensor = index_bytes(data + record("b", "Int8", (1,), b"2"), tmp_path).tensors["table"]
    assert (tensor.dtype, tensor.shape) == ("MapTensor", ())
    assert tensor.nbytes == 2 * (12 + 48 + 12) and len(tensor.extents) == 6


def test_an_empty_file_contains_no_parameters(tmp_path: Path) -> None:
    # MindSpore writes one for a rank that has nothing to save in a de-duplicated checkpoint.
    assert index_bytes(b"", tmp_path).tensors == {}


# Records.


@pytest.mark.parametrize(
    "pieces",
    [
        [b"abcd", b"efgh"],
        [b"", b"abcdefgh"],
        [b"abcdefg", b"", b"h"],
    ],
)
def test_records_may_be_empty_and_end_inside_an_element(pieces: list[bytes], tmp_path: Path) -> None:
    data = b"".join(record("x", "Int16", (2, 2), piece) for piece in pieces)
    assert contents(index_bytes(data, tmp_path)) == {"x": b"abcdefgh"}


@pytest.mark.parametrize(
    ("records", "texts"),
    [
        ([("x", "Int8", (2,), b"ab"), ("x", "Int8", (2,), b"ab")], "twice"),
        ([("x", "Int8", (2,), b"a"), ("x", "UInt8", (2,), b"b")], "twice"),
        ([("x", "Int8", (1,), b"a"), ("y", "Int8", (1,), b"b"), ("x", "Int8", (1,), b"c")], "twice"),
        ([("x", "Int8", (2,), b"a"), ("y", "Int8", (1,), b"b"), ("x", "Int8", (2,), b"c")], "1 bytes"),
        ([("x", "Float32", (2, 2), bytes(15))], "15 bytes"),
        ([("x", "Float32", (2, 2), b"")], "0 bytes"),
        ([("x", "Float32", (0,), bytes(8))], "8 bytes"),
        ([("x", "Float32", (0, 2), bytes(8))], "8 bytes"),
        ([("x", "str", (0,), b"abc")], "3 bytes"),
    ],
)
def test_records_of_a_wrong_total_size_are_damage(
    records: list[tuple[str, str, tuple[int, ...], bytes]], texts: str, tmp_path: Path
) -> None:
    with pytest.raises(DamagedCheckpointError) as caught:
        index_bytes(b"".join(record(*one) for one in records), tmp_path)
    assert texts in str(caught.value) and "made.ckpt" in str(caught.value)
    assert caught.value.parameter == "x"


def test_offsets_over_four_gibibytes_are_indexed(tmp_path: Path) -> None:
    pieces = [*sparse_record("one", "Float32", (5 << 28,), 5 << 30)]
    for size in (512 << 20, 0, (512 << 20) + 1, (4 << 30) - 1):
        pieces += sparse_record("many", "BFloat16", (5 << 20, 512), size)
    pieces += sparse_record("last", "Int8", (3,), 3)
    index = index_of(write_sparse(tmp_path / "big.ckpt", pieces))
    assert index.tensors["one"].nbytes == index.tensors["many"].nbytes == 5 << 30
    assert len(index.tensors["many"].extents) == 3
    offset, size = index.tensors["last"].extents[0]
    assert offset + size == index.size > 10 << 30


# The wire format, as protobuf allows it.


# The trailer.


def test_the_crc_is_distinguished_from_records(tmp_path: Path) -> None:
    data = ckpt_bytes({"a": np.arange(5)}, crc=True)
    index = index_bytes(data, tmp_path)
    assert list(index.tensors) == ["a"]
    assert index.crc == int.from_bytes(data[-10:], "big")


def test_content_similar_to_a_trailer_is_content(tmp_path: Path) -> None:
    content = trailer(b"anything")
    index = index_bytes(record("x", "Int8", (17,), content), tmp_path)
    assert contents(index) == {"x": content} and index.crc is None


@pytest.mark.parametrize("cut", range(1, 17))
def test_a_cut_trailer_is_damage(cut: int, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError):
        index_bytes(ckpt_bytes({"a": np.arange(5)}, crc=True)[:-cut], tmp_path)


# Damage.


def test_every_truncation_is_detected_or_leaves_whole_parameters(tmp_path: Path) -> None:
    data = ckpt_bytes({"a": np.arange(3), "b": np.arange(40), "c": np.ones(2)}, record_limit=64)
    whole = contents(index_bytes(data, tmp_path))
    boundaries = 0
    for length in range(1, len(data)):
        try:
            actual = contents(index_bytes(data[:length], tmp_path))
        except DamagedCheckpointError as error:
            assert "made.ckpt" in str(error)
            continue
        boundaries += 1
        assert all(whole[name] == content for name, content in actual.items())
    assert boundaries == 2


def test_random_damage_is_an_error_or_harmless(tmp_path: Path) -> None:
    original = ckpt_bytes(random_arrays(), record_limit=20, crc=True)
    source = random.Random(7)
    damaged = 0
    for _ in range(1500):
        data = bytearray(original)
        for _ in range(source.randint(1, 3)):
            data[source.randrange(len(data))] = source.randrange(256)
        try:
            index = index_bytes(bytes(data), tmp_path)
        except CheckpointError:
            damaged += 1
            continue
        for tensor in index.tensors.values():
            assert all(offset >= 0 and offset + size <= len(data) for offset, size in tensor.extents)
    assert damaged > 100


VALUE = field(1, "x") + field(2, tensor_message("Int8", (2,), b"ab"))


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (bytes(100), "field number 0"),
        (b"not a checkpoint", ""),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "truncated"),
        (field(1, field(1, "") + field(2, tensor_message("Int8", (2,), b"ab"))), "no name"),
        (field(1, field(1, "x")), "'x' has no tensor"),
        (field(1, VALUE + field(2, tensor_message("Int8", (2,), b"ab"))), "two tensors"),
        (field(1, field(1, "x") + field(2, field(1, 2) + field(3, b"ab"))), "no type"),
        (field(1, field(1, "x") + field(2, tensor_message("Int8", (2,), b"ab") + field(3, b"cd"))), "two contents"),
        (record("x", "Int8", (-2,), b"ab"), "negative"),
        (field(1, field(1, b"\xff\xfe") + field(2, tensor_message("Int8", (2,), b"ab"))), "UTF-8"),
        (b"\x0a\x05" + b"\x0a\x0a" + b"x" * 40, "beyond its message"),
    ],
)
def test_an_invalid_structure_is_damage(data: bytes, texts: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError) as caught:
        index_bytes(data, tmp_path)
    assert texts in str(caught.value) and "made.ckpt" in str(caught.value)


def test_a_strategy_file_is_recognised() -> None:
    strategy = next((FIXTURES / "02_dp2mp4_opt" / "strategy").glob("*.ckpt"))
    with pytest.raises(CheckpointError, match="is a strategy file, not a checkpoint") as caught:
        index_of(strategy)
    assert not isinstance(caught.value, DamagedCheckpointError)


# Opening.


def test_files_of_other_endings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"x\.pt.*\.ckpt or \.safetensors"):
        index_of(tmp_path / "x.pt")


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.ckpt: does not exist"):
        index_of(tmp_path / "none.ckpt")
    (tmp_path / "dir.ckpt").mkdir()
    with pytest.raises(CheckpointError, match=r"dir\.ckpt: is not a file"):
        index_of(tmp_path / "dir.ckpt")


# Cost.


class Reads:
    """Counts bytes read from files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.bytes = 0
        pread = os.pread

        def counted(fd: int, count: int, offset: int) -> bytes:
            data = pread(fd, count, offset)
            self.calls += 1
            self.bytes += len(data)
            return data

        monkeypatch.setattr(os, "pread", counted)


def test_the_index_does_not_read_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[bytes | int] = []
    for number in range(300):
        pieces += sparse_record(f"layers.{number}.weight", "Float32", (1024, 1024), 4 << 20)
    path = write_sparse(tmp_path / "big.ckpt", pieces)
    reads = Reads(monkeypatch)
    assert len(index_of(path).tensors) == 300
    assert reads.calls <= 302
    assert reads.bytes <= 302 * 4096


def test_small_tensors_are_indexed_in_large_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_ckpt(tmp_path / "small.ckpt", {f"layers.{n}.bias": np.arange(16) for n in range(5000)})
    reads = Reads(monkeypatch)
    assert len(index_of(path).tensors) == 5000
    assert reads.calls < 30
    assert reads.bytes < 2 * path.stat().st_size
