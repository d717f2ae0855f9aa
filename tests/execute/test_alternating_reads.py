"""Small requests served from windows of files: of one file, and of many in turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.checkpoints import FileHandles
from reshard.execute import Budget
from reshard.execute.reader import FileReader
from reshard.plan.pieces import StoredSlice
from reshard.storage.store import REMOTE
from tests.counting import reads_of_local_files
from tests.layouts import examples

FILES = 12
SIZE = 1 << 20
SMALL = 16 << 10
BUDGET = Budget.of(1, costs=REMOTE._replace(window=1 << 20))


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What is in each file, by path."""
    place = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(3)
    actual = {str(place / f"{number}.ckpt"): rng.bytes(SIZE) for number in range(FILES)}
    for path, data in actual.items():
        Path(path).write_bytes(data)
    return actual


def read(reader: FileReader, path: str, start: int, count: int) -> bytes:
    out = bytearray(count)
    reader.read_into(StoredSlice(path, 0, ((0, SIZE),), ((0, SIZE),)), start, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("files", [1, 2, 8, FILES])
def test_alternating_reads_of_files_read_each_byte_about_once(
    files: int, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = reads_of_local_files(monkeypatch)
    with FileHandles() as handles:
        reader = FileReader(handles, BUDGET._replace(window_bytes=1 << 20))
        for start in range(0, SIZE, SMALL):
            for path in [*contents][:files]:
                assert read(reader, path, start, SMALL) == contents[path][start : start + SMALL]
    # The first request cannot predict others.
    assert sum(requests) <= files * SIZE + 3 * SIZE
    assert len(requests) <= 1 if files == 1 else len(requests) <= files * SIZE // SMALL // 2


@settings(examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_reads_through_windows_equal_the_file(contents: dict[str, bytes], data: st.DataObject) -> None:
    requests = st.tuples(st.sampled_from([*contents]), st.integers(0, SIZE - 1), st.integers(1, 128 << 10))
    with FileHandles() as handles:
        window_bytes = data.draw(st.sampled_from([1, 64 << 10, 1 << 20, 8 << 20]))
        reader = FileReader(handles, BUDGET._replace(window_bytes=window_bytes))
        for path, start, count in data.draw(st.lists(requests, max_size=60)):
            count = min(count, SIZE - start)
            assert read(reader, path, start, count) == contents[path][start : start + count]
