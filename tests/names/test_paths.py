"""Tables between two sides: their path, which an option belongs to, and what two configurations agree on."""

from __future__ import annotations

from typing import Any

import pytest

from reshard.errors import NamesError, UsageError
from reshard.names import Configuration, merged, path, rules_named, tables_named
from reshard.names.rules import NameRules

KEYS = rules_named("deepseek_v3").config_keys | rules_named("megatron").config_keys


SIDES = ("megatron", "huggingface")


def chosen(rules: NameRules) -> dict[str, str]:
    return dict(rules.chosen)


def test_an_option_belongs_to_each_table_that_has_it() -> None:
    family, megatron = tables_named("qwen3,gate_up=halves,layer_keys=numbered,output=shared", *SIDES)
    assert chosen(family) == {"gate_up": "halves", "output": "shared"}
    assert chosen(megatron) == {"family": "qwen3", "layer_keys": "numbered", "output": "shared"}
    # MindFormers alone has a copy of the embedding.
    family, megatron = tables_named("qwen3,output=copied", *SIDES)
    assert chosen(family) == {"output": "copied"} and chosen(megatron) == {"family": "qwen3"}


@pytest.mark.parametrize("mindformers", [True, False])
def test_padding_is_that_of_the_target(mindformers: bool) -> None:
    family, megatron = tables_named(
        "llama,vocab_multiple=16", "megatron", "mindformers" if mindformers else "huggingface"
    )
    assert ("vocab_multiple" in chosen(family)) == mindformers
    assert ("vocab_multiple" in chosen(megatron)) == (not mindformers)


@pytest.mark.parametrize("typed", ["llama,layers=numbered", "llama,layer_keys=both", "llama,family=qwen3"])
def test_an_unknown_option_or_value_is_refused(typed: str) -> None:
    with pytest.raises(UsageError):
        tables_named(typed, *SIDES)


def test_a_table_of_no_family_is_used_alone() -> None:
    assert [rules.path for rules in tables_named("fused_experts", *SIDES)] == ["fused_experts"]


def test_a_table_is_used_alone_between_sides_without_one_for_all_families() -> None:
    assert [rules.path for rules in tables_named("qwen3", "mindformers", "huggingface")] == ["qwen3"]


@pytest.mark.parametrize(
    ("source", "target", "names"),
    [
        ("megatron", "huggingface", [("megatron", True)]),
        ("huggingface", "megatron", [("megatron", False)]),
        ("megatron", "mindformers", [("megatron", True), ("qwen3", False)]),
        ("mindformers", "megatron", [("qwen3", True), ("megatron", False)]),
        ("megatron", "megatron", [("megatron", True), ("megatron", False)]),
        ("huggingface", "huggingface", []),
    ],
)
def test_a_path_leads_through_hugging_faces_names(source: str, target: str, names: list[tuple[str, bool]]) -> None:
    tables = tables_named("qwen3", *SIDES)
    assert [(edge.rules.path, edge.reverse) for edge in path(tables, source, target)] == names


def both(recorded: dict[str, Any], stated: dict[str, Any]) -> dict[str, object]:
    return dict(merged(recorded, Configuration(stated, "config.json"), KEYS))


def test_configurations_are_merged() -> None:
    assert merged({"a": 1}, None, ()) == {"a": 1}
    assert both({"num_experts": 4, "b": 2}, {"n_routed_experts": 4, "b": 3}) == {
        "num_experts": 4,
        "n_routed_experts": 4,
        "b": 3,
    }
    # Null and absent keys contradict nothing, not even what tables use in their place; a vocabulary may be padded.
    assert both({"head_dim": 8}, {"head_dim": None}) == {"head_dim": 8}
    latent = both({"num_attention_heads": 4}, {"num_attention_heads": 4, "num_key_value_heads": 2})
    assert latent["num_key_value_heads"] == 2
    assert both({"vocab_size": 30, "padded_vocab_size": 32}, {"vocab_size": 31})["vocab_size"] == 31
    padded = {"padded_vocab_size": 32, "make_vocab_size_divisible_by": 8}
    assert [both(padded, {"vocab_size": size})["vocab_size"] for size in (25, 32)] == [25, 32]
    assert both({"padded_vocab_size": 32}, {"vocab_size": 1})["vocab_size"] == 1


@pytest.mark.parametrize(
    "recorded, stated",
    [
        ({"num_hidden_layers": 2}, {"num_hidden_layers": 3}),
        ({"n_routed_experts": 4}, {"n_routed_experts": 8}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
        ({"padded_vocab_size": 32}, {"vocab_size": 33}),
        ({"vocab_size": 32}, {"vocab_size": 33}),
        ({"vocab_size": 32}, {"vocab_size": 31}),
        ({"padded_vocab_size": 32, "vocab_size": 30}, {"vocab_size": 29}),
        ({"head_dim": 8}, {"head_dim": 4}),
    ],
)
def test_contradictions_are_refused_by_name(recorded: dict[str, Any], stated: dict[str, Any]) -> None:
    with pytest.raises(NamesError) as refused:
        both(recorded, stated)
    recorded.pop("padded_vocab_size" if "vocab_size" in recorded else "", None)
    assert all(str(value) in str(refused.value) for value in (*stated, *stated.values(), *recorded.values()))
