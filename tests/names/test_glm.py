"""GLM-4.5: a family of the table `megatron` alone, since MindFormers has no names of it for training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import reshard
from tests.model_weights import float32, write_huggingface
from tests.names.models import Config, glm
from tests.running import Argument, done, fails
from tests.trees import Value, read_weights, same_checkpoints

HIDDEN, HEADS, GROUPS, SIZE, EXPERTS, LAYERS = 8, 4, 2, 3, 4, 3
CONFIG: Config = {
    "model_type": "glm4_moe",
    "vocab_size": 12,
    "hidden_size": HIDDEN,
    "intermediate_size": 6,
    "moe_intermediate_size": 5,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}


def weights(norms: bool) -> dict[str, Value]:
    random = np.random.default_rng(3)
    actual = {name: float32(random.standard_normal(shape)) for name, shape in glm(CONFIG, norms).items()}
    for name, twin in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        actual[f"model.layers.{LAYERS}.{name}.weight"] = actual[f"{twin}.weight"]
    return actual


@pytest.mark.parametrize("norms", [False, True])
def test_megatron_gets_grouped_attention_halves_and_the_bias_of_routers(norms: bool, tmp_path: Path) -> None:
    model = weights(norms)
    hf = write_huggingface(tmp_path / "hf", model, CONFIG)
    done("convert", hf, tmp_path / "megatron", "--to", "megatron", "--names", "glm4_moe", "--verify")
    arrays = {name: each.array.view("<f4") for name, each in model.items()}
    with reshard.open(tmp_path / "megatron") as made:
        names = set(made)
        for layer, place in ((1, "decoder.layers.1"), (LAYERS, "mtp.layers.0.transformer_layer")):
            old = f"model.layers.{layer}"
            for what in ("weight", "bias"):
                q, k, v = (
                    arrays[f"{old}.self_attn.{each}_proj.{what}"].reshape(
                        GROUPS, -1, SIZE, *[HIDDEN] * (what == "weight")
                    )
                    for each in "qkv"
                )
                joined = np.concatenate([q, k, v], axis=1).reshape((HEADS + 2 * GROUPS) * SIZE, *q.shape[3:])
                np.testing.assert_array_equal(made[f"{place}.self_attention.linear_qkv.{what}"][...], joined)
            shared = [arrays[f"{old}.mlp.shared_experts.{each}_proj.weight"] for each in ("gate", "up")]
            np.testing.assert_array_equal(
                made[f"{place}.mlp.shared_experts.linear_fc1.weight"][...], np.concatenate(shared)
            )
            bias = arrays[f"{old}.mlp.gate.e_score_correction_bias"]
            np.testing.assert_array_equal(made[f"{place}.mlp.router.expert_bias"][...], bias)
            assert (f"{place}.self_attention.q_layernorm.weight" in names) == norms
    assert {"mtp.layers.0.eh_proj.weight", "mtp.layers.0.final_layernorm.weight"} <= names
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names
    back: list[Argument] = ["convert", tmp_path / "megatron", tmp_path / "back", "--to", "huggingface", "--verify"]
    done(*back, "--names", "glm4_moe", "--config", hf)
    same_checkpoints(read_weights(tmp_path / "back"), model)


def test_a_missing_weight_of_a_router_is_an_error(tmp_path: Path) -> None:
    model = weights(True)
    del model["model.layers.2.mlp.gate.e_score_correction_bias"]
    hf = write_huggingface(tmp_path / "hf", model, CONFIG)
    words: list[Argument] = ["convert", hf, tmp_path / "megatron", "--to", "megatron", "--names", "glm4_moe"]
    fails(3, *words, texts=["missing: 'model.layers.2.mlp.gate.e_score_correction_bias'"])


@pytest.mark.parametrize(
    ("left_out", "stated", "missing"),
    [
        (".k_norm.", {}, "self_attn.k_norm.weight"),
        (".q_norm.", {}, "self_attn.q_norm.weight"),
        ("_norm.weight", {"use_qk_norm": True}, "self_attn.q_norm.weight"),
        ("_proj.bias", {"attention_bias": True}, "self_attn.q_proj.bias"),
        ("layers.0.self_attn.v_proj.bias", {}, "layers.0.self_attn.v_proj.bias"),
    ],
)
def test_norms_and_biases_are_there_together(
    left_out: str, stated: dict[str, bool], missing: str, tmp_path: Path
) -> None:
    """Also as config.json states them: without them, the model computes something else."""
    model = {name: each for name, each in weights(True).items() if left_out not in name}
    hf = write_huggingface(tmp_path / "hf", model, {**CONFIG, **stated})
    words: list[Argument] = ["convert", hf, tmp_path / "out", "--to", "megatron", "--names", "glm4_moe"]
    fails(3, *words, texts=["missing: ", missing])


def test_norms_that_the_configuration_denies_are_not_written(tmp_path: Path) -> None:
    hf = write_huggingface(tmp_path / "hf", weights(True), {**CONFIG, "use_qk_norm": False})
    words: list[Argument] = ["convert", hf, tmp_path / "out", "--to", "megatron", "--names", "glm4_moe"]
    fails(3, *words, texts=["no rule matches", "self_attn.q_norm.weight"])


def test_names_of_mindformers_are_refused(tmp_path: Path) -> None:
    hf = write_huggingface(tmp_path / "hf", weights(True), CONFIG)
    refused = ["--names glm4_moe: MindFormers has no names of this model for training", "--to megatron"]
    convert: list[Argument] = ["convert", hf, tmp_path / "out", "--to", "unified", "--names", "glm4_moe"]
    fails(2, *convert, texts=refused)
    done("convert", hf, tmp_path / "megatron", "--to", "megatron", "--names", "glm4_moe")
    fails(2, "convert", tmp_path / "megatron", *convert[2:], texts=refused)
    fails(2, "names", "show", "glm4_moe", texts=["MindFormers has no names"])
    assert json.loads(done("suggest", tmp_path / "megatron", "--json").out)["names"] == "megatron"
