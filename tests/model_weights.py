"""Whole models under Hugging Face's and MindFormers' names, made with plain NumPy.

What the built-in tables have to make is written down here a second time, tensor by tensor, and how MindFormers cuts it.
Nothing here knows of `reshard`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.names.models import Config, deepseek, dense, mixture
from tests.reference import Array, Strategy
from tests.trees import Checkpoint, Value, layout, write_checkpoint

_PLAIN: Config = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "tie_word_embeddings": False,
}
_MIXTURE: Config = {**_PLAIN, "moe_intermediate_size": 4, "num_experts": 4, "mlp_only_layers": [1]}
_DEEPSEEK: Config = {
    **_PLAIN,
    "moe_intermediate_size": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 3,
    "v_head_dim": 5,
    "num_nextn_predict_layers": 1,
}

#: Per built-in table: configuration, and the shapes of a model under Hugging Face's names.
MODELS: dict[str, tuple[Config, Mapping[str, tuple[int, ...]]]] = {
    "llama": (_PLAIN, dense(_PLAIN)),
    "qwen2": (_PLAIN, dense(_PLAIN, bias=True)),
    "qwen3": (_PLAIN, dense(_PLAIN, norms=True)),
    "qwen3_moe": (_MIXTURE, mixture(_MIXTURE)),
    "deepseek_v3": (_DEEPSEEK, deepseek(_DEEPSEEK)),
}

#: Parameters of MindFormers that tensor parallelism cuts by rows, and those that it cuts by columns.
_ROWS = re.compile(
    r".*(?:linear_qkv|linear_q_up_proj|linear_kv_up_proj|linear_fc1|output_layer|word_embeddings"
    r"|wq|wk|wv|w1|w3|lm_head|tok_embeddings|experts)\.(?:weight|bias|embedding_weight|weight1|weight2)"
)
_COLUMNS = re.compile(r".*(?:linear_proj|linear_fc2|wo|w2)\.weight")


def weights(family: str, seed: int = 0) -> dict[str, Value]:
    """A model under Hugging Face's names; tensors that releases contain twice are equal."""
    random = np.random.default_rng(seed)
    config, shapes = MODELS[family]
    actual = {name: float32(random.standard_normal(shape)) for name, shape in shapes.items()}
    again = f"model.layers.{config['num_hidden_layers']}"
    for name, twin in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        if f"{again}.{name}.weight" in actual:
            actual[f"{again}.{name}.weight"] = actual[f"{twin}.weight"]
    return actual


def float32(array: Array) -> Value:
    return Value("Float32", array.astype("<f4").view("<u4"))


def bfloat16(tensors: Checkpoint) -> dict[str, Value]:
    """Float32 rounded to the nearest BFloat16, to the even one of two; none of them is infinite or no number."""
    return {
        name: Value("BFloat16", ((bits.astype("u8") + 0x7FFF + (bits.astype("u8") >> 16 & 1)) >> 16).astype("<u2"))
        for name, (_, bits) in tensors.items()
    }


