"""Weights in words that compressed-tensors wrote, against its own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.corpus import FIXTURES, ROOT
from tests.corpus_dcp import held_in
from tests.running import reshard, warns

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
