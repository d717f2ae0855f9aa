"""Parameters of a rank of Megatron by their live names: which boxes of which tensors of the model they are.

The tensors are those that Megatron writes as ``torch_dist`` with a key for each layer: `TensorPart.key`. A rank has
rows or columns of a tensor, halves of rows (gated fc1: rows of the gate, then rows of the other half), some of the
experts, or all of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints.formats.archives import c_strides
from reshard.forms.megatron.keys import LAYER, MTP, MTP_INNER
from reshard.forms.megatron.problems import ProblemError

Rank = tuple[int, int]
"""Tensor rank and expert rank of a file."""


class Sizes(NamedTuple):
    """Sizes of the groups that parameters are divided over.

    Attributes:
        tp: tensor parallel size.
        ep: expert parallel size.
        etp: tensor parallel size of experts.
        extended: MindSpeed's ``moe_tp_extend_ep``: experts are dealt over ``ep * tp`` ranks, uncut.
    """

    tp: int
    ep: int = 1
    etp: int = 1
    extended: bool = False


class TensorPart(NamedTuple):
    """A box of a tensor of the model, and which elements of a rank's parameter it has.

    Attributes:
        key: name of the tensor.
        shape: of the tensor.
        start: first element of the box, per dimension.
        sizes: elements of the box, per dimension.
        first: its first element in the parameter, counted in C order.
        strides: elements of the parameter from one to the next, per dimension of the box.
    """

    key: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    strides: tuple[int, ...]


_QUERY_UP, _KV_UP = "self_attention.linear_q_up_proj.weight", "self_attention.linear_kv_up_proj.weight"
_QUERY_DOWN, KV_DOWN = "self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight"
_QKV, QUERY = "self_attention.linear_qkv.weight", "self_attention.linear_q_proj.weight"
_QUERY_NORM, _KV_NORM = "self_attention.q_layernorm.weight", "self_attention.kv_layernorm.weight"
ROUTER = "mlp.router.weight"
HEADS = {_QUERY_UP: ("linear_qk_nope", "linear_qk_rope"), _KV_UP: ("linear_kv_nope", "linear_v")}
"""MindSpeed's two layers of each up projection: the parts of every head, in order."""

# Per such layer its projection, and the number of its part.
_HEAD_PARTS = {
    f"self_attention.{name}.weight": (up, number) for up, names in HEADS.items() for number, name in enumerate(names)
}

FC1 = re.compile(r"(mlp\.(?:shared_experts\.)?)linear_fc1\.(?:weight|bias)")
ROWS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)|eh_proj\.weight"
    r"|self_attention\.linear_(qkv|q_proj|q_up_proj|kv_up_proj)\.(weight|bias)"
)
COLUMNS = re.compile(r"self_attention\.linear_proj\.weight|mlp\.(shared_experts\.)?linear_fc2\.weight")
WHOLE = re.compile(
    r"(.*[._])?(layernorm|layer_norm|norm|enorm|hnorm)[._](weight|bias)|(.*\.)?post_attn_norm\.weight"
    r"|self_attention\.linear_proj\.bias|mlp\.(shared_experts\.)?linear_fc2\.bias"
    r"|mlp\.router\.(weight|bias|expert_bias)|mlp\.shared_experts\.gate_weight|embedding\.position_embeddings\.weight"
    r"|self_attention\.dsa_indexer\..*"
)
_VOCABULARY = re.compile(r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)")
_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.([0-9]{1,6})\.(linear_fc[12])\.weight")
_GROUPED_TE = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight([0-9]{0,6})")
_GROUPED = re.compile(r"mlp\.experts\.weight([12])")
_EXPERTS = "mlp.experts.experts.{}.weight"
LOCAL_NORMS = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
"""Norms that local layers hold beside linear layers, and the layers that Transformer Engine holds them in."""

Shapes = Mapping[Rank, tuple[int, ...]]


