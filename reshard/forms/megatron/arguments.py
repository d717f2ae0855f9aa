"""Arguments of a training with Megatron, and the keys of config.json for the same.

`PAIRS` lists numbers that have two names. Others, such as which layers have experts, have a function for each
direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.errors import CheckpointError
from reshard.forms.megatron.stages import numbers_in
from reshard.forms.recorded import ProblemError
from reshard.text.messages import quoted

MLA, MOE, GROUPS = "multi_latent_attention", "num_experts", "group_query_attention"


class Pair(NamedTuple):
    """A number of a model under its names.

    Attributes:
        arguments: Megatron's argument, then those of others for the same, such as MindSpeed's converter.
        keys: keys of config.json; all of them get the number, and the first that is there gives it.
        where: the argument that has to be set for this one to mean anything, as others keep their defaults.
    """

    arguments: tuple[str, ...]
    keys: tuple[str, ...]
    where: str | None = None


PAIRS = (
    Pair(("num_layers",), ("num_hidden_layers",)),
    Pair(("hidden_size",), ("hidden_size",)),
    Pair(("ffn_hidden_size",), ("intermediate_size",)),
    Pair(("num_attention_heads",), ("num_attention_heads",)),
    Pair(("num_query_groups", "num_key_value_heads"), ("num_key_value_heads",), GROUPS),
    Pair(("vocab_size",), ("vocab_size",)),
    Pair(("padded_vocab_size",), ("padded_vocab_size",)),
    Pair(("max_position_embeddings",), ("max_position_embeddings",)),
    Pair(("layernorm_epsilon", "norm_epsilon"), ("rms_norm_eps",)),
    Pair(("rotary_base",), ("rope_theta",)),
    Pair((MOE,), ("num_experts", "n_routed_experts", "num_local_experts"), MOE),
    Pair(("moe_ffn_hidden_size", "moe_intermediate_size"), ("moe_intermediate_size",), MOE),
    Pair(("moe_router_topk",), ("num_experts_per_tok",), MOE),
    Pair(("moe_shared_expert_intermediate_size",), ("shared_expert_intermediate_size",), MOE),
    Pair(("moe_router_score_function",), ("scoring_func",), MOE),
    Pair(("moe_router_topk_scaling_factor",), ("routed_scaling_factor",), MOE),
    Pair(("moe_router_num_groups",), ("n_group",), MOE),
    Pair(("moe_router_group_topk",), ("topk_group",), MOE),
    Pair(("q_lora_rank",), ("q_lora_rank",), MLA),
    Pair(("kv_lora_rank",), ("kv_lora_rank",), MLA),
    Pair(("qk_head_dim", "qk_nope_head_dim"), ("qk_nope_head_dim",), MLA),
    Pair(("qk_pos_emb_head_dim", "qk_rope_head_dim"), ("qk_rope_head_dim",), MLA),
    Pair(("v_head_dim",), ("v_head_dim",), MLA),
    Pair(("mtp_num_layers",), ("num_nextn_predict_layers",)),
)

ARGUMENTS: Mapping[str, str] = {key: pair.arguments[0] for pair in PAIRS for key in pair.keys}
"""The argument for each key of config.json."""

_MULTIPLE = "make_vocab_size_divisible_by"
# Whether linear_fc1 has gate rows and up rows.
_GATED = "swiglu"
# Arguments that change what the rows of a weight mean, and the values of each with which they do not.
_OF_ROWS: Mapping[str, tuple[object, ...]] = {
    _GATED: (None, True),
    "glu_interleave_size": (None, 0),
    "moe_mlp_glu_interleave_size": (None, 0),
    "moe_shared_expert_glu_interleave_size": (None, 0),
    "apply_layernorm_1p": (None, False),
    "layernorm_zero_centered_gamma": (None, False),
    "rotary_interleaved": (None, False),
    "attention_output_gate": (None, False),
    "moe_latent_size": (None, 0),
    "linear_attention_freq": (None,),
    "experimental_attention_variant": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_override_pattern": (None,),
    "is_hybrid_model": (None, False),
    "use_legacy_models": (None, False),
}


def configuration_of(args: Mapping[str, Any], path: str) -> dict[str, object]:
    """The keys of config.json that arguments give; absent arguments give none.

    Args:
        args: arguments by name, of Megatron or of MindSpeed's converter.
        path: the file they are from, for messages.

    Raises:
        CheckpointError: with an argument, rows of weights mean something else than in such models, or arguments
            contradict one another.
    """
    refuse_other_rows(args, path)
    config: dict[str, object] = {}
    for pair in PAIRS:
        value = next((args[name] for name in pair.arguments if args.get(name) is not None), None)
        if isinstance(value, (int, float, str)) and _holds(args, pair.where):
            config.update(dict.fromkeys(pair.keys, value))
    multiple, tp = args.get(_MULTIPLE), args.get("tensor_model_parallel_size")
    if isinstance(multiple, int) and isinstance(tp, int):
        config[_MULTIPLE] = multiple * tp
    layers = config.get("num_hidden_layers")
    if args.get("noop_layers") and isinstance(layers, int):
        # MindSpeed counts layers that do nothing, which no other model has.
        try:
            config["num_hidden_layers"] = layers - len(numbers_in(args, "noop_layers") or ())
        except ProblemError as error:
            raise CheckpointError(f"{path}: {error}", file=path) from error
    heads = config.get("num_attention_heads")
    if heads is not None and args.get(GROUPS) is False and not args.get(MLA):
        config["num_key_value_heads"] = heads
    if not args.get(MLA) and isinstance(args.get("kv_channels"), int):
        config["head_dim"] = args["kv_channels"]
    if args.get("mtp_num_layers", 0) is None:
        config["num_nextn_predict_layers"] = 0
    untied = args.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        config["tie_word_embeddings"] = not untied
    config.update(_experts_of(args, config, path))
    return config


def refuse_other_rows(args: Mapping[str, Any], path: str) -> None:
    """Refuse arguments by name with which a table of names would put rows in wrong places."""
    for name, harmless in _OF_ROWS.items():
        if args.get(name) not in harmless and not (name == _GATED and args.get("quick_geglu")):
            raise CheckpointError(
                f"{path}: the arguments of the training have {name} = {quoted(str(args[name]))}, with which rows of "
                "weights mean something else than in tables of names",
                file=path,
                hint="export it with the tools that it was trained with",
            )


def _holds(args: Mapping[str, Any], where: str | None) -> bool:
    """Whether a condition of a pair holds; it holds if the argument is absent."""
    value = args.get(where, True) if where is not None else True
    return value is not None and value is not False


def _experts_of(args: Mapping[str, Any], config: Mapping[str, object], path: str) -> dict[str, object]:
    """Keys of which layers have experts, and of shared ones."""
    if not args.get(MOE):
        return {}
    found: dict[str, object] = {}
    shared, width = config.get("shared_expert_intermediate_size"), config.get("moe_intermediate_size")
    if isinstance(shared, int) and isinstance(width, int) and width and shared % width == 0:
        found["n_shared_experts"] = shared // width
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int):
        dense = dense_layers(args, layers, path)
        if dense == list(range(len(dense))):
            found["first_k_dense_replace"] = len(dense)
        found["mlp_only_layers"] = dense
    return found


def dense_layers(args: Mapping[str, Any], layers: int, path: str) -> list[int]:
    """The numbers of layers without experts, in a model that has some."""
    frequency = args.get("moe_layer_freq")
    first = args.get("first_k_dense_replace")
    first = first if isinstance(first, int) else 0
    if frequency is None or isinstance(frequency, int):
        every = frequency or 1
        return [layer for layer in range(layers) if layer < first or layer % every]
    if isinstance(frequency, (list, tuple)) and len(frequency) == layers and not set(frequency) - {0, 1}:
        return [layer for layer, has_experts in enumerate(frequency) if not has_experts]
    raise CheckpointError(
        f"{path}: the arguments of the training have moe_layer_freq = {quoted(str(frequency))}, which does not "
        f"state for each of {layers} layers whether it has experts",
        file=path,
    )


def arguments_of(config: Mapping[str, Any]) -> dict[str, object]:
    """Megatron's arguments that a config.json gives: those of the model, not of its training."""
    args: dict[str, object] = {}
    has = {MLA: config.get("kv_lora_rank") is not None, MOE: any(config.get(key) for key in _keys(MOE))}
    for pair in PAIRS:
        value = next((config[key] for key in pair.keys if config.get(key) is not None), None)
        if value is not None and has.get(pair.where or "", True):
            args[pair.arguments[0]] = value
    heads = config.get("num_attention_heads")
    args[MLA] = has[MLA]
    args[GROUPS] = not has[MLA] and args.get("num_query_groups", heads) != heads
    if not args[GROUPS]:
        args["num_query_groups"] = 1
    hidden = config.get("hidden_size")
    if not has[MLA] and isinstance(heads, int) and heads and isinstance(hidden, int):
        args["kv_channels"] = config.get("head_dim") or hidden // heads
    if isinstance(config.get("tie_word_embeddings"), bool):
        args["untie_embeddings_and_output_weights"] = not config["tie_word_embeddings"]
    layers = config.get("num_hidden_layers")
    if has[MOE] and isinstance(layers, int):
        args["moe_layer_freq"] = [int(_has_experts(config, layer)) for layer in range(layers)]
        shared, width = config.get("n_shared_experts"), config.get("moe_intermediate_size")
        if isinstance(shared, int) and shared and isinstance(width, int):
            args["moe_shared_expert_intermediate_size"] = shared * width
    return args


def _keys(argument: str) -> tuple[str, ...]:
    return next(pair.keys for pair in PAIRS if argument in pair.arguments)


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    if layer < (config.get("first_k_dense_replace") or 0):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0 and (
        layer % (config.get("moe_layer_freq") or 1) == 0
    )
