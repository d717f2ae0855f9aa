"""Checkpoints of Megatron-Core: recognised, read with their optimizer state, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from reshard.errors import CheckpointError
from reshard.forms.megatron.arguments import arguments_of, configuration_of
from reshard.forms.registry import form_of
from tests.corpus_mcore import McoreCase, mcore_cases

CASES = mcore_cases()


def named(case: McoreCase) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=named)
def test_arguments_give_the_sizes_of_the_models_configuration(case: McoreCase) -> None:
    form = form_of(str(case.root))
    assert form.name == "megatron"
    config, expected = form.configuration(str(case.root), "latest"), case.expected["config"]
    assert config is not None
    assert {key: value for key, value in config.items() if key in expected} == {
        key: value for key, value in expected.items() if key in config
    }
    required = {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings"}
    required |= {"num_key_value_heads"} | {key for key in expected if key.endswith("_rank")}
    assert not required - config.keys()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_arguments_of_a_configuration_give_it_back(case: McoreCase) -> None:
    config: dict[str, Any] = case.expected["config"]
    back = configuration_of(arguments_of(config), "config.json")
    assert {key: value for key, value in back.items() if key in config and config[key] is not None} == {
        key: config[key] for key in back if key in config and config[key] is not None
    }
    assert back["tie_word_embeddings"] == config["tie_word_embeddings"]


@pytest.mark.parametrize(
    "argument",
    [
        {"moe_mlp_glu_interleave_size": 32},
        {"apply_layernorm_1p": True},
        {"layernorm_zero_centered_gamma": True},
        {"rotary_interleaved": True},
        {"attention_output_gate": True},
        {"num_experts": 2, "num_layers": 2, "moe_layer_freq": "[0, 1]"},
    ],
)
def test_arguments_that_change_the_meaning_of_rows_are_refused_by_name(argument: dict[str, object]) -> None:
    with pytest.raises(CheckpointError) as refused:
        configuration_of(argument, "common.pt")
    assert list(argument)[-1] in str(refused.value)
