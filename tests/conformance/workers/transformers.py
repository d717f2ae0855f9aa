"""Hugging Face's own saving and loading, with random weights of tiny models.

Jobs:

* ``{"do": "save", "directory", "family", "dtype", "max_shard_size", "seed", "config"}``: `save_pretrained`. Every
  weight is random, also those that a new model has as ones or zeros. `config` replaces sizes.
* ``{"do": "state", "model_type", "directory", "states"}``: likewise of any model with experts, and its state, as torch
  saves it, in `states`: the directories of ``dcp`` and ``hf-sharded``. Answers the names of the state.
* ``{"do": "published", "model_type", "directory", "state"}``: of a default model of the type, up to three tensors of
  each kind, all with few elements: in `state` as torch saves them, in `directory` as `save_pretrained` names them.
  Answers the class and the names of the state.
* ``{"do": "whole", "class", "config", "directory", "state"}``: `save_pretrained` of a model, and its state as torch
  saves it. Answers the hashes of its weights.
* ``{"do": "load_whole", "class", "directory"}``: `from_pretrained`. Answers the names that it misses or does not know,
  and the hashes of the weights.
* ``{"do": "names"}``: of the types whose default models can be made without weights. Answers by type whether a model
  and its `save_pretrained` have other names, and whether experts are fused in the model and in what it saves.
* ``{"do": "load", "directory"}``: `from_pretrained`. Answers the names that it misses or does not know, the dtypes of
  its weights, their hashes, and the hash of the logits of one fixed text.
* ``{"do": "cast", "directory", "dtype", "to"}``: `from_pretrained`, `to`, and `save_pretrained` in another directory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 12,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "num_experts_per_tok": 3,
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
# Of any model: those that its configuration has.
_SIZES_OF_EXPERTS: dict[str, Any] = {
    **_SIZES,
    "head_dim": 8,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "moe_intermediate_size": 24,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "n_group"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), 1),
    "shared_expert_intermediate_size": 24,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    **dict.fromkeys(("index_head_dim", "mamba_d_state", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("index_n_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "index_topk"), 4),
    "mamba_d_head": 16,
}
_SIZES_OF_VISION = {
    **dict.fromkeys(("depth", "num_heads", "spatial_merge_size"), 2),
    **dict.fromkeys(("hidden_size", "out_hidden_size"), 32),
    "intermediate_size": 40,
    "patch_size": 4,
    "image_size": 16,
    "deepstack_visual_indexes": [0],
}


_EXPERTS = re.compile(r'("(?:num_experts|n_routed_experts|num_local_experts|moe_num_experts)": )([0-9]+)')
_WITH_A_HEAD = ("ForConditionalGeneration", "ForCausalLM")
_USUAL = [
    f"MODEL_{task}MAPPING_NAMES"
    for task in ("", "FOR_CAUSAL_LM_", "FOR_IMAGE_TEXT_TO_TEXT_", "FOR_MULTIMODAL_LM_", "FOR_SEQ_TO_SEQ_CAUSAL_LM_")
]


def _tiny(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """What makes a configuration's model small."""
    known = config.to_dict()
    values = {name: size for name, size in sizes.items() if name in known}
    if known.get("layer_types"):
        values["layer_types"] = [*known["layer_types"][:3], known["layer_types"][-1]]
    elif config.model_type == "lfm2_moe":
        values["layer_types"] = ["conv", "full_attention"] * 2
    return values


def state(job: Job) -> list[str]:
    torch.manual_seed(7)
    kind = CONFIG_MAPPING[job["model_type"]]
    default, several = kind(), transformers.AutoModelForCausalLM
    if hasattr(default, "vision_config"):
        several = transformers.AutoModelForImageTextToText
        parts = {"vision_config": _SIZES_OF_VISION, "text_config": _SIZES_OF_EXPERTS}
        config = kind(**{name: _tiny(getattr(default, name), sizes) for name, sizes in parts.items()})
    else:
        config = kind(**_tiny(default, _SIZES_OF_EXPERTS))
        if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
            # A part of a larger model, without a head.
            several = transformers.AutoModel
    model = several.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    model.save_pretrained(job["directory"])
    states = job["states"]
    dcp.save({"model": model.state_dict()}, checkpoint_id=states["dcp"], no_dist=True)
    writer = HuggingFaceStorageWriter(states["hf-sharded"], save_distributed=True)
    dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    return sorted(model.state_dict())


