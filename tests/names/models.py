"""Tensors of models under Hugging Face's names, tiny or of real sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.names.naive import Shapes

Config = dict[str, Any]

_MCORE = {"gate_up": "interleaved", "qkv": "grouped"}
#: Per table the options that nothing determines.
_PACKING = {"qwen3": _MCORE, "qwen3_moe": _MCORE, "deepseek_v3": {"gate_up": "interleaved", "mla": "separate"}}


def table_of(family: str, options: Sequence[str] = ()) -> str:
    """The words for --names: a family with its packing, where ``options`` do not state another."""
    stated = {**_PACKING.get(family, {}), **dict(option.split("=") for option in options)}
    return ",".join([family, *(f"{name}={value}" for name, value in stated.items())])


def _attention(shapes: dict[str, tuple[int, ...]], layer: str, config: Config, bias: bool, norms: bool) -> None:
    hidden, size = config["hidden_size"], config["head_dim"]
    for name, heads in (
        ("q", config["num_attention_heads"]),
        ("k", config["num_key_value_heads"]),
        ("v", config["num_key_value_heads"]),
    ):
        shapes[f"{layer}.self_attn.{name}_proj.weight"] = (heads * size, hidden)
        if bias:
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (heads * size,)
    shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, config["num_attention_heads"] * size)
    if norms:
        shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (size,)


def _mlp(shapes: dict[str, tuple[int, ...]], place: str, hidden: int, inner: int) -> None:
    shapes[f"{place}.gate_proj.weight"] = shapes[f"{place}.up_proj.weight"] = (inner, hidden)
    shapes[f"{place}.down_proj.weight"] = (hidden, inner)


def _experts(shapes: dict[str, tuple[int, ...]], layer: str, config: Config, count: int) -> None:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes[f"{layer}.mlp.gate.weight"] = (count, hidden)
    for expert in range(count):
        _mlp(shapes, f"{layer}.mlp.experts.{expert}", hidden, inner)


def _norms(shapes: dict[str, tuple[int, ...]], layer: str, hidden: int) -> None:
    shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)


def dense(config: Config, bias: bool = False, norms: bool = False) -> Shapes:
    """Llama and Qwen2 (with bias), Qwen3 (with norms)."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        _norms(shapes, layer, hidden)
        _attention(shapes, layer, config, bias, norms)
        _mlp(shapes, f"{layer}.mlp", hidden, config["intermediate_size"])
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def mixture(config: Config) -> Shapes:
    """Qwen3-MoE."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        _norms(shapes, layer, hidden)
        _attention(shapes, layer, config, False, True)
        if number in config["mlp_only_layers"]:
            _mlp(shapes, f"{layer}.mlp", hidden, config["intermediate_size"])
        else:
            _experts(shapes, layer, config, config["num_experts"])
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def deepseek(config: Config) -> Shapes:
    """DeepSeek-V3, with the layers that predict further tokens as its releases have them."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rope = config["qk_rope_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        layer = f"model.layers.{number}"
        _norms(shapes, layer, hidden)
        attention = f"{layer}.self_attn"
        shapes[f"{attention}.q_a_proj.weight"] = (config["q_lora_rank"], hidden)
        shapes[f"{attention}.q_a_layernorm.weight"] = (config["q_lora_rank"],)
        shapes[f"{attention}.q_b_proj.weight"] = (heads * (config["qk_nope_head_dim"] + rope), config["q_lora_rank"])
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (config["kv_lora_rank"] + rope, hidden)
        shapes[f"{attention}.kv_a_layernorm.weight"] = (config["kv_lora_rank"],)
        kv_rows = heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
        shapes[f"{attention}.kv_b_proj.weight"] = (kv_rows, config["kv_lora_rank"])
        shapes[f"{attention}.o_proj.weight"] = (hidden, heads * config["v_head_dim"])
        if number < config["first_k_dense_replace"]:
            _mlp(shapes, f"{layer}.mlp", hidden, config["intermediate_size"])
        else:
            _experts(shapes, layer, config, config["n_routed_experts"])
            shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
            inner = config["moe_intermediate_size"] * config["n_shared_experts"]
            _mlp(shapes, f"{layer}.mlp.shared_experts", hidden, inner)
        if number >= config["num_hidden_layers"]:
            shapes[f"{layer}.embed_tokens.weight"] = (config["vocab_size"], hidden)
            shapes[f"{layer}.enorm.weight"] = shapes[f"{layer}.hnorm.weight"] = (hidden,)
            shapes[f"{layer}.eh_proj.weight"] = (hidden, 2 * hidden)
            shapes[f"{layer}.shared_head.norm.weight"] = (hidden,)
            shapes[f"{layer}.shared_head.head.weight"] = (config["vocab_size"], hidden)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def glm(config: Config, norms: bool) -> Shapes:
    """GLM-4.5 (with norms) and GLM-4.5-Air: the experts of DeepSeek-V3, and attention with biases."""
    latent = deepseek({**config, **dict.fromkeys(_LATENT, 1)})
    shapes = {name: shape for name, shape in latent.items() if ".self_attn." not in name}
    for layer in dict.fromkeys(name.partition(".self_attn.")[0] for name in latent if ".self_attn." in name):
        _attention(shapes, layer, config, True, norms)
    return shapes


