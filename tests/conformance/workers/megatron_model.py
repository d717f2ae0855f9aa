"""Sizes of the models of `megatron`, which tests import without torch."""

from __future__ import annotations

from typing import Any

MODEL: dict[str, Any] = {
    "family": "qwen3",
    "layers": 4,
    "hidden": 16,
    "heads": 4,
    "groups": 4,
    "head_dim": 4,
    "ffn": 32,
    "vocab": 44,
    "divisible": 8,
    "tied": False,
    "experts": 0,
    "moe_ffn": 8,
    "shared_ffn": 0,
    "frequency": None,
    "grouped": False,
    "norms_in_linears": False,
    "mtp": 0,
    "seed": 1,
}
LATENT = {"q_lora": 12, "kv_lora": 8, "nope": 4, "rope": 4, "value": 6}
