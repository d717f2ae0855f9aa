"""Names in the states of PyTorch's trainers: words before and in a model's names, added and removed.

| in a trainer's state | in a model, and in MindSpore's checkpoints |
| --- | --- |
| ``model.NAME`` | ``NAME`` |
| ``optimizer.state.NAME.exp_avg``, ``optimizer.state.exp_avg.NAME`` | ``adam_m.NAME`` |
| ``optimizer.state.NAME.exp_avg_sq``, ``optimizer.state.exp_avg_sq.NAME`` | ``adam_v.NAME`` |
| ``optimizer.state.fp32_param.NAME`` | ``main_param.NAME`` |

Recorded keys around these, such as ``app`` in ``app.model.NAME``, are removed with them. Other optimizer state has no
place outside of a trainer's state, such as a step for each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Optional

from reshard.named_tuple import NamedTuple
from reshard.text.names import TRAINER_OPTIMIZERS, is_weight, trainer_optimizer

MODEL = "model."
_STATES = {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v.", "fp32_param": "main_param."}
# Between these and the names of parameters.
_INNER = ("optim.", "state.")
# Modules around others, of torch.compile, FSDP and activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Optimizer state without a key of its own: an optimizer's flattened state, saved beside a model's names.
_BARE_STATE, _BARE_GROUPS = "state.", "param_groups."
# Names of a causal language model of Hugging Face in a trainer's state.
_CAUSAL = ("model.model.", "model.lm_head.")


class PlainNames(NamedTuple):
    """Names without the words of a trainer.

    Attributes:
        names: the new name of every tensor; None for skipped tensors.
        prefix: the removed beginning of names, such as ``model.``; empty if none is removed.
        left_out: optimizer state that has no other name.
        outside: other tensors of the state, such as those of a generator.
        kept: recorded keys before names of weights that are not removed.
    """

    names: dict[str, Optional[str]]
    prefix: str
    left_out: list[str]
    outside: Sequence[str] = ()
    kept: Sequence[str] = ()


def plain_names(
    names: Collection[str], objects: Collection[str], keys: Mapping[str, Sequence[Any]], optimizer: bool
) -> PlainNames:
    """The names of tensors of a trainer's state as a model has them.

    ``model.`` is removed if it is a recorded key of nested dictionaries, with the keys before it. Without records it is
    removed if every weight has it and the state is a trainer's: it has optimizer state, or a second ``model.`` or
    ``lm_head.`` follows. Where weights have no recorded keys before their names, those that have some are not the
    model's.

    Args:
        names: of all tensors.
        objects: names of objects.
        keys: by name, where it is recorded, the keys of the nested dictionaries that it was made of.
        optimizer: optimizer state is kept, under MindSpore's names.
    """
    around = _keys_around(names, keys)
    if around:
        return _inner_names(around, names, objects, keys, optimizer)
    bare = any(name.startswith(_BARE_GROUPS) for name in objects)
    states = {name for name in names if trainer_optimizer(name) or (bare and name.startswith(_BARE_STATE))}
    weights = [name for name in names if name not in states]
    # State that an optimizer of MindSpore has under the name in the model, such as exp_avg.NAME beside model.NAME.
    inner = frozenset(name[len(MODEL) :] for name in weights if name.startswith(MODEL))
    inner_states = {name for name in weights if name.partition(".")[2] in inner and not is_weight(name, inner)}
    unrecorded = [name for name in weights if name not in keys and name not in inner_states]
    rooted = {name for name in weights if name in keys and len(keys[name]) > 1 and keys[name][0] == MODEL[:-1]}
    if unrecorded and all(name.startswith(MODEL) for name in unrecorded):
        beside = states or inner_states or any(trainer_optimizer(name) for name in objects)
        if beside or any(name.startswith(_CAUSAL) for name in unrecorded):
            rooted.update(unrecorded)
    if rooted:
        # Names that an edit gave have no recorded keys, or only themselves.
        rooted.update(name for name in weights if len(keys.get(name, ())) < 2 and name.startswith(MODEL))
    all_names = frozenset(names)
    # Counters and MindSpore's optimizer state stay.
    stay = rooted | inner_states
    others = [name for name in weights if name not in stay and is_weight(name, all_names)]
    nested = [name for name in others if len(keys.get(name, ())) > 1]
    outside: list[str] = []
    if rooted:
        # Of a nested state, a key beside "model" is not of the model.
        outside = [name for name in others if keys.get(name, (MODEL[:-1],))[0] != MODEL[:-1]]
    elif any("." in name and len(keys.get(name, ())) == 1 for name in others):
        outside = nested
    new_names: dict[str, Optional[str]] = {}
    for name in names:
        if name in states:
            new_names[name] = _state_name(name) if optimizer else None
        else:
            new_names[name] = _unwrapped(name[len(MODEL) :] if name in rooted else name)
    left_out = [name for name in names if new_names[name] is None]
    new_names.update(dict.fromkeys(outside))
    kept = {} if rooted or outside else {_keys_before(keys[name]): None for name in nested}
    return PlainNames(new_names, MODEL if rooted else "", left_out, outside, [*kept])


def _keys_before(path: Sequence[Any]) -> str:
    """The keys before a model's name, joined: to "model", or the first one."""
    count = path.index(MODEL[:-1]) + 1 if MODEL[:-1] in path[:-1] else 1
    return ".".join(map(str, path[:count]))


