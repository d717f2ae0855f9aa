"""What a written checkpoint of Megatron records beside tensors, compared with where it is from.

Nothing here is shared with the code that writes: of `reshard.forms.megatron` it has constants only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.asked import Target
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, StoredObject
from reshard.checkpoints.formats.pickles import Global, PickledInstance
from reshard.errors import CheckpointError, DamagedCheckpointError, InputError
from reshard.forms.megatron.arguments import PAIRS
from reshard.forms.megatron.form import LEGACY, MEGATRON, MODEL_FILE, RANK_DIRECTORY, TORCH_DIST
from reshard.forms.megatron.origin import OPTIMIZER
from reshard.forms.pytorch.form import BACKEND, COMMON, ITERATIONS, METADATA
from reshard.forms.tracker import TRACKER
from reshard.storage import is_directory, names_in, read_json, read_small, reading
from reshard.text.messages import Report, quoted
from reshard.text.names import TRAINING_STEP, natural_order
from reshard.verification.common_states import (
    Common,
    common_of,
    groups_of,
    objects_of,
    opened,
    read_common,
    stored_file,
)
from reshard.verification.megatron_state import state_differences

_MOST = 1 << 16
_PARAMETERS = frozenset(
    {"weight", "bias", "layer_norm_weight", "layer_norm_bias", "weight_w", "weight_v", "bias_w", "bias_v"}
)
_SIZE_ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}
_CONSUMED = "consumed_train_samples"
# Arguments for the division of a run over ranks: those of its stages, which another number of stages does not have,
# and those that a tree of ranks has none of.
_STAGES = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "schedules_method"),
    *("virtual_pipeline_model_parallel_size", "num_layer_list"),
)
_ABSENT = ("world_size", "data_parallel_size", "rank", "local_rank", "dist_ckpt_optim_fully_reshardable")
_DIVIDED = frozenset(
    {
        *(*_SIZE_ARGUMENTS.values(), *_STAGES, *_ABSENT),
        *("expert_tensor_parallel_size", "transformer_pipeline_model_parallel_size"),
    }
)
_KIND = "fully_reshardable"
_LARGEST = 16 << 20
# Arguments that depend on what is written, not on where it is from.
_SET = frozenset(
    {
        *("iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"),
        *("ckpt_format", "ckpt_fully_parallel_save", "use_distributed_optimizer", "no_save_optim", "no_save_rng"),
        "dist_ckpt_optim_fully_reshardable",
    }
)


class WrittenTraining(NamedTuple):
    """A written checkpoint whose records of the training are compared with their origin.

    Attributes:
        directory: the target directory.
        target: the checkpoint in it.
        source: the source, without edits.
        counters: the values of the source that the form records as numbers.
        asked: what is asked of the target.
        config: the model's configuration, or its directory.
        handles: open files.
    """

    directory: str
    target: Checkpoint
    source: Checkpoint
    counters: Mapping[str, int]
    asked: Target
    config: str | None
    handles: FileHandles


class Origin(NamedTuple):
    """Where the records are from.

    Attributes:
        own: the common state of a source of Megatron.
        named: that of the checkpoint that --args names.
        args: arguments that one of them records, with those of a JSON file in their place.
        groups: parameter groups; none where settings of the optimizer are stated in a JSON file.
        schedule: the state of the learning rate's schedule, likewise.
        config: the model's config.json, where nothing of Megatron has its sizes.
    """

    own: Common | None
    named: Common | None
    args: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    schedule: Mapping[str, Any] | None
    config: Mapping[str, Any] | None


def _origin(training: WrittenTraining) -> Origin:
    source, path, handles = training.source, training.asked.args, training.handles
    own = common_of(source.place, handles) if source.form == MEGATRON else None
    objects, named = source.objects, None
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
    recorded = named or own
    config = None
    if recorded is None and training.config is not None:
        from reshard.names import read_config

        config = read_config(training.config)
    if recorded is None or not stated.keys().isdisjoint(OPTIMIZER):
        return Origin(own, named, {**(recorded.args if recorded else {}), **stated}, [], None, config)
    first = [each for name, each in objects.items() if "optimizer.distributed.dp_group_idx_0.optimizer/" in name]
    groups = recorded.groups or [
        group for each in first for group in groups_of(read_common(each, handles).state) if isinstance(group, Mapping)
    ]
    schedule = recorded.state.get("opt_param_scheduler")
    schedule = schedule if isinstance(schedule, dict) else None
    return Origin(own, named, {**recorded.args, **stated}, groups, schedule, config)


def _is_iteration(path: str, names: Sequence[str]) -> bool:
    return METADATA in names or any(map(RANK_DIRECTORY.fullmatch, names))


def differences(training: WrittenTraining) -> Iterator[tuple[str, str]]:
    """Differences of a written checkpoint from its source, or from what --args states, each with a relative file."""
    directory, target, source, counters, _, _, handles = training
    place = os.path.relpath(target.place, directory)
    step = counters.get(TRAINING_STEP)
    yield from _marks(directory, place)
    if any(map(RANK_DIRECTORY.fullmatch, names_in(target.place))):
        yield from _of_legacy(training, place, _origin(training), step)
        return
    yield from _backend(directory, place)
    common_file = os.path.join(place, COMMON)
    try:
        common = common_of(target.place, handles)
    except InputError as error:
        yield common_file, error.message
        return
    if common is None:
        yield common_file, "is missing"
        return
    origin = _origin(training)
    has_optimizer = any(name.startswith("optimizer.state.") for name in target.tensors)
    problems = [
        *_numbers(common, place, origin, step, has_optimizer),
        *_arguments(common, origin),
        *_loading(common, TORCH_DIST, target, has_optimizer),
        *_positions(common, origin),
        *_content(common, target.tensors),
        *(_groups(common, origin) if has_optimizer else ()),
        *_optimizers(common, target.tensors),
        *state_differences(common, origin, target.tensors),
    ]
    yield from ((common_file, problem) for problem in problems)
    yield from _objects(directory, target, source, handles)


def _marks(directory: str, place: str) -> Iterator[tuple[str, str]]:
    expected = ITERATIONS.tracked_as(place)
    path = os.path.join(directory, TRACKER)
    text = None
    with reading(path), contextlib.suppress(FileNotFoundError):
        text = read_small(path, _MOST).decode("ascii", "replace").strip()
    if text is None:
        yield TRACKER, "is missing: it marks the iteration as complete"
    elif text != expected:
        yield TRACKER, f"names {quoted(text)}, not {expected}"


def _of_legacy(training: WrittenTraining, place: str, origin: Origin, step: int | None) -> Iterator[tuple[str, str]]:
    """Differences of every file of a legacy tree."""
    root = os.path.join(training.directory, place)
    names = sorted(filter(RANK_DIRECTORY.fullmatch, names_in(root)))
    asked_sizes = dict(training.asked.sizes or ())
    for name in names:
        path = os.path.join(root, name, MODEL_FILE)
        stored = stored_file(path)
        if stored is None:
            yield os.path.join(place, name, MODEL_FILE), "is missing"
            continue
        common = read_common(stored, training.handles)
        has_optimizer = bool(common.optimizers)
        problems = [
            *_numbers(common, place, origin, step, has_optimizer, None),
            *_arguments(common, origin, _DIVIDED),
            *_loading(common, LEGACY, training.target, has_optimizer),
            *_division(common, origin),
            *_positions(common, origin),
            *(_groups(common, origin, some=True) if has_optimizer else ()),
            *_optimizers(common, training.target.tensors),
        ]
        ranks = 1
        for key, argument in _SIZE_ARGUMENTS.items():
            size = common.args.get(argument)
            ranks *= size if type(size) is int else 0
            # Sizes that were not asked for are 1; without what was asked, those of the tree are taken.
            expected = asked_sizes.get(key, 1 if asked_sizes or training.asked.format == LEGACY else size)
            if size != expected:
                problems.append(f"args.{argument} is {size}, not {expected}")
        if isinstance(common.state.get("optimizer"), list) != (len(common.optimizers) > 1):
            problems.append(f"has {len(common.optimizers)} optimizers otherwise than Megatron loads as many")
        if ranks != len(names):
            problems.append(f"is one of {len(names)} files, and of {ranks} by its args")
        yield from ((os.path.join(place, name, MODEL_FILE), problem) for problem in problems)


def _backend(directory: str, place: str) -> Iterator[tuple[str, str]]:
    path = os.path.join(directory, place, BACKEND)
    with reading(path):
        try:
            content = json.loads(read_small(path, _MOST))
        except FileNotFoundError:
            yield os.path.join(place, BACKEND), "is missing: without it Megatron takes the directory for no checkpoint"
            return
        except ValueError:
            content = None
    expected_backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    if content != expected_backend:
        yield os.path.join(place, BACKEND), "names another backend than torch_dist, version 1"


def _numbers(
    common: Common,
    place: str,
    origin: Origin,
    step: int | None,
    has_optimizer: bool,
    kind: str | None = _KIND,
) -> Iterator[str]:
    own = origin.own
    if step is None and own is not None and len(own.steps) == 1:
        (step,) = own.steps
    expected = own.state.get("iteration") if own is not None else step
    recorded = {"iteration": common.state.get("iteration"), "args.iteration": common.args.get("iteration")}
    for name, number in recorded.items():
        if number != (expected or 0):
            yield f"{name} is {number}, not {expected or 0}"
    if place != ITERATIONS.of(expected):
        yield f"lies in {place}, not in the directory of iteration {expected}"
    if common.state.get("checkpoint_version") != 3.0:
        yield f"checkpoint_version is {common.state.get('checkpoint_version')}, not 3.0"
    if has_optimizer != bool(common.groups):
        yield (
            "has no parameter groups of the optimizer" if has_optimizer else "has groups of an optimizer without state"
        )
    if has_optimizer and common.steps != {step}:
        yield f"the optimizer's step is {' and '.join(map(str, sorted(common.steps))) or None}, not {step}"
    found = common.content.get("distrib_optim_sharding_type")
    if found != (kind if has_optimizer else None):
        yield f"content_metadata names the optimizer state {found}"


def _arguments(common: Common, origin: Origin, others: Collection[str] = ()) -> Iterator[str]:
    """Differences of arguments, but those that depend on what is written, ``others`` among them."""
    # Without layers that hold nothing, there are fewer.
    fewer = ("noop_layers", "num_layers") if origin.args.get("noop_layers") else ()
    for name, value in origin.args.items():
        if name in _SET or name in others or name in fewer:
            continue
        if name in common.args and not _same(value, common.args[name]):
            yield f"args.{name} is {_shown(common.args[name])}, not {_shown(value)}"
        elif name not in common.args and _is_plain(value):
            yield f"args.{name} is missing"
    for arguments, keys, where in PAIRS if origin.config else ():
        number = next((common.args[each] for each in arguments if common.args.get(each) is not None), None)
        holds = number is not None and common.args.get(where or "", True) not in (None, False)
        for key in keys if holds else ():
            expected = (origin.config or {}).get(key, number)
            if isinstance(expected, (int, float, str)) and expected != number and arguments[0] not in origin.args:
                yield f"args give {key} {number!r}, and config.json {expected!r}"
    tied = (origin.config or {}).get("tie_word_embeddings")
    untied = common.args.get("untie_embeddings_and_output_weights")
    if isinstance(tied, bool) and "untie_embeddings_and_output_weights" not in origin.args and untied is not (not tied):
        yield f"args.untie_embeddings_and_output_weights is {untied}, and config.json has tie_word_embeddings {tied}"


def _loading(common: Common, format: str, target: Checkpoint, has_optimizer: bool) -> Iterator[str]:
    """Other values than those by which Megatron loads what is written."""
    plain = format == LEGACY or any(name.startswith("optimizer.state.fp32_param.") for name in target.tensors)
    distributed = has_optimizer and not plain
    has_states = "rng_state" in common.state or any(name.startswith("rng_state/") for name in target.objects)
    expected = {
        "ckpt_format": format,
        "use_distributed_optimizer": distributed,
        "no_save_optim": not has_optimizer or None,
        "no_save_rng": not has_states or None,
        **(
            dict.fromkeys(("ckpt_fully_parallel_save", "dist_ckpt_optim_fully_reshardable"), True)
            if distributed
            else {}
        ),
    }
    for name, value in expected.items():
        if (common.args.get(name) or None) != (value or None):
            yield f"args.{name} is {_shown(common.args.get(name))}, not {_shown(value)}"
    for optimizer in common.optimizers if format != LEGACY else ():
        found = optimizer.get("param_state_sharding_type")
        if found != (_KIND if distributed else None):
            yield f"param_state_sharding_type is {_shown(found)}, not {_KIND if distributed else None}"


def _division(common: Common, origin: Origin) -> Iterator[str]:
    """Arguments that divide a run otherwise than its sizes, or than the source's of as many stages."""
    args = common.args
    tp, pp, _ = map(args.get, _SIZE_ARGUMENTS.values())
    same = origin.args.get(_SIZE_ARGUMENTS["pp"], 1) == pp
    expected = {
        "expert_tensor_parallel_size": tp,
        "transformer_pipeline_model_parallel_size": pp,
        **dict.fromkeys(_ABSENT),
        **{name: origin.args.get(name) if same else None for name in _STAGES},
    }
    for name in args.keys() & {*_STAGES} - origin.args.keys():
        yield f"args.{name} is in no arguments of the source"
    for name, value in expected.items():
        if not _same(args.get(name), value):
            yield f"args.{name} is {_shown(args.get(name))}, not {_shown(value)}"


