"""Many jobs with little memory: as many reads as with few jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.counting import reads_into_buffers
from tests.running import Argument, done
from tests.trees import layout, single, write_strategy

RULES = """
[[rule]]
from = "{layer}.w"
to = "{layer}.weight"
do = ["transpose"]
"""
SIDES = (1024, 1536)


@pytest.fixture()
def source(tmp_path: Path) -> Path:
    """Two matrices of 3 MiB."""
    elements = np.arange(2 * SIDES[0] * SIDES[1], dtype=np.uint32).astype(np.uint16).view(np.float16)
    (tmp_path / "src").mkdir()
    matrices = elements.reshape(2, *SIDES)
    save_file({f"{layer}.w": matrices[layer] for layer in (0, 1)}, tmp_path / "src" / "model.safetensors")
    return tmp_path / "src"


def converted(source: Path, target: Path, *words: Argument) -> Mapping[str, Any]:
    """The tensors of the first target file."""
    done("convert", source, target, *words, "--quiet")
    return load_file(min(target.rglob("*.safetensors")))


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["transposed", "transposed and cast", "columns"])
def test_more_jobs_do_not_make_reads_smaller_where_memory_is_small(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    words: list[Argument] = ["--names", tmp_path / "rules.toml", "--to", "unified"]
    if kind == "columns":
        new = single({f"{layer}.w": layout([4], [-1, 0]) for layer in (0, 1)})
        words = ["--dst-strategy", write_strategy(tmp_path / "new", new)]
    elif kind == "transposed and cast":
        words += ["--cast", "Float32"]
    counts = []
    for jobs in (1, 2, 16, 64):
        with monkeypatch.context() as patch:
            reads = reads_into_buffers(patch)
            tensors = converted(source, tmp_path / f"{jobs}", *words, "--jobs", jobs, "--max-memory", "1M")
            counts.append((sum(reads), len(reads)))
    matrices = load_file(source / "model.safetensors")
    for layer in (0, 1):
        matrix = matrices[f"{layer}.w"]
        actual = tensors[f"{layer}.w" if kind == "columns" else f"{layer}.weight"]
        expected = matrix[:, : SIDES[1] // 4] if kind == "columns" else matrix.T.astype(actual.dtype)
        np.testing.assert_array_equal(actual, expected)
    assert max(nbytes for nbytes, _ in counts) <= 1.1 * counts[0][0]
    assert max(requests for _, requests in counts) <= 1.1 * counts[0][1]


@pytest.mark.parametrize(("mebibytes", "most"), [(1, 12), (4, 6), (16, 6)])
def test_transposed_matrices_are_read_few_times_by_many_jobs(
    mebibytes: int, most: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    reads = reads_into_buffers(monkeypatch)
    words: list[Argument] = ["--names", tmp_path / "rules.toml", "--to", "unified", "--jobs", 16]
    converted(source, tmp_path / "dst", *words, "--max-memory", f"{mebibytes}M")
    assert sum(reads) <= most * (source / "model.safetensors").stat().st_size
