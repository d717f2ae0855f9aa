"""Small conversions that together use all code that places bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.corpus import FIXTURES
from tests.corpus_mcore import mcore_cases
from tests.model_weights import MODELS, weights
from tests.names.models import table_of
from tests.packed_model import CONFIG, RULES, SHAPES
from tests.quantised.models import SCHEMES, write_model
from tests.reference import Strategy
from tests.running import Argument, done
from tests.small import COPIED, SOURCE, TARGET, tensors
from tests.trees import (
    Checkpoint,
    Value,
    cut_ranks,
    layout,
    scalar,
    single,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)

# Blocks that alternate take more of the views than one tensor after the other.
_RULES = RULES.replace("{ concat = 0 }", "{ interleave = 0, block = 2 }")
_MAPS: dict[str, list[int]] = {
    "model.v": [-1, 0],
    "model.up": [1, 0],
    "model.down": [-1, 0],
    "model.embedding": [-1, 0],
    "model.experts.1.up": [0, 1],
    "model.norm": [0],
}
_PACKED = {
    "net.qkv": layout([2, 2], [0, -1]),
    "net.gate_up": layout([2, 2], [1, 0]),
    "net.down": layout([2, 2], [-1, 1]),
    "net.embedding": layout([2, 2], [0, 1]),
    "net.experts": layout([2, 2], [[1, 0], [-1]]),
    "net.norm": layout([2, 2], [1]),
}
_SPECIAL = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F7FFFFF, 0x00000001, 0x3F808000, 0x3F818000, 0x33800000]


# Of Megatron's checkpoints: state that has no names, or no shapes, and tensors of ranks.
_STATE = ("td14_grouped_model_space", "td_moe_buckets", "legacy_vpp", "legacy14_grouped")

# Arguments of an optimizer and its schedule.
STATED = {
    **{"lr": 0.002, "adam_beta1": 0.9, "adam_beta2": 0.99, "adam_eps": 1e-8, "weight_decay": 0.05},
    **{"global_batch_size": 4, "train_iters": 1000, "lr_warmup_iters": 10},
}

# Legacy trees to be written: their sizes, and further arguments.
_MINDSPEED = {"mla_mm_split": True, "moe_tp_extend_ep": True, "transformer_impl": "local", "moe_grouped_gemm": True}
_TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "td_dense_plain": ("tp=2,pp=2", {}),
    "td_moe_fully": ("tp=2,pp=2,ep=2", {}),
    "td_tied": ("tp=2,pp=2", {}),
    "legacy_vpp": ("tp=2,pp=2", {}),
    "legacy14_grouped": ("tp=2,ep=2", {}),
    "td_mla_mtp": ("tp=2,pp=2", _MINDSPEED),
}

# The prefixes of weights and moments.
_STATES = ("", "adam_m.", "adam_v.")


def _with_moments(strategy: Strategy) -> Strategy:
    """A strategy that also lists the moments of each weight, cut like it."""
    return [
        {**stage, "layouts": {state + name: one for state in _STATES for name, one in stage["layouts"].items()}}
        for stage in strategy
    ]


class Builder:
    """Writes sources below a directory, and the words that convert them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.commands: dict[str, list[str]] = {}

    def add(
        self, name: str, source: Strategy, target: Strategy, full: Checkpoint, *words: Argument, **options: Any
    ) -> None:
        """A conversion of rank directories."""
        place = self._root / name
        shapes = {key: tensor.array.shape for key, tensor in full.items()}
        form = options.pop("form", "merged")
        write_tree(place / "src", cut_ranks(source, full, COPIED, **options))
        old = write_strategy(place / "old", source, shapes, form)
        new: Argument = write_strategy(place / "new", target, shapes, form) if target else "none"
        self.plain(name, "--src-strategy", old, "--dst-strategy", new, *words)

    def plain(self, name: str, *words: Argument) -> None:
        """A conversion of the created checkpoint."""
        self.commands[name] = ["convert", str(self._root / name / "src"), "OUT", *map(str, words), "--verify", "-q"]


