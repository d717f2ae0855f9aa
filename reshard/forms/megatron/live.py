"""Reading parameters of ranks by their live names: the shapes of their tensors, and so which boxes of these they are.

What `placing` makes of a tensor is inverted: names and shapes on ranks give the tensors and how they were put together;
that these give the same shapes on every rank is checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.checkpoints.formats.archives import c_strides
from reshard.forms.megatron.keys import Place, place_of
from reshard.forms.megatron.placing import (
    DOWN,
    FC1,
    HEADS,
    KV_DOWN,
    KV_UP,
    LOCAL_NORMS,
    QKV,
    QUERY,
    QUERY_DOWN,
    QUERY_UP,
    ROUTER,
    Experts,
    Module,
    Parallel,
    Parameter,
    Rank,
    Style,
    TensorPart,
    cut_of,
    interleaving,
)
from reshard.forms.recorded import ProblemError

_QUERY_NORM, _KV_NORM = "self_attention.q_layernorm.weight", "self_attention.kv_layernorm.weight"
# Per layer of a part of each head its projection.
_PROJECTION = {f"self_attention.{name}.weight": up for up, names in HEADS.items() for name in names}
_VOCABULARY = re.compile(r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)")
_NUMBERED = {
    Experts.SEQUENTIAL: re.compile(
        r"mlp\.experts\.local_experts\.(?P<number>[0-9]{1,6})\.linear_fc(?P<layer>[12])\.weight"
    ),
    Experts.GROUPED: re.compile(r"mlp\.experts\.linear_fc(?P<layer>[12])\.weight(?P<number>[0-9]{1,6})"),
}
_TOGETHER = {
    Experts.STACKED: ("mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"),
    Experts.FUSED: ("mlp.experts.weight1", "mlp.experts.weight2"),
}

Shapes = Mapping[Rank, tuple[int, ...]]


class LiveModule:
    """The parameters of a layer, or those of the model outside of layers, on all ranks of a stage.

    Args:
        prefix: of their keys, such as ``decoder.layers.3.``.
        shapes: per parameter, by its live name after the prefix, its shape on every rank.
        parallel: sizes of the groups.
        args: arguments of the run.
    """

    def __init__(self, prefix: str, shapes: Mapping[str, Shapes], parallel: Parallel, args: Mapping[str, Any]) -> None:
        self._prefix = prefix
        self._shapes = shapes
        self._parallel = parallel
        self._args = args
        self._placed: dict[str, tuple[list[Parameter], Parallel]] = {}
        self._of_experts: dict[Experts, tuple[dict[str, Parameter], Parallel]] = {}
        self._latent = any(name in shapes for name in (KV_UP, _KV_NORM, *_PROJECTION))

    def parts(self, name: str, rank: Rank) -> list[TensorPart]:
        """The boxes that a parameter is on a rank.

        Raises:
            ProblemError: it is not known which they are.
        """
        if not all(self._shapes[name][rank]):
            raise ProblemError("has no elements")
        if name not in self._placed:
            self._placed[name] = self._checked(name)
        parameters, parallel = self._placed[name]
        parts: list[TensorPart] = []
        first = 0
        for each in parameters:
            parts += each.parts(self._prefix, parallel, rank, first)
            first += math.prod(each.on_rank(parallel, rank))
        return parts

    def _checked(self, name: str) -> tuple[list[Parameter], Parallel]:
        """The tensors that a parameter is made of, which give its shape on every rank."""
        parameters, parallel = self._parameters(name)
        for rank, shape in self._shapes[name].items():
            each = [parameter.on_rank(parallel, rank) for parameter in parameters]
            # Dimensions of a stack may be joined.
            stacked = name in _TOGETHER[Experts.STACKED] and math.prod(shape) == math.prod(each[0])
            if shape != (sum(rows for rows, *_ in each), *each[0][1:]) and not stacked:
                raise ProblemError(f"has the shape {[*shape]} on tensor rank {rank.tensor}, which is not its part")
        return parameters, parallel

    def _parameters(self, name: str) -> tuple[list[Parameter], Parallel]:
        for experts, pattern in _NUMBERED.items():
            if pattern.fullmatch(name):
                return self._expert(name, experts)
        for experts, names in _TOGETHER.items():
            if name in names:
                return self._expert(name, experts)
        style = self._style()
        if name == QKV and self._latent:
            tensors, style = self._joined(), style._replace(joined=True)
        elif name in _PROJECTION:
            tensors, style = self._heads(name, style)
        else:
            key = self._key(name)
            if DOWN.fullmatch(key):
                style = style._replace(cuts_down=self._cuts_down())
            tensors = {key: self._full(name, cut_of(key, style, self._parallel.tp))}
            gated = FC1.fullmatch(name)
            if gated:
                # Both layers show whether the first is gated.
                for number, dimension in ((1, 0), (2, -1)):
                    other = f"{gated[1]}linear_fc{number}.weight"
                    tensors.update({other: self._full(other, dimension)} if other in self._shapes else {})
        module = Module(tensors, self._parallel, style)
        keys = [*tensors] if style.joined else [*tensors][:1]
        found = [each for key in keys for each in module.parameters(key)]
        return [each for each in found if each.name == name or not style.heads], self._parallel

    def _style(self, experts: Experts = Experts.SEQUENTIAL) -> Style:
        return Style(None, experts, interleaved=interleaving(self._args))

    def _key(self, name: str) -> str:
        """The key of a parameter that is one tensor."""
        norm, _, kind = name.rpartition(".")
        local = not self._latent and any(each.startswith("input_layernorm.") for each in self._shapes)
        return f"{LOCAL_NORMS[norm]}.layer_norm_{kind}" if local and norm in LOCAL_NORMS else name

    def _full(self, name: str, cut: int | None) -> tuple[int, ...]:
        """The shape of a tensor; the last rank may have fewer rows of a vocabulary that was not padded."""
        shapes = {rank.tensor: shape for rank, shape in self._shapes[name].items()}
        first, last = shapes[min(shapes)], shapes.get(self._parallel.tp - 1)
        if cut is None:
            return first
        full = [*first]
        full[cut] *= self._parallel.tp
        if last is not None and _VOCABULARY.fullmatch(name):
            full[cut] += last[cut] - first[cut]
        return tuple(full)

    def _shape_of(self, name: str) -> tuple[int, ...] | None:
        return next(iter(self._shapes.get(name, {}).values()), None)

    def _cuts_down(self) -> bool:
        """Whether ranks cut down projections; with Transformer Engine's layers, every tensor rank has all of one."""
        tp = self._parallel.tp
        if tp == 1:
            return False
        for down, up, arg in ((QUERY_DOWN, QUERY_UP, "q_lora_rank"), (KV_DOWN, KV_UP, "kv_lora_rank")):
            rows, columns = self._shape_of(down), self._shape_of(up)
            if rows is None or columns is None:
                continue
            size = columns[-1]
            more = 0 if down == QUERY_DOWN else self._args.get("qk_pos_emb_head_dim")
            if type(more) is int and rows[0] in (size + more, (size + more) // tp):
                return rows[0] != size + more
            raise ProblemError(f"has {rows[0]} rows, and {arg} is {size}, which does not show whether it is cut")
        raise ProblemError("is not beside the projections that show whether it is cut")

    def _joined(self) -> dict[str, tuple[int, ...]]:
        """The tensors in MindSpeed's one layer of both down projections, or of the queries and a down projection."""
        rows, width = self._full(QKV, None)
        norm, kv_norm = self._shape_of(_QUERY_NORM), self._shape_of(_KV_NORM)
        if norm is not None:
            first, key = norm[0], QUERY_DOWN
        else:
            rope = self._args.get("qk_pos_emb_head_dim", self._args.get("qk_rope_head_dim"))
            if kv_norm is None or type(rope) is not int:
                raise ProblemError("has the rows of two projections, and nothing shows how many of each")
            first, key = rows - kv_norm[0] - rope, QUERY
        if not 0 < first < rows or (kv_norm is not None and rows - first <= kv_norm[0]):
            raise ProblemError(f"has {rows} rows, which are not those of two projections")
        return {key: (first, width), KV_DOWN: (rows - first, width)}

    def _heads(self, name: str, style: Style) -> tuple[dict[str, tuple[int, ...]], Style]:
        """The up projection that a layer has a part of each head of."""
        heads, up = self._args.get("num_attention_heads"), _PROJECTION[name]
        shapes = [self._shape_of(f"self_attention.{part}.weight") for part in HEADS[up]]
        if type(heads) is not int or not heads or heads % self._parallel.tp or shapes[0] is None or shapes[1] is None:
            raise ProblemError("is a part of each head, and args do not record how many heads there are")
        here, rows = heads // self._parallel.tp, [shape[0] for shape in shapes if shape is not None]
        if any(count % here for count in rows):
            raise ProblemError(f"has {rows} rows in both parts, which are none of {here} heads")
        return {up: (sum(rows) * self._parallel.tp, shapes[0][1])}, style._replace(heads=heads, part=rows[0] // here)

    def _expert(self, name: str, experts: Experts) -> tuple[list[Parameter], Parallel]:
        """The parameter of an expert, or of all of a rank."""
        if experts not in self._of_experts:
            self._of_experts[experts] = self._experts(experts)
        found, parallel = self._of_experts[experts]
        if name not in found:
            raise ProblemError("is one of experts that are not numbered without gaps, each with both of its layers")
        return [found[name]], parallel

    def _experts(self, experts: Experts) -> tuple[dict[str, Parameter], Parallel]:
        """The parameters of all experts, and the sizes of their groups."""
        router = self._shape_of(ROUTER)
        if router is None:
            raise ProblemError("is an expert's, and there is no router beside it that shows how many there are")
        total, (tp, ep, etp, extended) = router[0], self._parallel
        if experts in _NUMBERED:
            count, (first, second) = self._numbered(_NUMBERED[experts])
        else:
            over = ep * (tp if extended else 1)
            if total % over:
                raise ProblemError(f"holds experts, and {total} of them do not divide over {over} ranks")
            count = total // over
            first, second = self._together(experts, count)
        if first[1] != second[0]:
            raise ProblemError(f"is of experts of {first[1]} columns, and the layer after it has {second[0]} rows")
        extended = extended and count * ep * tp == total
        if not extended and count * ep != total:
            raise ProblemError(f"is one of {count} experts here, and there are {total} over {ep} expert ranks")
        if not extended and tp % etp:
            raise ProblemError(f"is an expert's, cut over {etp} ranks, more than the {tp} tensor ranks")
        cuts = 1 if extended else etp
        keys = [f"mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2)]
        tensors = {keys[0]: (total, first[0] * cuts, first[1]), keys[1]: (total, second[0], second[1] * cuts)}
        parallel = self._parallel._replace(extended=extended)
        module = Module(tensors, parallel, self._style(experts))
        return {each.name: each for key in keys for each in module.parameters(key)}, parallel

    def _numbered(self, pattern: re.Pattern[str]) -> tuple[int, list[tuple[int, ...]]]:
        """How many experts a rank has as tensors of their own, and the shapes of their two layers."""
        numbers: dict[str, set[int]] = {"1": set(), "2": set()}
        shapes: dict[str, set[tuple[int, ...]]] = {"1": set(), "2": set()}
        for match in filter(None, map(pattern.fullmatch, self._shapes)):
            numbers[match["layer"]].add(int(match["number"]))
            shapes[match["layer"]].update(self._shapes[match[0]].values())
        count = len(numbers["1"])
        if any(each != {*range(count)} for each in numbers.values()):
            raise ProblemError("is one of experts that are not numbered without gaps, each with both of its layers")
        if any(len(each) > 1 or len(min(each)) != 2 for each in shapes.values()):
            raise ProblemError("is one of experts of different shapes")
        return count, [min(each) for each in shapes.values()]

    def _together(self, experts: Experts, count: int) -> list[tuple[int, ...]]:
        """The shapes of the two layers of an expert in parameters of all experts of a rank."""
        shapes = [self._shape_of(name) for name in _TOGETHER[experts]]
        result: list[tuple[int, ...]] = []
        for number, shape in enumerate(shapes):
            dimensions = (2,) if experts is Experts.FUSED else (2, 3)
            if shape is None or len(shape) not in dimensions or (len(shape) == 3 and shape[0] != count):
                raise ProblemError(f"has the shapes {shapes}, which are not those of both layers of {count} experts")
            # Each is transposed where they are fused, in rows of the second and in columns of the first.
            rows, columns = math.prod(shape[:-1]), shape[-1]
            many, other = (columns, rows) if experts is Experts.FUSED and not number else (rows, columns)
            if many % count:
                raise ProblemError(f"has the shapes {shapes}, which are not those of both layers of {count} experts")
            many //= count
            result.append((other, many) if experts is Experts.FUSED and number else (many, other))
        return result


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


def parse(name: str) -> Place:
    """The place of a live name, with MindSpeed's and older names replaced by Megatron's of today's keys."""
    match = _MTP_NORM.fullmatch(name)
    if match:
        return place_of(f"mtp.layers.{match[1]}.final_layernorm.{match[2]}")
    if name.startswith("encoder."):
        return Place("", None, name)
    place = place_of(f"decoder.{name}" if name.startswith("final_layernorm.") else name)
    # Live modules have another name from core 0.17 on; keys have the old one.
    return place._replace(prefix=place.prefix.replace("mtp_model_layer.", "transformer_layer."))


def is_parameter(name: str) -> bool:
    """Whether an entry of a model is one of its parameters, which the optimizer has; not a buffer or an object."""
    return name.rpartition(".")[2] not in _NO_PARAMETERS
