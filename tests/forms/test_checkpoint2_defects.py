"""Checkpoint 2.0 with missing, damaged, wrong or unlisted parts: repaired, or an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.asked import Edits
from reshard.errors import CheckpointError, IncompleteSourceError, InputError
from reshard.forms.checkpoint2.checkpoint import Checkpoint2
from reshard.text.messages import Report
from tests.checkpoint2_writing import Laid, Saving, numbered, saving
from tests.checkpoint_writing import write_safetensors
from tests.corpus import FIXTURES
from tests.forms.reading import full_bytes, read

ITERATION = "iteration_00000010"
MISLISTED = FIXTURES / "checkpoint2" / "a19_pp2_fused_mislisted" / "checkpoint"


def same(checkpoint: Checkpoint2, saved: Saving, *but: str) -> None:
    """All that was saved is read, but for some names."""
    assert checkpoint.tensors.keys() == saved.tensors.keys() - set(but)
    for name in checkpoint.tensors:
        assert full_bytes(checkpoint, name) == saved.tensors[name].array.tobytes(), name


def change(iteration: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the metadata of an iteration."""
    path = iteration / "metadata.json"
    metadata = json.loads(path.read_text())
    edit(metadata)
    path.write_text(json.dumps(metadata))


def test_other_holders_replace_missing_and_damaged_files(tmp_path: Path) -> None:
    saved = saving()
    iteration = saved.write(tmp_path / ITERATION)
    (iteration / saved.file("model", 0)).unlink()
    (iteration / saved.file("opt", 1)).write_bytes(b"damaged")
    (iteration / saved.file("model", 5)).unlink()
    (iteration / saved.file("model", 5)).symlink_to(tmp_path / "nowhere")
    report = Report()
    checkpoint = read(iteration, report=report)
    same(checkpoint, saved)
    assert sorted(checkpoint.absent) == [saved.file("model", 0), saved.file("model", 5), saved.file("opt", 1)]
    assert len(report.warnings) == 1 and "3 files of" in report.warnings[0]
    assert set(checkpoint.files) == set(range(16)) - {0, 5, 9}


def test_a_file_recorded_as_damaged_is_not_read(tmp_path: Path) -> None:
    saved = saving()
    iteration = saved.write(tmp_path / ITERATION)
    path = str(iteration / saved.file("model", 0))
    checkpoint = read(iteration, damaged={path: f"{path}: its CRC is wrong"})
    same(checkpoint, saved)
    assert 0 not in checkpoint.files and checkpoint.absent == {saved.file("model", 0): f"{path}: its CRC is wrong"}


def test_all_lost_parameters_are_listed_at_once(tmp_path: Path) -> None:
    saved = saving(deduplicated=True)
    iteration = saved.write(tmp_path / ITERATION)
    missing = ["llm-model-0000000-0000005.safetensors", "llm-opt-0000003-0000005.safetensors"]
    for name in missing:
        (iteration / name).unlink()
    with pytest.raises(IncompleteSourceError) as caught:
        read(iteration)
    metadata = str(caught.value)
    for word in (
        "iteration 10",
        "is not complete",
        *missing,
        "'first.weight'",
        "does not exist",
        "bring the files back",
    ):
        assert word in metadata
    with pytest.raises(IncompleteSourceError):
        read(iteration, edits=Edits(include=("first.weight",)))
    checkpoint = read(iteration, edits=Edits(include=("second.weight",)))
    assert checkpoint.lost.keys() >= {"first.weight"} and checkpoint.lost["first.weight"].files == (missing[0],)


def test_an_unlisted_rank_with_the_slice_replaces_a_lost_one(tmp_path: Path) -> None:
    saved = saving()
    iteration = saved.write(tmp_path / ITERATION)
    change(
        iteration,
        lambda metadata: metadata.update(storage_data={k: v[:1] for k, v in metadata["storage_data"].items()}),
    )
    (iteration / saved.file("model", 0)).unlink()
    report = Report()
    same(read(iteration, report=report), saved)
    assert any("read from unlisted files" in warning and "first.weight" in warning for warning in report.warnings)


