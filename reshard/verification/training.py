"""What a written checkpoint of Megatron records beside tensors, compared with what it has to record.

One table has all of it: what config.json gives, then what the tensors show, then what the source or --args records,
then what Megatron needs to load the checkpoint. Nothing here is shared with the code that writes: of
`reshard.forms.megatron` it has constants only.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.asked import Target
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, StoredObject, stored_checkpoint
from reshard.checkpoints.formats.dtypes import FROM_TORCH
from reshard.checkpoints.formats.pickles import Global, PickledInstance, inert_class
from reshard.errors import CheckpointError, InputError
from reshard.forms.megatron.arguments import GROUPS, MLA, MOE, PAIRS
from reshard.forms.megatron.keys import EMBEDDING, LEGACY, MEGATRON, OUTPUT, RANK_DIRECTORY, STATE, TORCH_DIST
from reshard.forms.megatron.origin import OPTIMIZER
from reshard.forms.pytorch.form import BACKEND, COMMON, ITERATIONS, METADATA
from reshard.forms.tracker import TRACKER
from reshard.storage import is_directory, names_in, read_json, read_small, reading
from reshard.text.messages import Report, quoted
from reshard.text.names import TRAINING_STEP
from reshard.verification.common_states import (
    Common,
    common_of,
    commons_of,
    groups_of,
    objects_of,
    read_common,
    stored_file,
)
from reshard.verification.converted import object_differences
from reshard.verification.reading import Difference
from reshard.verification.stored import Source, number_in, value_content

_MOST, _LARGEST = 1 << 16, 16 << 20
_TP, _PP, _EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
_CONSUMED, _FLOPS = "consumed_train_samples", "num_floating_point_operations_so_far"
_BATCH = "global_batch_size"
# Positions in the data of another run.
_POSITIONS = (_CONSUMED, "consumed_valid_samples", "skipped_train_samples")
# Arguments for the stages of a run, which another number of stages does not have, and those that a tree has none of.
_STAGES = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "schedules_method"),
    *("virtual_pipeline_model_parallel_size", "num_layer_list"),
)
_NOT_IN_TREES = ("world_size", "data_parallel_size", "rank", "local_rank", "dist_ckpt_optim_fully_reshardable")
_KIND = "fully_reshardable"
_BACKEND = {
    **{"sharded_backend": "torch_dist", "sharded_backend_version": 1},
    **{"common_backend": "torch", "common_backend_version": 1},
}
_ENUMERATIONS = "megatron.core.transformer.enums."
_CLASSES = ("argparse.Namespace", "builtins.set", "builtins.frozenset", "signal.Signals", "torch.device")
_BY_ENDING = {
    "add_qkv_bias": (".linear_qkv.bias",),
    "add_bias_linear": (".linear_proj.bias", ".mlp.linear_fc1.bias"),
    "qk_layernorm": (".q_layernorm.weight", ".linear_q_up_proj.layer_norm_weight"),
    "moe_router_enable_expert_bias": (".expert_bias",),
}
_PARAMETERS = frozenset(
    {"weight", "bias", "layer_norm_weight", "layer_norm_bias", "weight_w", "weight_v", "bias_w", "bias_v"}
)
_MISSING = inert_class("missing")


class Origin(NamedTuple):
    """Where the records are from.

    Attributes:
        own: the common state of a source of Megatron.
        named: that of the checkpoint that --args names.
        args: arguments that one of them records, with those of a JSON file in their place.
        groups: parameter groups; none where settings of the optimizer are stated in a JSON file.
        schedule: the state of the learning rate's schedule, likewise.
        config: the model's config.json, where nothing of Megatron has its sizes.
        step: of the training.
        batch: samples of a step, where the source records no position in the data.
    """

    own: Common | None
    named: Common | None
    args: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    schedule: Mapping[str, Any] | None
    config: Mapping[str, Any]
    step: int | None
    batch: int | None

    @property
    def iteration(self) -> int | None:
        return self.step if self.own is None else self.own.state.get("iteration")


def _origin(source: Source, path: str | None, config_path: str | None, handles: FileHandles) -> Origin:
    checkpoint = stored_checkpoint(source.checkpoint)
    own = common_of(checkpoint.place, handles) if checkpoint.form == MEGATRON else None
    objects, named = checkpoint.objects, None
    stated: Mapping[str, Any] = {}
    if path is not None and is_directory(path):
        place = ITERATIONS.find(path, _is_iteration, "latest", Report()).path
        named = common_of(place, handles)
        objects = objects_of(place) if METADATA in names_in(place) else {}
    elif path is not None and path.endswith(".json"):
        stated = read_json(path, _LARGEST, CheckpointError, "name a JSON file of Megatron's arguments") or {}
    elif path is not None:
        stored = stored_file(path)
        named, objects = None if stored is None else read_common(stored, handles), {}
    step = source.checkpoint.training.get(TRAINING_STEP)
    if TRAINING_STEP in source.values:
        step = number_in(value_content(source.indexes, TRAINING_STEP, source.values[TRAINING_STEP][0]), handles)
    elif step is None and own is not None and len(own.steps) == 1:
        (step,) = own.steps
    recorded = named or own
    config: Mapping[str, Any] = {}
    if recorded is None and config_path is not None:
        from reshard.names import read_config

        config = read_config(config_path)
    args = {**(recorded.args if recorded else {}), **stated}
    batch = source.checkpoint.training.get(_BATCH) or args.get(_BATCH)
    if batch is None and named is not None and named.state.get("iteration"):
        batch = named.args.get(_CONSUMED, 0) // named.state["iteration"]
    if recorded is None or not stated.keys().isdisjoint(OPTIMIZER):
        return Origin(own, named, args, [], None, config, step, batch)
    first = [each for name, each in objects.items() if "optimizer.distributed.dp_group_idx_0.optimizer/" in name]
    groups = recorded.groups or [group for each in first for group in groups_of(read_common(each, handles).state)]
    schedule = recorded.state.get("opt_param_scheduler")
    schedule = schedule if isinstance(schedule, dict) else None
    return Origin(own, named, args, groups, schedule, config, step, batch)


def _is_iteration(path: str, names: Sequence[str]) -> bool:
    return METADATA in names or any(map(RANK_DIRECTORY.fullmatch, names))


def training_differences(
    target: Checkpoint, source: Source, asked: Target, config: str | None, handles: FileHandles
) -> Iterator[Difference]:
    """Differences of a written checkpoint from its source, or from what --args states.

    Args:
        target: the written checkpoint.
        source: the source, with its edits.
        asked: of the target.
        config: the model's configuration, or its directory.
        handles: open files.
    """
    origin = _origin(source, asked.args, config, handles)
    root, place = os.path.split(target.place)
    ranks = [*filter(RANK_DIRECTORY.fullmatch, names_in(target.place))]
    marks = {TRACKER: ITERATIONS.tracked_as(place), **({} if ranks else {os.path.join(place, BACKEND): _BACKEND})}
    for file, content in marks.items():
        if _mark(os.path.join(root, file)) != content:
            yield Difference("file", None, (), f"is not {content}, by which Megatron finds a checkpoint", (file,))
    written = _Written(origin, target, asked, len(ranks))
    try:
        for file, common in commons_of(target.place, handles):
            problems = ["is missing"] if common is None else written.problems(common)
            for problem in problems:
                yield Difference("file", None, (), problem, (os.path.join(place, file),))
    except InputError as error:
        yield Difference("file", None, (), error.message, (place,))
    if not ranks:
        expected: dict[str, StoredObject | None] = dict.fromkeys(_objects(target))
        if origin.own is not None:
            objects = stored_checkpoint(source.checkpoint).objects
            expected.update({name: stored for name, stored in objects.items() if "._extra_state/" in name})
        yield from object_differences(expected, target, handles, but=COMMON)


def _mark(path: str) -> object:
    """The text of a file, or its JSON; None if it is missing."""
    with reading(path):
        try:
            text = read_small(path, _MOST).decode("ascii", "replace").strip()
            return json.loads(text) if path.endswith(".json") else text
        except (FileNotFoundError, ValueError):
            return None


class _Written:
    """What the common states of a checkpoint have to hold.

    Args:
        origin: where it is from.
        target: the checkpoint.
        asked: of the target.
        ranks: files of ranks of a legacy tree; 0 for a ``torch_dist`` directory.
    """

    def __init__(self, origin: Origin, target: Checkpoint, asked: Target, ranks: int) -> None:
        self._origin, self._target, self._asked, self._ranks = origin, target, asked, ranks
        self._weights = {name: each for name, each in target.tensors.items() if not name.startswith("optimizer.")}
        self._has_optimizer = any(name.startswith(STATE) for name in target.tensors)
        parts = [name.split(".") for name in self._weights]
        self._numbered = any(
            each[0] in ("decoder", "encoder") and each[1] == "layers" and each[2].isdigit()
            for each in parts
            if len(each) > 2
        )
        self._apart = any(each[-1].endswith(("_w", "_v")) for each in parts)

    def problems(self, common: Common) -> Iterator[str]:
        """What a common state has otherwise."""
        expected, found = self._expected(common), self._found(common)
        for name in sorted(expected.keys() | found.keys()):
            value, other = (each.get(name, _MISSING) for each in (found, expected))
            if not _same(value, other):
                yield f"{name} is {_shown(value)}, not {_shown(other)}"
        if self._has_optimizer != bool(common.groups):
            yield "has parameter groups of an optimizer without state, or none for its state"
        elif self._has_optimizer:
            yield from self._optimizers(common)
            yield from self._groups(common)

    def _found(self, common: Common) -> dict[str, Any]:
        levels = {"args": common.args}
        levels |= {name: common.state.get(name) or {} for name in ("opt_param_scheduler", "content_metadata")}
        return {
            "directory": os.path.basename(self._target.place),
            **{name: common.state[name] for name in {"iteration", "checkpoint_version", _FLOPS} & common.state.keys()},
            **{f"{level}.{name}": value for level, values in levels.items() for name, value in values.items()},
        }

    def _expected(self, common: Common) -> dict[str, Any]:
        origin, iteration = self._origin, self._origin.iteration
        args = self._args(common)
        levels = {"args": args}
        if self._has_optimizer:
            levels["opt_param_scheduler"] = self._schedule(args)
        if not self._ranks:
            levels["content_metadata"] = {
                "singleton_local_shards": self._apart,
                "chained_optim_avoid_prefix": True,
                **({"non_homogeneous_layers": True} if self._numbered else {}),
                **({"distrib_optim_sharding_type": _KIND} if self._has_optimizer else {}),
                **({"distrib_optim_fully_reshardable_mem_efficient": False} if self._has_optimizer else {}),
            }
        flops = None if origin.own is None else origin.own.state.get(_FLOPS)
        return {
            "directory": ITERATIONS.of(iteration),
            "iteration": iteration or 0,
            "checkpoint_version": 3.0,
            **({_FLOPS: flops} if isinstance(flops, (int, float)) else {}),
            **{f"{level}.{name}": value for level, values in levels.items() for name, value in values.items()},
        }

    def _args(self, common: Common) -> dict[str, Any]:
        origin = self._origin
        recorded = {n: each for n, each in origin.args.items() if origin.named is None or n not in _POSITIONS}
        shown = {} if _TP in recorded else self._shown()
        args = {**(self._of_configuration(origin.config) if origin.config else {}), **shown, **recorded}
        if args.get("noop_layers"):
            # Without layers that hold nothing, there are fewer.
            args.update(num_layers=common.args.get("num_layers"), noop_layers=None)
        # What is no data may be left out.
        args = {name: value for name, value in args.items() if name in common.args or _is_data(value)}
        args.update(
            iteration=origin.iteration or 0,
            ckpt_format=LEGACY if self._ranks else TORCH_DIST,
            ckpt_fully_parallel_save=True,
            use_distributed_optimizer=self._has_optimizer and not self._ranks,
            no_save_optim=None if self._has_optimizer else True,
            no_save_rng=True,
        )
        if self._has_optimizer:
            args["dist_ckpt_optim_fully_reshardable"] = True
            if type(args.get(_CONSUMED)) is not int:
                args[_CONSUMED] = (origin.step or 0) * (origin.batch or 0)
        return self._divided(args, common.args) if self._ranks else args

    def _divided(self, args: dict[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a run with the requested sizes; without a request, with the sizes of the tree."""
        asked = dict(self._asked.sizes or ())
        known = asked or self._asked.format == LEGACY
        sizes = {
            size: asked.get(kind, 1) if known else found.get(size)
            for kind, size in (("tp", _TP), ("pp", _PP), ("ep", _EP))
        }
        if args.get(_PP) != sizes[_PP]:
            args.update((name, None) for name in _STAGES if name in args)
        args.update(sizes, expert_tensor_parallel_size=sizes[_TP], transformer_pipeline_model_parallel_size=sizes[_PP])
        return {name: value for name, value in args.items() if name not in _NOT_IN_TREES}

    def _of_configuration(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that config.json gives."""
        latent = config.get("kv_lora_rank") is not None
        experts = any(config.get(key) for pair in PAIRS if MOE in pair.arguments for key in pair.keys)
        holds = {MLA: latent, MOE: experts}
        args = {
            pair.arguments[0]: config[key]
            for pair in PAIRS
            for key in reversed(pair.keys)
            if config.get(key) is not None and holds.get(pair.where or "", True)
        }
        heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
        grouped = not latent and groups not in (None, heads)
        args.update({MLA: latent, GROUPS: grouped, "num_query_groups": groups if grouped else 1})
        if not latent and heads:
            args["kv_channels"] = config.get("head_dim") or config["hidden_size"] // heads
        if isinstance(config.get("tie_word_embeddings"), bool):
            args["untie_embeddings_and_output_weights"] = not config["tie_word_embeddings"]
        if experts:
            routers = [f"decoder.layers.{layer}.mlp.router.weight" for layer in range(config["num_hidden_layers"])]
            args["moe_layer_freq"] = [int(name in self._weights) for name in routers] if self._numbered else 1
            if config.get("n_shared_experts"):
                shared = config["n_shared_experts"] * config["moe_intermediate_size"]
                args["moe_shared_expert_intermediate_size"] = shared
        return args

    def _shown(self) -> dict[str, Any]:
        """The arguments that the names and types of tensors show."""
        args: dict[str, Any] = {_TP: 1, _PP: 1, "untie_embeddings_and_output_weights": OUTPUT in self._weights}
        for argument, endings in _BY_ENDING.items():
            args[argument] = any(name.endswith(endings) for name in self._weights)
        embedding: GlobalTensor | None = self._weights.get(EMBEDDING)
        if embedding is not None:
            dtype = embedding.dtype
            args.update(padded_vocab_size=embedding.shape[0], bf16=dtype == "BFloat16", fp16=dtype == "Float16")
            args["params_dtype"] = inert_class(next(name for name, each in FROM_TORCH.items() if each == dtype))
        return args

    def _schedule(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the schedule: the recorded one, or that of arguments, in steps of samples."""
        consumed, recorded = {"num_steps": args.get(_CONSUMED)}, self._origin.schedule
        if recorded is not None:
            return {**recorded, **({} if self._origin.named is None else consumed)}
        samples = isinstance(args.get("train_samples"), int)
        unit, kind = (1, "samples") if samples else (args.get(_BATCH), "iters")
        length = args.get("train_samples" if samples else "train_iters")
        if not isinstance(unit, int) or not isinstance(length, int):
            return consumed
        decay = unit * (args.get(f"lr_decay_{kind}") or length)
        warmup = unit * (args.get(f"lr_warmup_{kind}") or 0)
        style = args.get("weight_decay_incr_style") or "constant"
        before, after = ("weight_decay",) * 2 if style == "constant" else ("start_weight_decay", "end_weight_decay")
        return {
            **consumed,
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

    def _optimizers(self, common: Common) -> Iterator[str]:
        """Other optimizers than Megatron looks for: those of experts have one of their own if ranks divide them."""
        held, optimizers, parallel = common.state.get("optimizer"), common.optimizers, common.args.get(_EP)
        apart = type(parallel) is int and parallel > 1 and any(".experts." in name for name in self._weights)
        several = optimizers if self._ranks else dict(enumerate(optimizers))
        if len(optimizers) != 1 + apart or held != (several if apart else optimizers[0]):
            yield f"holds the state of {len(optimizers)} optimizers, and Megatron looks for {1 + apart}"
        if common.steps != {self._origin.step}:
            yield f"the optimizer's step is {sorted(common.steps)}, not {self._origin.step}"
        for number, optimizer in enumerate(optimizers):
            groups = groups_of(optimizer)
            kind = optimizer.get("param_state_sharding_type")
            if not self._ranks and kind != _KIND:
                yield f"param_state_sharding_type is {_shown(kind)}, not {_KIND}"
            if any(bool(group.get("is_expert_parallel")) != bool(number) for group in groups):
                yield f"has groups of experts in optimizer {number}, or of others"
            if len({_key(group) for group in groups}) < len(groups):
                yield f"has a parameter group of optimizer {number} twice"

    def _groups(self, common: Common) -> Iterator[str]:
        """Groups with other settings than the source's, or than --args states."""
        recorded = {_key(group): group for group in self._origin.groups}
        args = self._origin.args
        for group in common.groups:
            decoupled = bool(group.get("is_decoupled_lr"))
            expected: Mapping[str, Any] = recorded.get(_key(group), {})
            if not recorded:
                expected = {
                    "lr": args.get("decoupled_lr" if decoupled else "lr"),
                    "betas": (args.get("adam_beta1"), args.get("adam_beta2")),
                    "eps": args.get("adam_eps"),
                    "weight_decay": (args.get("weight_decay") or 0) * group.get("wd_mult", 1.0),
                    "default_config": not decoupled,
                }
            elif not expected:
                yield f"has a parameter group {_key(group)} that the source lacks"
            for name, value in expected.items():
                own = name in ("step", "params", "is_expert_parallel") or not _is_data(value)
                if not own and not _same(value, group.get(name)):
                    yield f"{name} of a parameter group is {_shown(group.get(name))}, not {_shown(value)}"
        # A rank may have parameters of some groups only.
        lacking = set() if self._ranks else recorded.keys() - {_key(group) for group in common.groups}
        yield from (f"lacks the parameter group {key} of the source" for key in sorted(lacking))


def _key(group: Mapping[str, Any]) -> tuple[float, float, bool]:
    """What distinguishes groups, experts apart: those of experts have the settings of others."""
    return group.get("wd_mult", 1.0), group.get("lr_mult", 1.0), bool(group.get("is_decoupled_lr"))


def _objects(target: Checkpoint) -> Iterator[str]:
    """An object for each module of a layer that is not an embedding, a head or a router; one for each stacked place."""
    for name, tensor in target.tensors.items():
        parts = name.split(".")
        if parts[0] in ("optimizer", "embedding", "output_layer") or "router" in parts:
            continue
        if parts[-1] not in _PARAMETERS:
            continue
        counts: Sequence[int] = ()
        if parts[1:2] == ["layers"] and not parts[2].isdigit() and parts[0] != "mtp":
            counts = tensor.shape[:1]
        of_experts = [at for at, part in enumerate(parts[:-2]) if parts[at : at + 2] == ["experts", "experts"]]
        if of_experts and not parts[of_experts[0] + 2].isdigit():
            counts = tensor.shape[: len(counts) + 1]
        counts = counts or (1,)
        modules = [parts[:-1]]
        if parts[-3:-1] == ["self_attention", "linear_proj"]:
            modules.append([*parts[:-2], "core_attention"])
        for module in modules:
            for place in itertools.product(*map(range, counts)):
                numbers = ".".join(map(str, place)) + "_" + ".".join(map(str, counts))
                yield f"{'.'.join(module)}._extra_state/shard_{numbers}"


def _same(first: Any, second: Any) -> bool:
    """Whether two values of pickles are equal; lists and tuples of equal values are."""
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(value, second[key]) for key, value in first.items())
    if isinstance(first, PickledInstance) and isinstance(second, PickledInstance):
        return first.name == second.name and _same((first.args, first.state), (second.args, second.state))
    if isinstance(first, Global) and isinstance(second, Global):
        return first.name == second.name
    return bool(first == second) and isinstance(first, bool) == isinstance(second, bool)


def _is_data(value: Any) -> bool:
    """Whether a value is written again: plain, a type of torch, an enumeration, or an instance of a class of data."""
    if isinstance(value, Global):
        return value.name in FROM_TORCH or value.name.startswith(_ENUMERATIONS)
    if isinstance(value, PickledInstance):
        return (value.name in _CLASSES or value.name.startswith(_ENUMERATIONS)) and _is_data((value.args, value.state))
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _shown(value: Any) -> str:
    return quoted(str(getattr(value, "name", value))[:80])
