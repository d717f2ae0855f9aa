"""Names in the states of PyTorch's trainers: words before and in a model's names, added and removed.

| in a trainer's state | in a model, and in MindSpore's checkpoints |
| --- | --- |
| ``model.NAME`` | ``NAME`` |
| ``optimizer.state.NAME.exp_avg``, ``optimizer.state.exp_avg.NAME`` | ``adam_m.NAME`` |
| ``optimizer.state.NAME.exp_avg_sq``, ``optimizer.state.exp_avg_sq.NAME`` | ``adam_v.NAME`` |
| ``optimizer.state.fp32_param.NAME``, ``optimizer.state.param.NAME`` of Megatron | ``main_param.NAME`` |
| ``model.module.NAME``, ``optimizer.state.module.module.module.NAME.exp_avg`` of Megatron's FSDP | as without them |

Recorded keys around these, such as ``app`` in ``app.model.NAME``, are removed with them. Other optimizer state has no
place outside of a trainer's state, such as a step for each parameter. Nothing is guessed: where a model's own names may
begin with ``model.``, this is undecided.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.text.names import TRAINER_OPTIMIZERS, UNNAMED_STATE, is_weight, state_prefix, trainer_optimizer

MODEL = "model."
_STATES = {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v.", "fp32_param": "main_param."}
# The masters of fully_reshardable optimizer state, beside moments of the same parameter.
_MASTER = "param"
# Between these and the names of parameters.
_INNER = ("optim.", "state.")
# That FSDP names parameters after one wrapper in its model, and after three of them in its optimizer.
_MODULES = re.compile(r"((?:adam_m\.|adam_v\.|main_param\.)?)(?:module\.)+")
# Modules around others, of torch.compile, FSDP and activation checkpointing.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Optimizer state without a key of its own: an optimizer's flattened state, saved beside a model's names.
_BARE_STATE, _BARE_GROUPS = "state.", "param_groups."


class PlainNames(NamedTuple):
    """Names without the words of a trainer.

    Attributes:
        names: the new name of every tensor; None for skipped tensors.
        prefix: the removed beginning of names, such as ``model.``; empty if none is removed.
        left_out: optimizer state that has no other name.
        outside: other tensors of the state, such as those of a generator.
        undecided: beginnings of names that may be a trainer's; weights keep their names then.
    """

    names: dict[str, str | None]
    prefix: str
    left_out: Sequence[str]
    outside: Sequence[str]
    undecided: Sequence[str]


def plain_names(
    names: Collection[str], objects: Collection[str], keys: Mapping[str, Sequence[Any]], optimizer: bool
) -> PlainNames:
    """The names of tensors of a trainer's state as a model has them.

    Recorded keys of nested dictionaries are removed to the key ``model``, unless there are several of it. ``model.``
    before all names at the root is removed or kept as the optimizer names its parameters; without an optimizer, it
    stays if keys are recorded. All else is undecided.

    Args:
        names: of all tensors.
        objects: names of objects.
        keys: by name, where it is recorded, the keys of the nested dictionaries that it was made of.
        optimizer: optimizer state is kept, under MindSpore's names.
    """
    bare = any(name.startswith(_BARE_GROUPS) for name in objects)
    states = {name for name in names if trainer_optimizer(name) or (bare and name.startswith(_BARE_STATE))}
    recorded = {name: _keys_before(keys[name]) for name in names if name in keys}

    def behind(beginning: str, among: Collection[str]) -> set[str]:
        return {_unwrapped(name[len(beginning) :]) for name in among if name.startswith(beginning)}

    inner = set().union(*(behind(each, names) for each in {"", MODEL, *recorded.values()}))
    weights = [name for name in names if name not in states and is_weight(name, inner)]
    # A name without a point, such as that of a counter, shows no model at the root.
    roots = {recorded[name] for name in weights if name in recorded and (recorded[name] or "." in name)}
    models = set(filter(_is_model, roots))
    loose = [name for name in weights if not recorded.get(name)]
    possible = models
    if len(models) != 1:
        at_root = {"", MODEL} if all(name.startswith(MODEL) for name in loose) else {""}
        possible = roots | (at_root if loose else set())
    decided = {each for each in possible if not each or _is_model(each)}
    if len(possible) > 1:
        # MindSpore's optimizers may have state beside the names of a trainer, such as moments.NAME.
        own = [name for name in names if name not in states and state_prefix(name, inner)]
        state_names = (_state_name(name, states) for name in states)
        parameters = {name.partition(".")[2] for name in (*own, *filter(None, state_names))}
        decided = {each for each in decided if parameters and parameters <= behind(each, weights)}
    if len(decided) != 1:
        # Recorded names at the root are those of a model, unless the optimizer has others.
        decided = {""} if "" in roots and not models else set()
    prefix, undecided = (decided.pop(), []) if decided else ("", sorted(possible - {""}))
    # Of a nested state, a key beside that of the model is not of the model.
    beside = weights if prefix else [name for name in weights if recorded.get(name)]
    outside = [] if undecided else [name for name in beside if not prefix or not name.startswith(prefix)]
    around = prefix[: -len(MODEL)] if _is_model(prefix) else ""
    new_names: dict[str, str | None] = {}
    for name in names:
        if name in states:
            new_names[name] = _state_name(name, states) if optimizer and name.startswith(around) else None
        else:
            new_names[name] = _unwrapped(name[len(prefix) :] if name.startswith(prefix) else name)
    if any((_state_name(name, states) or "").partition(".")[2].startswith("module.module.") for name in states):
        new_names = {name: None if new is None else _without_modules(new) for name, new in new_names.items()}
    left_out = [name for name in names if new_names[name] is None]
    new_names.update(dict.fromkeys(outside))
    return PlainNames(new_names, prefix, left_out, outside, undecided)


def _keys_before(path: Sequence[Any]) -> str:
    """The keys before a model's name, joined: to "model", or the first one; empty for a name at the root."""
    count = path.index(MODEL[:-1]) + 1 if MODEL[:-1] in path[:-1] else 1
    return "".join(f"{key}." for key in path[:count]) if len(path) > 1 else ""