class LiveModule:
    """The parameters of a layer, or those of the model outside of layers, on all ranks of a stage.

    Args:
        prefix: of their keys, such as ``decoder.layers.3.``.
        shapes: per parameter, by its live name after the prefix, its shape on every rank.
        sizes: of the groups.
        args: arguments of the run.
    """

    def __init__(self, prefix: str, shapes: Mapping[str, Shapes], sizes: Sizes, args: Mapping[str, Any]) -> None:
        self.prefix = prefix
        self._shapes = shapes
        self._sizes = sizes
        self._args = args
        self._of_tensor_rank: dict[str, Mapping[int, tuple[int, ...]]] = {}
        self._numbered_of: dict[Rank, tuple[int, dict[str, tuple[int, ...]]]] = {}
        self._latent = any(name in shapes for name in (_KV_UP, _KV_NORM, *_HEAD_PARTS))

    def parts(self, name: str, rank: Rank) -> list[TensorPart]:
        """The boxes that a parameter is on a rank.

        Raises:
            ProblemError: it is not known which they are.
        """
        shape = self._shapes[name][rank]
        if not all(shape):
            raise ProblemError("has no elements")
        sequential, grouped_te, grouped = (pattern.fullmatch(name) for pattern in (_SEQUENTIAL, _GROUPED_TE, _GROUPED))
        if sequential:
            return self._expert(sequential[2], int(sequential[1]), rank)
        if grouped_te and grouped_te[2]:
            return self._expert(grouped_te[1], int(grouped_te[2]), rank)
        if grouped_te:
            return self._stacked(grouped_te[1], rank)
        if grouped:
            return self._transposed(int(grouped[1]), rank)
        shapes = self._on_tensor_ranks(name)
        if name == _QKV and self._latent:
            _check_same(shapes)
            return self._down_projections(shape)
        if name in _HEAD_PARTS:
            return self._heads(name, shape, rank)
        key = self._key(name)
        gated = FC1.fullmatch(name)
        if gated and self._is_gated(gated[1], rank):
            return self._halves(key, shape, rank)
        if gated or ROWS.fullmatch(name) or (name in (_QUERY_DOWN, KV_DOWN) and not self._is_duplicated(name, rank)):
            return [self._cut(key, name, rank, 0)]
        if COLUMNS.fullmatch(name):
            return [self._cut(key, name, rank, len(shape) - 1)]
        if not (WHOLE.fullmatch(name) or name in (_QUERY_DOWN, KV_DOWN) or self._sizes.tp == 1):
            raise ProblemError(
                f"is a parameter of an unknown kind: how {self._sizes.tp} tensor ranks cut it is not known"
            )
        _check_same(shapes)
        return [_whole(key, shape)]

    def _key(self, name: str) -> str:
        """The key of a parameter that is one box of one tensor."""
        if not self._latent and any(each.startswith("input_layernorm.") for each in self._shapes):
            norm, _, kind = name.rpartition(".")
            if norm in LOCAL_NORMS:
                name = f"{LOCAL_NORMS[norm]}.layer_norm_{kind}"
        return self.prefix + name

    def _on_tensor_ranks(self, name: str) -> Mapping[int, tuple[int, ...]]:
        """The shape of a parameter on every tensor rank: ranks that differ in their experts alone hold the same."""
        shapes = self._of_tensor_rank.get(name)
        if shapes is None:
            on_ranks = self._shapes[name]
            shapes = {tensor: shape for (tensor, _), shape in on_ranks.items()}
            if any(shapes[tensor] != shape for (tensor, _), shape in on_ranks.items()):
                raise ProblemError("has different shapes in files of one tensor rank")
            self._of_tensor_rank[name] = shapes
        return shapes

    def _cut(self, key: str, name: str, rank: Rank, dimension: int) -> TensorPart:
        """Rows or columns of a tensor."""
        shape = self._shapes[name][rank]
        size, total = self._share(name, dimension)
        start = [0] * len(shape)
        start[dimension] = rank[0] * size
        full = list(shape)
        full[dimension] = total
        return TensorPart(key, tuple(full), tuple(start), shape, 0, c_strides(shape))

    def _share(self, name: str, dimension: int) -> tuple[int, int]:
        """Elements of each tensor rank along a dimension, and of all of them.

        Those of the last rank may be fewer where a converter cut a vocabulary that was not padded.
        """
        by_rank = {tensor: shape[dimension] for tensor, shape in self._on_tensor_ranks(name).items()}
        count, last = self._sizes.tp, self._sizes.tp - 1
        sizes = {size for tensor, size in by_rank.items() if tensor != last}
        size = sizes.pop() if sizes else by_rank[last]
        end = by_rank.get(last, size)
        if sizes or (end != size and not (_VOCABULARY.fullmatch(name) and end < size)):
            raise ProblemError(
                f"has {sorted({*by_rank.values()})} elements along dimension {dimension} on tensor ranks"
            )
        return size, (count - 1) * size + end

    def _halves(self, key: str, shape: tuple[int, ...], rank: Rank) -> list[TensorPart]:
        """Rows of the gate and rows of the other half, one after the other."""
        size = shape[0] // 2
        full = (self._sizes.tp * shape[0], *shape[1:])
        strides = c_strides(shape)
        box = (size, *shape[1:])
        rest = (0,) * (len(shape) - 1)
        return [
            TensorPart(
                key,
                full,
                ((half * self._sizes.tp + rank[0]) * size, *rest),
                box,
                half * size * strides[0],
                strides,
            )
            for half in (0, 1)
        ]

    def _is_gated(self, module: str, rank: Rank) -> bool:
        """Whether fc1 of a module has two halves: the second layer has as many columns as one half has rows."""
        name, second = f"{module}linear_fc1.weight", f"{module}linear_fc2.weight"
        if name not in self._shapes or second not in self._shapes or rank not in self._shapes[second]:
            raise ProblemError(f"is not beside {name} and {second}, which show whether it is gated")
        return self._halves_of(self._shapes[name][rank][0], self._shapes[second][rank][-1]) == 2

    def _halves_of(self, rows: int, columns: int) -> int:
        if rows not in (columns, 2 * columns):
            raise ProblemError(f"has {rows} rows, and the layer after it {columns} columns")
        interleaved = [name for name in self._args if name.endswith("glu_interleave_size") and self._args[name]]
        if interleaved and rows != columns:
            raise ProblemError(f"is interleaved by {interleaved[0]} in args, which is not read")
        return rows // columns

    def _is_duplicated(self, name: str, rank: Rank) -> bool:
        """Whether every tensor rank has all of a down projection, as Transformer Engine's layers do."""
        if self._sizes.tp == 1:
            return True
        for down, up, arg in ((_QUERY_DOWN, _QUERY_UP, "q_lora_rank"), (KV_DOWN, _KV_UP, "kv_lora_rank")):
            rows, columns = self._shapes.get(down, {}).get(rank), self._shapes.get(up, {}).get(rank)
            if rows is None or columns is None:
                continue
            size = columns[-1]
            more = 0 if down == _QUERY_DOWN else self._args.get("qk_pos_emb_head_dim")
            if type(more) is int and rows[0] in (size + more, (size + more) // self._sizes.tp):
                return rows[0] == size + more
            raise ProblemError(f"has {rows[0]} rows, and {arg} is {size}, which does not show whether it is cut")
        raise ProblemError("is not beside the projections that show whether it is cut")

    def _down_projections(self, shape: tuple[int, ...]) -> list[TensorPart]:
        """MindSpeed's one layer of both down projections, or of the queries and a down projection; all of both."""
        norm, kv_norm = self._shape_of(_QUERY_NORM), self._shape_of(_KV_NORM)
        rows, width = shape
        if norm is not None:
            first, name = norm[0], _QUERY_DOWN
        else:
            rope = self._args.get("qk_pos_emb_head_dim", self._args.get("qk_rope_head_dim"))
            if kv_norm is None or type(rope) is not int:
                raise ProblemError("has the rows of two projections, and nothing shows how many of each")
            first, name = rows - kv_norm[0] - rope, QUERY
        if not 0 < first < rows or (kv_norm is not None and rows - first <= kv_norm[0]):
            raise ProblemError(f"has {rows} rows, which are not those of two projections")
        return [
            TensorPart(self.prefix + name, (first, width), (0, 0), (first, width), 0, (width, 1)),
            TensorPart(
                self.prefix + KV_DOWN, (rows - first, width), (0, 0), (rows - first, width), first * width, (width, 1)
            ),
        ]

    def _shape_of(self, name: str) -> tuple[int, ...] | None:
        return next(iter(self._shapes.get(name, {}).values()), None)

    def _heads(self, name: str, shape: tuple[int, ...], rank: Rank) -> list[TensorPart]:
        """A part of each head of an up projection."""
        heads = self._args.get("num_attention_heads")
        up, number = _HEAD_PARTS[name]
        shapes = [self._shapes.get(f"self_attention.{part}.weight", {}).get(rank) for part in HEADS[up]]
        if type(heads) is not int or not heads or heads % self._sizes.tp or None in shapes:
            raise ProblemError("is a part of each head, and args do not record how many heads there are")
        here = heads // self._sizes.tp
        rows = [each[0] for each in shapes if each is not None]
        if any(count % here for count in rows):
            raise ProblemError(f"has {shape[0]} rows, which are no part of {here} heads")
        of_head = [count // here for count in rows]
        width, size = shape[1], of_head[number]
        full = (heads * sum(of_head), width)
        return [
            TensorPart(
                self.prefix + up,
                full,
                ((rank[0] * here + head) * sum(of_head) + number * of_head[0], 0),
                (size, width),
                head * size * width,
                (width, 1),
            )
            for head in range(here)
        ]

    def _numbered(self, rank: Rank) -> tuple[int, dict[str, tuple[int, ...]]]:
        """How many experts a rank has as tensors of their own, and the shapes of their two layers."""
        numbered = self._numbered_of.get(rank)
        if numbered is None:
            numbers: dict[str, set[int]] = {}
            shapes: dict[str, set[tuple[int, ...]]] = {}
            for name, on_ranks in self._shapes.items():
                match = _SEQUENTIAL.fullmatch(name) or _GROUPED_TE.fullmatch(name)
                linear, number = sorted(match.groups(), reverse=True) if match else ("", "")
                if number and rank in on_ranks:
                    numbers.setdefault(linear, set()).add(int(number))
                    shapes.setdefault(linear, set()).add(on_ranks[rank])
            counts = {linear: len(each) for linear, each in numbers.items()}
            count = counts.get("linear_fc1", 0)
            if [*counts.values()] != [count] * 2 or any(each != {*range(count)} for each in numbers.values()):
                raise ProblemError("is one of experts that are not numbered without gaps, each with both of its layers")
            if any(len(each) > 1 or len(min(each)) != 2 for each in shapes.values()):
                raise ProblemError("is one of experts of different shapes")
            numbered = self._numbered_of[rank] = count, {linear: min(each) for linear, each in shapes.items()}
        return numbered

    def _all_experts(self) -> int:
        """Experts of the model: the router has a row for each."""
        router = self._shape_of(ROUTER)
        if router is None:
            raise ProblemError("is an expert's, and there is no router beside it that shows how many there are")
        return router[0]

    def _expert_place(self, count: int, rank: Rank) -> tuple[int, int, int]:
        """The first expert of a rank, which cut of each it has, and the number of cuts."""
        tp, ep, etp, extended = self._sizes
        tensor, expert = rank
        total = self._all_experts()
        if extended and count * ep * tp == total:
            return (expert * tp + tensor) * count, 0, 1
        if count * ep != total:
            raise ProblemError(f"is one of {count} experts here, and there are {total} over {ep} expert ranks")
        if tp % etp:
            raise ProblemError(f"is an expert's, cut over {etp} ranks, more than the {tp} tensor ranks")
        return expert * count, tensor % etp, etp

    def _experts(
        self,
        linear: str,
        numbers: range,
        here: int,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        rank: Rank,
        transposed: bool = False,
    ) -> list[TensorPart]:
        """The boxes of a layer of some experts, one after the other in a parameter.

        Args:
            linear: the layer.
            numbers: of the experts on the rank.
            here: experts of the rank.
            shapes: of the two layers of each expert there.
            rank: the rank.
            transposed: a layer is stored by columns.
        """
        (rows, width), (height, size) = shapes
        if width != height:
            raise ProblemError(f"is of experts of {width} columns, and the layer after it has {height} rows")
        halves = self._halves_of(rows, size)
        first, cut, cuts = self._expert_place(here, rank)
        total, full = self._all_experts(), size * cuts
        first += numbers.start
        key = self.prefix + _EXPERTS.format(linear)
        if linear == "linear_fc2":
            box = (first, 0, cut * size), (len(numbers), width, size)
            strides = (width * size, 1, width) if transposed else (width * size, size, 1)
            return [TensorPart(key, (total, width, full), *box, 0, strides)]
        strides = (rows * width, 1, rows) if transposed else (rows * width, width, 1)
        of_half = size if transposed else size * width
        return [
            TensorPart(
                key,
                (total, halves * full, width),
                (first, half * full + cut * size, 0),
                (len(numbers), size, width),
                half * of_half,
                strides,
            )
            for half in range(halves)
        ]

    def _expert(self, linear: str, number: int, rank: Rank) -> list[TensorPart]:
        """One expert's layer as a tensor of its own."""
        count, shapes = self._numbered(rank)
        both = shapes["linear_fc1"], shapes["linear_fc2"]
        return self._experts(linear, range(number, number + 1), count, both, rank)

    def _stacked(self, linear: str, rank: Rank) -> list[TensorPart]:
        """The experts of a rank as one tensor, in their order."""
        names = [f"mlp.experts.linear_fc{number}.weight" for number in (1, 2)]
        shapes = [self._shapes.get(name, {}).get(rank) for name in names]
        count = self._experts_here()
        stacked: list[tuple[int, int]] = []
        for shape in shapes:
            rows = 0 if shape is None else math.prod(shape[:-1])
            if shape is None or len(shape) not in (2, 3) or rows % count or (len(shape) == 3 and shape[0] != count):
                raise ProblemError(f"is a stack of {count} experts of the shapes {shapes}")
            stacked.append((rows // count, shape[-1]))
        return self._experts(linear, range(count), count, (stacked[0], stacked[1]), rank)

    def _experts_here(self) -> int:
        over = self._sizes.ep * (self._sizes.tp if self._sizes.extended else 1)
        total = self._all_experts()
        if total % over:
            raise ProblemError(f"holds experts, and {total} of them do not divide over {over} ranks")
        return total // over

    def _transposed(self, number: int, rank: Rank) -> list[TensorPart]:
        """The experts of a rank in GroupedMLP's order: transposed layers, one after the other, whatever its shape."""
        shapes = [self._shapes.get(f"mlp.experts.weight{each}", {}).get(rank) for each in (1, 2)]
        if shapes[0] is None or shapes[1] is None or len(shapes[0]) != 2 or len(shapes[1]) != 2:
            raise ProblemError("is not beside the other weights of the same experts")
        (width, columns), (rows, height) = shapes[0], shapes[1]
        count = self._experts_here()
        if columns % count or rows % count:
            raise ProblemError(f"has the experts' shapes {shapes}, which are none of {count} experts")
        both = (columns // count, width), (height, rows // count)
        return self._experts(f"linear_fc{number}", range(count), count, both, rank, transposed=True)


def is_of_expert(name: str) -> bool:
    """Whether a parameter, by its live name, is one of experts."""
    return ".experts." in name


def is_decayed(name: str, shape: Sequence[int]) -> bool:
    """Whether Megatron's optimizer decays a parameter, by its live name and its shape on a rank."""
    return not (name.endswith(".bias") or len(shape) == 1)


def _check_same(shapes: Mapping[int, tuple[int, ...]]) -> None:
    if len({*shapes.values()}) > 1:
        raise ProblemError("has different shapes on different ranks, which should hold all of it")


def _whole(key: str, shape: tuple[int, ...]) -> TensorPart:
    return TensorPart(key, shape, (0,) * len(shape), shape, 0, c_strides(shape))


def strides_in(part: TensorPart, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
    """The first element and the strides of a part in a parameter that is stored with other strides than in C order.

    None where the part's steps are no steps along dimensions of the parameter.
    """
    usual = c_strides(shape)
    if all(size == 1 or stride == other for size, stride, other in zip(shape, strides, usual)):
        return part.first, part.strides
    steps = {step: stride for size, step, stride in zip(shape, usual, strides) if size > 1}
    within = zip(part.sizes, part.strides)
    if any(size > 1 and step not in steps for size, step in within):
        return None
    first, rest = 0, part.first
    for step, stride in zip(usual, strides):
        at, rest = divmod(rest, step)
        first += at * stride
    return first, tuple(0 if size == 1 else steps[step] for size, step in zip(part.sizes, part.strides))


_NO_PARAMETERS = ("expert_bias", "local_tokens_per_expert", "_extra_state")
_MTP_NORM = re.compile(r"mtp\.final_layernorms\.([0-9]{1,6})\.(weight|bias)")


class LiveName(NamedTuple):
    """A live name in two parts.

    Attributes:
        layer: the local number of a decoder layer; None for others.
        prefix: of keys; for a decoder layer that of a layer without its number.
        name: within the layer, or within the model outside of layers.
    """

    layer: int | None
    prefix: str
    name: str


def parse(name: str) -> LiveName:
    """The parts of a live name, with MindSpeed's and older names replaced by Megatron's of today's keys."""
    match = LAYER.fullmatch(name)
    if match and match[1]:
        return LiveName(int(match[1]), "decoder.layers.", match[2])
    match = MTP.fullmatch(name)
    if match:
        prefix, inner = f"mtp.layers.{match[1]}.", MTP_INNER.fullmatch(match[2])
        return LiveName(None, f"{prefix}transformer_layer.", inner[1]) if inner else LiveName(None, prefix, match[2])
    match = _MTP_NORM.fullmatch(name)
    if match:
        return LiveName(None, f"mtp.layers.{match[1]}.", f"final_layernorm.{match[2]}")
    if name.startswith("final_layernorm."):
        return LiveName(None, "", f"decoder.{name}")
    return LiveName(None, "", name)


def is_parameter(name: str) -> bool:
    """Whether an entry of a model is one of its parameters, which the optimizer has; not a buffer or an object."""
    return name.rpartition(".")[2] not in _NO_PARAMETERS
