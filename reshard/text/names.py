"""Names of parameters: their kinds, natural order, many of them in few lines, and those similar to a missing one."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Container, Iterable
from typing import NamedTuple

from reshard.text.messages import as_glob, one_line, plural, quoted, stepped_ranges

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
    """Number of names, and bytes of tensor contents; fields are named as in JSON."""

    tensors: int
    bytes: int


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

UNNAMED_STATE = "optimizer.distributed"
"""All state of an optimizer that is stored without names, where it cannot be given names."""

# Some trainers number the optimizers of dense weights and of experts.
_CHAINED = re.compile(r"chained_\d+\.")
# Of a state in another one, which only its keys show.
_NESTED_OPTIMIZER = re.compile(r"([^.]+\.)+?optim(izer)?\.(?=(state|param_groups)\.)")

TRAINING_STEP = "global_step"
"""The value that counts the steps of the optimizer."""

_OTHER = frozenset(
    [
        "beta1_power",
        "beta2_power",
        "current_iterator_step",
        "epoch_num",
        TRAINING_STEP,
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

_PIECES = re.compile(r"[0-9]+|[^0-9]+")
# Longer digits are not the number of a layer, and are slow to convert.
_MAX_DIGITS = 18
# Replaces a number; other pieces of a name contain no digit.
_ANY_NUMBER = "0"
# Only numbers in the form of str(int): a range determines their text.
_WHOLE_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")

# Comparing a longer name with others, or one name with more, takes seconds.
_MAX_COMPARED_LENGTH = 1000
_MAX_COMPARED = 5000
# Minimum prefix length: shorter prefixes match too many names.
_MIN_PREFIX = 3
# Marks of {rank} and of wildcards, which match no mistyped name.
_WILD = frozenset("*?[{")


def fused_expert(names: Iterable[str]) -> str | None:
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


def natural_order(names: Iterable[str]) -> list[str]:
    """Names with numbers in them compared as numbers: ``part10`` after ``part9``."""
    return sorted(names, key=lambda name: (natural_key(name), name))


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """A key by which numbers in texts are compared as numbers."""
    return tuple((0, int(piece), "") if _is_number(piece) else (1, 0, piece) for piece in _PIECES.findall(text))


def layers_in_order(names: Iterable[str]) -> list[str]:
    """Names in their original order, but with numbers ascending where names agree up to a number.

    Files hold names in any order, such as layer 10 before layer 2, or a few tensors of every layer. The result has
    the names of a layer together, at the place of the first layer, in their original order.

    Args:
        names: each once.
    """
    # Per prefix of several names the number of the first name with it.
    first: dict[str, int] = {}

    def key(name: str, number: int) -> tuple[int, ...]:
        numbers: list[int] = []
        for match in _PIECES.finditer(name):
            piece, end = match[0], match.end()
            if _is_number(piece):
                # All numbers at a place count as one continuation; 01 comes after 1.
                numbers += first.setdefault(name[: match.start()] + _ANY_NUMBER, number), int(piece), len(piece)
            elif end < len(name):
                numbers.append(first.setdefault(name[:end], number))
            else:
                numbers.append(number)
        return tuple(numbers)

    keys = {name: key(name, number) for number, name in enumerate(names)}
    return sorted(keys, key=keys.__getitem__)


def _is_number(piece: str) -> bool:
    return piece[0] in "0123456789" and len(piece) <= _MAX_DIGITS


class NamePattern(NamedTuple):
    """A pattern, and the number of names that it matches."""

    text: str
    size: int


def name_patterns(names: Iterable[str], parameters: Container[str] = ()) -> list[NamePattern]:
    """Many names in few lines: patterns that together match each of the names once, sorted by text.

    `{,adam_m.,adam_v.}blocks.{0-30}.dense{1-3}.weight` means 279 names. A pattern is exact: each of its combinations
    is one of the names.

    Args:
        names: the names, each once.
        parameters: all parameters; a prefix and a dot before one of them marks its optimizer state.
    """
    alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in names:
        prefix = name[: name.find(".") + 1]
        if name[len(prefix) :] not in parameters:
            prefix = state_prefix(name, parameters)
        parts = _WHOLE_NUMBER.split(name[len(prefix) :])
        alike.setdefault(tuple(parts[::2]), []).append((*parts[1::2], prefix))
    sortable = []
    for texts, rows in alike.items():
        for *numbers, prefixes in _products_of(rows):
            count = len(prefixes)
            text = texts[0]
            for values, after in zip(numbers, texts[1:]):
                count *= len(values)
                ranges = stepped_ranges(map(int, values), most=len(values))
                text += (ranges if len(values) == 1 else f"{{{ranges}}}") + after
            state = ",".join(sorted(prefixes))
            sortable.append(
                ((text, state), NamePattern((state if len(prefixes) == 1 else f"{{{state}}}") + text, count))
            )
    return [pattern for _, pattern in sorted(sortable)]


def _products_of(rows: list[tuple[str, ...]]) -> list[tuple[frozenset[str], ...]]:
    """Rows as products of sets: for each column, rows that are equal in all others are merged."""
    products: list[tuple[str | frozenset[str], ...]] = [*rows]
    for place in range(len(rows[0])):
        values: dict[tuple[str | frozenset[str], ...], list[str]] = {}
        for row in products:
            value = row[place]
            assert isinstance(value, str)
            values.setdefault((*row[:place], *row[place + 1 :]), []).append(value)
        products = [(*remaining[:place], frozenset(merged), *remaining[place:]) for remaining, merged in values.items()]
    return products  # type: ignore[return-value]


def pattern_lines(names: Iterable[str], parameters: Container[str], most: int) -> list[str]:
    """Up to ``most`` patterns with their counts, a line each, then the number of omitted names."""
    patterns = name_patterns(names, parameters)
    width = max((len(str(pattern.size)) for pattern in patterns), default=0)
    lines = [f"{pattern.size:>{width}}  {one_line(pattern.text)}" for pattern in patterns[:most]]
    omitted = sum(pattern.size for pattern in patterns[most:])
    return [*lines, f"... and {plural(omitted, 'more name')}"] if omitted else lines


def near_names(typed: str, names: Iterable[str]) -> list[str]:
    """A few similar names, nearest first, ignoring case."""
    # Loaded only here: a run without mistakes does not need it.
    from difflib import get_close_matches

    if len(typed) > _MAX_COMPARED_LENGTH:
        return []
    spelled: dict[str, str] = {}
    for name in itertools.islice(names, _MAX_COMPARED):
        spelled.setdefault(name.lower(), name)
    # If only an ending is missing, other similar names are unlikely.
    longer = [name for name in sorted(spelled, key=len) if name.startswith(typed.lower())]
    if not longer or len(typed) < _MIN_PREFIX:
        return [spelled[name] for name in get_close_matches(typed.lower(), spelled)]
    return [spelled[name] for name in longer[:3]]


def did_you_mean(typed: str, names: Iterable[str]) -> str | None:
    """A hint with similar names, or None."""
    near = near_names(typed, names)
    return f"did you mean {' or '.join(map(quoted, near))}?" if near else None


def similar_path_hint(path: str) -> str | None:
    """``did you mean ...?`` with similar names beside the first missing part of a path, or None."""
    if "://" in path:
        # An object store is not searched for similar names.
        return None
    parent, name = os.path.split(path.rstrip(os.sep))
    while parent and not os.path.lexists(parent):
        parent, name = os.path.split(parent.rstrip(os.sep))
    if not name or _WILD.intersection(name):
        return None
    try:
        near = near_names(name, os.listdir(parent or os.curdir))
    except OSError:
        return None
    return f"did you mean {' or '.join(os.path.join(parent, each) for each in near)}?" if near else None
