"""Converting Checkpoint 2.0 directories that MindFormers saved, to every form and back."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint2_writing import Laid, numbered, saving
from tests.conftest import LONG
from tests.forms.test_checkpoint2 import cases, expected_of, hash_of
from tests.running import Argument, done, fails, warns
from tests.trees import layout, read_checkpoint, read_tree, scalar, single, value, write_checkpoint, write_strategy

UNPLACED = {"a08_dtypes": {"extra_cell.q"}}


def full(directory: Path) -> dict[str, Any]:
    """Shape and hash of everything in a directory of full weights."""
    actual: dict[str, Any] = {}
    for file in directory.glob("*.safetensors"):
        for name, tensor in read_checkpoint(file).items():
            actual[name] = (list(tensor.array.shape), hashlib.sha256(tensor.array.tobytes()).hexdigest())
    return actual


def saved(case: Path) -> dict[str, Any]:
    """The same for the saved values."""
    return {name: (entry["shape"], hash_of(entry)) for name, entry in expected_of(case).items()}


@pytest.mark.parametrize("case", cases())
def test_a_checkpoint_of_mindformers_converts_to_every_form_and_back(case: Path, tmp_path: Path) -> None:
    source, expected = case / "checkpoint", saved(case)
    for name in UNPLACED.get(case.name, ()):
        del expected[name]
    done("convert", source, tmp_path / "hf", "--to", "huggingface")
    assert full(tmp_path / "hf") == expected
    # By default one of them, which differs from case to case.
    for strategy in ("same", "none") if LONG else ("same",) if len(case.name) % 2 else ("none",):
        done("convert", source, tmp_path / strategy, "--to", "checkpoint2", "--dst-strategy", strategy, "--verify")
        done("convert", tmp_path / strategy, tmp_path / f"{strategy}-full", "--to", "unified")
        assert full(tmp_path / f"{strategy}-full") == expected


def test_rank_files_of_the_same_layouts_equal_the_saved_ranks(tmp_path: Path) -> None:
    saved = saving(unlisted={"table": numbered((4,), 7)})
    done("convert", saved.write_root(tmp_path / "src"), tmp_path / "dst", "--dst-strategy", "same")
    ranks = read_tree(tmp_path / "dst")
    for rank in range(8):
        contents = {**saved.files()[saved.file("model", rank)], **saved.files()[saved.file("opt", rank)]}
        assert {name: tensor.array.tobytes() for name, tensor in ranks[rank].items()} == {
            name: array.tobytes() for name, array in contents.items()
        }


@pytest.mark.parametrize("form", ["hf-sharded", "dcp", "hyper-parallel"])
def test_weights_without_a_layout_are_tensors_of_forms_of_pytorch(form: str, tmp_path: Path) -> None:
    source = saving(unlisted={"table": numbered((4,), 7)}).write_root(tmp_path / "src")
    done("convert", source, tmp_path / "dst", "--to", form, "--shards", 3, "--verify")
    done("convert", source, tmp_path / "whole", "--to", "unified")
    done("convert", tmp_path / "dst", tmp_path / "back", "--to", "unified", "--verify")
    assert full(tmp_path / "back") == full(tmp_path / "whole")
    assert full(tmp_path / "back")["table"]


def test_weights_without_a_layout_are_copied_to_every_rank(tmp_path: Path) -> None:
    listing = {
        "bias": Laid(numbered((3,), 5), None, (), range(4)),
        "adam_m.bias": Laid(numbered((3,)), None, (), [0, 1]),
    }
    saved = saving(unlisted={"table": numbered((4,), 7)})
    saved = replace(saved, tensors={**saved.tensors, **listing})
    strategy = write_strategy(tmp_path / "strategy", single({"first.weight": layout([2], [0, -1])}))
    root = saved.write_root(tmp_path / "src")
    # In Checkpoint 2.0 they are in files of the model, not beside the training's values.
    done("convert", root, tmp_path / "again", "--to", "checkpoint2", "--dst-strategy", "same", "--verify")
    done("convert", root, tmp_path / "dst", "--dst-strategy", strategy)
    for rank, tensors in read_tree(tmp_path / "dst").items():
        assert tensors.keys() == {"first.weight", "bias", "table", "learning_rate", "global_step"}
        assert tensors["table"].array.tobytes() == numbered((4,), 7).tobytes()
        assert tensors["bias"].array.tobytes() == numbered((3,), 5).tobytes()
        assert tensors["first.weight"].array.tobytes() == numbered((4, 6), 100)[2 * rank : 2 * rank + 2].tobytes()
    whole = single({"first.weight": layout([2], [0, -1]), "bias": layout([2], [-1]), "table": layout([2], [0])})
    done("convert", root, tmp_path / "cut", "--dst-strategy", write_strategy(tmp_path / "other", whole))
    for rank, tensors in read_tree(tmp_path / "cut").items():
        assert tensors["table"].array.tobytes() == numbered((4,), 7)[2 * rank : 2 * rank + 2].tobytes()


def test_unreadable_tensors_are_an_error_only_where_they_are_written(tmp_path: Path) -> None:
    saved = saving(deduplicated=True)
    root = saved.write_root(tmp_path / "src")
    (root / "iteration_00000010" / "llm-opt-0000000-0000005.safetensors").unlink()
    words: list[Argument] = ["convert", root, tmp_path / "dst", "--to", "huggingface"]
    output = ["iteration 10", "is not complete", "llm-opt-0000000-0000005.safetensors", "'adam_m.first.weight'"]
    fails(3, *words, texts=output)
    assert not (tmp_path / "dst" / "model.safetensors").exists()
    warns(done(*words, "--exclude", "adam_m.*"), "cannot be read")
    assert full(tmp_path / "dst").keys() == {"first.weight", "second.weight", "second.norm"}


def test_the_tracker_or_step_selects_the_iteration(tmp_path: Path) -> None:
    saved = saving(values={})
    root = saved.write_root(tmp_path / "src", 10)
    saved.write(root / "iteration_00000020")
    words: list[Argument] = ["convert", root, "--to", "unified", "--dry-run"]
    warns(done(*words[:2], tmp_path / "a", *words[2:]), "skipped iteration 20")
    warns(done(*words[:2], tmp_path / "a", *words[2:], "--step", "20"), "cut short while it was saved")
    fails(3, *words[:2], tmp_path / "a", *words[2:], "--step", "30", texts=["holds no iteration_00000030"])
    fails(2, *words[:2], tmp_path / "a", *words[2:], "--step", "3_10", texts=["is not the number of an iteration"])


def test_same_is_an_error_for_layouts_that_no_strategy_expresses(tmp_path: Path) -> None:
    over_some = {"a.weight": Laid(numbered((4, 2)), (2,), (0, -1), [0, 2])}
    saved = saving()
    root = replace(saved, tensors={**saved.tensors, **over_some}).write_root(tmp_path / "src")
    words: list[Argument] = ["convert", root, tmp_path / "dst"]
    fails(3, *words, "--dst-strategy", "same", texts=["'a.weight'", "a part of a stage's ranks", "instead of same"])
    done(*words, "--to", "huggingface")
    root = saving(tensors=over_some, world=4, values={}).write_root(tmp_path / "gaps")
    fails(3, "convert", root, tmp_path / "ranks", "--dst-strategy", "same", texts=["ranks 0,2", "instead of same"])


@pytest.mark.parametrize("name", ["global_step", "step_num"])
def test_a_negative_step_gives_no_iteration_number(name: str, tmp_path: Path) -> None:
    """A directory of that number would be found by no reader."""
    source = write_checkpoint(tmp_path / "x.ckpt", {"w": value("w", (2, 2)), name: scalar((1 << 32) - 1)})
    words: list[Argument] = ["convert", source, tmp_path / "out", "--src-strategy", "none", "--to", "checkpoint2"]
    warns(done(*words, "--dst-strategy", "none"), "global_step is -1", "iteration 0")
    assert full(tmp_path / "out" / "iteration_00000000")
    done("inspect", tmp_path / "out")
