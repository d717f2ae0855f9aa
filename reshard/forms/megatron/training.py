"""What a checkpoint to be written records of its training beside tensors: arguments, parameter groups, the schedule.

It comes from ``--args``, from a source of Megatron, or, without optimizer state, from config.json. MindFormers records
no betas, no weight decay and no groups: with optimizer state, what is missing is an error that lists it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints.checkpoint import Checkpoint, stored_checkpoint
from reshard.checkpoints.formats.dtypes import FROM_TORCH
from reshard.checkpoints.formats.pickles import NAMESPACE, Global, PickledInstance, inert
from reshard.errors import CheckpointError
from reshard.forms.megatron.arguments import arguments_of
from reshard.forms.megatron.common import common_of
from reshard.forms.megatron.keys import LEGACY, MEGATRON
from reshard.forms.megatron.model import Model
from reshard.forms.megatron.origin import OPTIMIZER, Stated, groups_among, stated_arguments
from reshard.forms.request import Means, Request
from reshard.forms.writing import without_step
from reshard.text.messages import listing, some_names

FULLY_RESHARDABLE = "fully_reshardable"
"""The kind of optimizer state that is written: it is loaded at any tensor and pipeline sizes."""

_EXPERTS, _MULTIPLIER = "is_expert_parallel", "wd_mult"
_IDENTIFIERS = (_MULTIPLIER, "lr_mult", _EXPERTS, "is_decoupled_lr")
_CLASSES = frozenset({NAMESPACE, "builtins.set", "builtins.frozenset", "signal.Signals", "torch.device"})
_ENUMERATIONS = "megatron.core.transformer.enums."
_BATCH, _CONSUMED, _PARALLEL = "global_batch_size", "consumed_train_samples", "expert_model_parallel_size"
# Positions in the data of another run, whose steps are not those of the tensors.
_POSITIONS = (_CONSUMED, "consumed_valid_samples", "skipped_train_samples")


class Training(NamedTuple):
    """What is written of a training beside its tensors.

    Attributes:
        args: Megatron's arguments by name.
        iteration: the iteration after which it is to go on; None if none is known.
        optimizers: per optimizer its parameter groups; None without optimizer state.
        schedule: the state of the learning rate's schedule; None if it is unknown.
        content: what Megatron has to know of the names.
        others: further entries of the common state.
    """

    args: Mapping[str, Any]
    iteration: int | None
    optimizers: Sequence[Sequence[Mapping[str, Any]]] | None
    schedule: Mapping[str, Any] | None
    content: Mapping[str, bool]
    others: Mapping[str, Any]

    def state(self) -> dict[str, Any]:
        """The common state of ``torch_dist``, as `pickles.pickled` takes it."""
        content: dict[str, Any] = {**self.content, "chained_optim_avoid_prefix": True}
        if self.optimizers is None:
            return {**self.common({}, None), "content_metadata": content}
        each = [
            {"optimizer": {"param_groups": [*map(dict, groups)]}, "param_state_sharding_type": FULLY_RESHARDABLE}
            for groups in self.optimizers
        ]
        content = {
            "distrib_optim_sharding_type": FULLY_RESHARDABLE,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            **content,
        }
        return {**self.common({}, each[0] if len(each) == 1 else dict(enumerate(each))), "content_metadata": content}

    def common(self, models: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
        """The common state, with models by the keys of their chunks, and the optimizer's state; None without one."""
        state = {
            "args": inert(NAMESPACE, state=dict(self.args)),
            "checkpoint_version": 3.0,
            "iteration": self.iteration or 0,
            **self.others,
            **models,
        }
        if optimizer is not None:
            state["optimizer"] = optimizer
            if self.schedule is not None:
                state["opt_param_scheduler"] = dict(self.schedule)
        return state


def training_of(checkpoint: Checkpoint, model: Model, step: int | None, request: Request, means: Means) -> Training:
    """What is to be written of a training.

    Args:
        checkpoint: the source, with the edits of the conversion.
        model: the tensors to write.
        step: the optimizer's step; None if the source has none.
        request: the conversion.

    Raises:
        CheckpointError: something is not known, or contradicts the tensors.
    """
    return _Made(checkpoint, model, step, request, means).training()


