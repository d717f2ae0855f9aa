"""Random Checkpoint 2.0 directories, written naively, are read correctly in any layout."""

from __future__ import annotations

import ast
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.forms.checkpoint2.form import parse_key
from reshard.layout import Layout
from reshard.text.messages import Report
from tests.checkpoint2_writing import Laid, Saving, numbered
from tests.forms.reading import full_bytes, read

NAMES = st.text(min_size=1, max_size=12)


@st.composite
def laid(draw: Any, ranks: range, start: int) -> Laid:
    """A tensor over a stage: any device matrix, any axes of it on any dimension; or whole."""
    count = len(ranks)
    if draw(st.integers(0, 5)) == 0:
        return Laid(numbered(draw(st.lists(st.integers(0, 3), max_size=2)), start), None, (), ranks)
    matrix = []
    while count > 1:
        size = draw(st.sampled_from([size for size in range(2, count + 1) if count % size == 0]))
        matrix.append(size)
        count //= size
    matrix.insert(draw(st.integers(0, len(matrix))), 1)
    axes = draw(st.permutations(range(len(matrix))))
    tensor_map: list[Any] = []
    shape = []
    for _ in range(draw(st.integers(0, 3))):
        used, axes = axes[: (number := draw(st.integers(0, 2)))], axes[number:]
        cut = int(np.prod([matrix[-1 - axis] for axis in used]))
        shape.append(cut * draw(st.integers(1, 2)))
        tensor_map.append(used[0] if len(used) == 1 else list(used) or -1)
    return Laid(numbered(shape, start), matrix, tensor_map, ranks)


@st.composite
def savings(draw: Any) -> Saving:
    """Up to three stages, of equal numbers of ranks."""
    per_stage, stages = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    tensors: dict[str, Laid] = {}
    for stage in range(stages):
        ranks = range(stage * per_stage, (stage + 1) * per_stage)
        for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
            for whole in (name, f"adam_m.{name}"):
                tensors[whole] = draw(laid(ranks, 1000 * len(tensors)))
    return Saving(
        tensors,
        per_stage * stages,
        {},
        {"learning_rate": np.array(0.5, np.float32)},
        deduplicated=draw(st.booleans()),
        groups=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 4])),
        prefix=draw(st.sampled_from([None, "llm", "a-model-b"])),
    )


@given(savings())
def test_any_layouts_are_read_correctly(saving: Saving) -> None:
    with tempfile.TemporaryDirectory() as directory:
        report = Report()
        checkpoint = read(saving.write_root(Path(directory)), report=report)
        for name, item in saving.tensors.items():
            if name not in checkpoint.values():
                assert checkpoint.tensors[name].shape == item.array.shape
                assert full_bytes(checkpoint, name) == item.array.tobytes()
        assert not checkpoint.unplaced and not report.warnings
        layouts = {name: layout for laid_out in checkpoint.layouts().values() for name, layout in laid_out.items()}
        for name, item in saving.tensors.items():
            if item.matrix is not None and saving.world > 1:
                assert layouts[name].slice_of_rank == [item.part(rank)[0] for rank in item.ranks]
                assert isinstance(layouts[name], Layout)


@given(st.text(), st.integers(0, 10**17))
def test_keys_are_parsed_as_python_writes_them(name: str, number: int) -> None:
    expected = (name, number) if name.encode(errors="replace").decode() == name else None
    assert parse_key(repr((name, (number,)))) == expected
    assert parse_key(ascii((name, (number,)))) == expected


@given(st.text(alphabet="('a\\\", )0x1u{}[]d"))
def test_invalid_keys_are_refused_and_never_evaluated(text: str) -> None:
    for key in (text, f"('{text}', (0,))", f'("{text}", (0,))', f"('w', ({text},))"):
        actual = parse_key(key)
        if actual is not None:
            assert ast.literal_eval(key) == (actual[0], (actual[1],))
