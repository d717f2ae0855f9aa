"""The common state of a written ``torch_dist`` directory, computed once more from arguments, config.json and tensors.

Arguments that the source or --args records are compared elsewhere. Here are those that only config.json or the tensors
give, the learning rate's schedule where nothing records it, and the form of the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from reshard.checkpoints.formats.dtypes import FROM_TORCH
from reshard.checkpoints.formats.pickles import Global, PickledInstance
from reshard.forms.megatron.keys import EMBEDDING, OUTPUT, STATE
from reshard.text.messages import plural

if TYPE_CHECKING:
    from reshard.checkpoints.checkpoint import GlobalTensor
    from reshard.verification.common_states import Common
    from reshard.verification.training import Origin

_FLOPS = "num_floating_point_operations_so_far"
_ENUMERATIONS = "megatron.core.transformer.enums."
_CLASSES = ("argparse.Namespace", "builtins.set", "builtins.frozenset", "signal.Signals", "torch.device")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_SIZES = {
    **{"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size"},
    **{"num_attention_heads": "num_attention_heads", "vocab_size": "vocab_size", "layernorm_epsilon": "rms_norm_eps"},
    **{"max_position_embeddings": "max_position_embeddings", "rotary_base": "rope_theta"},
}
_BY_ENDING = {
    "add_qkv_bias": (".linear_qkv.bias",),
    "add_bias_linear": (".linear_proj.bias", ".mlp.linear_fc1.bias"),
    "qk_layernorm": (".q_layernorm.weight", ".linear_q_up_proj.layer_norm_weight"),
    "moe_router_enable_expert_bias": (".expert_bias",),
}


def state_differences(common: Common, origin: Origin, tensors: Mapping[str, GlobalTensor]) -> Iterator[str]:
    """Differences of a written common state from its origin and from the tensors beside it."""
    yield from _optimizer(common)
    if common.groups:
        yield from _schedule(common, origin)
    yield from _arguments(common, origin, tensors)
    if origin.config is not None:
        yield from _of_configuration(common.args, origin.args, origin.config)
    operations = None if origin.own is None else origin.own.state.get(_FLOPS)
    if isinstance(operations, (int, float)) and common.state.get(_FLOPS) != operations:
        yield f"{_FLOPS} is {common.state.get(_FLOPS)}, not {operations}"


def _optimizer(common: Common) -> Iterator[str]:
    """One optimizer by itself, several by number: Megatron looks for nothing else."""
    state, count = common.state.get("optimizer"), len(common.optimizers)
    keys = [*state] if isinstance(state, dict) else []
    if count and (keys != [*range(count)] if count > 1 else "optimizer" not in keys):
        yield f"holds the state of {plural(count, 'optimizer')} in another way than Megatron"
    for group in common.groups:
        if "default_config" in group and group["default_config"] is bool(group.get("is_decoupled_lr")):
            yield "a parameter group has the default settings and a learning rate of its own, or neither"


def _schedule(common: Common, origin: Origin) -> Iterator[str]:
    """Differences of the schedule that arguments give, in steps of samples."""
    args, found = common.args, common.state.get("opt_param_scheduler")
    if not isinstance(found, dict):
        yield "has no opt_param_scheduler"
        return
    if origin.schedule is not None:
        return
    samples = isinstance(args.get("train_samples"), int)
    unit, kind = (1, "samples") if samples else (args.get("global_batch_size"), "iters")
    length = args.get("train_samples" if samples else "train_iters")
    if not isinstance(unit, int) or not isinstance(length, int):
        yield "opt_param_scheduler is not that of args, which lack its length"
        return
    decay = unit * (args.get(f"lr_decay_{kind}") or length)
    warmup = unit * (args.get(f"lr_warmup_{kind}") or 0)
    style = args.get("weight_decay_incr_style") or "constant"
    before, after = ("weight_decay",) * 2 if style == "constant" else ("start_weight_decay", "end_weight_decay")
    expected = {
        "max_lr": args.get("lr"),
        "min_lr": args.get("min_lr") or 0,
        "lr_warmup_steps": args["lr_warmup_fraction"] * decay if args.get("lr_warmup_fraction") else warmup,
        "lr_decay_style": args.get("lr_decay_style") or "linear",
        "lr_decay_steps": decay,
        "start_wd": args.get(before),
        "end_wd": args.get(after),
        "wd_incr_style": style,
        "wd_incr_steps": unit * length,
    }
    for name, value in expected.items():
        if found.get(name) != value:
            yield f"opt_param_scheduler.{name} is {found.get(name)}, not {value}"


def _arguments(common: Common, origin: Origin, tensors: Mapping[str, GlobalTensor]) -> Iterator[str]:
    """Arguments that the names and types of tensors show, and those that are data, but not plain values."""
    for name, value in origin.args.items():
        if name not in common.args and _is_kept(value):
            yield f"args.{name} is missing"
    names = [name for name in tensors if not name.startswith(STATE)]
    numbered = any(part.isdigit() for name in names for part in name.split(".")[2:3] if not name.startswith("mtp."))
    frequency = common.args.get("moe_layer_freq")
    if not numbered and isinstance(frequency, (list, tuple)) and "moe_layer_freq" not in origin.args:
        yield "args.moe_layer_freq is a list, with which Megatron reads a key for each layer"
    if "tensor_model_parallel_size" in origin.args:
        return
    # A type is compared by its name.
    args = {name: value.name if isinstance(value, Global) else value for name, value in common.args.items()}
    shown: dict[str, object] = {"untie_embeddings_and_output_weights": OUTPUT in names}
    shown.update(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    for argument, endings in _BY_ENDING.items():
        shown[argument] = any(name.endswith(endings) for name in names)
    if EMBEDDING in tensors:
        (rows, _), dtype = tensors[EMBEDDING].shape, tensors[EMBEDDING].dtype
        shown.update(padded_vocab_size=rows, bf16=dtype == "BFloat16", fp16=dtype == "Float16")
        shown.update(params_dtype=next(name for name, each in FROM_TORCH.items() if each == dtype))
    for name, value in shown.items():
        if name not in origin.args and args.get(name) != value:
            yield f"args.{name} is {args.get(name)}, and the tensors show {value}"


def _is_kept(value: Any) -> bool:
    """Whether a value that is not plain is written again: a type of torch, an enumeration, or a class of data."""
    if isinstance(value, Global):
        return value.name in FROM_TORCH or value.name.startswith(_ENUMERATIONS)
    if not isinstance(value, PickledInstance) or not (value.name in _CLASSES or value.name.startswith(_ENUMERATIONS)):
        return False
    return value.state is None and all(isinstance(each, (bool, int, float, str)) for each in value.args)


def _of_configuration(args: Mapping[str, Any], stated: Collection[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Arguments that config.json gives, but those that are stated."""
    latent = config.get("kv_lora_rank") is not None
    experts = next((config[key] for key in _EXPERTS if config.get(key)), None)
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    expected = {name: config[key] for name, key in _SIZES.items() if config.get(key) is not None}
    expected.update(multi_latent_attention=latent, num_experts=experts, kv_lora_rank=config.get("kv_lora_rank"))
    if not latent and isinstance(heads, int):
        grouped = groups not in (None, heads)
        expected.update(group_query_attention=grouped, num_query_groups=groups if grouped else 1)
        expected.update(kv_channels=config.get("head_dim") or config["hidden_size"] // heads)
    for name, value in expected.items():
        if name not in stated and args.get(name) != value:
            yield f"args.{name} is {args.get(name)}, and config.json gives {value}"
    if experts is None and args.get("moe_layer_freq") is not None and "moe_layer_freq" not in stated:
        yield "args.moe_layer_freq is that of a model with experts"
