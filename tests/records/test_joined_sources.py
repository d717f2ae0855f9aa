"""Runs of one conversion that read its source again: every difference that samples show is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.reference import Strategy
from tests.running import Argument, done, fails, warns
from tests.trees import Value, layout, single, value, write_checkpoint, write_strategy

NAMES = [f"layers.{number}.w" for number in range(60)]
FULL = {name: value(name, (16, 16)) for name in NAMES}
OPTIMIZER = {f"adam_m.{name}": value(f"m {name}", (16, 16)) for name in NAMES[:4]}


def target(names: list[str]) -> Strategy:
    return single({name: layout([2], [0, -1]) for name in names})


def words(source: Path, root: Path, *options: Argument, names: list[str] = NAMES) -> list[Argument]:
    strategy = write_strategy(root / "strategy", target(names))
    return ["convert", source, root / "dst", "--dst-strategy", strategy, *options]


@pytest.mark.parametrize("number", range(0, 60, 7))
def test_another_source_is_refused_that_differs_in_one_tensor(number: int, tmp_path: Path) -> None:
    first, second = (tmp_path / name / "model.safetensors" for name in ("a", "b"))
    write_checkpoint(first, FULL)
    write_checkpoint(second, {**FULL, NAMES[number]: value("other", (16, 16))})
    done(*words(first.parent, tmp_path, "--ranks", "0"))
    fails(3, *words(second.parent, tmp_path), texts=["source file 0 differs"])


def test_large_tensors_are_sampled_at_several_places(tmp_path: Path) -> None:
    path = tmp_path / "src" / "model.safetensors"
    write_checkpoint(path, {"layers.w": value("w", (2048, 512))})
    done(*words(path.parent, tmp_path, "--ranks", "0", names=["layers.w"]))
    data = bytearray(path.read_bytes())
    # An eighth of its rows are others now.
    data[-len(data) * 15 // 16 : -len(data) * 13 // 16] = bytes(len(data) * 2 // 16)
    path.write_bytes(data)
    fails(3, *words(path.parent, tmp_path, names=["layers.w"]), texts=["source file 0 differs"])


def test_the_same_from_another_path_is_joined_with_a_note(tmp_path: Path) -> None:
    first, second = (tmp_path / name / "model.safetensors" for name in ("a", "b"))
    for path in (first, second):
        write_checkpoint(path, FULL)
    done(*words(first.parent, tmp_path, "--ranks", "0"))
    assert "was begun" not in done(*words(first.parent, tmp_path, "--dry-run")).err
    text = f"was begun from {first.parent}; the files read of {second.parent} look the same"
    warns(done(*words(second.parent, tmp_path)), text)


def write_model(source: Path, files: list[dict[str, Value]]) -> None:
    places = {}
    for number, tensors in enumerate(files):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        write_checkpoint(source / name, tensors)
        places.update(dict.fromkeys(tensors, name))
    index = {"metadata": {}, "weight_map": places}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("grows", [True, False])
def test_a_source_with_other_files_than_before_is_refused(grows: bool, tmp_path: Path) -> None:
    source, names = tmp_path / "src", [*FULL, *OPTIMIZER]
    sizes: list[list[dict[str, Value]]] = [[FULL], [FULL, OPTIMIZER]]
    if not grows:
        sizes.reverse()
    write_model(source, sizes[0])
    done(*words(source, tmp_path, "--ranks", "0", names=names))
    write_model(source, sizes[1])
    fails(3, *words(source, tmp_path, names=names), texts=["source file 1 differs", "number"])
    done(*words(source, tmp_path, "--overwrite", names=names))
    assert done(*words(source, tmp_path, "--json", names=names)).json["ranks"] == []
