"""Networks for a real compiler, and their rules.

A network is written as a model's code writes it: an operator's strategy is numbers of devices per dimension of its
inputs. Its rules are written in named axes, by hand; nothing here makes one of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.conformance import oracles

HIDDEN, INNER, ROWS = 80, 160, 320
HEADS = 2
"""Of keys and values: they are cut no further."""

Operator = dict[str, Any]


class Run(NamedTuple):
    """A run of a network that is compiled, as it is configured.

    Attributes:
        sizes: devices per kind of parallelism.
        shards: ``parallel_optimizer_config``, as MindSpore has it; None where the optimizer does not shard.
        layers: layers per stage.
        training: with the optimizer.
    """

    sizes: dict[str, int]
    shards: dict[str, int] | None = None
    layers: tuple[int, ...] = (4,)
    training: bool = True

    @property
    def devices(self) -> int:
        product = 1
        for name, size in self.sizes.items():
            product *= 1 if name == "ep" else size
        return product

    @property
    def text(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def stages(self) -> int:
        return self.sizes.get("pp", 1)

    def options(self) -> list[str]:
        """What is typed for `strategy make` and `derive` to make the strategy of this run, sizes aside."""
        options = ["--optimizer-shards", "off"]
        if self.shards is not None:
            options[1] = str(self.shards["optimizer_weight_shard_size"])
            options += ["--optimizer-threshold", str(self.shards["parallel_optimizer_threshold"])]
        if self.stages > 1:
            options += ["--layers-per-stage", ",".join(map(str, self.layers))]
        return options if self.training else [*options, "--weights-only"]


class Network(NamedTuple):
    """A network: its code, its rules, and runs of it."""

    operators: Callable[[Run], list[Operator]]
    rules: str
    runs: dict[str, Run]


def operator(
    kind: str,
    weight: str,
    shape: Sequence[int],
    *shard: Any,
    stage: int | None = None,
    dtype: str = "float32",
    trained: bool = True,
    opted_out: bool = False,
) -> Operator:
    """In the format of `workers.compiler`."""
    options = {"kind": kind, "weight": weight, "shape": list(shape), "shard": list(shard), "stage": stage}
    return {**options, "dtype": dtype, "trained": trained, "opted_out": opted_out}


def shards(size: int, threshold: int) -> dict[str, int]:
    return {"optimizer_weight_shard_size": size, "parallel_optimizer_threshold": threshold}


def _decoder(run: Run) -> list[Operator]:
    """A decoder whose keys and values have few heads; data is cut by samples and by parts of the sequence."""
    mp, cp = run.sizes.get("mp", 1), run.sizes.get("cp", 1)
    data = run.sizes.get("dp", 1) * cp
    heads = min(mp, HEADS)
    last = run.stages - 1

    def on(stage: int) -> int | None:
        return stage if run.stages > 1 else None

    first_table = [mp * cp, 1], [data // cp]
    created = [operator("gather", "embedding.table", (ROWS, HIDDEN), *first_table, stage=on(0))]
    stages = [stage for stage, count in enumerate(run.layers) for _ in range(count)]
    rows = [data, 1], [mp, 1]
    columns = [data, mp], [1, mp]
    for layer, stage in enumerate(stages):
        at = f"decoder.{layer}"
        created += [
            operator("mul", f"{at}.norm", (HIDDEN,), [data, 1], [1], stage=on(stage), opted_out=True),
            operator("matmul", f"{at}.query", (HIDDEN, HIDDEN), *rows, stage=on(stage)),
            operator("matmul", f"{at}.key", (HIDDEN, HIDDEN), [data, 1], [heads, 1], stage=on(stage)),
            operator("matmul", f"{at}.out", (HIDDEN, HIDDEN), *columns, stage=on(stage)),
            operator("matmul", f"{at}.up", (INNER, HIDDEN), *rows, stage=on(stage)),
            operator("mul", f"{at}.gate", (INNER,), [data, mp], [mp], stage=on(stage)),
            operator("matmul", f"{at}.down", (HIDDEN, INNER), *columns, stage=on(stage)),
        ]
    created.append(operator("mul", "norm", (HIDDEN,), [data, 1], [1], stage=on(last), opted_out=True))
    created.append(operator("matmul", "head", (ROWS, HIDDEN), *rows, stage=on(last)))
    return created


_DECODER = """
optimizer_states = ["adam_m", "adam_v"]

