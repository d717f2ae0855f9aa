"""Weights in words that compressed-tensors wrote, against its own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint_writing import Parts, write_safetensors
from tests.corpus import FIXTURES, ROOT
from tests.corpus_dcp import held_in
from tests.quantised.models import INT4, INT8, in_words, packed
from tests.running import done, fails, reshard, warns

CORPUS_INT4 = ROOT.parent / "shared" / "corpus_int4"
"""The whole collection; it lies beside the repository where the project is developed."""

CASES = {
    path.parent.name: path.parent
    for root in (FIXTURES / "packed", CORPUS_INT4)
    for path in sorted(root.glob("*/expected.json"))
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "answers"), [("BFloat16", "tensors"), ("Float32", "tensors_f32")])
def test_a_case_has_its_answer(case: str, dtype: str, answers: str, tmp_path: Path) -> None:
    expected: dict[str, Any] = json.loads((CASES[case] / "expected.json").read_text())
    source, out = CASES[case] / "checkpoint", tmp_path / "out"

    result = reshard("convert", source, out, "--dequantize", dtype, "--verify")

    if result.status:
        assert result.status == 3
        assert expected["expect"] == "refuse" or expected.get("may_refuse")
        for words in expected["must_say"]:
            assert any(each.lower() in result.err.lower() for each in words.split("|")), (words, result.err)
        assert not [*out.glob("*.safetensors")]
        return
    assert expected["expect"] == "convert"
    warns(result, "no differences")
    assert held_in(out) == {
        name: (answer["dtype"], tuple(answer["shape"]), answer["sha256"]) for name, answer in expected[answers].items()
    }
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, out))
    # Not all weights are in Float32.
    assert {**after, "torch_dtype": "bfloat16"} == {key: before[key] for key in before if key != "quantization_config"}


def write_one(directory: Path, sizes: tuple[int, int], code: str, strategy: dict[str, Any]) -> Path:
    """A weight of 6 rows in three words, with these sizes."""
    weight = in_words("a.weight", code, 6, 24 if code == INT4 else 12, (1, 8) if "group_size" in strategy else ())
    listed: Parts = ("Int64", (2,), np.array(sizes, "<i8").tobytes())
    write_safetensors(directory / "model.safetensors", {**weight.stored, "a.weight_shape": listed})
    settings = packed({"num_bits": 4 if code == INT4 else 8, **strategy})
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return directory


@pytest.mark.parametrize(
    ("code", "sizes", "fits"),
    [
        (INT4, (6, 24), True),
        (INT4, (6, 17), True),
        (INT4, (6, 25), False),
        (INT4, (6, 16), False),
        (INT4, (5, 24), False),
        (INT4, (24, 6), False),
        (INT8, (6, 12), True),
        (INT8, (6, 9), True),
        (INT8, (6, 8), False),
        (INT8, (6, 13), False),
        (INT8, (-6, -12), False),
    ],
)
def test_sizes_of_rows_with_one_scale_are_read_while_planning(
    tmp_path: Path, code: str, sizes: tuple[int, int], fits: bool
) -> None:
    source = write_one(tmp_path / "src", sizes, code, {"strategy": "channel"})
    words = (source, tmp_path / "out", "--to", "huggingface", "--dequantize", "BFloat16")

    if not fits:
        fails(3, "plan", *words, texts=["model.safetensors", "'a.weight_shape'", f"{sizes[0]} x {sizes[1]}"])
        return
    done("convert", *words, "--verify")
    done("plan", *words)
    (tensor,) = held_in(tmp_path / "out").values()
    assert tensor[:2] == ("BF16", sizes)


@pytest.mark.parametrize("sizes", [(6, 23), (6, 16), (7, 24)])
def test_sizes_that_contradict_groups_are_found_when_the_weight_is_read(tmp_path: Path, sizes: tuple[int, int]) -> None:
    source = write_one(tmp_path / "src", sizes, INT4, {"strategy": "group", "group_size": 8})
    texts = ["model.safetensors", "'a.weight_shape'", f"{sizes[0]} x {sizes[1]}", "6 x 24"]

    for command in ("stats", "fingerprint"):
        fails(3, command, source, "--dequantize", "BFloat16", texts=texts if command == "stats" else texts[1:2])
    fails(3, "convert", source, tmp_path / "out", "--to", "huggingface", "--dequantize", "BFloat16", texts=texts)
    assert not [*(tmp_path / "out").glob("*.safetensors")]


def test_the_state_of_a_trainer_has_the_columns_of_the_model(tmp_path: Path) -> None:
    """Sizes lie in a chunk of a distributed checkpoint, and words are cut."""
    case = FIXTURES / "packed" / "int4_partial_words"
    options = ("--dequantize", "BFloat16", "--config", case / "checkpoint")
    done("convert", case / "checkpoint", tmp_path / "dcp", "--to", "dcp", "--shards", 3)

    done("convert", tmp_path / "dcp", tmp_path / "out", "--to", "huggingface", *options, "--verify")
    done("convert", tmp_path / "dcp", tmp_path / "numbers", "--to", "hf-sharded", "--shards", 2, *options, "--verify")

    answers = json.loads((case / "expected.json").read_text())["tensors"]
    assert {name: digest for name, (_, _, digest) in held_in(tmp_path / "out").items()} == {
        name: answer["sha256"] for name, answer in answers.items()
    }