def build(root: Path) -> Mapping[str, list[str]]:
    """Write all sources; the command of every conversion, with OUT for where it writes to."""
    created = Builder(root)
    created.add("demo", SOURCE, TARGET, tensors())

    shapes = {"w": (16, 8), "t": (16, 4, 6), "e": (24, 3)}
    full = {name: value(name, shape) for name, shape in shapes.items()}
    sharded = {
        "w": layout([2, 4], [0, -1], -1, 4),
        "t": layout([2, 2, 2], [1, -1, 0], -1, 4),
        "e": layout([8], [-1, -1], 4, 1),
    }
    other = {
        "w": layout([4, 2], [-1, 0], 2, 2),
        "t": layout([2, 2, 2], [[2, 0], [1], [-1]]),
        "e": layout([2, 4], [1, -1], 2, 1),
    }
    created.add("sharded", single(sharded), single(other), full)
    gradients = {**full, **{"accu_grads." + name: value("g" + name, shape) for name, shape in shapes.items()}}
    both = {**sharded, **{"accu_grads." + name: one for name, one in sharded.items()}}
    others = {**other, **{"accu_grads." + name: one for name, one in other.items()}}
    unsharded = [name for name in gradients if name.startswith("accu_grads.")]
    created.add("gradients", single(both), single(others), gradients, unsharded=unsharded, form="merged-json")

    stages = [
        *single({"a": layout([2, 2], [1, 0]), "s": layout([2, 2], [0, -1])}),
        *single({"b": layout([2, 2], [[-1], [0, 1]], 1, 0), "s": layout([2, 2], [-1, 1])}),
    ]
    after = [
        *single({"b": layout([2], [0, -1])}),
        *single({"a": layout([4], [0, -1])}),
        *single({"s": layout([2], [-1, 0])}),
    ]
    created.add("pipeline", stages, after, {name: value(name, (8, 12), "Float16") for name in ("a", "b", "s")})

    # Written under a trainer's names, which the strategy does not list.
    trained = {state + name: value(state + name, (8, 12)) for state in _STATES for name in ("a", "b", "s")}
    created.add("dcp", _with_moments(stages), _with_moments(after), trained, "--to", "dcp")
    values = {"epoch_num": scalar(2, shape=(1,)), "step_num": scalar(5, shape=(1,))}
    place = root / "trained2" / "src"
    write_tree(place, cut_ranks(_with_moments(stages), trained, {**COPIED, **values}))
    shapes_of_trained = dict.fromkeys(trained, (8, 12))
    old_strategy = write_strategy(root / "trained2" / "old", _with_moments(stages), shapes_of_trained, "merged")
    new_strategy = write_strategy(root / "trained2" / "new", _with_moments(after), shapes_of_trained, "merged")
    names: list[Argument] = ["--src-strategy", old_strategy, "--dst-strategy", new_strategy]
    created.plain("trained2", *names, "--to", "checkpoint2", "--prefix", "net")
    # And from these names to those of a model.
    created.add("trainer", single({name: layout([2], [0, -1]) for name in trained}), [], trained, "--to", "dcp")
    state = root / "trainer" / "state"
    done(*(str(state) if word == "OUT" else word for word in created.commands["trainer"]))
    moments = {name: layout([4], [-1, 0]) for name in trained}
    strategy = write_strategy(root / "trainer" / "cut", single(moments), {name: (8, 12) for name in trained})
    created.commands["trainer"] = [
        "convert", str(state), "OUT", "--dst-strategy", str(strategy), "--to", "ranks", "--verify", "-q",
    ]  # fmt: skip

    # Two of eight ranks are lost.
    lost = [
        {"devices": 4, "layouts": {"a": layout([2, 2], [0, -1]), "t": layout([2, 2], [-1, 0])}},
        {"devices": 4, "layouts": {"b": layout([2, 2], [-1, 0]), "t": layout([2, 2], [0, -1])}},
    ]
    place = root / "recover"
    held = cut_ranks(lost, {name: value(name, (8, 12)) for name in ("a", "b", "t")}, COPIED)
    write_tree(place / "src", {rank: tensors for rank, tensors in held.items() if rank not in (1, 6)})
    strategy = write_strategy(place / "old", lost, dict.fromkeys(("a", "b", "t"), (8, 12)))
    created.commands["recover"] = [
        "recover", str(place / "src"), "OUT", "--strategy", str(strategy), "-q",
        "then", "verify", "OUT", "--src", str(place / "src"), "--src-strategy", str(strategy),
        "--dst-strategy", str(strategy), "-q",
    ]  # fmt: skip

    experts = {
        "up": value("up", (4, 6, 8), "BFloat16"),
        "down": value("down", (4, 8, 6), "BFloat16"),
        "table": value("table", (10, 3)),
    }
    created.add(
        "expert",
        single(
            {
                "up": layout([2, 2, 2], [2, 1, 0]),
                "down": layout([2, 2, 2], [[2, 1], [0], [-1]]),
                "table": {**layout([8], [0, -1]), "uneven": [1, 2, 0, 3, 1, 1, 1, 1]},
            }
        ),
        single(
            {"up": layout([4, 2], [1, -1, 0]), "down": layout([2, 4], [-1, 0, 1]), "table": layout([2, 4], [1, -1])}
        ),
        experts,
        "--format",
        "safetensors",
    )
    created.add("full", single(sharded), [], full, "--to", "huggingface", "--max-shard-size", "300B")
    created.add("unified", single(others), [], gradients, "--to", "unified", "--max-shard-size", "600B")
    created.add(
        "checkpoint2",
        single(sharded),
        # Shards as a part of an axis, before, behind and without another axis that cuts.
        single({**other, "t": layout([2, 4], [-1, 1, -1], 2, 1), "e": layout([8], [-1, -1], 4, 1)}),
        full,
        "--to",
        "checkpoint2",
    )

    unpacked = {name: value(name, shape) for name, shape in SHAPES.items()}
    cut = single({name: layout([2, 2], _MAPS.get(name, [0, -1])) for name in SHAPES})
    (root / "packed").mkdir(parents=True)
    (root / "packed" / "rules.toml").write_text(_RULES)
    (root / "packed" / "config.json").write_text(json.dumps(CONFIG))
    names = ["--names", root / "packed" / "rules.toml", "--config", root / "packed" / "config.json"]
    created.add("packed", cut, single(_PACKED), unpacked, *names)

    place = root / "model" / "src"
    write_checkpoint(place / "model.safetensors", weights("qwen3"), metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(MODELS["qwen3"][0]))
    created.plain(
        "model", "--names", table_of("qwen3"), "--dst-strategy", "none", "--cast", "BFloat16", "--to", "ranks"
    )

    # Copies of the files beside weights, with another type in one.
    (root / "published").mkdir()
    shutil.copytree(place, root / "published" / "src")
    (root / "published" / "src" / "tokenizer.json").write_text("{}")
    created.plain("published", "--cast", "Float16", "--to", "huggingface", "--max-shard-size", "20K")

    # Objects, in archives and by themselves.
    saved = FIXTURES / "dcp" / "hyper_w4_2026_03_by_rank" / "checkpoint"
    for name in ("dcp", "hyper-parallel", "hf-sharded"):
        (root / f"to-{name}").mkdir()
        (root / f"to-{name}" / "src").symlink_to(saved)
        created.plain(f"to-{name}", "--to", name, "--shards", "3")

    # A chain of two tables, the second of which packs parts of tensors.
    (root / "megatron").mkdir()
    (root / "megatron" / "src").symlink_to(FIXTURES / "megatron" / "td_moe_fully" / "checkpoint")
    names = ["--names", "qwen3_moe,qkv=contiguous", "--optimizer", "keep"]
    created.plain("megatron", *names, "--dst-strategy", "none", "--to", "ranks")
    megatron, place = root / "megatron" / "src", root / "to-megatron" / "src"
    done("convert", megatron, place, "--to", "unified", *names)
    created.plain("to-megatron", "--names", "qwen3_moe", "--to", "megatron", "--args", megatron)
    # Megatron's files in a distributed checkpoint, arguments of a file, and those that a configuration shows.
    dense = FIXTURES / "megatron" / "td_dense_plain"
    expected = json.loads((dense / "expected.json").read_text())
    (root / "rewritten").mkdir()
    (root / "rewritten" / "src").symlink_to(dense / "checkpoint")
    created.plain("rewritten", "--to", "dcp", "--shards", "2")
    (root / "stated").mkdir()
    (root / "stated" / "src").symlink_to(dense / "checkpoint")
    (root / "stated" / "args.json").write_text(json.dumps(STATED))
    created.plain("stated", "--to", "megatron", "--args", root / "stated" / "args.json", "--shards", "2")
    names = ["--names", expected["names"], "--config", root / "configured" / "config.json"]
    (root / "configured").mkdir()
    (root / "configured" / "config.json").write_text(json.dumps(expected["config"]))
    done("convert", dense / "checkpoint", root / "configured" / "src", "--to", "unified", *names)
    created.plain("configured", *names, "--to", "megatron", "--shards", "3")

    # State in blocks and in buckets, and trees of ranks.
    for case in mcore_cases():
        if case.name in _STATE:
            (root / case.name).mkdir()
            (root / case.name / "src").symlink_to(case.root)
            config = root / case.name / "config.json"
            config.write_text(json.dumps(case.expected["config"]))
            names = ["--names", str(case.expected["names"]), "--optimizer", "keep", "--config", config]
            created.plain(case.name, *names, "--to", "huggingface")

        # Trees with other sizes.
        if case.name in _TREES:
            sizes, args = _TREES[case.name]
            place = root / f"{case.name}-tree"
            place.mkdir()
            (place / "src").symlink_to(case.root)
            (place / "args.json").write_text(json.dumps(args))
            options: list[Argument] = ["--format", "torch", "--sizes", sizes]
            options += ["--args", place / "args.json"] if args else []
            created.plain(f"{case.name}-tree", "--to", "megatron", *options)

    # Float32 weights that become their own masters.
    old = ("decoder", "embedding", "output_layer")
    renames = [f"--rename={each}.*=old.{each}.*" for each in old] + ["--rename=optimizer.state.fp32_param.*=*"]
    shards = ["--to", "hf-sharded", "--shards", "1", "--exclude", "old.*"]
    done("convert", dense / "checkpoint", root / "masters" / "src", *shards, *renames)
    names = [
        "--to",
        "megatron",
        "--rename",
        "*=*",
        "--args",
        dense / "checkpoint",
        "--cast",
        "BFloat16",
        "--shards",
        "2",
    ]
    created.plain("masters", *names)

    for scheme in SCHEMES:
        name = scheme.replace(" ", "-").replace(",", "")
        (root / name).mkdir()
        coded = write_model(root / name / "src", scheme)
        rows = {each.name: layout([2, 2], [*[-1] * (each.values.ndim - 2), 1, 0]) for each in coded}
        strategy = write_strategy(root / name / "new", single(rows))
        created.plain(name, "--dequantize", "BFloat16", "--dst-strategy", strategy)

    numbers = np.random.default_rng(3).standard_normal(96).astype("<f4").view("<u4")
    numbers[: len(_SPECIAL)] = _SPECIAL
    wide = np.frombuffer(numbers.view("<f4").astype("<f8").tobytes(), "<u8")
    wide = np.where(np.arange(96) % 3 == 0, wide + 1, wide)
    floats = {
        "m.a": Value("Float32", numbers.reshape(8, 12)),
        "m.b": Value("Float64", wide.reshape(8, 12)),
        "m.c": Value("BFloat16", (numbers >> 16).astype("<u2").reshape(8, 12)),
        "m.d": Value("Float32", numbers[::-1].copy().reshape(8, 12)),
        "m.e": Value("Float16", (numbers >> 13).astype("<u2").reshape(8, 12)),
    }
    casts = ["--cast", "BFloat16", "--cast", "m.c=Float32", "--cast", "m.d=Float16", "--cast", "m.e=Float32"]
    created.add(
        "cast",
        single({name: layout([2, 2], [1, 0]) for name in floats}),
        single({name: layout([2], [-1, 0]) for name in floats}),
        floats,
        *casts,
    )
    return created.commands
