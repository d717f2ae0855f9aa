"""Legacy trees of Megatron: the boxes of the model's tensors that the tensors of each rank are.

They follow from names and shapes. Numbers of layers follow from how many each stage holds, in the order of the stages.
Written for proof alone: it shares no code with `reshard.forms.megatron`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints.formats.archives import Elements
from reshard.verification.boxes import Shape

EMBEDDING = "embedding.word_embeddings.weight"
_ATTENTION = "self_attention."
_QKV = "self_attention.linear_qkv.weight"
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_(fc[12])\.weight|linear_(fc[12])\.weight(\d*))")
_GROUPED = re.compile(r"mlp\.experts\.weight([12])")
_FC1 = re.compile(r"(mlp\.(?:shared_experts\.)?linear_fc)1\.(weight|bias)")
_ROWS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\..*|.*eh_proj\.weight|self_attention\.linear_(qkv|q_proj|q_up_proj"
    r"|kv_up_proj)\.(weight|bias)"
)
_COLUMNS = re.compile(r"self_attention\.linear_proj\.weight|mlp\.(shared_experts\.)?linear_fc2\.weight")
_NOWHERE = "?"
_HEADS = {"linear_qk_nope": ("q", 0), "linear_qk_rope": ("q", 1), "linear_kv_nope": ("kv", 0), "linear_v": ("kv", 1)}


class Part(NamedTuple):
    """A box of a tensor of the model, and which elements of a tensor of a rank it is.

    Attributes:
        key: the tensor of the model.
        start: of the box.
        sizes: of the box.
        first: its first element in the rank's tensor, counted in C order.
        strides: elements from one to the next in that order, per dimension of the box.
    """

    key: str
    start: Shape
    sizes: Shape
    first: int
    strides: Shape


class Group(NamedTuple):
    """A group of parameters of a plain optimizer.

    Attributes:
        settings: its entry in ``param_groups``.
        moments: per parameter its tensors by name.
        masters: FP32 copies of its parameters of 16 bits, in order.
    """

    settings: Mapping[str, Any]
    moments: Sequence[Mapping[str, Elements]]
    masters: Sequence[Elements]


class RankFile(NamedTuple):
    """A file of a rank.

    Attributes:
        path: its path.
        numbers: in the name of its directory.
        args: arguments of the run.
        keys: of the file.
        models: per chunk its tensors.
        steps: of its optimizers.
        optimizers: the groups of each plain optimizer.
    """

    path: str
    numbers: tuple[int, ...]
    args: Mapping[str, Any]
    keys: Collection[str]
    models: Sequence[Mapping[str, Elements]]
    steps: Collection[int]
    optimizers: Sequence[Sequence[Group]]


class _Sizes(NamedTuple):
    tp: int
    ep: int
    etp: int
    extended: bool


def parts_of(ranks: Sequence[RankFile]) -> Iterator[tuple[RankFile, dict[tuple[int, str], list[Part]]]]:
    """Per file, by chunk and name, the parts that each tensor is; none where its place is unknown."""
    args = ranks[0].args
    places = places_of(ranks)
    tp, pp, ep = (
        args.get(f"{kind}_model_parallel_size") or 1 + max(numbers)
        for kind, numbers in zip(("tensor", "pipeline", "expert"), zip(*places))
    )
    sizes = _Sizes(tp, ep, args.get("expert_tensor_parallel_size") or tp, bool(args.get("moe_tp_extend_ep")))
    count = args.get("num_layers") or args.get("num_hidden_layers") or 0
    layers = layers_of(args, pp, len(ranks[0].models), count)
    # The last rank may have fewer rows of a vocabulary.
    most: dict[tuple[int, int, str], int] = defaultdict(int)
    for rank, (_, stage, _) in zip(ranks, places):
        for chunk, model in enumerate(rank.models):
            for name, elements in model.items():
                most[stage, chunk, name] = max(most[stage, chunk, name], *elements.shape[:1], 0)
    for rank, (tensor, stage, expert) in zip(ranks, places):
        parts: dict[tuple[int, str], list[Part]] = {}
        for chunk, model in enumerate(rank.models):
            modules: dict[str, dict[str, str]] = defaultdict(dict)
            for name in model:
                prefix, within = _parsed(name, layers.get((stage, chunk), ()))
                modules[prefix][within] = name
            modules.pop(_NOWHERE, None)
            for prefix, names in modules.items():
                shapes = {within: model[name].shape for within, name in names.items()}
                module = _Module(
                    prefix, shapes, {within: most[stage, chunk, name] for within, name in names.items()}, args, sizes
                )
                for within, name in names.items():
                    parts[chunk, name] = []
                    # Without the tensors or arguments that it depends on, the place of a tensor is unknown.
                    with contextlib.suppress(LookupError, TypeError, ValueError, ZeroDivisionError):
                        parts[chunk, name] = module.parts(within, tensor, expert)
        yield rank, parts


def places_of(ranks: Sequence[RankFile]) -> list[tuple[int, int, int]]:
    """Tensor, pipeline and expert rank of each file."""
    return [*map(_place, ranks, itertools.repeat(ranks))]


def _place(rank: RankFile, ranks: Sequence[RankFile]) -> tuple[int, int, int]:
    """Tensor, pipeline and expert rank of a directory."""
    tensor, *rest = rank.numbers
    if len(rest) != 1:
        return (tensor, rest[0], rest[1]) if rest else (tensor, 0, 0)
    pp, ep = (rank.args.get(f"{kind}_model_parallel_size") or 1 for kind in ("pipeline", "expert"))
    # Every expert rank of a model of one stage has its embedding.
    experts = ep > 1 if pp > 1 or ep > 1 else all(EMBEDDING in each.models[0] for each in ranks)
    return (tensor, 0, rest[0]) if experts else (tensor, rest[0], 0)


def layers_of(args: Mapping[str, Any], pp: int, chunks: int, count: int) -> dict[tuple[int, int], list[int | None]]:
    """Per pipeline rank and chunk the numbers of its layers, in the order of the model; None for those without any.

    Args:
        args: of the run.
        pp: ranks of the pipeline.
        chunks: of each rank.
        count: layers, with those that do nothing.
    """
    order = [(stage, chunk) for chunk in range(chunks) for stage in range(pp)]
    if args.get("schedules_method") == "dualpipev":
        order[pp:] = order[pp:][::-1]
    empty = args.get("noop_layers")
    skipped = {*_numbers(getattr(empty, "args", (empty,))[0])}
    position, number = itertools.count(), itertools.count()
    return {
        place: [None if next(position) in skipped else next(number) for _ in range(size)]
        for place, size in zip(order, _counts(args, pp, chunks, count))
    }


def _numbers(listed: Any) -> list[int]:
    """A list of numbers, or a text of them."""
    return [int(each) for each in (listed.split(",") if isinstance(listed, str) else listed or ()) if str(each)]


def _counts(args: Mapping[str, Any], pp: int, chunks: int, count: int) -> list[int]:
    """Layers of every chunk, in the order of the model."""
    layout = args.get("pipeline_model_parallel_layout")
    layout = getattr(layout, "fields", {}).get("input_data", layout)
    if isinstance(layout, str):
        text = re.sub("[, ]", "", layout)
        for repeated in (r"\(([^()]*)\)\*(\d+)", r"(.)\*(\d+)"):
            text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
        layout = text.split("|")
    if layout is not None:
        return [sum(kind in ("t", "decoder") for kind in stage) for stage in layout]
    if args.get("num_layer_list"):
        return _numbers(args["num_layer_list"])
    ends = [
        args.get(f"decoder_{end}_pipeline_num_layers") or args.get(f"num_layers_in_{end}_pipeline_stage")
        for end in ("first", "last")
    ]
    if pp > 1 and any(ends):
        middle = (count - sum(filter(None, ends))) // max(1, pp - sum(end is not None for end in ends))
        of_ranks = [ends[0] or middle, *[middle] * (pp - 2), ends[1] or middle]
        return [each // chunks for each in of_ranks] * chunks
    more = [bool(args.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss")]
    counts = [(count + sum(more)) // (pp * chunks)] * (pp * chunks)
    counts[0] -= more[0]
    counts[-1] -= more[1]
    return counts


def _parsed(name: str, layers: Sequence[int | None]) -> tuple[str, str]:
    """The module of a tensor, by its name in the model, and the tensor's name in it."""
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        local = int(parts[2])
        # A tensor in a layer that does nothing has no key.
        number = layers[local] if local < len(layers) else None
        return f"decoder.layers.{number}." if number is not None else _NOWHERE, ".".join(parts[3:])
    if name.startswith("mtp.layers."):
        inner = parts[3] in ("transformer_layer", "mtp_model_layer")
        return ".".join([*parts[:3], *["transformer_layer"] * inner, ""]), ".".join(parts[4 if inner else 3 :])
    if name.startswith("mtp.final_layernorms."):
        return f"mtp.layers.{parts[2]}.", f"final_layernorm.{parts[3]}"
    return "", f"decoder.{name}" if parts[0] == "final_layernorm" else name