def fused(shapes: Shapes) -> Shapes:
    """The same model as transformers 5 has it: the experts of a layer in two tensors."""
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        match = re.fullmatch(r"(.*\.experts)\.([0-9]+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            result[name] = shape
        else:
            rows, columns = shape
            packed = f"{match[1]}.down_proj" if match[3] == "down" else f"{match[1]}.gate_up_proj"
            result[packed] = (int(match[2]) + 1, rows if match[3] == "down" else 2 * rows, columns)
    return result


_TINY: Config = {
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "tie_word_embeddings": False,
}
_TINY_DEEPSEEK: Config = {
    **_TINY,
    "moe_intermediate_size": 4,
    "n_routed_experts": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 5,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 3,
    "v_head_dim": 2,
    "num_nextn_predict_layers": 1,
}
_TINY_MIXTURE: Config = {**_TINY, "moe_intermediate_size": 4, "num_experts": 3, "mlp_only_layers": [1]}

#: Per built-in table: the configuration and the tensors of a made-up model.
TINY: dict[str, tuple[Config, Shapes]] = {
    "llama": (_TINY, dense(_TINY)),
    "qwen2": (_TINY, dense(_TINY, bias=True)),
    "qwen3": (_TINY, dense(_TINY, norms=True)),
    "qwen3_moe": (_TINY_MIXTURE, mixture(_TINY_MIXTURE)),
    "deepseek_v3": (_TINY_DEEPSEEK, deepseek(_TINY_DEEPSEEK)),
    "fused_experts": ({**_TINY_MIXTURE, "model_type": "qwen3_moe"}, fused(mixture(_TINY_MIXTURE))),
    "megatron": (_TINY_MIXTURE, mixture(_TINY_MIXTURE)),
}

_LLAMA_70B: Config = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_QWEN2_72B: Config = {**_LLAMA_70B, "vocab_size": 152064, "intermediate_size": 29568}
_QWEN3_32B: Config = {
    **_LLAMA_70B,
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
}
QWEN3_235B: Config = {
    **_QWEN3_32B,
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "mlp_only_layers": [],
}
#: Some of its layers: tests look at every region of a tensor of all layers and experts.
_QWEN3_SHORT: Config = {**QWEN3_235B, "num_hidden_layers": 8, "model_type": "qwen3_moe"}
DEEPSEEK_V3: Config = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
}

#: The same of models that are in use.
REAL: dict[str, tuple[Config, Shapes]] = {
    "llama": (_LLAMA_70B, dense(_LLAMA_70B)),
    "qwen2": (_QWEN2_72B, dense(_QWEN2_72B, bias=True)),
    "qwen3": (_QWEN3_32B, dense(_QWEN3_32B, norms=True)),
    "qwen3_moe": (QWEN3_235B, mixture(QWEN3_235B)),
    "deepseek_v3": (DEEPSEEK_V3, deepseek(DEEPSEEK_V3)),
    "fused_experts": ({**DEEPSEEK_V3, "model_type": "deepseek_v3"}, fused(deepseek(DEEPSEEK_V3))),
    "megatron": (_QWEN3_SHORT, mixture(_QWEN3_SHORT)),
}
