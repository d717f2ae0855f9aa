"""Names in the states of PyTorch's trainers: words before and in a model's names, added and removed.

| in a trainer's state | in a model, and in MindSpore's checkpoints |
| --- | --- |
| ``model.NAME`` | ``NAME`` |
| ``optimizer.state.NAME.exp_avg``, ``optimizer.state.exp_avg.NAME`` | ``adam_m.NAME`` |
| ``optimizer.state.NAME.exp_avg_sq``, ``optimizer.state.exp_avg_sq.NAME`` | ``adam_v.NAME`` |
| ``optimizer.state.fp32_param.NAME`` | ``main_param.NAME`` |

Other optimizer state has no place outside of a trainer's state, such as a step for each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from reshard.text.names import TRAINER_OPTIMIZERS, is_weight, trainer_optimizer

MODEL = "model."
_STATES = {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v.", "fp32_param": "main_param."}
# Between these and the names of parameters.
_INNER = ("optim.", "state.")
# Modules around others, of torch.compile, FSDP and activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Names of a causal language model of Hugging Face in a trainer's state.
_CAUSAL = ("model.model.", "model.lm_head.")


class PlainNames(NamedTuple):
    """Names without the words of a trainer.

    Attributes:
        names: the new name of every tensor; None for skipped tensors.
        rooted: names began with ``model.``, which is removed.
        left_out: optimizer state that has no other name.
        outside: other tensors of the state, such as those of a generator.
    """

    names: dict[str, Optional[str]]
    rooted: bool
    left_out: list[str]
    outside: Sequence[str] = ()


def plain_names(
    names: Collection[str], objects: Collection[str], keys: Mapping[str, Sequence[Any]], optimizer: bool
) -> PlainNames:
    """The names of tensors of a trainer's state as a model has them.

    ``model.`` is removed if it is a recorded key of nested dictionaries. Without records it is removed if every weight
    has it and the state is a trainer's: it has optimizer state, or a second ``model.`` or ``lm_head.`` follows.

    Args:
        names: of all tensors.
        objects: names of objects.
        keys: by name, where it is recorded, the keys of the nested dictionaries that it was made of.
        optimizer: optimizer state is kept, under MindSpore's names.
    """
    weights = [name for name in names if not trainer_optimizer(name)]
    unrecorded = [name for name in weights if name not in keys]
    rooted = {name for name in weights if name in keys and len(keys[name]) > 1 and keys[name][0] == MODEL[:-1]}
    if unrecorded and all(name.startswith(MODEL) for name in unrecorded):
        beside = any(trainer_optimizer(name) for name in (*names, *objects))
        if beside or any(name.startswith(_CAUSAL) for name in unrecorded):
            rooted.update(unrecorded)
    if rooted:
        # Names that an edit gave have no recorded keys, or only themselves.
        rooted.update(name for name in weights if len(keys.get(name, ())) < 2 and name.startswith(MODEL))
    new_names: dict[str, Optional[str]] = {}
    left_out: list[str] = []
    # Of a nested state, a key beside "model" is not of the model. Counters and MindSpore's optimizer state stay.
    all_names = frozenset(names)
    outside = [
        name
        for name in weights
        if rooted
        and name not in rooted
        and keys.get(name, (MODEL[:-1],))[0] != MODEL[:-1]
        and is_weight(name, all_names)
    ]
    for name in names:
        if trainer_optimizer(name):
            new_names[name] = _state_name(name) if optimizer else None
            if new_names[name] is None:
                left_out.append(name)
        elif name in outside:
            new_names[name] = None
        else:
            new_names[name] = _unwrapped(name[len(MODEL) :] if name in rooted else name)
    return PlainNames(new_names, bool(rooted), left_out, outside)


def possible_plain_names(name: str, optimizer: bool) -> list[str]:
    """The names that `plain_names` may give a tensor, whatever the others are; none where it is left out."""
    if trainer_optimizer(name):
        state = _state_name(name) if optimizer else None
        return [] if state is None else [state]
    unrooted = [name[len(MODEL) :]] if name.startswith(MODEL) else []
    return [_unwrapped(each) for each in (name, *unrooted)]


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