[pipeline]
first = "embedding.*"
last = ["norm", "head"]

[[parameter]]
match = "embedding.table"
map = ["mp*cp", "None"]

[[parameter]]
match = ["*norm"]
map = ["None"]
optimizer_shard = false

[[parameter]]
match = "*.key"
map = ["min(mp,2)", "None"]

[[parameter]]
match = "*.gate"
map = ["mp"]

[[parameter]]
match = ["*.out", "*.down"]
map = ["None", "mp"]

[[parameter]]
match = "*"
map = ["mp", "None"]
"""


def _mixed(run: Run) -> list[Operator]:
    """Layouts that are no transformer's: experts outermost, the weight on the left, both dimensions cut, bfloat16."""
    dp, mp, ep = (run.sizes.get(name, 1) for name in ("dp", "mp", "ep"))
    return [
        operator("gather", "table", (ROWS, HIDDEN), [1, mp], [dp], dtype="bfloat16"),
        operator("left", "left", (HIDDEN, HIDDEN), [mp, 1], [dp, 1]),
        operator("experts", "experts.columns", (8, HIDDEN, INNER), [ep, dp // ep, 1], [ep, 1, mp]),
        operator("experts", "experts.rows", (8, INNER, HIDDEN), [ep, dp // ep, mp], [ep, mp, 1], dtype="bfloat16"),
        operator("matmul", "square", (HIDDEN, HIDDEN), [dp // ep, mp], [ep, mp], dtype="float16"),
        operator("matmul", "frozen", (HIDDEN, HIDDEN), [dp, 1], [mp, 1], trained=False),
        operator("mul", "everywhere", (HIDDEN,), [dp * mp, 1], [1]),
    ]


_MIXED = """
optimizer_states = ["adam_m", "adam_v"]

[[parameter]]
match = "table"
matrix = ["dp", "mp"]
map = ["None", "mp"]

[[parameter]]
match = "left"
matrix = ["mp", "dp"]
map = ["mp", "None"]

[[parameter]]
match = "experts.columns"
matrix = ["ep", "dp/ep", "mp"]
map = ["ep", "None", "mp"]

[[parameter]]
match = "experts.rows"
matrix = ["ep", "dp/ep", "mp"]
map = ["ep", "mp", "None"]

[[parameter]]
match = "square"
matrix = ["dp/ep", "mp", "ep"]
map = ["ep", "mp"]

[[parameter]]
match = "frozen"
map = ["mp", "None"]
trained = false

[[parameter]]
match = "everywhere"
matrix = ["dp*mp"]
map = ["None"]
"""


def _grid(run: Run) -> list[Operator]:
    """Layouts over named axes of the model's own."""
    dp, x, y = (run.sizes[name] for name in ("dp", "x", "y"))

    def over(*entries: Any) -> dict[str, Any]:
        return {"matrix": [dp, x, y], "names": ["dp", "x", "y"], "map": list(entries)}

    return [
        operator("gather", "table", (ROWS, HIDDEN), [1, 1], [dp]),
        operator("matmul", "both", (INNER, HIDDEN), over("dp", "None"), over(["x", "y"], "None")),
        operator("matmul", "turned", (HIDDEN, INNER), over("dp", ["y", "x"]), over("None", ["y", "x"])),
        operator("matmul", "square", (ROWS, HIDDEN), over("dp", "x"), over("y", "x")),
        operator("mul", "scale", (ROWS,), over(["dp", "x"], "y"), over("y")),
    ]


_GRID = """
optimizer_states = ["adam_m", "adam_v"]

[[parameter]]
match = "table"
matrix = ["dp", "x*y"]
map = "None"

[[parameter]]
match = "both"
matrix = ["dp", "x", "y"]
map = [["x", "y"], "None"]
nested = true

[[parameter]]
match = "turned"
matrix = ["dp", "x", "y"]
map = ["None", ["y", "x"]]
nested = true

[[parameter]]
match = "square"
matrix = ["dp", "x", "y"]
map = ["y", "x"]
nested = true

[[parameter]]
match = "scale"
matrix = ["dp", "x", "y"]
map = ["y"]
nested = true
"""

NETWORKS = {
    "decoder": Network(
        _decoder,
        _DECODER,
        {
            "sixteen": Run({"dp": 8, "mp": 2}, shards(-1, 0)),
            # The threshold equals the size of the square matrices.
            "forty": Run({"dp": 5, "mp": 8}, shards(-1, 25)),
            "sizes of four": Run({"dp": 16, "mp": 2}, shards(4, 26)),
            "context": Run({"dp": 2, "cp": 2, "mp": 4}, shards(-1, 0)),
            "three uneven stages": Run({"dp": 2, "mp": 4, "pp": 3}, shards(-1, 0), (2, 1, 1)),
            "two stages": Run({"dp": 4, "mp": 2, "pp": 2}, shards(2, 0), (2, 2)),
            "inference": Run({"mp": 8}, training=False),
            "unsharded": Run({"dp": 2, "mp": 8}),
        },
    ),
    "mixed": Network(
        _mixed,
        _MIXED,
        {
            "pairs of experts": Run({"dp": 4, "mp": 2, "ep": 2}, shards(-1, 0)),
            "four experts": Run({"dp": 8, "mp": 2, "ep": 4}, shards(2, 13)),
            # The first does not show where experts lie in the second.
            "all experts": Run({"dp": 8, "mp": 1, "ep": 8}),
            "all experts twice": Run({"dp": 16, "mp": 1, "ep": 8}),
        },
    ),
    "grid": Network(
        _grid,
        _GRID,
        {
            "wide": Run({"dp": 2, "x": 2, "y": 4}, shards(-1, 0)),
            "wide, not sharded": Run({"dp": 2, "x": 2, "y": 4}),
            "tall": Run({"dp": 4, "x": 4, "y": 2}, shards(2, 0)),
        },
    ),
}


def _deepseek(release: str, sequence_parallel: bool) -> Callable[[Run], list[Operator]]:
    """Parts of DeepSeek-V3 as MindFormers' parallel_core shards them: in 1.6, or later."""

    def operators(run: Run) -> list[Operator]:
        dp, mp, cp, ep = (run.sizes.get(name, 1) for name in ("dp", "mp", "cp", "ep"))
        data = dp * cp
        rows, columns, whole = ([data, 1], [mp, 1]), ([data, mp], [1, mp]), ([data * mp, 1], [1, 1])

        def over(matrix: Sequence[int], names: str, *entries: Any) -> dict[str, Any]:
            return {"matrix": list(matrix), "names": names.split(), "map": list(entries)}

        def cut(*entries: Any) -> dict[str, Any]:
            return over((dp, cp, mp), "dp cp tp", *entries)

        def linear(name: str, shape: Sequence[int], in_1_6: tuple[list[int], list[int]]) -> Operator:
            """A linear layer that is sequence parallel in later releases."""
            if release == "1.6":
                return operator("matmul", name, shape, *in_1_6)
            features = cut(["dp", "cp", "tp"], "None")
            return operator("morph", name, shape, features, cut("None", "None"), features)

        def column(name: str, shape: Sequence[int]) -> Operator:
            if release == "1.6":
                return operator("matmul", name, shape, *rows)
            features = cut(["dp", "cp"], "None"), cut("tp", "None"), cut(["dp", "cp"], "tp")
            return operator("morph", name, shape, *features)

        tokens = over((data * mp // ep, ep), "outer ep", ["outer", "ep"], "None")
        experts = tokens, over((data * mp // ep, ep), "outer ep", "ep", "None"), tokens
        layer, attention, mtp = "decoder.layers.0", "decoder.layers.0.self_attention", "mtp.layers.0"
        square, up, down = (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
        shared = [(whole, whole) if sequence_parallel else (rows, columns)][0]
        return [
            operator("gather", "embedding.word_embeddings.weight", (ROWS, HIDDEN), [mp, 1], [1]),
            operator("mul", f"{layer}.input_layernorm.weight", (HIDDEN,), [data, 1], [1], opted_out=True),
            linear(f"{attention}.linear_q_down_proj.weight", square, ([data, 1], [1, 1])),
            column(f"{attention}.linear_q_up_proj.weight", square),
            operator("matmul", f"{attention}.linear_proj.weight", square, *columns),
            linear(f"{layer}.mlp.shared_experts.linear_fc1.weight", up, shared[0]),
            linear(f"{layer}.mlp.shared_experts.linear_fc2.weight", down, shared[1]),
            operator("morph added", f"{layer}.mlp.experts.weight1", (8 * HIDDEN, INNER), *experts),
            operator("morph added", f"{layer}.mlp.experts.weight2", (8 * INNER, HIDDEN), *experts),
            operator("mul", f"{mtp}.enorm.weight", (HIDDEN,), [data, 1], [1], opted_out=True),
            linear(f"{mtp}.transformer_layer.mlp.shared_experts.linear_fc1.weight", up, shared[0]),
            linear(f"{mtp}.eh_proj.weight", (HIDDEN, 2 * HIDDEN), whole if sequence_parallel and cp == 1 else rows),
            operator("matmul", "output_layer.weight", (ROWS, HIDDEN), *rows),
        ]

    return operators


_DEEPSEEK_RUNS = {
    "experts beside model parallelism": Run({"dp": 2, "mp": 4, "ep": 4}, shards(-1, 0)),
    "experts over all": Run({"dp": 4, "mp": 2, "ep": 8}, shards(-1, 0)),
    "context": Run({"dp": 2, "cp": 2, "mp": 2}, shards(-1, 0)),
    "inference": Run({"mp": 8, "ep": 8}, training=False),
}
#: Models of MindFormers' parallel_core, by its release and by use_seq_parallel.
DEEPSEEK = {
    (release, parallel): Network(_deepseek(release, parallel), "mcore", _DEEPSEEK_RUNS)
    for release in ("1.6", "later")
    for parallel in (False, True)
}
#: Runs of the decoder that do not compile, and what is said of them here.
REFUSED = {
    "six devices": (Run({"dp": 3, "mp": 2}), "6 devices; MindSpore's compiler takes 1, 2, 4 or a multiple of 8"),
    "groups across servers": (Run({"dp": 5, "mp": 4, "pp": 2}, layers=(2, 2)), "as a group, which"),
    "more shards than devices": (Run({"dp": 4, "mp": 2}, shards(16, 0)), "is more than the 8 devices"),
    "what does not divide": (Run({"dp": 2, "mp": 32}), "does not divide by"),
}


def compile_run(
    version: str, network: str | Network, run: Run, directory: Path, ending: str = "ckpt"
) -> dict[str, Any]:
    """Have the stages compiled, each into a file of its own below a new directory.

    Returns:
        The last answer: the first error, if there is one.
    """
    directory.mkdir(parents=True)
    per_stage = run.devices // run.stages
    chosen = NETWORKS[network] if isinstance(network, str) else network
    answer: dict[str, Any] = {}
    for rank in range(0, run.devices, per_stage):
        job = {
            "rank": rank,
            "devices": run.devices,
            "stages": run.stages,
            "file": str(directory / f"ckpt_strategy_rank_{rank}.{ending}"),
            "optimizer": run.training,
            "shards": run.shards,
            "operators": chosen.operators(run),
        }
        answer = oracles.compiler(version, job)
        if "error" in answer:
            break
    return answer