def _positions(common: Common, origin: Origin) -> Iterator[str]:
    """Differences of the position in the data, and of that in the learning rate's schedule."""
    consumed, schedule = common.args.get(_CONSUMED), common.state.get("opt_param_scheduler")
    expected = consumed if origin.named is not None else origin.args.get(_CONSUMED, consumed)
    if consumed != expected:
        yield f"args.{_CONSUMED} is {consumed}, not {expected}"
    if origin.named is None and origin.schedule is not None:
        expected = origin.schedule.get("num_steps")
    if isinstance(schedule, dict) and schedule.get("num_steps") != expected:
        yield f"opt_param_scheduler.num_steps is {schedule.get('num_steps')}, not {expected}"


def _content(common: Common, names: Collection[str]) -> Iterator[str]:
    """Entries of the content metadata that contradict the names of the tensors."""
    parts = [name.split(".") for name in names if not name.startswith("optimizer.")]
    numbered = any(each[1:2] == ["layers"] and each[2].isdigit() for each in parts if each[0] in ("decoder", "encoder"))
    expected = {
        "singleton_local_shards": any(each[-1].endswith(("_w", "_v")) for each in parts),
        "chained_optim_avoid_prefix": True,
        **({"non_homogeneous_layers": True} if numbered else {}),
    }
    found = {name: value for name, value in common.content.items() if not name.startswith("distrib_optim_")}
    if found != expected:
        yield f"content_metadata is {_shown(found)}, not {_shown(expected)}"


