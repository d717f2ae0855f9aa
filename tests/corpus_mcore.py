"""Checkpoints that Megatron-Core wrote, and what they hold."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from tests.corpus import FIXTURES, ROOT

CORPUS_MCORE = ROOT.parent / "shared" / "corpus_mcore"
"""The whole collection; it lies beside the repository where the project is developed."""


class McoreCase(NamedTuple):
    """A case: its name, its root and what is expected of it."""

    name: str
    root: Path
    expected: dict[str, Any]

    @property
    def directory(self) -> Path:
        """The directory of its iteration."""
        return self.root.parent / str(self.expected["folder"])

    @property
    def optimizer(self) -> str:
        """The kind of its optimizer's state; empty if it has none."""
        return str(self.expected["model"]["optimizer"] or "")


def mcore_cases(start: str = "") -> list[McoreCase]:
    """The cases whose names start so, by name: those of the fixtures where the whole collection is missing."""
    place = CORPUS_MCORE if CORPUS_MCORE.is_dir() else FIXTURES / "megatron"
    found = sorted(place.glob(f"{start}*/expected.json"))
    return [McoreCase(path.parent.name, path.parent / "checkpoint", json.loads(path.read_text())) for path in found]


def mcore_case(name: str) -> McoreCase:
    """The case of this name; where it is missing, the test skips."""
    for case in mcore_cases(name):
        if case.name == name:
            return case
    pytest.skip(f"the whole collection is not on this machine, and {name} is not among the fixtures")


_NORMS_AND_MATRICES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    **{f"{each}.weight": f"{each}.weight" for each in ("enorm", "hnorm", "eh_proj")},
    "final_layernorm.weight": "shared_head.norm.weight",
}


def to_hugging_face(native: Mapping[str, npt.NDArray[Any]], config: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Tensors of a model as Megatron holds them, under Hugging Face's names: an oracle that reads no table."""
    layers, vocabulary = config["num_hidden_layers"], config["vocab_size"]
    mla = "kv_lora_rank" in config
    result = {}
    for name, value in native.items():
        if name == "embedding.word_embeddings.weight":
            result["model.embed_tokens.weight"] = value[:vocabulary]
        elif name == "output_layer.weight":
            result["lm_head.weight"] = value[:vocabulary]
        elif name == "decoder.final_layernorm.weight":
            result["model.norm.weight"] = value
        else:
            match = re.fullmatch(r"(decoder|mtp)\.layers\.(?:(\d+)\.)?(?:transformer_layer\.)?(.*)", name)
            assert match is not None, name
            first = layers if match[1] == "mtp" else 0
            numbered = enumerate(value) if match[2] is None else [(int(match[2]), value)]
            for number, each in numbered:
                for tail, part in _parts(match[3], each, config, mla):
                    result[f"model.layers.{first + number}.{tail}"] = part
    return result


def _parts(
    tail: str, value: npt.NDArray[Any], config: Mapping[str, Any], mla: bool
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The parts of one layer's tensor."""
    if tail in _NORMS_AND_MATRICES:
        yield _NORMS_AND_MATRICES[tail], value
    elif tail.startswith("self_attention.linear_qkv."):
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        grouped = value.reshape(groups, heads // groups + 2, -1, *value.shape[1:])
        for key, part in (("q", grouped[:, :-2]), ("k", grouped[:, -2]), ("v", grouped[:, -1])):
            yield f"self_attn.{key}_proj.{tail.rpartition('.')[2]}", part.reshape(-1, *value.shape[1:])
    elif tail.startswith("self_attention."):
        matched = re.fullmatch(r"self_attention\.(q|k|kv)_layernorm\.weight", tail)
        assert matched is not None, tail
        yield f"self_attn.{matched[1]}{'_a_layernorm' if mla else '_norm'}.weight", value
    elif tail.startswith("mlp.experts.experts."):
        for number, expert in enumerate(value):
            for inner, part in _parts(tail.replace("experts.experts.", ""), expert, config, mla):
                yield inner.replace("mlp.", f"mlp.experts.{number}."), part
    else:
        assert tail.endswith("linear_fc1.weight"), tail
        for key, part in zip(("gate", "up"), np.split(value, 2)):
            yield tail.replace("linear_fc1", f"{key}_proj"), part


def digest(value: npt.NDArray[Any]) -> str:
    """The SHA-256 of a tensor's bytes, as the answers have it."""
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
