"""Compiled strategies as cases for `strategy make`: handwritten rules, sizes, settings, shapes.

A case is a compile of MindSpore's. Its rules are written from the network's code, not from the strategy.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.strategies import RecordedLayout, read_strategy_file
from reshard.strategies.rules import FullTensor, ModelTensors, ShardSetting, TargetRun, model_tensors, parse_sizes
from tests.corpus import CORPUS, FIXTURES

RULES = FIXTURES / "rules"
ROOTS = (FIXTURES / "strategies", FIXTURES, CORPUS.parent / "corpus_strategies", CORPUS)
_VARIANTS = (
    *("net", "embedding", "parallel_optimizer_false", "tied", "kv_cap", "vocab_emb_dp", "norm_opt", "seq_parallel"),
    *("frozen", "moe"),
)
_NAMED = ("dp", "mp", "pp", "cp", "ep")


class MadeCase(NamedTuple):
    """One compile: the options that make its strategy, and the strategy that it wrote."""

    name: str
    path: Path
    rules: str
    sizes: dict[str, int]
    shards: ShardSetting
    layers_per_stage: tuple[int, ...] | None
    tensors: tuple[FullTensor, ...]
    own: str | None

    @property
    def same_network(self) -> object:
        """Equal for compiles of one network that differ in parallelism alone."""
        if self.own is not None:
            return self.own
        config = json.loads((self.path / "case.json").read_text())["config"]
        model = self.model
        weights = frozenset((name, tensor.shape, tensor.dtype) for name, tensor in model.weights.items())
        return weights, frozenset(model.states.values()), tuple(str(config.get(key)) for key in _VARIANTS)

    @property
    def model(self) -> ModelTensors:
        return model_tensors("shapes", self.tensors, ITEM_SIZES)

    @property
    def target(self) -> TargetRun:
        options = ",".join(f"{name}={size}" for name, size in self.sizes.items())
        return TargetRun(parse_sizes(options), self.shards, self.layers_per_stage, not self.model.states)

    @property
    def strategy(self) -> Path:
        return self.path / "strategy"

    def compiled(self) -> dict[int, dict[str, RecordedLayout]]:
        """What the compile recorded, per stage."""
        files = [read_strategy_file(str(path)) for path in sorted(self.strategy.glob("*.ckpt"))]
        return {file.items[0].stage: dict(file.layouts) for file in files}

    def options(self) -> list[str]:
        """The options of `strategy make` and `derive` for `target`, without sizes."""
        options = ["--optimizer-shards", "off" if not self.shards.size else str(self.shards.size)]
        options += ["--optimizer-threshold", str(self.shards.threshold)]
        if self.layers_per_stage is not None:
            options += ["--layers-per-stage", ",".join(map(str, self.layers_per_stage))]
        return options if self.model.states else [*options, "--weights-only"]

    @property
    def sizes_text(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())


def case_names() -> list[str]:
    """All cases that are on this machine; rules cannot express tables that are split by hand."""
    names = {path.parent.name for root in ROOTS for path in root.glob("*/case.json")}
    return sorted(name for name in names if not name.startswith("12_manual_split"))


@cache
def load(name: str) -> MadeCase:
    path = next(root / name for root in ROOTS if (root / name / "case.json").is_file())
    options = json.loads((path / "case.json").read_text())
    config = options.get("config", {})
    classes = options["layout_classes"]
    tensors = tuple(
        FullTensor(param, tuple(classes[label]["full_shape"]), classes[label]["dtype"])
        for param, (label, *_) in options["params"].items()
    )
    stages = config.get("stage_of_layer")
    layers = tuple(count for _, count in sorted(Counter(stages).items())) if stages else None
    own = next((named for named in sorted(_OWN, reverse=True) if name.startswith(named)), None)
    if own is not None:
        sizes, rules = _OWN[own]
    else:
        sizes = {key: config[key] for key in _NAMED if config.get(key, 1) > 1} or {"dp": 1}
        rules = _rules(config)
    return MadeCase(name, path, rules, sizes, _shards(options["auto_parallel_context"]), layers, tensors, own)


def _shards(context: dict[str, Any]) -> ShardSetting:
    if not context.get("enable_parallel_optimizer"):
        return ShardSetting(0)
    config = context.get("parallel_optimizer_config") or {}
    threshold = config.get("parallel_optimizer_threshold", 64)
    return ShardSetting(config.get("optimizer_weight_shard_size", -1), threshold)


def _rules(config: dict[str, Any]) -> str:
    """The rules of a network that comes in variants."""
    if config.get("net") == "left":
        return _LEFT
    before = ""
    if config.get("net") == "llama":
        text = (RULES / "llama.toml").read_text()
        if config["kv_cap"]:
            heads = config["kv_heads"]
            before += (
                f'[[parameter]]\nmatch = ["*.wk.weight", "*.wv.weight"]\nmap = ["min(mp,{heads})", "None"]\n'
                f'optimizer_shard = "uncapped"\n'
            )
        if config["vocab_emb_dp"]:
            before += '[[parameter]]\nmatch = ["model.tok_embeddings.*", "lm_head.*"]\nmap = "None"\n'
        if config["seq_parallel"]:
            before += '[[parameter]]\nmatch = "*.layers.*norm.weight"\nmatrix = ["dp*cp*mp"]\nmap = "None"\n'
        if config["norm_opt"]:
            text = text.replace("optimizer_shard = false", "")
    else:
        text = (RULES / "backbone.toml").read_text()
        tables = '[[parameter]]\nmatch = ["*.embedding_table", "head.weight"]\n'
        if config.get("embedding") == "hidden":
            before += '[[parameter]]\nmatch = "*.embedding_table"\nmap = ["None", "mp"]\n'
        if config.get("embedding") == "rep":
            before += f'{tables}map = "None"\n'
        if config.get("parallel_optimizer_false"):
            before += f'{tables}map = ["mp", "None"]\noptimizer_shard = false\n'
    return text.replace("[[parameter]]", f"{before}[[parameter]]", 1)


def rule(match: str, matrix: list[str], entries: list[Any], more: str = "") -> str:
    """One rule as TOML."""
    options = {"match": match, "matrix": matrix, "map": entries}
    return "\n".join(["[[parameter]]", *(f"{key} = {json.dumps(value)}" for key, value in options.items()), more, ""])


def _block(number: int, matrix: list[str], entries: list[Any], more: str = "") -> str:
    return rule(f"backbone.blocks.{number}.weight", matrix, entries, more)


_NESTED = "nested = true"
_XYZ = ["x", "y", "z"]
_LEFT = (
    rule("gather.*", ["dp", "mp"], ["None", "mp"])
    + rule("conv.*", ["dp", "mp"], ["mp", "None", "None", "None"])
    + rule("mul.*", ["dp", "mp"], ["mp"])
    + rule("left.*", ["mp", "dp"], ["mp", "None"])
    + rule("bmm.*", ["mp", "dp"], ["mp", "None", "None"])
)
_CONV = (
    rule("head.weight", ["dp", "mp"], ["mp", "None"])
    + '[[parameter]]\nmatch = ["head.odd_weight", "head.bias", "norm.*", "moe.router_scale"]\nmap = "None"\n'
    + rule("moe.ffn.projection.bias", ["dp", "mp"], ["None", "dp", "None", "None"])
    + rule("moe.ffn.projection.weight", ["dp", "mp"], ["None", "dp", "mp", "None"])
    + rule("moe.ffn.mapping.*", ["dp", "mp"], ["dp", "None", "mp"])
    + rule("conv.bias", ["dp", "mp"], ["mp"])
    + rule("conv.weight", ["dp", "mp"], ["mp", "None", "None", "None"])
)
_TWO = _block(0, ["dp", "mp"], ["None", "mp"]) + _block(1, ["dp", "mp"], ["mp", "None"])
# Networks that are no others' variants: sizes and rules by the beginning of the case's name.
_OWN: dict[str, tuple[dict[str, int], str]] = {
    "05_2dtp_tb16": (
        {"dp": 2, "x": 2, "y": 4},
        _block(0, ["dp", "x", "y"], ["y", "x"]) + _block(1, ["dp", "y", "x"], ["x", "y"]),
    ),
    "05b_2dtp_tb32": (
        {"dp": 2, "x": 2, "y": 4, "z": 2},
        _block(0, ["dp", *_XYZ], ["y", "x"]) + _block(1, ["dp*x", "y", "z"], ["z", "y"]),
    ),
    "06_mid": (
        {"dp": 4, "x": 2, "y": 2},
        _block(0, ["dp", "x", "y"], ["x", "None"])
        + _block(1, ["dp", "x*y"], ["None", "x*y"])
        + _block(2, ["x", "y", "dp"], ["y", "dp"]),
    ),
    "06b_repeat8": (
        {"x": 2, "y": 2, "z": 2},
        _block(0, _XYZ, ["None", "y"])
        + _block(1, ["x", "y*z"], ["x", "None"])
        + _block(2, ["x*y*z"], ["None", "None"])
        + _block(3, _XYZ, ["x", "y"]),
    ),
    "07_layout8": (
        {"x": 2, "y": 2, "z": 2},
        _block(0, _XYZ, ["None", ["y", "z"]], _NESTED)
        + _block(1, _XYZ, [["x", "z"], "None"], _NESTED)
        + _block(2, _XYZ, [["z", "x"], "None"], _NESTED)
        + _block(3, _XYZ, ["z", "y"], _NESTED),
    ),
    "07b_layout16": (
        {"x": 2, "y": 2, "z": 4},
        _block(0, _XYZ, ["None", ["y", "z"]], _NESTED)
        + _block(1, _XYZ, ["z", "y"], _NESTED)
        + _block(2, _XYZ, [["z", "y"], "None"], _NESTED),
    ),
    "07c_layout8_simple": (
        {"x": 2, "y": 2, "z": 2},
        _block(0, _XYZ, ["None", "z"], _NESTED) + _block(1, _XYZ, ["z", "None"], _NESTED),
    ),
    "08l_": (
        {"dp": 2, "mp": 2, "pp": 2},
        '[pipeline]\nfirst = "network.word*"\nlast = "network.lm_head*"\n'
        + rule("network.*", ["dp", "mp"], ["None", "mp"]),
    ),
    "09_conv_moe": ({"dp": 4, "mp": 2}, _CONV),
    "09c_": ({"dp": 4, "mp": 2}, _TWO),
    "09d_": ({"dp": 4, "mp": 2}, _TWO),
}