def test_layouts_place_slices_despite_gaps_and_wrong_rank_numbers(tmp_path: Path) -> None:
    tensors = {
        "a.weight": Laid(numbered((4, 2)), (2,), (0, -1), [0, 2]),
        "b.weight": Laid(numbered((4, 2), 100), (2,), (0, -1), [1, 3]),
        "c.weight": Laid(numbered((4, 2), 200), (2, 2), (0, -1), range(4)),
    }
    saved = saving(tensors=tensors, world=4, values={})
    iteration = saved.write(tmp_path / ITERATION)

    def misnumber(metadata: dict[str, Any]) -> None:
        stored = metadata["storage_data"]
        for name, number in (("a.weight", 0), ("b.weight", 1)):
            entries = stored.pop(str((name, (0,)))) + stored.pop(str((name, (1,))))
            stored[str((name, (number,)))] = entries

    change(iteration, misnumber)
    report = Report()
    checkpoint = read(iteration, report=report)
    same(checkpoint, saved)
    assert any("numbered wrongly" in warning for warning in report.warnings)
    assert [*checkpoint.layouts()] == [(0, 1, 2, 3)] and [*checkpoint.layouts()[0, 1, 2, 3]] == ["c.weight"]


def test_copies_of_ranks_outside_the_layout_are_skipped(tmp_path: Path) -> None:
    saved = saving()
    iteration = saved.write(tmp_path / ITERATION)

    def add(metadata: dict[str, Any]) -> None:
        metadata["storage_data"]["('first.weight', (0,))"].append(
            {"file_name": saved.file("model", 1), "storage_rank": 9}
        )

    change(iteration, add)
    report = Report()
    same(read(iteration, report=report), saved)
    assert "ranks outside the layout" in report.warnings[0]


def lay(name: str, **changes: Any) -> Callable[[dict[str, Any]], object]:
    """Change the layout of a tensor."""
    return lambda metadata: metadata["state_dict_metadata"][name]["layout"].update(changes)


def describe(name: str, **changes: Any) -> Callable[[dict[str, Any]], object]:
    """Change other metadata of a tensor."""
    return lambda metadata: metadata["state_dict_metadata"][name].update(changes)


def store(key: str, *entries: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    """List other files for a slice."""
    return lambda metadata: metadata["storage_data"].update({key: list(entries)})


FIRST = "first.weight"
KEY = "('first.weight', (0,))"
FILE = "llm-model-{}-0000008.safetensors"


@pytest.mark.parametrize(
    ("edit", "output"),
    [
        (lay(FIRST, tensor_map=[-1, 0]), "axis_fragmentations"),
        (lay(FIRST, tensor_map=[0, 0]), "uses an axis twice"),
        (lay(FIRST, tensor_map=[5, -1]), "uses axis 5"),
        (lay(FIRST, tensor_map=[0]), "axis_fragmentations|dimensions"),
        (lay(FIRST, device_matrix=[2, 4]), "does not lay out"),
        (lay(FIRST, rank_list=[0, 1, 2]), "does not lay out"),
        (lay(FIRST, rank_list=[0, 1, 2, 2]), "does not lay out"),
        (lay(FIRST, rank_list=[1, 0, 3, 2]), "recorded with slice"),
        (lay(FIRST, interleaved_parallel=True), "interleaved_parallel"),
        (describe(FIRST, layout=None), "axis_fragmentations"),
        (describe(FIRST, layout=None, axis_fragmentations=None), "slice 1 is listed"),
        (describe(FIRST, layout=None, axis_fragmentations=None, chunk=[]), "slice 1 is stored"),
        (describe(FIRST, global_shape=[5, 6]), "does not divide"),
        (describe(FIRST, global_shape=[8, 6], chunk=[]), r"has shape \[2, 6\], but a slice of it has \[4, 6\]"),
        (describe(FIRST, chunk=[{"global_offset": [2], "local_shape": [2, 6]}]), "slice 2 is listed"),
        (describe(FIRST, chunk=[{"global_offset": [0], "local_shape": [2, 6]}] * 2), "listed twice"),
        (describe(FIRST, chunk=[{"global_offset": [0], "local_shape": [2, 5]}]), "is listed with shape"),
        (describe(FIRST, properties={"dtype": "float16"}), "is Float32, but Float16"),
        (store(KEY, {"file_name": FILE.format("0000001"), "storage_rank": 0}), "recorded with slices 0 and 1"),
        (store(KEY, {"file_name": FILE.format("0000000"), "storage_rank": 1}), "the layout gives the rank slice 1"),
        (
            store("('first.weight', (7,))", {"file_name": FILE.format("0000000"), "storage_rank": 0}),
            "slice 7 is stored",
        ),
        (store(KEY, {"file_name": FILE.format("0000005"), "storage_rank": 0}), "for which metadata.json lists it"),
    ],
)
def test_a_contradiction_names_file_and_parameter_and_affects_only_them(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], output: str
) -> None:
    saved = saving()
    iteration = saved.write(tmp_path / ITERATION)
    change(iteration, edit)
    with pytest.raises(InputError, match=output) as caught:
        read(iteration)
    assert caught.value.status == 3
    assert "'first.weight'" in str(caught.value) and str(iteration) in str(caught.value)
    assert len(str(caught.value)) < 2000
    same(read(iteration, edits=Edits(exclude=(FIRST,))), saved, FIRST)