def write_huggingface(root: Path, tensors: Checkpoint, config: Config, files: int = 3) -> Path:
    """A directory as `save_pretrained` leaves it."""
    root.mkdir(parents=True)
    names, weight_map = list(tensors), {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::files]}
        write_checkpoint(root / file, part, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.array.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer.json").write_text("{}")
    return root


def mindformers(family: str, tensors: Checkpoint, config: Config, options: Sequence[str] = ()) -> dict[str, Value]:
    """The same model under MindFormers' names.

    Args:
        family: the name of a built-in table.
        tensors: under Hugging Face's names.
        config: of the model.
        options: ``gate_up=halves`` and ``qkv=contiguous``, where they hold.
    """
    dtypes = {tensor.dtype for tensor in tensors.values()}
    (dtype,) = dtypes
    arrays = {name: tensor.array for name, tensor in tensors.items()}
    if family in ("llama", "qwen2"):
        created = {_legacy(name): array for name, array in arrays.items()}
    else:
        created = _mcore(arrays, config, options)
    return {name: Value(dtype, np.ascontiguousarray(array)) for name, array in created.items()}


def _legacy(name: str) -> str:
    for old, new in (
        ("model.embed_tokens.weight", "model.tok_embeddings.embedding_weight"),
        ("model.norm.", "model.norm_out."),
        ("self_attn.q_proj", "attention.wq"),
        ("self_attn.k_proj", "attention.wk"),
        ("self_attn.v_proj", "attention.wv"),
        ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attention_norm"),
    ):
        name = name.replace(old, new)
    return name


def _mcore(arrays: Mapping[str, Array], config: Config, options: Sequence[str]) -> dict[str, Array]:
    created = {
        "embedding.word_embeddings.weight": arrays["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": arrays["model.norm.weight"],
    }
    if "lm_head.weight" in arrays:
        created["output_layer.weight"] = arrays["lm_head.weight"]
    layers = config["num_hidden_layers"]
    for number in range(layers):
        _layer(created, arrays, f"model.layers.{number}", f"decoder.layers.{number}", config, options)
    for number in range(config.get("num_nextn_predict_layers", 0)):
        old, new = f"model.layers.{layers + number}", f"mtp.layers.{number}"
        _layer(created, arrays, old, f"{new}.transformer_layer", config, options)
        for name in ("enorm", "hnorm", "eh_proj"):
            created[f"{new}.{name}.weight"] = arrays[f"{old}.{name}.weight"]
        created[f"{new}.final_layernorm.weight"] = arrays[f"{old}.shared_head.norm.weight"]
    return created


def _layer(
    tensors: dict[str, Array], arrays: Mapping[str, Array], old: str, new: str, config: Config, options: Sequence[str]
) -> None:
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_norm": "self_attention.q_layernorm",
        "self_attn.k_norm": "self_attention.k_layernorm",
        "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
        "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
        "self_attn.q_a_layernorm": "self_attention.q_layernorm",
        "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
        "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
        "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
        "mlp.gate": "mlp.router",
        "mlp.down_proj": "mlp.linear_fc2",
        "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
    }
    for theirs, ours in names.items():
        if f"{old}.{theirs}.weight" in arrays:
            tensors[f"{new}.{ours}.weight"] = arrays[f"{old}.{theirs}.weight"]
    if f"{old}.mlp.gate.e_score_correction_bias" in arrays:
        tensors[f"{new}.mlp.router.expert_bias"] = arrays[f"{old}.mlp.gate.e_score_correction_bias"]
    if f"{old}.self_attn.k_proj.weight" in arrays:
        q, k, v = (arrays[f"{old}.self_attn.{name}_proj.weight"] for name in "qkv")
        tensors[f"{new}.self_attention.linear_qkv.weight"] = _qkv(q, k, v, config, "qkv=contiguous" in options)
    for place in ("mlp", "mlp.shared_experts"):
        if f"{old}.{place}.gate_proj.weight" in arrays:
            gate, up = (arrays[f"{old}.{place}.{name}_proj.weight"] for name in ("gate", "up"))
            rows = [gate, up] if "gate_up=halves" in options else [row[None] for both in zip(gate, up) for row in both]
            tensors[f"{new}.{place}.linear_fc1.weight"] = np.concatenate(rows)
    if f"{old}.mlp.experts.0.up_proj.weight" in arrays:
        first, second = [], []
        for expert in range(len(arrays[f"{old}.mlp.gate.weight"])):
            gate, up, down = (
                arrays[f"{old}.mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            first.append(np.concatenate([gate.T, up.T], axis=1))
            second.append(down.T)
        tensors[f"{new}.mlp.experts.weight1"] = np.concatenate(first)
        tensors[f"{new}.mlp.experts.weight2"] = np.concatenate(second)


def _qkv(q: Array, k: Array, v: Array, config: Config, contiguous: bool) -> Array:
    if contiguous:
        return np.concatenate([q, k, v])
    groups = config["num_key_value_heads"]
    return np.concatenate([part for parts in zip(*(np.split(each, groups) for each in (q, k, v))) for part in parts])


def cut(tensors: Checkpoint, layers: int, data: int = 1, model: int = 2, stages: int = 2) -> Strategy:
    """How MindFormers cuts a model over replicas, tensor parallelism and pipeline stages.

    Experts are shared out over the devices that cut the other parameters.
    """
    rows: list[dict[str, Any]] = [{"devices": data * model, "layouts": {}} for _ in range(stages)]
    for name, tensor in tensors.items():
        axes = [-1] * tensor.array.ndim
        if _ROWS.fullmatch(name):
            axes[0] = 0
        elif _COLUMNS.fullmatch(name):
            axes[1] = 0
        number = re.search(r"(?:decoder|model)\.layers\.([0-9]+)", name)
        first = name.startswith(("embedding.", "model.tok_embeddings."))
        stage = int(number[1]) * stages // layers if number else 0 if first else stages - 1
        rows[stage]["layouts"][name] = layout([data, model], axes)
    return rows