class _Module:
    """The tensors of a layer of a rank, or those outside of layers, by their names in it.

    Args:
        prefix: of keys.
        shapes: of the tensors.
        most: the most rows that any rank has of each.
        args: arguments of the run.
        sizes: of groups of ranks.
    """

    def __init__(
        self,
        prefix: str,
        shapes: Mapping[str, Shape],
        most: Mapping[str, int],
        args: Mapping[str, Any],
        sizes: _Sizes,
    ) -> None:
        self._most = most
        self._prefix = prefix
        self._shapes = shapes
        self._args = args
        self._sizes = sizes
        experts = {match[1] or match[4] for match in map(_EXPERT.fullmatch, shapes) if match}
        self._numbered = len(experts - {""})
        self._latent = any(re.search("kv_(up|layer|nope)|linear_v|qk_nope", name) for name in shapes)

    def parts(self, name: str, tensor: int, expert: int) -> list[Part]:
        """The parts that a tensor is; none if its place is unknown."""
        shape, tp = self._shapes[name], self._sizes.tp
        if not all(shape):
            return []
        if name.startswith("mlp.experts."):
            return self._of_experts(name, tensor, expert)
        if name == _QKV and self._latent:
            return self._down(shape)
        of_head = _HEADS.get(name[len(_ATTENTION) : -len(".weight")])
        if of_head is not None:
            return self._of_heads(name, *of_head, tensor)
        key = self._prefix + self._norm(name)
        fc1 = _FC1.fullmatch(name)
        rows, *inner = shape
        if fc1 and self._shapes[f"{fc1[1]}1.weight"][0] == 2 * self._shapes[f"{fc1[1]}2.weight"][1]:
            half = rows // 2
            return [self._rows(key, shape, number * half, half, (number * tp + tensor) * half) for number in (0, 1)]
        if fc1 or _ROWS.fullmatch(name) or (name.endswith("_down_proj.weight") and self._is_cut(name)):
            return [self._rows(key, shape, 0, rows, tensor * self._most[name])]
        if _COLUMNS.fullmatch(name):
            return [Part(key, (0, tensor * inner[0]), shape, 0, (inner[0], 1))]
        return [self._rows(key, shape, 0, rows, 0)]

    @staticmethod
    def _rows(key: str, shape: Shape, first: int, count: int, start: int) -> Part:
        strides = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
        return Part(key, (start, *(0 for _ in shape[1:])), (count, *shape[1:]), first * strides[0], strides)

    def _norm(self, name: str) -> str:
        """The key of a norm that layers hold beside what comes after it."""
        if self._latent or "input_layernorm.weight" not in self._shapes:
            return name
        for beside, within in (("input", "self_attention.linear_qkv"), ("pre_mlp", "mlp.linear_fc1")):
            name = re.sub(rf"^{beside}_layernorm\.", f"{within}.layer_norm_", name)
        return name

    def _is_cut(self, name: str) -> bool:
        up = self._shapes[name.replace("_down_", "_up_")][1]
        rows: int = self._shapes[name][0]
        return bool(rows != up + ("kv_down" in name) * self._args.get("qk_pos_emb_head_dim", 0))

    def _down(self, shape: Shape) -> list[Part]:
        """Two projections, one after the other: of queries, and of keys and values."""
        query = self._shapes.get("self_attention.q_layernorm.weight")
        if query is None:
            rope = self._args.get("qk_pos_emb_head_dim", self._args.get("qk_rope_head_dim"))
            query, name = (shape[0] - self._shapes["self_attention.kv_layernorm.weight"][0] - rope,), "q_proj"
        else:
            name = "q_down_proj"
        parts = ((name, 0, query[0]), ("kv_down_proj", query[0], shape[0]))
        return [
            self._rows(f"{self._prefix}{_ATTENTION}linear_{each}.weight", shape, first, stop - first, 0)
            for each, first, stop in parts
        ]

    def _of_heads(self, name: str, kind: str, number: int, tensor: int) -> list[Part]:
        """The rows of each head are a part of the rows of the head."""
        heads = self._args["num_attention_heads"] // self._sizes.tp
        both = [self._shapes[f"{_ATTENTION}{each}.weight"] for each, (of, _) in _HEADS.items() if of == kind]
        rows = [shape[0] // heads for shape in both]
        key = f"{self._prefix}{_ATTENTION}linear_{kind}_up_proj.weight"
        size, shape = rows[number], self._shapes[name]
        return [
            self._rows(key, shape, head * size, size, (tensor * heads + head) * sum(rows) + number * rows[0])
            for head in range(heads)
        ]

    def _of_experts(self, name: str, tensor: int, expert: int) -> list[Part]:
        """Experts, one by one, in turn, or all of a rank."""
        tp, ep, etp, extended = self._sizes
        single, grouped = _EXPERT.fullmatch(name), _GROUPED.fullmatch(name)
        if not (single or grouped):
            return []
        router = self._shapes.get("mlp.router.weight")
        total = router[0] if router else self._args.get("num_experts") or self._args["n_routed_experts"]
        here = self._numbered or total // (ep * tp if extended else ep)
        part, first = tensor % etp, expert * here
        if extended and here * ep * tp == total:
            part, etp, first = 0, 1, (expert * tp + tensor) * here
        if grouped:
            return self._transposed(int(grouped[1]), here, first, part, etp)
        assert single is not None
        linear, number = single[2] or single[3], single[1] or single[4]
        layers = [self._shapes[name.replace(linear, each)] for each in ("fc1", "fc2")]
        count = 1 if number else here
        rows, size = math.prod(layers[0][:-1]) // count, layers[1][-1]
        key = f"{self._prefix}mlp.experts.experts.linear_{linear}.weight"
        parts = []
        for each in range(count):
            at = first + (int(number) if number else each)
            if linear == "fc1":
                width = layers[0][-1]
                for half in range(rows // size):
                    box = (at, (half * etp + part) * size, 0), (1, size, width)
                    parts.append(Part(key, *box, (each * rows + half * size) * width, (0, width, 1)))
            else:
                high = math.prod(layers[1][:-1]) // count
                parts.append(Part(key, (at, 0, part * size), (1, high, size), each * high * size, (0, size, 1)))
        return parts

    def _transposed(self, number: int, here: int, first: int, part: int, etp: int) -> list[Part]:
        """Transposed layers of experts, one after the other in memory, whatever shape is recorded."""
        (width, all_columns), (all_rows, _) = (self._shapes[f"mlp.experts.weight{each}"] for each in (1, 2))
        size, columns = all_rows // here, all_columns // here
        key = f"{self._prefix}mlp.experts.experts.linear_fc{number}.weight"
        if number == 2:
            return [
                Part(key, (first + at, 0, part * size), (1, width, size), at * size * width, (0, 1, width))
                for at in range(here)
            ]
        return [
            Part(
                key,
                (first + at, (half * etp + part) * size, 0),
                (1, size, width),
                at * width * columns + half * size,
                (0, 1, columns),
            )
            for at in range(here)
            for half in range(columns // size)
        ]
