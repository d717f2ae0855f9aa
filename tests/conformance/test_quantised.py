"""Dequantised weights equal those of the libraries that define the schemes, bit for bit.

`make conformance-transformers` runs these tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance import oracles
from tests.conformance.workers.protocol import described
from tests.running import done
from tests.trees import read_checkpoint

pytestmark = pytest.mark.filterwarnings("default")

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", "fp8", {"hidden_size": 160, "intermediate_size": 264, "kv_lora_rank": 140}),
    "qwen3": ("qwen3", "fp8", {"hidden_size": 256, "intermediate_size": 384}),
    "gpt_oss": ("gpt_oss", "mxfp4", {}),
    "kimi_k2": ("deepseek_v3", "pack-quantized", {"hidden_size": 96, "moe_intermediate_size": 64}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Per family a directory with the model quantised (``coded``) and by the library's own numbers (``plain``)."""
    root = tmp_path_factory.mktemp("quantised")
    save = [
        {"do": "save", "directory": str(root / name / "saved"), "family": family, "dtype": "bfloat16"}
        | {"max_shard_size": "1GB", "seed": 3, "config": config}
        for name, (family, _, config) in FAMILIES.items()
    ]
    oracles.done(oracles.transformers(save))
    quantise = [
        {"do": "quantise", "source": str(root / family / "saved"), "to": str(root / family / "coded")}
        | {"plain": str(root / family / "plain"), "scheme": scheme, "seed": 5}
        for family, (_, scheme, _) in FAMILIES.items()
    ]
    assert all(oracles.done(oracles.quantised(quantise))), "nothing was quantised"
    return {family: root / family for family in FAMILIES}


def converted(model: Path, tmp_path: Path, dtype: str = "BFloat16") -> Path:
    done("convert", model / "coded", tmp_path / "out", "--to", "huggingface", "--dequantize", dtype)
    return tmp_path / "out"


def contents(directory: Path) -> dict[str, Any]:
    return {name: value for path in directory.glob("*.safetensors") for name, value in read_checkpoint(path).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_dequantised_logits_equal_those_of_the_librarys_numbers(
    models: dict[str, Path], family: str, tmp_path: Path
) -> None:
    written = converted(models[family], tmp_path)

    mine, theirs = oracles.done(
        oracles.transformers([{"do": "load", "directory": str(path)} for path in (written, models[family] / "plain")])
    )

    assert (mine["missing"], mine["unknown"], mine["dtypes"]) == ([], [], theirs["dtypes"])
    assert mine["logits"] == theirs["logits"]
    actual, expected = contents(written), contents(models[family] / "plain")
    assert actual.keys() == expected.keys()
    assert all(actual[name].same(expected[name]) for name in expected)


# transformers takes a block for a part of equal size, so that it fails for partial blocks, or is wrong.
DEFINED = {
    "deepseek_v3": {"torch": True, "compressed-tensors": True, "transformers": False},
    "qwen3": {"torch": True, "compressed-tensors": True, "transformers": True},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", DEFINED)
def test_dequantised_weights_equal_those_of_their_libraries(
    models: dict[str, Path], family: str, dtype: str, tmp_path: Path
) -> None:
    written = contents(converted(models[family], tmp_path, {"bfloat16": "BFloat16", "float32": "Float32"}[dtype]))
    jobs = [
        {"do": "dequantise", "by": library, "directory": str(models[family] / "coded"), "dtype": dtype}
        for library in DEFINED[family]
    ]

    answers = oracles.done(oracles.quantised(jobs))

    for (library, agrees), answer in zip(DEFINED[family].items(), answers):
        hashes = {name: described(written[name].array.view("u1"))["sha256"] for name in answer}
        same = [isinstance(answer[name], dict) and answer[name]["sha256"] == hashes[name] for name in answer]
        assert all(same) == agrees, f"{library}: {[name for name, equal in zip(answer, same) if not equal]}"


STRATEGIES: dict[str, dict[str, Any]] = {
    "tensor": {},
    "channel": {},
    "group": {"group_size": 32},
    "block": {"block_structure": [16, 32]},
}


@pytest.mark.parametrize("scale", ["float32", "bfloat16"])
def test_int8_weights_equal_those_of_compressed_tensors(tmp_path: Path, scale: str) -> None:
    jobs = [
        {"do": "int8", "to": str(tmp_path / f"{strategy}-{symmetric}"), "dtype": scale, "seed": 7}
        | {"weights": {"strategy": strategy, "symmetric": symmetric, **settings}}
        for strategy, settings in STRATEGIES.items()
        for symmetric in (True, False)
    ]

    answers = oracles.done(oracles.quantised(jobs))

    for job, answer in zip(jobs, answers):
        source = Path(str(job["to"]))
        assert ("weight_zero_point" in answer.pop("stored")) == ("False" in source.name)
        for dtype, expected in answer.items():
            out = source.with_name(f"{source.name}-{dtype}")
            done("convert", source, out, "--to", "huggingface", "--dequantize", dtype)
            (written,) = contents(out).values()
            assert described(written.array.view("u1"))["sha256"] == expected["sha256"], (source.name, dtype)


WORDS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "4 bits in groups": ({"num_bits": 4, "strategy": "group", "group_size": 32}, (40, 96)),
    "4 bits per row": ({"num_bits": 4, "strategy": "channel"}, (9, 64)),
    "4 bits per row, which ends within a word": ({"num_bits": 4, "strategy": "channel"}, (7, 83)),
    "8 bits in groups": ({"num_bits": 8, "strategy": "group", "group_size": 64}, (12, 128)),
    "8 bits per row, which ends within a word": ({"num_bits": 8, "strategy": "channel"}, (5, 33)),
}


@pytest.mark.parametrize("scale", ["float32", "bfloat16", "float16"])
def test_weights_in_words_equal_those_of_compressed_tensors(tmp_path: Path, scale: str) -> None:
    jobs = [
        {"do": "words", "to": str(tmp_path / str(number)), "dtype": scale, "seed": 11, "weights": weights}
        | {"shape": shape}
        for number, (weights, shape) in enumerate(WORDS.values())
    ]

    answers = oracles.done(oracles.quantised(jobs))

    for name, job, answer in zip(WORDS, jobs, answers):
        source = Path(str(job["to"]))
        assert answer.pop("stored") == ["weight_packed", "weight_scale", "weight_shape"]
        for dtype, expected in answer.items():
            out = source.with_name(f"{source.name}-{dtype}")
            done("convert", source, out, "--to", "huggingface", "--dequantize", dtype, "--verify")
            (written,) = contents(out).values()
            assert described(written.array.view("u1"))["sha256"] == expected["sha256"], (name, dtype)