def test_a_file_of_another_save_is_detected(tmp_path: Path) -> None:
    saved = saving()
    iteration = saved.write(tmp_path / ITERATION)
    write_safetensors(iteration / saved.file("model", 0), {"first.weight": numbered((2, 6), dtype="float16")})
    with pytest.raises(CheckpointError, match=r"is Float16, but Float32 by .*metadata.json"):
        read(iteration)
    write_safetensors(iteration / saved.file("model", 0), {"third.weight": numbered((2, 6))})
    with pytest.raises(CheckpointError, match=r"'first.weight' is not in .*, for which metadata.json lists it"):
        read(iteration)


def test_files_of_an_older_save_with_other_ranks_are_skipped(tmp_path: Path) -> None:
    saved = saving()
    iteration = saved.write(tmp_path / ITERATION)
    for name in ("llm-model-0000003-0000004.safetensors", "other-model-0000003-0000008.safetensors", "x.safetensors"):
        write_safetensors(iteration / name, {"first.weight": numbered((9,)), "unknown": numbered((3,))})
    report = Report()
    same(read(iteration, report=report), saved)
    assert len(report.warnings) == 1 and "skipped" in report.warnings[0]


def test_states_in_files_of_another_stage_replace_missing_listed_files(tmp_path: Path) -> None:
    checkpoint = read(MISLISTED)
    for file in Path(checkpoint.place).iterdir():
        if "opt-0000004" not in file.name and "opt-0000006" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    report = Report()
    contents = read(tmp_path, report=report, edits=Edits(include=("*layers.0*",)))
    for name in ("exp_avg.embedding.weight", "exp_avg_sq.layers.0.linear_fc1.weight"):
        assert full_bytes(contents, name) == full_bytes(checkpoint, name)
    assert any("files of another pipeline stage" in warning for warning in report.warnings)


def test_states_that_no_file_holds_are_an_error(tmp_path: Path) -> None:
    saved = saving()
    iteration = saved.write(tmp_path / ITERATION)
    path = iteration / saved.file("opt", 2)
    write_safetensors(path, saved.values)
    with pytest.raises(CheckpointError, match=r"'adam_m.first.weight' is not in .*, for which metadata.json lists it"):
        read(iteration)


