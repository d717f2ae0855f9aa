"""Tied and unlisted tensors are compared in every byte, whatever their layouts."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import CheckpointError
from tests.asking import open_checkpoint
from tests.checkpoint2_writing import saving
from tests.checkpoint_writing import Parts, write_safetensors
from tests.forms.test_hf_sharded import Box, Chunk, write_shards
from tests.layouts import examples, strategies
from tests.running import Argument, done, fails
from tests.trees import Value, cut_ranks, write_strategy, write_tree

TIED = '[[rule]]\nfrom = "net.weight"\nto = ["a.weight", "b.weight"]\ndo = "copy"\n'


@examples(10)
@given(st.data())
def test_tied_tensors_are_equal_in_every_element_or_nothing_is_written(data: st.DataObject) -> None:
    array = np.arange(32, dtype="<u2").reshape(8, 4)
    other = array.copy()
    place = (data.draw(st.integers(0, 7)), data.draw(st.integers(0, 3)))
    differs = data.draw(st.booleans())
    other[place] ^= differs
    full = {"a.weight": Value("Float16", array), "b.weight": Value("Float16", other)}
    strategy = data.draw(strategies(full))
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "rules.toml").write_text(TIED)
        write_tree(root / "src", cut_ranks(strategy, full))
        src = write_strategy(root / "strategy", strategy, None, "merged")
        words: list[Argument] = ["--src-strategy", src, "--names", root / "rules.toml", "--to", "huggingface"]
        with open_checkpoint(root / "src", src_strategy=src, names=root / "rules.toml") as tensors:
            if not differs:
                done("convert", root / "src", root / "dst", *words)
                assert tensors["net.weight"][...].tobytes() == array.tobytes()
                return
            fails(3, "convert", root / "src", root / "dst", *words, texts=["'b.weight'", f"at {list(place)}"])
            assert not list(root.glob("dst/**/*.safetensors"))
            with pytest.raises(CheckpointError, match=r"'b\.weight' differs"):
                tensors["net.weight"][0]


def test_the_last_element_of_large_tied_tensors_counts(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(TIED)
    array = np.ones((3, 5 << 20), "u1")
    other = array.copy()
    other[-1, -1] = 2
    write_tree(tmp_path / "src", {0: {"a.weight": Value("Int8", array), "b.weight": Value("Int8", other)}})
    words: list[Argument] = ["--src-strategy", "none", "--names", tmp_path / "rules.toml", "--to", "huggingface"]
    fails(3, "convert", tmp_path / "src", tmp_path / "dst", *words, texts=[f"[2, {(5 << 20) - 1}]"])


def test_a_plan_compares_the_beginning_of_tied_tensors(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(TIED)
    array = np.ones((4, 4), "<u2")
    full = {"a.weight": Value("Float16", array), "b.weight": Value("Float16", array + 1)}
    write_tree(tmp_path / "src", {0: full})
    words: list[Argument] = ["--src-strategy", "none", "--names", tmp_path / "rules.toml", "--to", "huggingface"]
    fails(3, "plan", tmp_path / "src", tmp_path / "dst", *words, texts=["'b.weight' differs from 'a.weight'"])


@pytest.mark.parametrize("place", [None, *np.ndindex(3, 3)])
def test_tied_tensors_in_boxes_that_are_no_grid_are_compared(tmp_path: Path, place: tuple[int, int] | None) -> None:
    pinwheel: list[Box] = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
    (tmp_path / "rules.toml").write_text(TIED)
    array = np.arange(9, dtype="<u2").reshape(3, 3)
    other = array.copy()
    if place is not None:
        other[place] += 1
    full = {"a.weight": Value("Float16", array), "b.weight": Value("Float16", other)}
    write_shards(
        tmp_path / "src", full, [Chunk(name, box, shard) for name in full for shard, box in enumerate(pinwheel, 1)]
    )
    words: list[Argument] = ["--names", tmp_path / "rules.toml", "--to", "huggingface"]
    if place is None:
        done("convert", tmp_path / "src", tmp_path / "dst", *words)
    else:
        fails(3, "convert", tmp_path / "src", tmp_path / "dst", *words, texts=["'b.weight'", f"at {list(place)}"])


def write_quantised(directory: Path, different: str = "") -> Path:
    """Two quantised tensors, equal unless the codes or scales of this name differ."""
    codes, scales = np.arange(1, 33, dtype="u1"), np.arange(1, 5, dtype="<f4")
    stored: dict[str, Parts] = {}
    for name in ("a.weight", "b.weight"):
        stored[name] = ("Float8E4M3FN", (4, 8), (codes + (name == different)).astype("u1").tobytes())
        changed = (scales + (f"{name}_scale" == different)).astype("<f4")
        stored[f"{name}_scale"] = ("Float32", (4, 1), changed.tobytes())
    write_safetensors(directory / "model.safetensors", stored)
    groups = {"group_0": {"weights": {"strategy": "channel"}}}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return directory


@pytest.mark.parametrize("different", ["b.weight", "b.weight_scale"])
def test_tied_tensors_are_compared_after_dequantising(tmp_path: Path, different: str) -> None:
    (tmp_path / "rules.toml").write_text(TIED)
    words: list[Argument] = ["--names", tmp_path / "rules.toml", "--dequantize", "Float32"]
    equal, other = write_quantised(tmp_path / "equal"), write_quantised(tmp_path / "other", different)
    done("convert", equal, tmp_path / "dst", *words, "--verify")
    done("fingerprint", equal, *words)

    commands: list[list[Argument]] = [["convert", other, tmp_path / "out"], ["fingerprint", other]]
    for command in commands:
        fails(3, *command, *words, texts=["'b.weight' differs", "at [0, 0]"])
    assert "'b.weight': is tied to" in fails(4, "verify", tmp_path / "dst", "--src", other, *words).out


@pytest.mark.parametrize("differs", [False, True])
def test_tied_tensors_of_a_trainers_state_are_compared(tmp_path: Path, differs: bool) -> None:
    """Their names in the files have a prefix that the rules do not see."""
    rules = tmp_path / "rules.toml"
    rules.write_text(TIED)
    array = np.ones((4, 4), "<u2")
    full = {"a.weight": Value("Float16", array), "b.weight": Value("Float16", array + int(differs))}
    write_tree(tmp_path / "src", {0: full})
    done("convert", tmp_path / "src", tmp_path / "dcp", "--src-strategy", "none", "--to", "dcp", "--shards", 2)
    command = ("convert", tmp_path / "dcp", tmp_path / "dst", "--names", rules, "--to", "huggingface")
    if differs:
        fails(3, *command, texts=["'model.b.weight' differs", "at [0, 0]"])
    else:
        done(*command, "--verify")
        write_tree(tmp_path / "src", {0: {**full, "b.weight": Value("Float16", array + 1)}})
        shutil.rmtree(tmp_path / "dcp")
        done("convert", tmp_path / "src", tmp_path / "dcp", "--src-strategy", "none", "--to", "dcp", "--shards", 2)
        result = fails(4, "verify", tmp_path / "dst", "--src", tmp_path / "dcp", "--names", rules)
        assert "'model.b.weight': is tied to 'model.a.weight'" in result.out


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_unlisted_tensors_of_checkpoint2_count_as_whole_only_if_all_files_are_equal(tmp_path: Path, rank: int) -> None:
    """The files differ in one element, between samples, be it on a rank that no sample is taken of."""
    tables = [np.arange(300_000, dtype="<f4") for _ in range(8)]
    saved = saving(unlisted={"table": list(tables)})
    saved.write(tmp_path / "same")
    done("convert", tmp_path / "same", tmp_path / "full", "--to", "unified")
    tables[rank][6000] += 1
    saving(unlisted={"table": list(tables)}).write(tmp_path / "other")
    fails(3, "convert", tmp_path / "other", tmp_path / "dst", "--to", "unified", texts=["'table' differs", "[6000]"])
    for command in ("stats", "diff"):
        others: list[Any] = [tmp_path / "full"] if command == "diff" else []
        fails(3, command, tmp_path / "other", *others, texts=["'table' differs", "--exclude 'table'"])
    fails(3, "fingerprint", tmp_path / "other", texts=["'table' differs"])
    fails(3, "get", tmp_path / "other", "table", texts=["'table' differs"])
    done("convert", tmp_path / "other", tmp_path / "dst", "--to", "unified", "--exclude", "table")
