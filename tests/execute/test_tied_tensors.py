"""Tied and unlisted tensors are compared in every byte, whatever their layouts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import CheckpointError
from tests.checkpoint2_writing import saving
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
        with reshard.open(root / "src", src_strategy=src, names=root / "rules.toml") as tensors:
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
