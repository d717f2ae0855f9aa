"""--shapes of strategy make and derive: read from every form, and never made of what may or may not be slices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.running import Argument, done, fails
from tests.trees import cut_ranks, layout, single, value, write_checkpoint, write_strategy, write_tree

FULL = {name: value(name, shape) for name, shape in (("a.weight", [8, 4]), ("b.weight", [16, 8]))}
RULES = '[[parameter]]\nmatch = "*"\nmap = ["mp", "None"]\n'
DERIVED = ("--src-sizes", "dp=2,mp=2", "--dst-sizes", "mp=2", "--weights-only")
SAVED_WITH = single(dict.fromkeys(FULL, layout([2, 2], [0, -1])))


def made_shapes(tmp_path: Path, *words: Argument) -> dict[str, list[int]]:
    out = tmp_path / "made.json"
    (tmp_path / "rules.toml").write_text(RULES)
    done("strategy", "make", tmp_path / "rules.toml", out, *words, "--sizes", "mp=2", "--weights-only", "--overwrite")
    layouts = json.loads(out.read_text())["parallel_layout_item"]
    return {name: layout_record["tensor_shape"] for name, layout_record in layouts.items()}


@pytest.mark.parametrize("form", ["huggingface", "unified", "checkpoint2"])
def test_shapes_are_read_from_every_form(form: str, tmp_path: Path) -> None:
    old = write_strategy(tmp_path / "old", SAVED_WITH)
    tree = write_tree(tmp_path / "tree", cut_ranks(SAVED_WITH, FULL))
    expected = {name: list(of.array.shape) for name, of in FULL.items()}
    assert made_shapes(tmp_path, "--shapes", tree, "--src-strategy", old) == expected
    cut: list[Argument] = ["--dst-strategy", "same"] if form == "checkpoint2" else ["--max-shard-size", "200B"]
    done("convert", tree, tmp_path / form, "--src-strategy", old, "--to", form, *cut)
    named = sorted((tmp_path / form).glob("*.index.json")) + sorted((tmp_path / form).glob("param_name_map.json"))
    assert named or form == "checkpoint2"
    for path in (tmp_path / form, *named):
        assert made_shapes(tmp_path, "--shapes", path) == expected


@pytest.mark.parametrize("directory", ["rank_0", "rank0", "0"])
def test_rank_0_alone_is_neither_a_slice_nor_a_full_checkpoint(directory: str, tmp_path: Path) -> None:
    old = write_strategy(tmp_path / "old", SAVED_WITH)
    tree = tmp_path / "a tree"
    file = write_checkpoint(tree / directory / "net-1_10.ckpt", FULL)
    (tmp_path / "rules.toml").write_text(RULES)
    out, refused = tmp_path / "out.ckpt", ["only rank 0 exists, of 4"]
    make: list[Argument] = ["strategy", "make", tmp_path / "rules.toml", out, "--src-strategy", old, "--sizes", "mp=2"]
    derive: list[Argument] = ["strategy", "derive", old, out, *DERIVED]
    fails(3, *make, "--weights-only", "--shapes", tree, texts=refused)
    fails(3, *derive, "--shapes", tree, texts=refused)

    full = {name: list(of.array.shape) for name, of in FULL.items()}
    slices = {name: [2 * shape[0], *shape[1:]] for name, shape in full.items()}
    for path, expected in ((file, full), (tree / directory.replace("0", "{rank}") / "*", slices)):
        assert made_shapes(tmp_path, "--shapes", path, "--src-strategy", old) == expected
        done(*derive, "--shapes", path, "--overwrite")
    assert made_shapes(tmp_path, "--shapes", tree, "--src-strategy", "none") == full


def test_slices_that_contradict_the_recorded_shapes_are_refused(tmp_path: Path) -> None:
    """Full tensors in every rank's file, and a JSON strategy with their shapes."""
    shapes = {name: of.array.shape for name, of in FULL.items()}
    old = write_strategy(tmp_path / "old", SAVED_WITH, shapes, "json")
    tree = write_tree(tmp_path / "tree", dict.fromkeys(range(4), FULL))
    derive: list[Argument] = [old, tmp_path / "out.ckpt", *DERIVED]
    fails(3, "strategy", "derive", *derive, "--shapes", tree, texts=["'a.weight'", "[16, 4]", "[8, 4]"])
