"""Kinds of parameters by their names in MindSpore's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable
from typing import NamedTuple, Optional

from reshard.text.wording import as_glob

ACCUMULATED_GRADIENTS = "accu_grads."
"""Begins the name of a parameter's accumulated gradients; the rest is the parameter's own name."""

# End-of-life saves store cur_rank; generators are cells with _seed and _offset.
_OF_ONE_RANK = re.compile(r"(^|[._])(cur_rank|rng_state|generator(_\d+)?\._?(seed|offset|state))$|\._(seed|offset)$")


def belongs_to_rank(name: str) -> bool:
    """Whether a value outside the strategies belongs to its rank: copies on other ranks differ."""
    return _OF_ONE_RANK.search(name) is not None


CURRENT_RANK = "cur_rank"
"""A value that end-of-life saves hold."""

WEIGHTS, OPTIMIZER_STATE, GRADIENTS, OTHER = "weights", "optimizer state", "accumulated gradients", "other values"
KINDS = (WEIGHTS, OPTIMIZER_STATE, GRADIENTS, OTHER)


class Total(NamedTuple):
    """Number of names, and bytes of tensor contents."""

    names: int
    nbytes: int


# Prefixes of MindSpore's and MindFormers' optimizers that are no names of modules.
_OPTIMIZER_WORDS = (
    *("adam_m.", "adam_v.", "exp_avg.", "exp_avg_sq.", "exp_avg_sq_col.", "exp_avg_sq_row.", "lamb_m.", "lamb_v."),
    *("main_param.", "max_exp_avg_sq.", "max_exp_avg_sq_col.", "max_exp_avg_sq_row.", "moment1.", "moment2."),
    *("muon_m.", "muon_v."),
)
_ALSO_MODULES = (
    *("accum.", "accum_update.", "delta.", "exp_inf.", "linear.", "mean_grad.", "mean_square.", "moments.", "prev."),
    *("rms.", "square_average.", "stat.", "vhat."),
)
STATE_PREFIXES = (*_OPTIMIZER_WORDS, *_ALSO_MODULES)
"""Prefixes of optimizer state before the name of its parameter."""

TRAINER_OPTIMIZERS = ("optimizer.", "optim.")
"""Keys before the optimizer state of PyTorch's trainers."""

# Megatron numbers the optimizers of dense weights and of experts.
_CHAINED = re.compile(r"chained_\d+\.")
# Of a state in another one, which only its keys show.
_NESTED_OPTIMIZER = re.compile(r"([^.]+\.)+?optim(izer)?\.(?=(state|param_groups)\.)")

_OTHER = frozenset(
    [
        "beta1_power",
        "beta2_power",
        "current_iterator_step",
        "epoch_num",
        "global_step",
        "last_overflow_iterator_step",
        "learning_rate",
        "loss_scale",
        "scale_sense",
        "state_step",
        "step_num",
        "weight_decay",
    ]
)


# Endings of tensors of transformers 5 that hold all experts of a layer.
_FUSED = (".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")
# One is in every name that the table `fused_experts` changes.
_NEAR_EXPERTS = (".experts.", ".shared_experts.", ".gate.", ".router.", ".e_score_correction_bias", ".sinks")


def fused_expert(names: Iterable[str]) -> Optional[str]:
    """The first name of experts that transformers 5 fuses; None if there is none."""
    return next((name for name in names if name.endswith(_FUSED)), None)


def is_near_experts(name: str) -> bool:
    """Whether a name may change where fused experts get published names."""
    return any(part in name for part in _NEAR_EXPERTS)


def state_prefix(name: str, parameters: Container[str]) -> str:
    """``adam_m.`` of ``adam_m.w``: the mark of optimizer state and accumulated gradients; empty for other names.

    Modules may be called ``linear`` or ``stat``: these words mark state only before the name of a parameter.

    Args:
        name: a name.
        parameters: names of the parameters of the checkpoint or strategy.
    """
    trainers = trainer_optimizer(name)
    if trainers:
        return trainers
    word, dot, parameter = name.partition(".")
    prefix = word + dot
    if not parameter or prefix not in (ACCUMULATED_GRADIENTS, *STATE_PREFIXES):
        return ""
    return "" if prefix in _ALSO_MODULES and parameter not in parameters else prefix


def trainer_optimizer(name: str) -> str:
    """The keys before optimizer state of PyTorch's trainers, such as ``optimizer.``; empty for other names."""
    chained = _CHAINED.match(name)
    start = 0 if chained is None else chained.end()
    for root in TRAINER_OPTIMIZERS:
        if name.startswith(root, start) and len(name) > start + len(root):
            return name[: start + len(root)]
    nested = _NESTED_OPTIMIZER.match(name)
    return "" if nested is None else nested[0]


def is_value(name: str, elements: int) -> bool:
    """Whether a tensor is a counter, a learning rate or the like.

    Args:
        name: its name in the checkpoint.
        elements: its number of elements; a single value whose name is no path is no weight.
    """
    return is_training_value(name) or (elements == 1 and "." not in name)


def is_training_value(name: str) -> bool:
    """Whether a name is that of a counter or setting of the training, such as ``global_step``."""
    return name in _OTHER or name.startswith("state_step.") or belongs_to_rank(name)


def kind_of(name: str, elements: int, parameters: Container[str]) -> str:
    """The kind of a tensor by its name: one of `KINDS`.

    Args:
        name: its name in the checkpoint.
        elements: its number of elements.
        parameters: names of the parameters of the checkpoint or strategy.
    """
    prefix = state_prefix(name, parameters)
    if prefix == ACCUMULATED_GRADIENTS:
        return GRADIENTS
    if is_value(name, elements):
        return OTHER
    return OPTIMIZER_STATE if prefix else WEIGHTS


def is_weight(name: str, parameters: Container[str]) -> bool:
    """Whether a parameter that a strategy lists is a weight by its name."""
    return kind_of(name, elements=2, parameters=parameters) == WEIGHTS


def trained(names: Collection[str]) -> set[str]:
    """The parameters that have optimizer state among some names, and that state: weights, whatever their size."""
    states = {name: name[len(state_prefix(name, names)) :] for name in names}
    return {
        each
        for name, parameter in states.items()
        if parameter != name and parameter in names
        for each in (name, parameter)
    }


def training_globs(names: Collection[str], parameters: Container[str]) -> list[str]:
    """Patterns of --exclude that match optimizer state, gradients and values among names, and no weight."""
    weights = [name for name in names if is_weight(name, parameters)]
    globs: dict[str, None] = {}
    for name in names:
        if not is_weight(name, parameters):
            prefix = state_prefix(name, parameters)
            # A word of an optimizer may begin the name of a weight, too.
            alone = prefix and not any(weight.startswith(prefix) for weight in weights)
            globs[f"{prefix}*" if alone else as_glob(name)] = None
    return [*globs]
