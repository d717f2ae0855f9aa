"""Kinds of parameters by their names in MindSpore's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from typing import NamedTuple

ACCUMULATED_GRADIENTS = "accu_grads."
"""Begins the name of a parameter's accumulated gradients; the rest is the parameter's own name."""

# End-of-life saves store cur_rank; generators are cells with _seed and _offset.
_OF_ONE_RANK = re.compile(r"(^|[._])(cur_rank|rng_state|generator(_\d+)?\._?(seed|offset|state))$|\._(seed|offset)$")


def belongs_to_rank(name: str) -> bool:
    """Whether a value outside the strategies differs between ranks by nature."""
    return _OF_ONE_RANK.search(name) is not None


def as_glob(name: str) -> str:
    """The pattern of --include and --exclude for a parameter."""
    # Special characters in brackets; ? for characters that a shell cannot pass.
    return "".join(f"[{c}]" if c in "*?[" else c if c.isprintable() and c != "'" else "?" for c in name)


def as_pattern(name: str) -> str:
    """The same, quoted for a shell."""
    return f"'{as_glob(name)}'"


CURRENT_RANK = "cur_rank"
"""A value that end-of-life saves hold."""

WEIGHTS, OPTIMIZER_STATE, GRADIENTS, OTHER = "weights", "optimizer state", "accumulated gradients", "other values"
KINDS = (WEIGHTS, OPTIMIZER_STATE, GRADIENTS, OTHER)


class Total(NamedTuple):
    """How many names, and how many bytes of tensor contents."""

    names: int
    nbytes: int


# Prefixes of MindSpore's and MindFormers' optimizers that are no names of modules.
_OPTIMIZER_WORDS = (
    *("adam_m.", "adam_v.", "exp_avg.", "exp_avg_sq.", "exp_avg_sq_col.", "exp_avg_sq_row.", "lamb_m.", "lamb_v."),
    *("main_param.", "max_exp_avg_sq.", "max_exp_avg_sq_col.", "max_exp_avg_sq_row.", "moment1.", "moment2."),
    *("muon_m.", "muon_v."),
)
STATE_PREFIXES = (
    *_OPTIMIZER_WORDS,
    *("accum.", "accum_update.", "delta.", "exp_inf.", "linear.", "mean_grad.", "mean_square.", "moments.", "prev."),
    *("rms.", "square_average.", "stat.", "vhat."),
)
"""Prefixes of optimizer state before the name of its parameter."""

_OTHER = re.compile(
    r"(global_step|current_iterator_step|last_overflow_iterator_step|epoch_num|step_num|learning_rate|"
    r"weight_decay|beta[12]_power|loss_scale|scale_sense|state_step(\..*)?)"
)


def state_prefix(name: str, known: Container[str]) -> str:
    """``adam_m.`` of ``adam_m.w``: the mark of optimizer state and accumulated gradients; empty for other names.

    Modules may be called ``linear`` or ``stat``: these words mark state only before the name of a parameter.

    Args:
        name: a name.
        known: names of the parameters of the checkpoint or strategy.
    """
    word, dot, rest = name.partition(".")
    prefix = word + dot
    if not rest or (prefix != ACCUMULATED_GRADIENTS and prefix not in STATE_PREFIXES):
        return ""
    return prefix if prefix == ACCUMULATED_GRADIENTS or prefix in _OPTIMIZER_WORDS or rest in known else ""


def is_value(name: str, elements: int) -> bool:
    """Whether a tensor is a counter, a learning rate or the like.

    Args:
        name: its name in the checkpoint.
        elements: its number of elements; a single value whose name is no path is no weight.
    """
    return is_training_value(name) or (elements == 1 and "." not in name)


def is_training_value(name: str) -> bool:
    """Whether a name is that of a counter or setting of the training, such as ``global_step``."""
    return _OTHER.fullmatch(name) is not None or belongs_to_rank(name)


def kind_of(name: str, elements: int, known: Container[str]) -> str:
    """The kind of a tensor by its name: one of `KINDS`.

    Args:
        name: its name in the checkpoint.
        elements: its number of elements.
        known: names of the parameters of the checkpoint or strategy.
    """
    prefix = state_prefix(name, known)
    if prefix == ACCUMULATED_GRADIENTS:
        return GRADIENTS
    if is_value(name, elements):
        return OTHER
    return OPTIMIZER_STATE if prefix else WEIGHTS


def is_weight(name: str, known: Container[str]) -> bool:
    """Whether a parameter that a strategy lists is a weight by its name."""
    return kind_of(name, elements=2, known=known) == WEIGHTS


def training_globs(names: Collection[str], known: Container[str]) -> list[str]:
    """Patterns of --exclude that match optimizer state, gradients and values among names, and no weight."""
    weights = [name for name in names if is_weight(name, known)]
    globs: dict[str, None] = {}
    for name in names:
        if not is_weight(name, known):
            prefix = state_prefix(name, known)
            # A word of an optimizer may begin the name of a weight, too.
            alone = prefix and not any(weight.startswith(prefix) for weight in weights)
            globs[f"{prefix}*" if alone else as_glob(name)] = None
    return [*globs]