def _without_modules(name: str) -> str:
    return _MODULES.sub(r"\1", name, 1) if _MODULES.match(name) else name


def _is_model(beginning: str) -> bool:
    return f".{beginning}".endswith(f".{MODEL}")


def possible_plain_names(name: str, optimizer: bool) -> list[str]:
    """The names that `plain_names` may give a tensor, whatever the others are; none where it is left out."""
    if name == UNNAMED_STATE:
        return [name] if optimizer else []
    if trainer_optimizer(name):
        found = _possible_states(name) if optimizer else []
        return [*dict.fromkeys([*found, *map(_without_modules, found)])]
    # Behind any key "model".
    parts = name.split(".")
    unrooted = [".".join(parts[place + 1 :]) for place, part in enumerate(parts[:-1]) if part == MODEL[:-1]]
    states = _possible_states(name) if optimizer and name.startswith(_BARE_STATE) else []
    found = [_unwrapped(each) for each in (name, *unrooted, *states)]
    return [*dict.fromkeys([*found, *map(_without_modules, found)])]


def _possible_states(name: str) -> list[str]:
    return [*dict.fromkeys(filter(None, (_state_name(name, states) for states in ((), None))))]


def _state_name(name: str, states: Collection[str] | None) -> str | None:
    """MindSpore's name of optimizer state; None where it has none.

    Args:
        name: its name.
        states: the names of all optimizer state; None if unknown.
    """
    inner_name = name[len(trainer_optimizer(name)) :]
    for inner in _INNER:
        inner_name = inner_name[len(inner) :] if inner_name.startswith(inner) else inner_name
    first, _, behind = inner_name.partition(".")
    if first == _MASTER:
        # A module of a model may be called param, too.
        moment = f"{name[: -len(inner_name)]}exp_avg.{behind}"
        first = "fp32_param" if states is None or moment in states else first
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


class Naming(NamedTuple):
    """Names that a trainer gives the tensors of a model and of MindSpore's optimizers.

    Attributes:
        model: begins the names of weights.
        state: a name of optimizer state, of a parameter's ``name`` and a ``key``.
        keys: the keys by MindSpore's prefixes.
    """

    model: str
    state: str
    keys: Mapping[str, str]

    def add(self, names: Collection[str]) -> dict[str, str]:
        """The trainer's names of all tensors, by those of the model and of MindSpore's optimizers."""
        all_names = frozenset(names)
        new_names: dict[str, str] = {}
        for name in names:
            word, dot, parameter = name.partition(".")
            if word + dot in self.keys and parameter in all_names:
                new_names[name] = self.state.format(name=parameter, key=self.keys[word + dot])
            else:
                new_names[name] = self.model + name if is_weight(name, all_names) else name
        return new_names

    def remove(self, name: str) -> str:
        """The name that `add` replaced."""
        if trainer_optimizer(name):
            return _state_name(name, None) or name
        return name[len(self.model) :] if name.startswith(self.model) else name


_PREFIXES = {prefix: key for key, prefix in _STATES.items()}
_TORCH = Naming(MODEL, "optimizer.state.{name}.{key}", _PREFIXES)
_NAMINGS = {"megatron": Naming("", "optimizer.state.{key}.{name}", {**_PREFIXES, _STATES["fp32_param"]: _MASTER})}


def naming_of(side: str) -> Naming:
    """The names that trainers have whose models are on a side of the tables."""
    return _NAMINGS.get(side, _TORCH)


def trainer_keys(name: str) -> tuple[str, ...]:
    """The keys of the nested dictionaries of a trainer's state for a name that `Naming.add` made."""
    root, _, inner_name = name.partition(".")
    if root + "." == MODEL:
        return root, inner_name
    inner, _, last = inner_name.rpartition(".")
    if root + "." in TRAINER_OPTIMIZERS and inner.startswith("state."):
        return root, "state", inner[len("state.") :], last
    return (name,)