def test_an_unlisted_state_has_the_layout_of_its_parameter(tmp_path: Path) -> None:
    saved = saving()
    iteration = saved.write(tmp_path / ITERATION)

    def drop(metadata: dict[str, Any]) -> None:
        del metadata["state_dict_metadata"]["adam_m.first.weight"]
        for number in range(2):
            del metadata["storage_data"][str(("adam_m.first.weight", (number,)))]

    change(iteration, drop)
    report = Report()
    same(read(iteration, report=report), saved)
    assert "unlisted states of the optimizer" in report.warnings[0]


@pytest.mark.parametrize(
    ("array", "output"),
    [
        (numbered((4,), 7), "read as whole"),
        (numbered((300_000,), 7), "read as whole"),
        (np.zeros(4, np.float32), "its elements are all the same"),
        ([numbered((4,), 4 * (rank % 2)) for rank in range(8)], "ranks hold different values"),
        ([numbered((4,), 4 * (rank // 4)) for rank in range(8)], "ranks hold different values"),
        ([numbered((4 + rank % 2,)) for rank in range(8)], "its shapes differ"),
        (np.zeros((0, 4), np.float32), "it has no elements"),
    ],
)
def test_unlisted_parameters_count_as_whole_only_if_their_values_agree(tmp_path: Path, array: Any, output: str) -> None:
    saved = saving(unlisted={"table": array})
    report = Report()
    checkpoint = read(saved.write(tmp_path / ITERATION), report=report)
    assert len(report.warnings) == 1 and output in report.warnings[0] and "'table'" in report.warnings[0]
    if output == "read as whole":
        assert full_bytes(checkpoint, "table") == array.tobytes()
        assert all("table" in layouts for layouts in checkpoint.layouts().values())
    else:
        assert "table" not in checkpoint.tensors and "table" in checkpoint.unplaced


def test_unlisted_parameters_of_absent_ranks_do_not_count_as_whole(tmp_path: Path) -> None:
    saved = saving(unlisted={"table": [numbered((4,), 4 * (rank % 2)) for rank in range(8)]})
    iteration = saved.write(tmp_path / ITERATION)
    for rank in (1, 3, 5, 7):
        (iteration / saved.file("model", rank)).unlink()
    checkpoint = read(iteration, partial=True)
    assert checkpoint.unplaced == {"table": "it is missing in files that would decide it"}


def test_a_name_in_two_files_of_one_rank_is_an_error(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-0000000-0000001.safetensors", {"w": numbered((2,)), "v": numbered((2,))})
    write_safetensors(tmp_path / "opt-0000000-0000001.safetensors", {"w": numbered((2,))})
    with pytest.raises(CheckpointError, match=r"'w' is in .*, too, and it is unknown"):
        read(tmp_path)
    assert [*read(tmp_path, edits=Edits(include=("v",))).tensors] == ["v"]


def test_an_iteration_that_lacks_its_metadata_is_an_error(tmp_path: Path) -> None:
    iteration = saving().write(tmp_path / ITERATION)
    (iteration / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"metadata.json is missing, .* 8 ranks"):
        read(iteration)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1, "a": 2}', "\xff"])
def test_a_damaged_common_json_is_an_error(tmp_path: Path, text: str) -> None:
    iteration = saving().write(tmp_path / ITERATION)
    (iteration / "common.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"common.json: is damaged"):
        read(iteration)
    (iteration / "common.json").unlink()
    assert read(iteration).training == {}


def test_names_may_contain_any_characters(tmp_path: Path) -> None:
    names = ["it's", 'a "b"', "back\\slash", "comma, (0,)", "line\nbreak", "层.权重", "\u2028", "😀", "'\"", "x\x7f"]
    tensors = {name: Laid(numbered((4,), n), (2,), (0,), range(2)) for n, name in enumerate(names)}
    saved = saving(tensors=tensors, world=2, values={})
    same(read(saved.write(tmp_path / ITERATION)), saved)


def test_an_adapter_is_named_and_skipped(tmp_path: Path) -> None:
    saved = saving()
    iteration = saved.write(tmp_path / ITERATION)
    (iteration / "mindformers_adapter_config.json").write_text("{}")
    report = Report()
    same(read(iteration, report=report), saved)
    assert "is not carried over" in report.notes[0]
