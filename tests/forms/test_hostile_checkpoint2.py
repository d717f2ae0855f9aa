"""Checkpoint 2.0 with hostile metadata: correct values, or an error that names the file."""

from __future__ import annotations

import copy
import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import ReshardError
from tests.bounds import within
from tests.checkpoint2_writing import Laid, numbered, saving
from tests.conftest import LONG
from tests.corpus import FIXTURES
from tests.forms.reading import full_bytes, read

ITERATION = "iteration_00000010"
KEY = "('first.weight', (0,))"
OUTSIDE = [
    "../x.safetensors",
    "/etc/x.safetensors",
    "a/b.safetensors",
    "..",
    "x\0.safetensors",
    "x" * 300 + ".safetensors",
]
OUTSIDE += ["passwd", ".safetensors", "", "x.ckpt"]


def written(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """An iteration and its metadata."""
    saved = saving()
    return saved.write(tmp_path / ITERATION), saved.metadata()


def refused(iteration: Path, content: bytes) -> str:
    """Reading fails with an error that names the file; returns its message."""
    path = iteration / "metadata.json"
    path.write_bytes(content)
    with within(), pytest.raises(ReshardError) as caught:
        read(iteration)
    metadata = str(caught.value)
    assert str(path) in metadata and caught.value.status == 3 and len(metadata) < 3000
    return metadata


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_file_outside_the_directory_is_opened(tmp_path: Path, name: str) -> None:
    iteration, metadata = written(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"never read")
    metadata["storage_data"][KEY][0]["file_name"] = name
    for indent in (None, 4):
        assert "no name of a .safetensors file" in refused(iteration, json.dumps(metadata, indent=indent).encode())
        spelled = json.dumps(metadata, indent=indent).replace("file_name", "file\\u005fname")
        assert "no name of a .safetensors file" in refused(iteration, spelled.encode())


@pytest.mark.parametrize(
    "key",
    [
        "first.weight",
        "('first.weight', (0, 0))",
        "('first.weight', (1000000000000000000000,))",
        "__import__('os').system('touch hacked')",
        "('a' + 'b', (0,))",
        "('\\ud800', (0,))",
    ],
)
def test_keys_are_never_evaluated(tmp_path: Path, key: str) -> None:
    iteration, metadata = written(tmp_path)
    metadata["storage_data"][key] = metadata["storage_data"].pop(KEY)
    assert "no name and number of a slice" in refused(iteration, json.dumps(metadata).encode())


def test_duplicate_entries_are_refused(tmp_path: Path) -> None:
    iteration, metadata = written(tmp_path)
    first = json.dumps(metadata["storage_data"][KEY])
    text = json.dumps(metadata)
    for spelled in (KEY, "('first\\\\x2eweight', (0,))"):
        again = text.replace('"storage_data": {', f'"storage_data": {{"{spelled}": {first}, ')
        assert "twice" in refused(iteration, again.encode())
    double = text.replace('"state_dict_metadata": {', '"state_dict_metadata": {"first.weight": {}, ', 1)
    refused(iteration, double.encode())
    metadata["storage_data"][KEY] *= 2
    assert "a file is listed twice" in refused(iteration, json.dumps(metadata).encode())
    refused(iteration, (text[:-1] + ', "storage_data": {}}').encode())


def test_a_tensor_without_a_list_of_slices_is_read(tmp_path: Path) -> None:
    """Its empty list must not be taken for a tensor map of the same length, whose dimensions are not cut."""
    saved = saving()
    metadata = saved.metadata()
    for record in metadata["state_dict_metadata"].values():
        record["chunk"] = []
    whole = {"chunk": [], "global_shape": [2, 2], "properties": {"dtype": "float32"}}
    layout = {"device_matrix": [1], "tensor_map": [-1, -1], "rank_list": [0]}
    metadata["state_dict_metadata"] = {
        "unsaved": {**whole, "axis_fragmentations": None, "layout": layout},
        **metadata["state_dict_metadata"],
    }
    iteration = saved.write(tmp_path / ITERATION)
    (iteration / "metadata.json").write_text(json.dumps(metadata))
    see_that_it_is_right(iteration, saved.tensors)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"storage_data": {}, "state_dict_metadata": []}',
        b'{"storage_data": {"\xff": []}, "state_dict_metadata": {}}',
        b'{"state_dict_metadata": {"": {}}, "storage_data": {}}',
    ],
)
def test_invalid_metadata_is_refused(tmp_path: Path, content: bytes) -> None:
    iteration, _ = written(tmp_path)
    refused(iteration, content)