def _keys_around(names: Collection[str], keys: Mapping[str, Sequence[Any]]) -> tuple[Any, ...]:
    """The recorded keys before that of the one model; empty if there are none, or several models."""
    recorded = [tuple(keys[name]) for name in names if name in keys]
    around = {path[: path.index(MODEL[:-1])] for path in recorded if MODEL[:-1] in path[:-1]}
    return around.pop() if len(around) == 1 else ()


def _inner_names(
    around: tuple[Any, ...],
    names: Collection[str],
    objects: Collection[str],
    keys: Mapping[str, Sequence[Any]],
    optimizer: bool,
) -> PlainNames:
    """`plain_names` of the state in some keys of another one, whose other tensors are not of the model."""
    prefix = "".join(f"{key}." for key in around)
    count = len(prefix)
    inner = [name for name in names if name.startswith(prefix)]
    plain = plain_names(
        [name[count:] for name in inner],
        [name[count:] for name in objects if name.startswith(prefix)],
        {name[count:]: keys[name][len(around) :] for name in inner if name in keys},
        optimizer,
    )
    all_names = frozenset(names)
    new_names: dict[str, Optional[str]] = {name: name for name in names}
    new_names.update((name, plain.names[name[count:]]) for name in inner)
    left_out = [prefix + name for name in plain.left_out]
    for name in names:
        if not name.startswith(prefix) and trainer_optimizer(name):
            new_names[name] = None
            left_out.append(name)
    beside = [name for name in names if not name.startswith(prefix) and is_weight(name, all_names)]
    new_names.update(dict.fromkeys(beside))
    return PlainNames(new_names, prefix + plain.prefix, left_out, [*(prefix + name for name in plain.outside), *beside])


def possible_plain_names(name: str, optimizer: bool) -> list[str]:
    """The names that `plain_names` may give a tensor, whatever the others are; none where it is left out."""
    if trainer_optimizer(name):
        state = _state_name(name) if optimizer else None
        return [] if state is None else [state]
    # Behind any key "model".
    parts = name.split(".")
    unrooted = [".".join(parts[place + 1 :]) for place, part in enumerate(parts[:-1]) if part == MODEL[:-1]]
    state = _state_name(name) if optimizer and name.startswith(_BARE_STATE) else None
    return [_unwrapped(each) for each in (name, *unrooted, *([] if state is None else [state]))]


def _state_name(name: str) -> Optional[str]:
    """MindSpore's name of optimizer state; None where it has none."""
    inner_name = name[len(trainer_optimizer(name)) :]
    for inner in _INNER:
        inner_name = inner_name[len(inner) :] if inner_name.startswith(inner) else inner_name
    first, _, behind = inner_name.partition(".")
    before, _, last = inner_name.rpartition(".")
    state, parameter = (first, behind) if first in _STATES else (last, before)
    # A number counts parameters of an unknown order.
    if state not in _STATES or not parameter or parameter.isdigit():
        return None
    return _STATES[state] + _unwrapped(parameter)


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper) or "." + wrapper in name:
            name = name.replace(wrapper, "")
    return name


def trainer_keys(name: str) -> tuple[str, ...]:
    """The keys of the nested dictionaries of a trainer's state for a name that `trainer_names` made."""
    root, _, inner_name = name.partition(".")
    if root + "." == MODEL:
        return root, inner_name
    inner, _, last = inner_name.rpartition(".")
    if root + "." in TRAINER_OPTIMIZERS and inner.startswith("state."):
        return root, "state", inner[len("state.") :], last
    return (name,)


def name_before(name: str) -> str:
    """The name that a model, or MindSpore's optimizer, has for a tensor that `trainer_names` named."""
    keys = trainer_keys(name)
    if len(keys) == len(("optimizer", "state", "NAME", "KEY")) and keys[-1] in _STATES:
        return _STATES[keys[-1]] + keys[-2]
    return keys[-1]


def trainer_names(names: Collection[str]) -> dict[str, Optional[str]]:
    """The names of tensors of a model, and of MindSpore's optimizer state, as a trainer's state has them."""
    all_names = frozenset(names)
    states = {prefix: state for state, prefix in _STATES.items()}
    new_names: dict[str, Optional[str]] = {}
    for name in names:
        word, dot, parameter = name.partition(".")
        if word + dot in states and parameter in all_names:
            new_names[name] = f"optimizer.state.{parameter}.{states[word + dot]}"
        else:
            new_names[name] = MODEL + name if is_weight(name, all_names) else name
    return new_names
