"""Tensors that are joined from runs of records in several files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.archives import ArchiveEntry, Elements
from reshard.checkpoints.placed import Placement, Run, Stored
from reshard.errors import DamagedCheckpointError, RetryableError


def _run(path: str, at: int, count: int, first: int, elements: int) -> Run:
    located = Elements("Float32", (count,), (1,), 4 * at, ArchiveEntry(4 * at, 4 * count, None))
    return Run(path, 4 * at, 4 * count, first, elements, located)


@given(data=st.data())
def test_runs_of_two_files_are_read_as_one_tensor(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("joined")
    numbers = np.arange(200, dtype="<f4").reshape(2, 100)
    paths = [str(directory / name) for name in "ab"]
    for path, part in zip(paths, numbers):
        Path(path).write_bytes(part.tobytes())
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    runs, expected = [], []
    for length in lengths:
        number, at, first = data.draw(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 20)))
        runs.append(_run(paths[number], at, first + length, first, length))
        expected.append(numbers[number, at + first : at + first + length])
    flat = np.concatenate(expected)
    stored = Stored("w", "Float32", (len(flat),), runs=tuple(runs))
    with FileHandles() as handles:
        handles.place(paths[0], Placement(paths[0], [stored]))
        start = data.draw(st.integers(0, 4 * len(flat) - 1))
        stop = data.draw(st.integers(start + 1, 4 * len(flat)))
        with handles.borrow(paths[0]) as file:
            assert file.read(start, stop - start) == flat.tobytes()[start:stop]


def test_joined_elements_may_be_transposed(tmp_path: Path) -> None:
    numbers = np.arange(24, dtype="<f4")
    path = str(tmp_path / "a")
    Path(path).write_bytes(numbers.tobytes())
    runs = (_run(path, 0, 10, 0, 10), _run(path, 10, 14, 0, 14))
    stored = Stored("w", "Float32", (6, 4), runs=runs, strides=(1, 6))
    with FileHandles() as handles:
        handles.place(path, Placement(path, [stored]))
        with handles.borrow(path) as file:
            assert file.read(0, 96) == np.ascontiguousarray(numbers.reshape(4, 6).T).tobytes()
            assert file.read(9, 50) == np.ascontiguousarray(numbers.reshape(4, 6).T).tobytes()[9:59]


def test_a_run_beyond_its_record_or_of_another_type_is_damage(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    Path(path).write_bytes(bytes(400))
    for stored in (
        Stored("w", "Float32", (8,), runs=(_run(path, 0, 10, 3, 8),)),
        Stored("w", "Float16", (8,), runs=(_run(path, 0, 10, 0, 8),)),
    ):
        with FileHandles() as handles:
            handles.place(path, Placement(path, [stored]))
            with handles.borrow(path) as file, pytest.raises(DamagedCheckpointError, match="w"):
                file.read(0, 4)


def test_a_change_of_a_file_with_runs_is_an_error(tmp_path: Path) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    Path(first).write_bytes(bytes(80))
    Path(second).write_bytes(bytes(80))
    stored = Stored("w", "Float32", (8,), runs=(_run(first, 0, 4, 0, 4), _run(second, 0, 4, 0, 4)))
    with FileHandles() as handles:
        handles.place(first, Placement(first, [stored]))
        with handles.borrow(first) as file:
            file.read(0, 32)
        handles.check_unchanged([first])
        Path(second).write_bytes(bytes(81))
        with pytest.raises(RetryableError, match=second):
            handles.check_unchanged([first])
