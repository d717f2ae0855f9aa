"""The recorded CRC of a file, checked by MindSpore's own rules."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from reshard.checkpoints import FileHandles, read_index
from reshard.checkpoints.formats.crc import check_crc
from reshard.errors import DamagedCheckpointError, RetryableError
from tests.checkpoint_writing import (
    Source,
    ckpt_bytes,
    map_record,
    parts,
    random_arrays,
    safetensors_bytes,
    trailer,
    write_ckpt,
    write_safetensors,
)
from tests.corpus import FIXTURES

FILES = FIXTURES / "ckpt_files"


def check(path: Path, block_bytes: int = 64) -> str | None:
    with FileHandles() as handles:
        return check_crc(handles, read_index(handles, str(path)), block_bytes)


def mindspores_crc(tensors: Mapping[str, Source]) -> str:
    """As MindSpore computes it for safetensors, from arrays."""
    crc = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        assert isinstance(tensor, np.ndarray)
        crc = zlib.crc32(bytes(tensor), zlib.crc32(name.encode(), crc))
    return str(crc)


@pytest.mark.parametrize(
    "name", ["crc.ckpt", "crc_append.ckpt", "chunked_crc.ckpt", "crc.safetensors", "crc_fp16.safetensors"]
)
@pytest.mark.parametrize("block_bytes", [1, 17, 1 << 20])
def test_files_of_mindspore_match_their_crc(name: str, block_bytes: int) -> None:
    assert check(FILES / name, block_bytes) is None


@pytest.mark.parametrize("name", ["all_dtypes.ckpt", "plain.safetensors"])
def test_a_file_without_a_crc_is_not_checked(name: str) -> None:
    outcome = check(FILES / name)
    assert outcome is not None and "no CRC" in outcome


def test_any_changed_bit_of_content_is_a_mismatch(tmp_path: Path) -> None:
    tensors = {"a": np.arange(20, dtype="float32"), "b": np.arange(5, dtype="int16")}
    for path in (
        write_ckpt(tmp_path / "x.ckpt", tensors, crc=True),
        write_safetensors(tmp_path / "x.safetensors", tensors, {"crc_num": mindspores_crc(tensors)}),
    ):
        assert check(path) is None
        data = bytearray(path.read_bytes())
        with FileHandles() as handles:
            (offset, _) = read_index(handles, str(path)).tensors["b"].extents[0]
        data[offset + 3] ^= 4
        path.write_bytes(bytes(data))
        with pytest.raises(DamagedCheckpointError) as caught:
            check(path)
        assert str(path) in str(caught.value) and "CRC" in str(caught.value)


def test_a_crc_of_more_than_32_bits_is_a_mismatch(tmp_path: Path) -> None:
    data = bytearray(ckpt_bytes({"a": np.arange(4)}, crc=True))
    data[-10] = 1
    (tmp_path / "x.ckpt").write_bytes(bytes(data))
    with pytest.raises(DamagedCheckpointError):
        check(tmp_path / "x.ckpt")


def test_the_crc_of_a_file_with_map_tensors_is_not_checked(tmp_path: Path) -> None:
    data = ckpt_bytes({"a": np.arange(4)})
    data += map_record("table", [np.arange(3, dtype="int32")] * 3) + trailer(data)
    (tmp_path / "x.ckpt").write_bytes(data)
    outcome = check(tmp_path / "x.ckpt")
    assert outcome is not None and "map tensors" in outcome


# safetensors: MindSpore takes `bytes(array)`, which for a 0-d integer is that many zero bytes.


def test_scalars_of_every_dtype_match_their_crc(tmp_path: Path) -> None:
    tensors: dict[str, Source] = {
        "é": np.arange(3, dtype="float32"),
        "step": np.array(70_000, "int64"),
        "zero": np.array(0, "uint8"),
        "byte": np.array(200, "uint8"),
        "small": np.array(5, "int16"),
        "flag": np.array(True),
        "rate": np.array(0.5, "float32"),
        "one": np.array([7], "int32"),
        "B": np.zeros((0, 2), "int32"),
    }
    path = write_safetensors(tmp_path / "x.safetensors", tensors, {"crc_num": mindspores_crc(tensors)})
    assert check(path) is None
    by_content = 0
    for name in sorted(tensors):
        by_content = zlib.crc32(parts(tensors[name])[2], zlib.crc32(name.encode(), by_content))
    path.write_bytes(safetensors_bytes(tensors, {"crc_num": str(by_content)}))
    with pytest.raises(DamagedCheckpointError):
        check(path)


def test_a_0d_int4_counts_as_an_integer(tmp_path: Path) -> None:
    crc = zlib.crc32(bytes(9), zlib.crc32(b"x"))
    path = write_safetensors(tmp_path / "x.safetensors", {"x": ("Int4", (), b"\x09")}, {"crc_num": str(crc)})
    assert check(path) is None


@pytest.mark.parametrize("value", [-1, 2**62])
def test_integers_outside_mindspores_crc_are_not_checked(value: int, tmp_path: Path) -> None:
    tensors: dict[str, Source] = {"a": np.arange(3), "seed": np.array(value)}
    path = write_safetensors(tmp_path / "x.safetensors", tensors, {"crc_num": "1"})
    outcome = check(path)
    assert outcome is not None and "seed" in outcome


# Reading.


def test_the_check_reports_blocks_and_can_be_stopped(tmp_path: Path) -> None:
    path = write_ckpt(tmp_path / "x.ckpt", random_arrays(), crc=True)
    visited: list[int] = []
    with FileHandles() as handles:
        index = read_index(handles, str(path))
        check_crc(handles, index, 100, visited.append)
        assert sum(visited) == index.size - 17 and max(visited) <= 100

        def stop(count: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            check_crc(handles, index, 100, stop)


def test_a_file_that_shrinks_during_the_check_is_a_retryable_error(tmp_path: Path) -> None:
    path = write_ckpt(tmp_path / "x.ckpt", random_arrays(), crc=True)
    with FileHandles() as handles:
        index = read_index(handles, str(path))
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(RetryableError, match=r"x\.ckpt"):
            check_crc(handles, index)
