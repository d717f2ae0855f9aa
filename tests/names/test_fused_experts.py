"""Experts that transformers 5 fuses, in PyTorch's checkpoints: they get published names, MindFormers' or stay."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.errors import NamesError
from reshard.names import apply_rules, rules_named
from reshard.text.names import is_near_experts
from tests.model_weights import MODELS, mindformers, weights, write_huggingface
from tests.names.models import TINY
from tests.names.naive import made_by
from tests.running import Argument, done, fails
from tests.trees import Value, read_tree, read_weights, same_checkpoints

PACKING = {"qwen3_moe": "gate_up=interleaved,qkv=grouped", "deepseek_v3": "gate_up=interleaved,mla=separate"}


def numbered(family: str) -> dict[str, Value]:
    """A model as it is published, without the layer after the last, which transformers leaves out."""
    beyond = f"model.layers.{MODELS[family][0]['num_hidden_layers']}."
    return {name: each for name, each in weights(family).items() if not name.startswith(beyond)}


def fused(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """The model as transformers 5 has it: all experts' gates above ups, and downs."""
    parts: dict[str, dict[tuple[str, int], Any]] = {}
    result = {}
    for name, each in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.([0-9]+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            result[name] = each
        else:
            parts.setdefault(match[1], {})[match[3], int(match[2])] = each.array
    for place, arrays in parts.items():
        gates, ups, downs = (
            np.stack([arrays[kind, number] for number in range(len(arrays) // 3)]) for kind in ("gate", "up", "down")
        )
        result[f"{place}.gate_up_proj"] = Value("Float32", np.concatenate([gates, ups], axis=1))
        result[f"{place}.down_proj"] = Value("Float32", downs)
    return result


def moments(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Of an optimizer, with other numbers than the weights."""
    return {f"adam_m.{name}": Value(each.dtype, each.array ^ 1) for name, each in tensors.items()}


def trained(root: Path, tensors: Mapping[str, Value], form: str = "dcp") -> Path:
    """A checkpoint of PyTorch, without a config.json."""
    write_huggingface(root / "source", tensors, {})
    (root / "source" / "config.json").unlink()
    done("convert", root / "source", root / form, "--to", form, "--shards", 3)
    return root / form


def config_of(family: str, root: Path, **more: object) -> Path:
    root.mkdir()
    (root / "config.json").write_text(json.dumps({**MODELS[family][0], "model_type": family, **more}))
    return root


@pytest.mark.deep
@pytest.mark.parametrize("form", ["dcp", "hf-sharded"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fused_experts_get_their_published_names(family: str, form: str, tmp_path: Path) -> None:
    expected = numbered(family)
    source, config = trained(tmp_path, fused(expected), form), config_of(family, tmp_path / "model")
    done("convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, "--verify")
    same_checkpoints(read_weights(tmp_path / "out"), expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == family
    done("verify", tmp_path / "out", "--src", source)
    done("resume", tmp_path / "out")


def test_the_configuration_beside_the_source_decides(tmp_path: Path) -> None:
    source = trained(tmp_path, fused(numbered("qwen3_moe")))
    (config_of("qwen3_moe", tmp_path / "model") / "config.json").rename(source / "config.json")
    done("convert", source, tmp_path / "out", "--to", "huggingface", "--verify")
    same_checkpoints(read_weights(tmp_path / "out"), numbered("qwen3_moe"))
    done("verify", tmp_path / "out", "--src", source)
    done("convert", source, tmp_path / "renamed", "--to", "huggingface", "--verify", "--rename", "model.*=*")
    same_checkpoints(read_weights(tmp_path / "renamed"), numbered("qwen3_moe"))


@pytest.mark.parametrize("model_type", [None, "some_new_moe"])
def test_an_unknown_model_is_an_error_and_names_can_stay(model_type: str | None, tmp_path: Path) -> None:
    tensors = fused(numbered("qwen3_moe"))
    source = trained(tmp_path, tensors)
    words: list[Argument] = ["convert", source, tmp_path / "out", "--to", "huggingface", "--verify"]
    if model_type is not None:
        words += ["--config", config_of("qwen3_moe", tmp_path / "model", model_type=model_type)]
    refused = fails(3, *words, texts=["model.layers.0.mlp.experts.gate_up_proj", "--names none", model_type or ""])
    assert ("--config" in refused.err) == (model_type is None)
    assert not (tmp_path / "out").exists()
    done(*words, "--names", "none")
    same_checkpoints(read_weights(tmp_path / "out"), tensors)
    done("verify", tmp_path / "out", "--src", source)


@pytest.mark.parametrize("model_type", ["gpt_oss", "mistral4"])
def test_experts_that_are_published_fused_stay(model_type: str, tmp_path: Path) -> None:
    tensors = fused(numbered("qwen3_moe"))
    source, config = trained(tmp_path, tensors), config_of("qwen3_moe", tmp_path / "model", model_type=model_type)
    done("convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, "--verify")
    same_checkpoints(read_weights(tmp_path / "out"), tensors)


@pytest.mark.parametrize("nested", ["qwen3_moe", "mixtral"])
def test_experts_of_a_nested_model_are_an_error_where_its_model_is_not_known_with_them(
    nested: str, tmp_path: Path
) -> None:
    """save_pretrained splits them, though it keeps the names of SmolVLM with other language models."""
    source = trained(tmp_path, fused(numbered("qwen3_moe")))
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"model_type": "smolvlm", "text_config": {"model_type": nested}}))
    words: list[Argument] = ["convert", source, tmp_path / "out", "--to", "huggingface", "--config", config]
    fails(3, *words, texts=["gate_up_proj", f"text_config in config.json is a '{nested}'", "--names none"])
    config.write_text(json.dumps({"model_type": "smolvlm", "text_config": {"model_type": "llama"}}))
    done(*words, "--names", "none", "--verify")


def test_a_model_without_experts_needs_no_configuration(tmp_path: Path) -> None:
    source = trained(tmp_path, weights("qwen3"))
    done("convert", source, tmp_path / "out", "--to", "huggingface", "--verify")
    same_checkpoints(read_weights(tmp_path / "out"), weights("qwen3"))


def test_another_number_of_experts_than_configured_is_an_error(tmp_path: Path) -> None:
    source = trained(tmp_path, fused(numbered("qwen3_moe")))
    config = config_of("qwen3_moe", tmp_path / "model", num_experts=5)
    fails(
        3, "convert", source, tmp_path / "out", "--to", "huggingface", "--config", config, texts=["gate_up_proj", "5"]
    )


@pytest.mark.deep
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fused_experts_become_mindformers_with_their_optimizer_state(family: str, tmp_path: Path) -> None:
    model = numbered(family)
    tensors = {**fused(model), **moments(fused(model))}
    source, config = trained(tmp_path, tensors), config_of(family, tmp_path / "model")
    names = f"{family},{PACKING[family]}"
    words: list[Argument] = [
        "--names",
        names,
        "--config",
        config,
        "--optimizer",
        "keep",
        "--dst-strategy",
        "none",
        "--verify",
    ]
    done("convert", source, tmp_path / "out", *words)
    expected = mindformers(family, model, {**MODELS[family][0], "num_nextn_predict_layers": 0})
    (rank,) = read_tree(tmp_path / "out").values()
    same_checkpoints(rank, {**expected, **moments(expected)})


def test_mindformers_experts_become_fused_ones_on_request(tmp_path: Path) -> None:
    tensors = fused(numbered("qwen3_moe"))
    source, config = trained(tmp_path, tensors), config_of("qwen3_moe", tmp_path / "model")
    names = f"qwen3_moe,{PACKING['qwen3_moe']}"
    words: list[Argument] = ["--config", config, "--verify", "--names"]
    done("convert", source, tmp_path / "ranks", "--dst-strategy", "none", *words, names)
    words += [f"{names},expert_names=fused", "--src-strategy", "none", "--to", "hf-sharded", "--shards", 1]
    done("convert", tmp_path / "ranks", tmp_path / "back", *words)
    same_checkpoints(read_weights(tmp_path / "back"), tensors)


def test_numbered_experts_are_fused_only_if_all_are_there() -> None:
    config, shapes = TINY["qwen3_moe"]
    table, config = rules_named("fused_experts"), {**config, "model_type": "qwen3_moe"}
    lacking = {name: shape for name, shape in shapes.items() if ".experts.2." not in name}
    assert "model.layers.0.mlp.experts.gate_up_proj" in made_by(apply_rules(table, shapes, config))
    with pytest.raises(NamesError, match=r"experts\.2"):
        apply_rules(table, lacking, config)


def test_filters_of_names_see_every_name_that_the_table_changes() -> None:
    """A source may lack what filters leave out, so these names count as needed."""
    assert all(is_near_experts(pattern.text) for rule in rules_named("fused_experts").rules for pattern in rule.left)
