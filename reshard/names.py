"""What parameter names in MindSpore's checkpoints say by themselves."""

from __future__ import annotations

import re

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

KINDS = ("weights", "optimizer state", "accumulated gradients", "other values")

# What MindSpore's and MindFormers' optimizers put before the name of the parameter they belong to.
_OPTIMIZER_STATE = re.compile(
    r"(accum(_update)?|(adam|lamb|muon)_[mv]|delta|exp_(avg|inf)|(max_)?exp_avg_sq(_col|_row)?|linear|mean_(grad|square)|"
    r"moment[12s]|prev|rms|square_average|stat|vhat)\..+",
    re.DOTALL,
)
_OTHER = re.compile(
    r"(global_step|current_iterator_step|last_overflow_iterator_step|epoch_num|step_num|learning_rate|"
    r"weight_decay|beta[12]_power|loss_scale|scale_sense|state_step(\..*)?)"
)


def state_prefix(name: str) -> str:
    """``adam_m.`` of ``adam_m.w``: what marks optimizer state and accumulated gradients; of others nothing."""
    if name.startswith(ACCUMULATED_GRADIENTS) or _OPTIMIZER_STATE.fullmatch(name):
        return name[: name.index(".") + 1]
    return ""


def kind_of(name: str, elements: int) -> str:
    """What a tensor is by its name: one of `KINDS`.

    Args:
        name: its name in the checkpoint.
        elements: how many it has; a single value whose name is no path is no weight.
    """
    if name.startswith(ACCUMULATED_GRADIENTS):
        return "accumulated gradients"
    if _OTHER.fullmatch(name) or belongs_to_rank(name) or (elements == 1 and "." not in name):
        return "other values"
    return "optimizer state" if _OPTIMIZER_STATE.fullmatch(name) else "weights"


def is_weight(name: str) -> bool:
    """Whether a parameter that a strategy lists is a weight by its name."""
    return kind_of(name, elements=2) == "weights"