def _optimizers(common: Common, names: Collection[str]) -> Iterator[str]:
    """Optimizers for other parameters: those of experts have one of their own if ranks divide them."""
    if not common.optimizers:
        return
    parallel = common.args.get(_SIZE_ARGUMENTS["ep"])
    count = 2 if type(parallel) is int and parallel > 1 and any(".experts." in name for name in names) else 1
    if len(common.optimizers) != count:
        yield f"has {len(common.optimizers)} optimizers, not {count}"
    for number, optimizer in enumerate(common.optimizers):
        groups = common._replace(optimizers=[optimizer]).groups
        if any(bool(group.get("is_expert_parallel")) != bool(number) for group in groups):
            yield f"has groups of experts in optimizer {number}, or of others"
        if len({_key(group) for group in groups}) < len(groups):
            yield f"has a parameter group of optimizer {number} twice"


def _groups(common: Common, origin: Origin, some: bool = False) -> Iterator[str]:
    """Groups with other settings than the source's, or than --args states; ``some``: of a part of the parameters."""
    recorded = {_key(group): group for group in origin.groups}
    for group in common.groups:
        expected: Mapping[str, Any] = recorded.get(_key(group), {})
        if not recorded:
            args, decoupled = origin.args, group.get("is_decoupled_lr")
            expected = {
                "lr": args.get("decoupled_lr" if decoupled else "lr"),
                "betas": (args.get("adam_beta1"), args.get("adam_beta2")),
                "eps": args.get("adam_eps"),
                "weight_decay": (args.get("weight_decay") or 0) * group.get("wd_mult", 1.0),
            }
        elif not expected:
            yield f"has a parameter group {_key(group)} that the source lacks"
        for name, value in expected.items():
            own = name in ("step", "params", "is_expert_parallel") or _holds_tensor(value)
            if not own and not _same(value, group.get(name)):
                yield f"{name} of a parameter group is {_shown(group.get(name))}, not {_shown(value)}"
    lacking = set() if some else recorded.keys() - {_key(group) for group in common.groups}
    yield from (f"lacks the parameter group {key} of the source" for key in sorted(lacking))
    schedule = common.state.get("opt_param_scheduler")
    for name, value in (origin.schedule or {}).items():
        if name != "num_steps" and (not isinstance(schedule, dict) or not _same(value, schedule.get(name))):
            yield f"opt_param_scheduler.{name} is not {_shown(value)}"


