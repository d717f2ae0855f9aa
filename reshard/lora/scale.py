"""The factor and the orientation of an adapter's products, from its configuration, from --alpha and from shapes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.errors import CheckpointError
from reshard.lora.pairs import module_of
from reshard.storage import exists, is_directory, is_regular_file, read_json
from reshard.text.messages import Report, quoted
from reshard.text.names import similar_path_hint

_PEFT_CONFIG, _MINDFORMERS_CONFIG = "adapter_config.json", "mindformers_adapter_config.json"
_MAX_CONFIG_BYTES = 1 << 22
_ALPHA = "pass --alpha"
_KEY_HINT = "correct the key, or remove it from a copy of the file"
MIN_ALPHA, MAX_ALPHA = 1e-9, 1e9
"""Limits of every alpha: smaller values vanish in Float32, larger values overflow 16-bit weights."""
# Initialisations that subtract the initial product from the weights.
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_SAME_BASE = ("gaussian", "orthogonal", "eva")
# Keys of PEFT that this module reads, or that do not change the products.
_SUPPORTED_KEYS = frozenset(
    (
        *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
        *("peft_version", "r", "lora_alpha", "lora_dropout", "alpha_pattern", "rank_pattern", "use_rslora"),
        *("fan_in_fan_out", "bias", "init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "modules_to_save", "megatron_core", "runtime_config", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "qalora_group_size"),
    )
)
# Modules of GPT-2 and its kin that are transformers' Conv1D, whose weights have a row for each input.
_CONV1D = frozenset(("c_attn", "c_fc", "c_proj", "q_attn"))
_UNSUPPORTED = frozenset(("use_dora", "use_qalora", "lora_bias", "layer_replication", "alora_invocation_tokens"))


def values_of(patterns: Mapping[str, float], modules: Collection[str]) -> tuple[dict[str, float], list[str]]:
    r"""The values of modules by alpha_pattern or rank_pattern, matched like PEFT; and the keys that match no module.

    PEFT uses the first key, in the order of the file, for which ``re.match(rf"(.*\.)?({key})$", module)`` succeeds.

    Raises:
        ValueError: a key is not a regular expression.
    """
    values: dict[str, float] = {}
    unused = []
    for key, value in patterns.items():
        try:
            expression = re.compile(rf"(.*\.)?({key})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{quoted(key)} cannot be matched: it is not a regular expression: {error}") from error
        matching = list(filter(expression.match, modules))
        if not matching:
            unused.append(key)
        for module in matching:
            values.setdefault(module, value)
    # If no expression matches, PEFT looks up the name itself.
    others = {module: patterns[module] for module in modules if module in patterns and module not in values}
    return {**others, **values}, [key for key in unused if key not in others]


class Scale(NamedTuple):
    """The scale of an adapter: alpha / rank.

    Attributes:
        path: its file, for messages.
        alpha: of modules that no key of ``alphas`` matches.
        alphas: alphas by pattern of modules; see `values_of`.
        rank: of modules that no key of ``ranks`` matches; None if the file does not contain it.
        ranks: ranks by pattern of modules.
        by_root: alpha is divided by the root of the rank instead.
        fan_in_fan_out: weights have a row for each input, as PEFT decided for the last module that it made.
    """

    path: str
    alpha: float
    alphas: Mapping[str, float] = {}
    rank: float | None = None
    ranks: Mapping[str, float] = {}
    by_root: bool = False
    fan_in_fan_out: bool = False

    def of(self, alpha: float, rank: int) -> float:
        """The scale of a pair of this rank."""
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def transposed(self, shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, bool]:
        """Whether each product is added transposed: to a weight with a row for each input, as PEFT decides by module.

        Shapes show it. A square weight follows the other modules that are named as Conv1D, or not, like its own; and
        the configuration, where all modules are named alike.

        Args:
            shapes: of each product and its weight, by stem.

        Raises:
            CheckpointError: shapes differ, or nothing shows how a square weight is stored.
        """
        named = {stem: stem.rpartition(".")[2] in _CONV1D for stem in shapes}
        transposed: dict[str, bool] = {}
        for stem, (product, weight) in shapes.items():
            if weight not in (product, product[::-1]):
                raise CheckpointError(
                    f"the product of the matrices of {quoted(stem)} has the shape {list(product)}, and their weight "
                    f"has {list(weight)}",
                    parameter=stem,
                    hint="is it the adapter of another model, or a strategy wrong?",
                )
            if product != product[::-1]:
                transposed[stem] = product != weight
        shown = {kind: {value for stem, value in transposed.items() if named[stem] == kind} for kind in named.values()}
        if len(shown) == 1:
            shown[next(iter(shown))].add(self.fan_in_fan_out)
        for stem in shapes.keys() - transposed.keys():
            values = shown[named[stem]]
            if len(values) != 1:
                raise CheckpointError(
                    f"the weight of {quoted(stem)} is square, and nothing shows whether it has a row for each input: "
                    "the adapter has modules of both kinds (Linear and Conv1D), and fan_in_fan_out is that of one",
                    file=self.path,
                    parameter=stem,
                    hint="merge it with PEFT (merge_and_unload)",
                )
            (transposed[stem],) = values
        return transposed

    def alphas_of(self, ranks: Mapping[str, int]) -> dict[str, float]:
        """The alpha of each pair, by stem; refuses a configuration that does not fit the ranks of all pairs.

        Raises:
            CheckpointError: a key matches no module, or a rank differs.
        """
        modules = {stem: module_of(stem) for stem in ranks}
        alphas, own_ranks = (
            self._by_module(name, patterns, [*modules.values()])
            for name, patterns in (("alpha_pattern", self.alphas), ("rank_pattern", self.ranks))
        )
        for stem, module in modules.items():
            stated, name = (own_ranks[module], "rank_pattern") if module in own_ranks else (self.rank, "r")
            if stated is not None and stated != ranks[stem]:
                raise CheckpointError(
                    f"{self.path}: {name} is {stated:g} for {quoted(module)}, whose matrices have rank {ranks[stem]}",
                    file=self.path,
                    parameter=stem,
                    hint="is it the configuration of another adapter?",
                )
        return {stem: alphas.get(module, self.alpha) for stem, module in modules.items()}

    def _by_module(self, name: str, patterns: Mapping[str, float], modules: Sequence[str]) -> dict[str, float]:
        try:
            values, unused = values_of(patterns, modules)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}", file=self.path, hint=_KEY_HINT) from error
        if unused:
            raise CheckpointError(
                f"{self.path}: the key {quoted(unused[0])} of {name} matches no module of the adapter, such as "
                f"{quoted(modules[0])}",
                file=self.path,
                hint=_KEY_HINT,
            )
        return values


def scale_of(adapter: str, alpha: float | None, report: Report) -> Scale:
    """The scale from --alpha or else from the configuration beside an adapter; warns if it needs another base.

    Raises:
        CheckpointError: the configuration is missing or unsupported.
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
                raise CheckpointError(f"{adapter}: does not exist", file=adapter, hint=similar_path_hint(adapter))
            raise CheckpointError(
                f"{adapter}: has no {_PEFT_CONFIG} or {_MINDFORMERS_CONFIG} beside it, so alpha is unknown",
                file=adapter,
                hint=_ALPHA,
            )
        return Scale("--alpha", alpha)
    config = _config(path)
    _check_supported(path, config)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OTHER_BASE):
        report.warn(
            f"{path}: init_lora_weights is {quoted(start)}: training changed the base before the first step, and the "
            "adapter fits only that changed base"
        )
    if alpha is None:
        alpha = _number(path, "lora_alpha", config.get("lora_alpha"))
    rank = config.get("r", config.get("lora_rank"))
    return Scale(
        path,
        alpha,
        _patterns(path, "alpha_pattern", config),
        None if rank is None else _number(path, "r", rank),
        _patterns(path, "rank_pattern", config),
        bool(config.get("use_rslora")),
        bool(config.get("fan_in_fan_out")),
    )