def test_a_stored_tensor_without_metadata_is_refused(tmp_path: Path) -> None:
    iteration, metadata = written(tmp_path)
    del metadata["state_dict_metadata"]["first.weight"]
    assert "which state_dict_metadata does not" in refused(iteration, json.dumps(metadata).encode())


SAVED = {
    "first.weight": Laid(numbered((4, 6)), (2, 2), (0, -1), range(4)),
    "adam_m.first.weight": Laid(numbered((4, 6), 100), (2, 2), (0, -1), range(4)),
    "whole": Laid(numbered((3,), 200), None, (), range(4)),
}
VALUES: list[Any] = [None, True, 0, 1, 2, 3, -1, 7, 1 << 20, 1 << 40, 10**25, 0.5, "", "x", [], [0], [[0]], {}]


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from parts(value[key])


@given(st.integers(0, 1 << 40))
def test_modified_metadata_gives_right_values_or_an_error(seed: int) -> None:
    saved = saving(tensors=SAVED, world=4)
    metadata = saved.metadata()
    change(metadata, random.Random(seed))
    with tempfile.TemporaryDirectory() as directory:
        iteration = saved.write(Path(directory) / ITERATION)
        (iteration / "metadata.json").write_text(json.dumps(metadata))
        right_or_refused(iteration, saved.tensors)


def change(metadata: Any, rng: random.Random) -> None:
    """Drop, replace, move or repeat one to three values of the metadata."""
    for _ in range(rng.randint(1, 3)):
        places = list(parts(metadata))
        if not places:
            return
        (holder, key), (other, target) = rng.choice(places), rng.choice(places)
        replacement = copy.deepcopy(rng.choice([rng.choice(VALUES), other[target]]))
        action = rng.randrange(3)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, list):
            holder.insert(key, replacement)
        else:
            holder[key] = replacement


def right_or_refused(iteration: Path, tensors: Mapping[str, Laid]) -> None:
    """What is read of the checkpoint is right, or an error names it."""
    try:
        with within():
            see_that_it_is_right(iteration, tensors)
    except ReshardError as error:
        assert str(iteration) in str(error) and len(str(error)) < 3000


def see_that_it_is_right(iteration: Path, tensors: Mapping[str, Laid]) -> None:
    """Read a checkpoint and compare with what was saved.

    Raises:
        ReshardError: it is refused.
    """
    checkpoint = read(iteration, partial=True)
    for name in (checkpoint.tensors.keys() - checkpoint.lost.keys()) & tensors.keys():
        if checkpoint.tensors[name].shape == tensors[name].array.shape:
            assert full_bytes(checkpoint, name) == tensors[name].array.tobytes(), name
    assert all(str(fault) for fault in checkpoint.faults.values())
    assert all(checkpoint.holders(name) for name in checkpoint.values())
    checkpoint.layouts()


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(400 if LONG else 60))
def test_damaged_bytes_of_real_directories_give_right_values_or_an_error(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    case = rng.choice(sorted((FIXTURES / "checkpoint2").iterdir()))
    source = case / "checkpoint" / ITERATION
    files = sorted(os.listdir(source))
    damaged = rng.sample(files, rng.randint(1, 2))
    for name in files:
        if name not in damaged:
            (tmp_path / name).symlink_to(source / name)
            continue
        content = bytearray((source / name).read_bytes())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(min(len(content), 2000 if name.endswith("s") else len(content)))
            action = rng.randrange(4)
            if action == 0:
                content[at] = rng.randrange(256)
            elif action == 1:
                del content[at : at + rng.randint(1, 40)]
            elif action == 2:
                content[at:at] = content[at : at + rng.randint(1, 40)]
            else:
                del content[max(at, 1) :]
        (tmp_path / name).write_bytes(content)
    try:
        with within():
            checkpoint = read(tmp_path, partial=True)
    except ReshardError as error:
        assert str(tmp_path) in str(error)
        return
    checkpoint.layouts()
    assert all(str(tmp_path) in str(fault) for fault in checkpoint.faults.values())