class _Made:
    def __init__(self, checkpoint: Checkpoint, model: Model, step: int | None, request: Request, means: Means) -> None:
        self._model, self._asked = model, request.asked.target
        self._place, self._report = checkpoint.place, means.report
        source, handles, path = stored_checkpoint(checkpoint), means.handles, self._asked.args
        # The common state of a source of Megatron, and that of the checkpoint that --args names.
        self._own = common_of(source.place, handles) if source.form == MEGATRON else None
        stated = Stated({}) if path is None else stated_arguments(path, handles)
        self._named = stated.common
        recorded = self._named or self._own
        self._recorded_args = {**({} if recorded is None else recorded.args), **stated.args}
        self._config: Mapping[str, object] | None = None
        if recorded is None and request.edits.config_path is not None:
            from reshard.names import read_config

            self._config = read_config(request.edits.config_path)
        self._groups: Sequence[Mapping[str, Any]] = []
        self._recorded_schedule: Any = None
        # Settings that are stated replace those of the source.
        if recorded is not None and stated.args.keys().isdisjoint(OPTIMIZER):
            objects = source.objects if self._named is None else stated.objects
            self._groups = recorded.groups or groups_among(objects, handles)
            self._recorded_schedule = recorded.state.get("opt_param_scheduler")
        self._step = step
        self._recorded = checkpoint.training
        if step is None and self._own is not None and len(self._own.steps) == 1:
            (self._step,) = self._own.steps
        self._missing: list[str] = []

    def training(self) -> Training:
        args, asked = self._arguments(), self._asked
        if asked.args is not None and asked.format == LEGACY:
            # Megatron loads no legacy tree with other padding than its own. Another run may have fewer tokens.
            of_size = self._own.args if self._own is not None and self._named is not None else args
            self._model.pad(args.get("padded_vocab_size"), of_size.get("vocab_size"), asked.args)
        self._model.check(args, asked.args or self._place)
        iteration = self._step if self._own is None else self._own.iteration
        optimizers = schedule = None
        if self._model.has_optimizer:
            if self._step is None:
                raise without_step(self._place)
            args[_CONSUMED] = self._consumed(args)
            optimizers = self._optimizers(args)
            schedule = self._schedule(args)
            self._refuse_missing()
        args.update(
            iteration=iteration or 0,
            ckpt_format="torch_dist",
            ckpt_fully_parallel_save=True,
            use_distributed_optimizer=optimizers is not None,
            no_save_optim=None if optimizers is not None else True,
            no_save_rng=True,
        )
        if optimizers is not None:
            args["dist_ckpt_optim_fully_reshardable"] = True
        written = {name: value for name, value in args.items() if _is_written(value)}
        if len(written) < len(args):
            names = sorted(args.keys() - written.keys())
            self._report.warn("arguments that are more than plain values are left out: " + listing(names))
        flops = None if self._own is None else self._own.state.get("num_floating_point_operations_so_far")
        others = {"num_floating_point_operations_so_far": flops} if isinstance(flops, (int, float)) else {}
        return Training(written, iteration, optimizers, schedule, self._model.content(), others)

    def _arguments(self) -> dict[str, Any]:
        """The arguments, those of the model included where only its configuration is known."""
        args = dict(self._recorded_args)
        if self._named is not None:
            # Of another run: the position in its data is not that of the tensors.
            args = {name: value for name, value in args.items() if name not in _POSITIONS}
        if self._config is not None:
            made = arguments_of(self._config)
            if not self._model.has_numbered_layers and "moe_layer_freq" in made:
                # A list of equal layers is also 1, with which Megatron stacks them.
                made["moe_layer_freq"] = 1
            args = {**made, **args}
        if not args:
            raise CheckpointError(
                f"{self._place}: does not record the arguments of a training with Megatron",
                file=self._place,
                hint="add --config DIR with config.json of the model, or --args with a checkpoint of Megatron or a "
                "JSON file of arguments",
            )
        if args.get("noop_layers"):
            # Keys number the layers that there are.
            args.update(num_layers=self._model.layers, noop_layers=None)
        # A configuration, and arguments of converters, lack what the tensors show.
        return args if "tensor_model_parallel_size" in args else {**self._model.arguments(), **args}

    def _consumed(self, args: Mapping[str, Any]) -> int:
        """The samples that the training has seen, which the schedule and the data loader go on from."""
        # What the source records of its own run comes before that of the next one.
        consumed, batch = args.get(_CONSUMED), self._recorded.get(_BATCH) or args.get(_BATCH)
        if type(consumed) is int:
            return consumed
        if batch is None:
            batch = self._batch_of_other()
        if type(batch) is not int or args.get("rampup_batch_size"):
            self._missing.append(_CONSUMED)
            return 0
        consumed = (self._step or 0) * batch
        self._report.note(f"{_CONSUMED}: {consumed:,}, the step times {_BATCH} {batch:,}; --args may state another")
        return consumed

    def _batch_of_other(self) -> int | None:
        """The samples of each iteration of the checkpoint that --args names, where all had as many."""
        named = self._named
        iteration = None if named is None else named.iteration
        samples = None if named is None else named.args.get(_CONSUMED)
        if type(samples) is int and iteration and samples % iteration == 0:
            return samples // iteration
        return None

    def _optimizers(self, args: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        """The parameter groups of each optimizer: with expert parallelism, experts have one of their own."""
        groups = _by_identifier(self._groups or self._new_groups(args))
        asked = self._asked
        parallel = dict(asked.sizes or ()).get("ep", 1) if asked.format == LEGACY else args.get(_PARALLEL)
        if self._model.has_experts and type(parallel) is not int:
            self._missing.append(_PARALLEL)
        of_experts = self._model.has_experts and type(parallel) is int and parallel > 1
        groups = [{**group, "step": self._step} for group in groups]
        others = _by_identifier({**group, _EXPERTS: False} for group in groups if not group[_EXPERTS])
        others = others or _by_identifier({**group, _EXPERTS: False} for group in groups)
        if not of_experts:
            return [others]
        experts = [group for group in groups if group[_EXPERTS]]
        return [others, experts or [{**group, _EXPERTS: True} for group in others if not group["is_decoupled_lr"]]]

    def _new_groups(self, args: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Groups as Megatron makes them: no weight decay for vectors, and another rate where one is decoupled."""
        self._missing += (name for name in OPTIMIZER if not _is_number(args.get(name)))
        if self._missing:
            return
        lr, *betas, eps, decay = (float(args[name]) for name in OPTIMIZER)
        decoupled = args.get("decoupled_lr")
        rates = [(False, lr), *([] if decoupled is None else [(True, float(decoupled))])]
        for is_decoupled, rate in rates:
            for multiplier in (1.0, 0.0):
                yield {
                    _MULTIPLIER: multiplier,
                    "lr_mult": 1.0,
                    _EXPERTS: False,
                    "is_decoupled_lr": is_decoupled,
                    "default_config": not is_decoupled,
                    "lr": rate,
                    "betas": tuple(betas),
                    "eps": eps,
                    "weight_decay": decay * multiplier,
                    # Settings of torch's AdamW and of fused ones, as they are by default.
                    "bias_correction": True,
                    "amsgrad": False,
                    "maximize": False,
                    "foreach": None,
                    "capturable": False,
                    "differentiable": False,
                    "fused": None,
                    "decoupled_weight_decay": True,
                    **({"max_lr": rate, "min_lr": args.get("decoupled_min_lr") or 0.0} if is_decoupled else {}),
                }

    def _schedule(self, args: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state of the schedule: that of the source, or as Megatron makes one from its arguments."""
        recorded = self._recorded_schedule
        if isinstance(recorded, dict):
            return {**recorded, **({} if self._named is None else {"num_steps": args[_CONSUMED]})}
        batch = args.get(_BATCH)
        by_samples = type(args.get("train_samples")) is int
        unit, length = (1, args["train_samples"]) if by_samples else (batch, args.get("train_iters"))
        if type(unit) is not int or type(length) is not int:
            names = [name for name in (_BATCH, "train_iters") if type(args.get(name)) is not int]
            self._missing += (name for name in names if name not in self._missing)
            return None
        if self._missing:
            return None
        kind = "samples" if by_samples else "iters"
        decay = (args.get(f"lr_decay_{kind}") or length) * unit
        fraction = args.get("lr_warmup_fraction")
        warmup = fraction * decay if fraction else (args.get(f"lr_warmup_{kind}") or 0) * unit
        style = args.get("weight_decay_incr_style") or "constant"
        constant = style == "constant"
        return {
            "max_lr": float(args["lr"]),
            "lr_warmup_steps": warmup,
            "num_steps": args[_CONSUMED],
            "lr_decay_style": args.get("lr_decay_style") or "linear",
            "lr_decay_steps": decay,
            "min_lr": args.get("min_lr") or 0.0,
            "start_wd": args["weight_decay"] if constant else args.get("start_weight_decay"),
            "end_wd": args["weight_decay"] if constant else args.get("end_weight_decay"),
            "wd_incr_style": style,
            "wd_incr_steps": length * unit,
        }

    def _refuse_missing(self) -> None:
        missing = [*dict.fromkeys(self._missing)]
        if missing:
            place = self._asked.args or self._place
            example = ", ".join(f'"{name}": ...' for name in missing)
            raise CheckpointError(
                f"{place}: does not record {some_names(missing, len(missing))}, which Megatron needs with optimizer "
                "state",
                file=place,
                hint=f"add --args FILE with {{{example}}}, or --args with a checkpoint of Megatron that has these "
                "settings; to convert weights alone: --exclude 'optimizer.*'",
            )


def _by_identifier(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups with the keys by which Megatron finds them, each once; parameters and tensors are left out."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for group in groups:
        kept = {name: value for name, value in group.items() if name != "params" and _is_written(value)}
        kept = {_MULTIPLIER: 1.0, "lr_mult": 1.0, _EXPERTS: False, "is_decoupled_lr": False, **kept}
        found.setdefault(tuple(kept[name] for name in _IDENTIFIERS), kept)
    return [*found.values()]


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_written(value: Any) -> bool:
    """Whether a value of a pickle is written again: plain values, types of torch, and enumerations of Megatron.

    Tensors lie outside of a pickle. Other classes would run where Megatron loads the file, or be missing there.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return True
    if isinstance(value, Global):
        return value.name in FROM_TORCH or value.name.startswith(_ENUMERATIONS)
    if isinstance(value, (list, tuple)):
        return all(map(_is_written, value))
    if isinstance(value, dict):
        return all(map(_is_written, (*value, *value.values())))
    if isinstance(value, PickledInstance) and (value.name in _CLASSES or value.name.startswith(_ENUMERATIONS)):
        return _is_written((value.args, value.state))
    return False