def published(job: Job) -> tuple[str, list[str]]:
    kind = CONFIG_MAPPING[job["model_type"]]
    classes = sorted(_classes_of(job["model_type"]), key=lambda each: not each.endswith(_WITH_A_HEAD))
    made = _made_of(job["model_type"], classes)
    name, model = next((name, model) for name, model in made if isinstance(model.config, kind))
    torch.manual_seed(7)
    state: dict[str, torch.Tensor] = {}
    count: dict[str, int] = {}
    for tensor_name, tensor in sorted(model.state_dict().items(), key=lambda item: dot_natural_key(item[0])):
        alike = re.sub("[0-9]+", "0", tensor_name)
        count[alike] = count.get(alike, 0) + 1
        if count[alike] <= 3:
            small = torch.rand([*map(_few, tensor.shape)])
            state[tensor_name] = small.to(tensor.dtype)
            module, _, own = tensor_name.rpartition(".")
            # Conversions compare shapes with those of the model.
            parameters = model.get_submodule(module)._parameters
            if own in parameters:
                parameters[own] = torch.nn.Parameter(state[tensor_name], requires_grad=False)
    config = model.config
    config.architectures = [name]
    config.save_pretrained(job["directory"])
    path = Path(job["directory"], "config.json")
    path.write_text(_EXPERTS.sub(lambda match: f"{match[1]}{_few(int(match[2]))}", path.read_text()))
    saved = {name: tensor.clone().contiguous() for name, tensor in revert_weight_conversion(model, state).items()}
    save_file(saved, f"{job['directory']}/model.safetensors")
    dcp.save({"model": state}, checkpoint_id=job["state"], no_dist=True)
    return name, sorted(state)


def whole(job: Job) -> dict[str, str]:
    torch.manual_seed(7)
    kind = getattr(transformers, job["class"])
    model = kind(kind.config_class(**job["config"]))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    model.save_pretrained(job["directory"])
    dcp.save({"model": model.state_dict()}, checkpoint_id=job["state"], no_dist=True)
    return {name: _digest(value) for name, value in model.state_dict().items()}


def load_whole(job: Job) -> dict[str, Any]:
    kind = getattr(transformers, job["class"])
    model, info = kind.from_pretrained(job["directory"], local_files_only=True, output_loading_info=True)
    weights = {name: _digest(value) for name, value in model.state_dict().items()}
    return {"missing": sorted(info["missing_keys"]), "unknown": sorted(info["unexpected_keys"]), "weights": weights}


def _few(size: int) -> int:
    """A small size instead, which can be divided by 2 and 3."""
    return size if size < 6 else 6 * (1 + size % 3)


def _made_of(model_type: str, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Default models without weights, as far as they can be made."""
    for name in names:
        try:
            with torch.device("meta"):
                model = getattr(transformers, name)(CONFIG_MAPPING[model_type]())
        except Exception:
            # The default configuration is none of a model, or the model needs another library.
            continue
        yield name, model


def names(job: Job) -> dict[str, list[bool]]:
    result = {}
    for model_type in CONFIG_MAPPING:
        answers = [each for each in (_names_of(model_type, name) for name in _classes_of(model_type)) if each]
        if answers:
            result[model_type] = [any(each) for each in zip(*answers)]
    return result


def _classes_of(model_type: str) -> list[str]:
    """Classes of models of text and those without a head, else any other."""
    usual: list[str] = []
    others: list[str] = []
    for mapping in filter(re.compile("MODEL.*_MAPPING_NAMES").fullmatch, dir(modeling_auto)):
        classes = getattr(modeling_auto, mapping).get(model_type, ())
        (usual if mapping in _USUAL else others).extend([classes] if isinstance(classes, str) else classes)
    return [*dict.fromkeys(usual)] or others[:1]


def _names_of(model_type: str, name: str) -> tuple[bool, bool, bool] | None:
    try:
        with torch.device("meta"):
            state = (model := getattr(transformers, name)(CONFIG_MAPPING[model_type]())).state_dict()
        # As in save_pretrained, which needs weights.
        saved = revert_weight_conversion(model, state)
    except Exception:
        # The default configuration is none of a model, or the model needs another library.
        return None
    experts = (".experts.gate_up_proj", ".experts.down_proj")
    fused, saved_fused = (any(each.endswith(experts) for each in of) for of in (state, saved))
    return state.keys() != saved.keys(), fused, saved_fused


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
        "weights": {name: _digest(value) for name, value in model.state_dict().items()},
        "logits": described(logits.float().numpy()),
    }


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def cast(job: Job) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(job["directory"], dtype="auto", local_files_only=True)
    model.to(getattr(torch, job["dtype"])).save_pretrained(job["to"])


if __name__ == "__main__":
    jobs = {each.__name__: each for each in (save, state, published, whole, load_whole, names, load, cast)}
    serve(lambda job: jobs[job["do"]](job))