def _check_supported(path: str, config: Mapping[str, Any]) -> None:
    """Refuse unknown keys of a configuration, because they may change the products.

    Raises:
        CheckpointError: the configuration has unknown keys.
    """
    unknown = {
        key: value
        for key, value in config.items()
        # MindFormers' configuration has further keys.
        if (key not in _SUPPORTED_KEYS if os.path.basename(path) == _PEFT_CONFIG else key in _UNSUPPORTED)
        # For PEFT, even an empty list of these tokens is activated LoRA.
        and (value not in (None, False, {}, []) or (key == "alora_invocation_tokens" and value is not None))
    }
    for key, usual in (("peft_type", "LORA"), ("bias", "none")):
        if str(config.get(key) or usual).lower() != usual.lower():
            unknown[key] = config[key]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and not start.lower().startswith((*_OTHER_BASE, *_SAME_BASE)):
        unknown["init_lora_weights"] = start
    if unknown:
        settings = ", ".join(f"{key} = {quoted(json.dumps(value))}" for key, value in unknown.items())
        raise CheckpointError(
            f"{path}: has {settings}, which merge-lora does not support",
            file=path,
            hint="merge it with PEFT (merge_and_unload); if a key does not change the product, remove it from a copy "
            "of the file",
        )


def _patterns(path: str, name: str, config: Mapping[str, Any]) -> dict[str, float]:
    values = config.get(name) or {}
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{path}: {name} is not a JSON object", file=path)
    return {key: _number(path, f"{name} of {quoted(key)}", value) for key, value in values.items()}


def _config(path: str) -> Mapping[str, Any]:
    config = read_json(path, _MAX_CONFIG_BYTES)
    if config is None:
        raise CheckpointError(f"{path}: does not exist", file=path)
    # MindFormers nests it in lora_config.
    inner = config.get("lora_config")
    return inner if isinstance(inner, Mapping) else config


def _number(path: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not MIN_ALPHA <= abs(value) <= MAX_ALPHA:
        raise CheckpointError(
            f"{path}: {key} is {quoted(str(value))}, not a number between {MIN_ALPHA:g} and {MAX_ALPHA:g}",
            file=path,
            hint=_ALPHA if key == "lora_alpha" else None,
        )
    return float(value)
