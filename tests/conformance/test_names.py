"""Built-in tables of names equal MindFormers' own converters and tables, element for element."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reshard.names import apply_rules, rules_named
from tests.conformance import oracles
from tests.names.models import TINY, Config, mixture, table_of
from tests.names.naive import Array, Shapes, arrays_of, assert_equal, made_by, numbered

_VERSION = "2.1.0"


def both_ways(
    table: tuple[str, Sequence[str]], shapes: Shapes, config: Config
) -> tuple[dict[str, Array], dict[str, Array]]:
    """A model in both namings, ours."""
    arrays = numbered(shapes)
    return arrays, arrays_of(apply_rules(rules_named(table_of(*table)), shapes, config), arrays)


def wanted_of(config: Config, **more: Any) -> dict[str, Any]:
    """MindFormers' names of the settings in a config.json."""
    return {
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "hidden_size": config["hidden_size"],
        "num_moe_experts": config.get("num_experts"),
        "moe_ffn_hidden_size": config.get("moe_intermediate_size"),
        **more,
    }


def converted(tmp_path: Path, way: str, model: str, arrays: dict[str, Array], config: dict[str, Any]) -> Any:
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({name: np.ascontiguousarray(array.astype(np.float32)) for name, array in arrays.items()}, source)
    job = {"do": way, "model": model, "file": str(source), "out": str(out), "config": config}
    oracles.done(oracles.mindformers_names(_VERSION, [job]))
    return load_file(out)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("way", ["to_mindformers", "to_huggingface"])
def test_qwen3_equals_mindformers_conversion(tmp_path: Path, way: str, interleaved: bool) -> None:
    config, shapes = TINY["qwen3"]
    options = () if interleaved else ("gate_up=halves",)
    theirs, ours = both_ways(("qwen3", options), shapes, config)
    output = wanted_of(config, use_interleaved_weight_layout_mlp=interleaved)

    if way == "to_mindformers":
        assert_equal(converted(tmp_path, way, "qwen3", theirs, output), ours)
    else:
        assert_equal(converted(tmp_path, way, "qwen3", ours, output), theirs)


def test_qwen3_moe_equals_mindformers_conversion(tmp_path: Path) -> None:
    """Their table has no dense layers."""
    config = {**TINY["qwen3_moe"][0], "mlp_only_layers": []}
    theirs, ours = both_ways(("qwen3_moe", ()), mixture(config), config)

    assert_equal(converted(tmp_path, "to_huggingface", "qwen3_moe", ours, wanted_of(config)), theirs)


def test_experts_of_deepseek_equal_mindformers_conversion(tmp_path: Path) -> None:
    """Their converters are those of DeepSeek-V4, whose experts and shared experts are the same under other names."""
    config, shapes = TINY["deepseek_v3"]
    theirs, ours = both_ways(("deepseek_v3", ()), shapes, config)
    output = wanted_of(config, use_interleaved_weight_layout_mlp=True)
    output["num_moe_experts"] = config["n_routed_experts"]
    packed = {name: array for name, array in ours.items() if "decoder" in name and "experts." in name}

    created = converted(tmp_path, "to_huggingface", "deepseek4", packed, output)

    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "layers.": "model.layers.", ".ffn.": ".mlp."}
    renamed = {}
    for name, array in created.items():
        for old, new in parts.items():
            name = name.replace(old, new, 1)
        renamed[name] = array
    expected = {
        name: array for name, array in theirs.items() if "experts." in name and not name.startswith("model.layers.3.")
    }
    assert len(expected) > 10
    assert_equal(renamed, expected)


@pytest.mark.parametrize("table", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_names_equal_those_of_mindformers_tables(table: str) -> None:
    """`weight_mapping` lists the name of each tensor before packing."""
    config, shapes = TINY[table]
    model = {"deepseek_v3": "deepseek3"}.get(table, table)
    views = made_by(apply_rules(rules_named(table_of(table)), shapes, config))
    targets: dict[str, set[str]] = {}
    for made, each in views.items():
        for source in each.sources:
            targets.setdefault(source, set()).add(made)
    # Of the layer that predicts further tokens they have other names in this table, which is one for inference.
    names = [name for name in targets if not name.startswith("model.layers.3.")]

    [theirs] = oracles.done(oracles.mindformers_names(_VERSION, [{"do": "names", "model": model, "names": names}]))

    for name, mapped in zip(names, theirs):
        mapped = re.sub(r"linear_[qkv]\.", "linear_qkv.", mapped)
        mapped = re.sub(r"experts\.[0-9]+\.(gating|hidden)\.weight", "experts.weight1", mapped)
        mapped = re.sub(r"experts\.[0-9]+\.linear_fc2\.weight", "experts.weight2", mapped)
        mapped = re.sub(r"\.(gating|hidden)\.", ".linear_fc1.", mapped)
        assert targets[name] == {mapped}, name


def test_the_multi_token_prediction_layer_has_mindformers_names() -> None:
    """Those of DeepSeek-V4's converters, but for attention and the bias of experts, which V4 has not alike."""
    config, shapes = TINY["deepseek_v3"]
    views = made_by(apply_rules(rules_named(table_of("deepseek_v3")), shapes, config))

    [reference] = oracles.done(oracles.mindformers_names(_VERSION, [{"do": "known", "model": "deepseek4"}]))

    ours = {name for name in views if name.startswith("mtp.")}
    theirs = {name.replace("{}", "0", 1) for name in reference}
    other = {name for name in ours if "self_attention.linear_kv" in name or "expert_bias" in name}
    assert len(ours) > 15 and len(other) == 3
    assert ours - other <= theirs


@pytest.mark.parametrize("table", ["llama", "qwen2"])
def test_legacy_names_equal_those_of_mindformers_scripts(table: str) -> None:
    config, shapes = TINY[table]
    views = made_by(apply_rules(rules_named(table_of(table)), shapes, config))
    ours = {each.sources[0]: name for name, each in views.items()}
    jobs = [
        {"do": "legacy_names", "names": [*ours], "back": False},
        {"do": "legacy_names", "names": [*ours.values()], "back": True},
    ]

    names, back = oracles.done(oracles.mindformers_names(_VERSION, jobs))

    assert names == [*ours.values()]
    assert back == [*ours]
