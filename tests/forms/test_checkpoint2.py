"""Reading Checkpoint 2.0: iterations, files, slices and assembled tensors."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError, UsageError
from reshard.forms.checkpoint2.form import COMMON, find_iterations, parse_key
from reshard.forms.checkpoint2.written_files import Checkpoint2Files
from reshard.forms.registry import form_of
from reshard.forms.target import FinishingFile
from reshard.layout import Layout
from reshard.strategies.read import read_strategy
from reshard.text.messages import Report
from tests.checkpoint2_writing import Laid, Saving, numbered
from tests.checkpoint_writing import STORED
from tests.corpus import CORPUS2, FIXTURES
from tests.forms.reading import content, full_bytes, read
from tests.trees import layout, single, write_strategy

HERE = FIXTURES / "checkpoint2"
TRACKER = "latest_checkpointed_iteration.txt"


def cases() -> list[Any]:
    """Every directory of Checkpoint 2.0, the fixtures first."""
    here = sorted(HERE.iterdir())
    beyond = sorted(CORPUS2.glob("[ap][0-9]*")) if CORPUS2.is_dir() else []
    reference = {case.name for case in here}
    actual = []
    for case in [*here, *(case for case in beyond if case.name not in reference)]:
        actual.append(pytest.param(case, id=case.name))
    return actual


def expected_of(case: Path) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((case / "expected.json").read_text())["tensors"]
    return actual


def hash_of(saved: dict[str, Any]) -> str:
    """SHA-256 of a full tensor."""
    if "value" not in saved:
        return str(saved["sha256"])
    dtype = {"F32": "<f4", "I32": "<i4", "I64": "<i8"}[saved["dtype"]]
    return hashlib.sha256(np.array(saved["value"], dtype).tobytes()).hexdigest()


def stored_type(tensor: GlobalTensor) -> str:
    """The type as safetensors calls it."""
    return STORED[tensor.dtype]


@pytest.mark.parametrize("case", cases())
def test_every_value_equals_the_saved_one(case: Path) -> None:
    assert form_of(str(case / "checkpoint")).name == "checkpoint2"
    checkpoint = read(case / "checkpoint")
    expected = expected_of(case)
    for name, tensor in checkpoint.tensors.items():
        assert [stored_type(tensor), list(tensor.shape)] == [expected[name]["dtype"], expected[name]["shape"]]
        assert hashlib.sha256(full_bytes(checkpoint, name)).hexdigest() == hash_of(expected[name]), name
    for name in checkpoint.values():
        for holder in checkpoint.holders(name):
            assert hashlib.sha256(content(checkpoint, name, holder)).hexdigest() == hash_of(expected[name]), name
    assert expected.keys() == checkpoint.tensors.keys() | set(checkpoint.values()) | checkpoint.unplaced.keys()


@pytest.mark.parametrize("case", cases())
def test_an_iteration_is_read_from_its_own_directory_as_from_the_root(case: Path) -> None:
    root = read(case / "checkpoint")
    alone = read(Path(root.place))
    assert (alone.step, alone.files, alone.tensors) == (root.step, root.files, root.tensors)


def test_files_are_numbered_models_first_then_by_name() -> None:
    checkpoint = read(HERE / "a02_dp2mp2_dedup" / "checkpoint")
    names = [Path(checkpoint.files[number]).name for number in range(8)]
    assert names == [f"llm-{kind}-{n:07d}-0000004.safetensors" for kind in ("model", "opt") for n in range(4)]


def test_layouts_are_those_of_the_saving_stages() -> None:
    layouts = read(HERE / "a19_pp2_fused_mislisted" / "checkpoint").layouts()
    assert list(layouts) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layouts[0, 1, 2, 3]["embedding.weight"].cuts == (1, 2)
    assert "embedding.weight" not in layouts[4, 5, 6, 7]
    assert layouts[4, 5, 6, 7]["output_layer.weight"].cuts == (2, 1)


def test_values_of_common_json_are_read() -> None:
    assert read(HERE / "a14_single" / "checkpoint").training["global_step"] == 10


def iterations(tmp_path: Path, *numbers: int, tracker: str | None = None) -> Path:
    """A root with equal iterations of these numbers."""
    for number in numbers:
        shutil.copytree(HERE / "a02_dp2mp2_dedup/checkpoint/iteration_00000010", tmp_path / f"iteration_{number:08d}")
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    return tmp_path


def test_the_iteration_of_the_tracker_is_read_and_newer_ones_are_listed(tmp_path: Path) -> None:
    report = Report()
    checkpoint = read(iterations(tmp_path, 2, 10, 20, tracker="10\n"), "latest", report)
    assert checkpoint.step == "10"
    assert [iteration.number for iteration in find_iterations(str(tmp_path))] == [2, 10, 20]
    assert len(report.warnings) == 1 and "skipped iteration 20" in report.warnings[0]


def test_step_selects_an_iteration(tmp_path: Path) -> None:
    report = Report()
    root = iterations(tmp_path, 2, 10, 20, tracker="10")
    assert read(root, "2", report).step == "2"
    assert not report.warnings
    assert read(root, "20", report).step == "20"
    assert "cut short" in report.warnings[0]
    with pytest.raises(CheckpointError, match=r"holds no iteration_00000003[^;]*\n.*its iterations: 20, 10, 2"):
        read(root, "3")
    for wrong in ("3_10", "-1", "x"):
        with pytest.raises(UsageError, match="is not the number of an iteration"):
            read(root, wrong)
    with pytest.raises(UsageError, match="directory of one checkpoint"):
        read(root / "iteration_00000010", "2")


def test_without_a_tracker_the_newest_complete_iteration_is_read(tmp_path: Path) -> None:
    root = iterations(tmp_path, 2, 10, 20)
    (root / "iteration_00000020" / "llm-model-0000001-0000004.safetensors").unlink()
    report = Report()
    assert form_of(str(root)).name == "checkpoint2"
    assert read(root, report=report).step == "10"
    assert "it is unknown which iterations are finished" in report.warnings[0]
    assert any("iteration 20 is not complete and is skipped" in warning for warning in report.warnings)
    # The only iteration may be unfinished, too.
    only, report = iterations(tmp_path / "only", 2), Report()
    assert read(only, report=report).step == "2"
    assert "it is unknown which iterations are finished" in report.warnings[0]
    report = Report()
    assert read(only, "2", report).step == "2"
    assert not report.warnings


@pytest.mark.parametrize("text", ["", "ten", "1" * 300, "release", "-1", "\0"])
def test_a_tracker_that_names_no_iteration_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match="names no iteration"):
        read(iterations(tmp_path, 10, tracker=text))


def test_a_tracker_that_names_a_missing_iteration_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="names iteration 30, but"):
        read(iterations(tmp_path, 10, tracker="30"))


def test_other_directories_are_not_recognised(tmp_path: Path) -> None:
    assert form_of(str(tmp_path / "nothing")).name != "checkpoint2"
    assert form_of(str(tmp_path)).name != "checkpoint2"
    (tmp_path / "metadata.json").write_text('{"name": "a dataset"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    (tmp_path / "iteration_1").mkdir()
    assert form_of(str(tmp_path)).name != "checkpoint2"
    (tmp_path / "model-0000000-0000001.safetensors").write_bytes(b"")
    assert form_of(str(tmp_path)).name == "checkpoint2"


@pytest.mark.deep
def test_memory_for_metadata_does_not_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    ranks, peaks = 256, []
    for count in (10, 80):
        names = [f"layers.{number}.w" for number in range(count)]
        stages = single({name: layout([ranks], [0, -1]) for name in names})
        strategy = read_strategy(str(write_strategy(tmp_path / f"{count}", stages)))
        tensors = {name: GlobalTensor(name, "Float32", 4, (ranks, 2), ()) for name in names}
        common = FinishingFile(COMMON, lambda: [b""])
        metadata = Checkpoint2Files(strategy, tensors, tensors, (), 0, "", common).finishing()[0]
        tracemalloc.start()
        size = sum(map(len, metadata.make()))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        document = json.loads(b"".join(metadata.make()))
        assert len(document["state_dict_metadata"]) == count and len(document["storage_data"]) == count * ranks
    assert size > 3 << 20 and peaks[1] < peaks[0] + (1 << 20)


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
