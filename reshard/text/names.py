"""What parameter names in MindSpore's checkpoints say by themselves."""

from __future__ import annotations

import re
from typing import NamedTuple

ACCUMULATED_GRADIENTS = "accu_grads."
"""Begins the name of a parameter's accumulated gradients; the rest is the parameter's own name."""

# End-of-life saves store cur_rank; generators are cells with _seed and _offset.
_OF_ONE_RANK = re.compile(r"(^|[._])(cur_rank|rng_state|generator(_\d+)?\._?(seed|offset|state))$|\._(seed|offset)$")


def belongs_to_rank(name: str) -> bool:
    """Whether a value outside the strategies differs between ranks by nature."""
    return _OF_ONE_RANK.search(name) is not None


def as_pattern(name: str) -> str:
    """The pattern of --include and --exclude that a parameter of this name fits, as it is typed into a shell."""
    # What stands for itself in a pattern, and one of anything for what a shell cannot be given.
    pattern = "".join(f"[{c}]" if c in "*?[" else c if c.isprintable() and c != "'" else "?" for c in name)
    return f"'{pattern}'"


CURRENT_RANK = "cur_rank"
"""A value that end-of-life saves hold."""

WEIGHTS, OPTIMIZER_STATE, GRADIENTS, OTHER = "weights", "optimizer state", "accumulated gradients", "other values"
KINDS = (WEIGHTS, OPTIMIZER_STATE, GRADIENTS, OTHER)


class Total(NamedTuple):
    """How many names, and how many bytes of tensor contents."""

    names: int
    nbytes: int


# What MindSpore's and MindFormers' optimizers put before the name of the parameter they belong to.
STATE_PREFIXES = (
    *("accum.", "accum_update.", "adam_m.", "adam_v.", "delta.", "exp_avg.", "exp_avg_sq.", "exp_avg_sq_col."),
    *("exp_avg_sq_row.", "exp_inf.", "lamb_m.", "lamb_v.", "linear.", "max_exp_avg_sq.", "max_exp_avg_sq_col."),
    *("max_exp_avg_sq_row.", "mean_grad.", "mean_square.", "moment1.", "moment2.", "moments.", "muon_m.", "muon_v."),
    *("prev.", "rms.", "square_average.", "stat.", "vhat."),
)
_STATE = re.compile(f"({'|'.join(map(re.escape, STATE_PREFIXES))}).+", re.DOTALL)
_OTHER = re.compile(
    r"(global_step|current_iterator_step|last_overflow_iterator_step|epoch_num|step_num|learning_rate|"
    r"weight_decay|beta[12]_power|loss_scale|scale_sense|state_step(\..*)?)"
)


def state_prefix(name: str) -> str:
    """``adam_m.`` of ``adam_m.w``: what marks optimizer state and accumulated gradients; of others nothing."""
    if name.startswith(ACCUMULATED_GRADIENTS) or _STATE.fullmatch(name):
        return name[: name.index(".") + 1]
    return ""


def kind_of(name: str, elements: int) -> str:
    """What a tensor is by its name: one of `KINDS`.

    Args:
        name: its name in the checkpoint.
        elements: how many it has; a single value whose name is no path is no weight.
    """
    if name.startswith(ACCUMULATED_GRADIENTS):
        return GRADIENTS
    if _OTHER.fullmatch(name) or belongs_to_rank(name) or (elements == 1 and "." not in name):
        return OTHER
    return OPTIMIZER_STATE if _STATE.fullmatch(name) else WEIGHTS


def is_weight(name: str) -> bool:
    """Whether a parameter that a strategy lists is a weight by its name."""
    return kind_of(name, elements=2) == WEIGHTS