def _key(group: Mapping[str, Any]) -> tuple[float, float, bool]:
    """What distinguishes groups, experts apart: those of experts have the settings of others."""
    return group.get("wd_mult", 1.0), group.get("lr_mult", 1.0), bool(group.get("is_decoupled_lr"))


def _objects(directory: str, target: Checkpoint, source: Checkpoint, handles: FileHandles) -> Iterator[tuple[str, str]]:
    found = {name: stored for name, stored in target.objects.items() if name != COMMON}
    expected: dict[str, StoredObject | None] = dict.fromkeys(_expected_objects(target))
    if source.form == MEGATRON:
        expected.update({name: stored for name, stored in source.objects.items() if "._extra_state/" in name})
    for name in natural_order(found.keys() | expected.keys()):
        stored = found.get(name)
        if stored is None:
            yield os.path.relpath(target.place, directory), f"lacks the object {quoted(name)}"
            continue
        file = os.path.relpath(stored.path, directory)
        if name not in expected:
            yield file, f"has the object {quoted(name)}, which belongs to no module"
            continue
        original = expected[name]
        try:
            same = (
                _is_empty(stored, handles) if original is None else _bytes(stored, handles) == _bytes(original, handles)
            )
        except DamagedCheckpointError as error:
            yield file, error.message
            continue
        if not same:
            yield file, f"the object {quoted(name)} is not " + ("empty" if original is None else "the source's")


def _expected_objects(target: Checkpoint) -> Iterator[str]:
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


def _archive(stored: StoredObject, handles: FileHandles) -> tuple[bytes, Any]:
    with opened(stored, handles) as (state, archive, _):
        archive.check(memoryview(bytearray(_MOST)))
        return archive.pickle(), state


def _bytes(stored: StoredObject, handles: FileHandles) -> bytes:
    return _archive(stored, handles)[0]


def _is_empty(stored: StoredObject, handles: FileHandles) -> bool:
    return bool(_archive(stored, handles)[1] == [None])


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


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, PickledInstance):
        return not value.name or _holds_tensor(value.args) or _holds_tensor(value.state)
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensor, value))
    return isinstance(value, dict) and any(map(_holds_tensor, value.values()))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _shown(value: Any) -> str:
    return quoted(str(getattr(value, "name", value))[:80])
