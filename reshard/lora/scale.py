"""What the product of an adapter's matrices is multiplied with, by what lies beside them or was typed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from reshard.errors import CheckpointError, RetryableError
from reshard.storage import UnfitError, exists, is_directory, is_regular_file, read_small
from reshard.storage.json_text import JsonError, parse_json
from reshard.text.near_names import path_meant
from reshard.text.report import Report
from reshard.text.wording import quoted

_PEFT_CONFIG, _MINDFORMERS_CONFIG = "adapter_config.json", "mindformers_adapter_config.json"
_LARGEST = 1 << 22
_ALPHA = "give it with --alpha"
_MOST = 1e9
# Ways to begin that take from the weights what the matrices begin with.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class Scale:
    """How strongly an adapter counts.

    Attributes:
        path: where it was read; for messages.
        alpha: divided by the rank it is the scale.
        alphas: other values for modules whose names end as a pattern says.
        by_root: alpha is divided by the root of the rank instead.
        transposed: weights have a row for each input.
    """

    path: str
    alpha: float
    alphas: Mapping[str, float] = field(default_factory=dict)
    by_root: bool = False
    transposed: bool = False

    def of(self, stem: str, rank: int) -> float:
        """The scale of a pair of so many ranks, of a module."""
        alpha = next((value for pattern, value in self.alphas.items() if _ends(stem, pattern)), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def scale_of(adapter: str, alpha: Optional[float], report: Report) -> Scale:
    """The scale that is typed, or that lies beside an adapter.

    Args:
        adapter: its directory or file.
        alpha: what was typed, if anything.
        report: warned of what the base has to be.

    Raises:
        CheckpointError: nothing tells it, or what does cannot be understood.
        RetryableError: reading failed.
    """
    place = adapter if is_directory(adapter) else os.path.dirname(adapter)
    path = next(
        (path for name in (_PEFT_CONFIG, _MINDFORMERS_CONFIG) if is_regular_file(path := os.path.join(place, name))),
        None,
    )
    if path is None:
        if alpha is None:
            if "{" not in adapter and not exists(adapter):
                raise CheckpointError(f"{adapter}: does not exist", file=adapter, hint=path_meant(adapter))
            raise CheckpointError(
                f"{adapter}: has no {_PEFT_CONFIG} or {_MINDFORMERS_CONFIG} beside it, so nothing tells alpha",
                file=adapter,
                hint=_ALPHA,
            )
        return Scale("--alpha", alpha)
    said = _config(path)
    if said.get("use_dora"):
        raise CheckpointError(f"{path}: says use_dora, which cannot be merged here", file=path)
    if said.get("bias") not in (None, "none"):
        raise CheckpointError(f"{path}: says bias {said['bias']!r}; biases cannot be merged here", file=path)
    start = said.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
        report.warn(
            f"{path}: says init_lora_weights {quoted(start)}: training began by changing the base, too, and the "
            "adapter fits only the base that was saved after that"
        )
    if alpha is None:
        alpha = _number(path, "lora_alpha", said.get("lora_alpha"))
    alphas = said.get("alpha_pattern") or {}
    if not isinstance(alphas, Mapping):
        raise CheckpointError(f"{path}: alpha_pattern is no object", file=path)
    return Scale(
        path,
        alpha,
        {str(pattern): _number(path, f"alpha_pattern of {pattern}", value) for pattern, value in alphas.items()},
        bool(said.get("use_rslora")),
        bool(said.get("fan_in_fan_out")),
    )


def _config(path: str) -> Mapping[str, Any]:
    try:
        said = parse_json(read_small(path, _LARGEST))
    except (UnfitError, JsonError) as error:
        raise CheckpointError(f"{path} {error}", file=path) from error
    except OSError as error:
        raise RetryableError(f"{path}: cannot be read: {error.strerror or error}", file=path) from error
    if not isinstance(said, Mapping):
        raise CheckpointError(f"{path}: holds no object", file=path)
    # MindFormers' own has it one level below.
    inner = said.get("lora_config")
    return inner if isinstance(inner, Mapping) else said


def _number(path: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < abs(value) < _MOST:
        raise CheckpointError(f"{path}: {key} is {quoted(str(value))}, not a number", file=path, hint=_ALPHA)
    return float(value)


def _ends(stem: str, pattern: str) -> bool:
    """Whether a module is meant by a key of alpha_pattern: its name, or an expression that its end fits."""
    if stem == pattern or stem.endswith("." + pattern):
        return True
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})", stem) is not None
    except re.error:
        return False
