"""Hugging Face's own saving and loading, with random weights of tiny models.

Jobs:

* ``{"do": "save", "directory", "family", "dtype", "max_shard_size", "seed", "config"}``: `save_pretrained`. Every
  weight is random, also those that a new model has as ones or zeros. `config` replaces sizes.
* ``{"do": "load", "directory"}``: `from_pretrained`. Answers the names that it misses or does not know, the dtypes of
  its weights, and the hash of the logits of one fixed text.
* ``{"do": "cast", "directory", "dtype", "to"}``: `from_pretrained`, `to`, and `save_pretrained` in another directory.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.conformance.workers.protocol import Job, described, serve

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    # Its second layer is dense.
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
        },
    ),
    # Its first layer is dense.
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 14,
        },
    ),
}


def save(job: Job) -> None:
    torch.manual_seed(job["seed"])
    name, sizes = _FAMILIES[job["family"]]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **sizes, **job["config"]})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.to(getattr(torch, job["dtype"])).save_pretrained(job["directory"], max_shard_size=job["max_shard_size"])


def load(job: Job) -> dict[str, Any]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        job["directory"], dtype="auto", local_files_only=True, output_loading_info=True
    )
    with torch.no_grad():
        logits = model.eval()(torch.arange(0, model.config.vocab_size, 5)[None]).logits
    assert torch.isfinite(logits).all()
    return {
        "missing": sorted(info["missing_keys"]),
        "unknown": sorted(info["unexpected_keys"]),
        "dtypes": sorted({str(value.dtype) for value in model.parameters()}),
        "logits": described(logits.float().numpy()),
    }


def cast(job: Job) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(job["directory"], dtype="auto", local_files_only=True)
    model.to(getattr(torch, job["dtype"])).save_pretrained(job["to"])


if __name__ == "__main__":
    serve(lambda job: {"save": save, "load": load, "cast": cast}[job["do"]](job))
