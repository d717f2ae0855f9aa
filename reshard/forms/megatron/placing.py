"""Parameters of Megatron's ranks: which tensors they are made of, how ranks cut them, and their order.

A module is a layer, or the model outside of layers. Its tensors have the keys that Megatron writes as ``torch_dist``
with a key for each layer, its parameters have live names. The table of kinds gives, for a key, a shape and a run, the
parameters: writers take their views, readers the boxes of the tensors that they are. Their order is another table.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from reshard.checkpoints.formats.archives import c_strides
from reshard.forms.megatron.keys import EMBEDDING, OUTPUT, Place, place_of
from reshard.forms.recorded import ProblemError
from reshard.layout.views import View
from reshard.text.messages import quoted

TP, EP = 0, 1
"""Axes of a device matrix of expert ranks and tensor ranks, counted from the right."""

QKV, QUERY = "self_attention.linear_qkv.weight", "self_attention.linear_q_proj.weight"
QUERY_DOWN, KV_DOWN = "self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight"
QUERY_UP, KV_UP = "self_attention.linear_q_up_proj.weight", "self_attention.linear_kv_up_proj.weight"
ROUTER = "mlp.router.weight"
DOWN = re.compile(r"self_attention\.linear_(q|kv)_down_proj\.weight")
HEADS = {QUERY_UP: ("linear_qk_nope", "linear_qk_rope"), KV_UP: ("linear_kv_nope", "linear_v")}
"""MindSpeed's two layers of each up projection: the parts of every head, in order."""

LOCAL_NORMS = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
"""Norms that local layers hold beside linear layers, and the layers that Transformer Engine holds them in."""

_NORMS = {
    **LOCAL_NORMS,
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}
FC1 = re.compile(r"(mlp\.(?:shared_experts\.)?)linear_fc1\.(?:weight|bias)")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(linear_fc[12])\.weight")
# The kinds of tensors outside of experts: their keys, and the dimension that tensor ranks cut. The rows of a gated fc1
# are split into halves first.
_KINDS: tuple[tuple[re.Pattern[str], int | None], ...] = (
    (FC1, 0),
    (
        re.compile(
            r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)|eh_proj\.weight"
            r"|self_attention\.linear_(qkv|q_proj|q_up_proj|kv_up_proj)\.(weight|bias)"
        ),
        0,
    ),
    (re.compile(r"self_attention\.linear_proj\.weight|mlp\.(shared_experts\.)?linear_fc2\.weight"), -1),
    (
        re.compile(
            r"(.*[._])?(layernorm|layer_norm|norm|enorm|hnorm)[._](weight|bias)|(.*\.)?post_attn_norm\.weight"
            r"|self_attention\.linear_proj\.bias|mlp\.(shared_experts\.)?linear_fc2\.bias"
            r"|mlp\.router\.(weight|bias|expert_bias)|mlp\.shared_experts\.gate_weight"
            r"|embedding\.position_embeddings\.weight|self_attention\.dsa_indexer\..*"
        ),
        None,
    ),
)


class Rank(NamedTuple):
    """A rank of the groups that weights are divided over."""

    tensor: int
    stage: int = 0
    expert: int = 0


class Parallel(NamedTuple):
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


class Experts(Enum):
    """How a rank's experts are put together."""

    SEQUENTIAL = "one after the other"
    GROUPED = "all of the first linear layer, then all of the second"
    FUSED = "two parameters, transposed"
    STACKED = "two parameters"


class Style(NamedTuple):
    """How modules put parameters together.

    Attributes:
        local: norms are beside linear layers, as in local layers; False: within them, as Transformer Engine has them;
            None: as the keys have them.
        experts: how experts are put together.
        cuts_down: ranks cut the down projections of latent attention.
        joined: MindSpeed's one layer of both down projections, or of the queries and one.
        heads: of attention, each of whose two parts is in a layer of its own; 0 where they are in one.
        part: rows of the first part of each head.
        interleaved: the argument by which the rows of a gated fc1 are interleaved; empty if they are not.
    """

    local: bool | None
    experts: Experts
    cuts_down: bool = False
    joined: bool = False
    heads: int = 0
    part: int = 0
    interleaved: str = ""


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


class Parameter(NamedTuple):
    """A parameter of the ranks of a stage, as a view of a tensor; or those of its rows that are of one tensor.

    Attributes:
        name: its live name in the module.
        key: of the tensor in the module.
        split: per dimension of the tensor, the dimensions that it is split into.
        cut: per dimension then, the axes of the device matrix that cut it.
        part: which elements of the second dimension are taken; None for all.
        order: of the dimensions in the parameter; None for the same.
        joined: per dimension in a file, the dimensions of the parameter; None: those of `split`.
    """

    name: str
    key: str
    split: tuple[tuple[int, ...], ...]
    cut: tuple[tuple[int, ...], ...]
    part: tuple[int, int] | None = None
    order: tuple[int, ...] | None = None
    joined: tuple[tuple[int, ...], ...] | None = None

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        """Per dimension of the parameter the axes of the device matrix that cut it."""
        return self.cut if self.order is None else tuple(self.cut[dimension] for dimension in self.order)

    def view(self, view: View) -> View:
        """The parameter of all ranks, of a view of the tensor."""
        shape = tuple(itertools.chain(*self.split))
        if len(shape) > len(self.split):
            view = view.reshape(shape)
        if self.part is not None:
            view = view.part(1, *self.part)
        return view if self.order is None else view.transpose(self.order)

    def shape_in_file(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of the parameter in a file, by the elements of its dimensions there."""
        joined = self._dimensions() if self.joined is None else self.joined
        return tuple(math.prod(sizes[dimension] for dimension in each) for each in joined)

    def _dimensions(self) -> list[range]:
        """Per dimension of the tensor, the numbers of the dimensions that split it."""
        ends = [0, *itertools.accumulate(map(len, self.split))]
        return [*map(range, ends, ends[1:])]

    def _held(self, parallel: Parallel, rank: Rank) -> list[range]:
        """The elements of a rank, per dimension that the tensor is split into."""
        tp = parallel.etp if is_of_expert(self.key) and not parallel.extended else parallel.tp
        numbers, counts = (rank.tensor % tp, rank.expert), (tp, parallel.ep)
        held = []
        for dimension, (size, axes) in enumerate(zip(itertools.chain(*self.split), self.cut)):
            begin, end = (0, size) if dimension != 1 or self.part is None else self.part
            number, count = 0, 1
            for axis in axes:
                number, count = number * counts[axis] + numbers[axis], count * counts[axis]
            # The last rank has fewer rows of a vocabulary that was cut without padding.
            most = -(-(end - begin) // count)
            held.append(range(begin + number * most, max(begin, min(end, begin + (number + 1) * most))))
        return held

    def on_rank(self, parallel: Parallel, rank: Rank) -> tuple[int, ...]:
        """The shape of the parameter in the file of a rank."""
        held = [len(each) for each in self._held(parallel, rank)]
        return self.shape_in_file(held if self.order is None else [held[dimension] for dimension in self.order])

    def parts(self, prefix: str, parallel: Parallel, rank: Rank, first: int = 0) -> Iterator[TensorPart]:
        """The boxes of the tensor that the parameter is on a rank.

        Args:
            prefix: of the module's keys.
            parallel: sizes of the groups.
            rank: the rank.
            first: the first element in the parameter.
        """
        held, dimensions = self._held(parallel, rank), self._dimensions()
        order = range(len(held)) if self.order is None else self.order
        strides = [0] * len(held)
        for dimension, stride in zip(order, c_strides([len(held[dimension]) for dimension in order])):
            strides[dimension] = stride
        shape = tuple(map(math.prod, self.split))
        sizes, steps = (tuple(each[dims[-1]] for dims in dimensions) for each in ([*map(len, held)], strides))
        # A box has one index of every dimension but the last of those that a dimension of the tensor is split into.
        outer = [dimension for dims in dimensions for dimension in dims[:-1]]
        for index in itertools.product(*(held[dimension] for dimension in outer)):
            at = {**{dims[-1]: held[dims[-1]].start for dims in dimensions}, **dict(zip(outer, index))}
            start = tuple(
                sum(at[dimension] * step for dimension, step in zip(dims, c_strides(split)))
                for dims, split in zip(dimensions, self.split)
            )
            before = sum((at[dimension] - held[dimension].start) * strides[dimension] for dimension in outer)
            yield TensorPart(prefix + self.key, shape, start, sizes, first + before, steps)


class Module:
    """The parameters of a layer, or of the model outside of layers.

    Args:
        shapes: of its tensors, by key.
        parallel: sizes of the groups.
        style: how parameters are put together.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], parallel: Parallel, style: Style) -> None:
        self._shapes = shapes
        self._parallel = parallel
        self._style = style

    def parameters(self, key: str) -> list[Parameter]:
        """The parameters that a tensor becomes; those of one name are rows of one parameter, in their order.

        Raises:
            ProblemError: it is not known which they are.
        """
        shape, style = self._shapes[key], self._style
        experts = _EXPERTS.fullmatch(key)
        if experts:
            return self._experts(key, experts[1])
        split: list[tuple[int, ...]] = [(size,) for size in shape]
        cut: list[tuple[int, ...]] = [()] * len(shape)
        if style.joined and key in (QUERY, QUERY_DOWN, KV_DOWN):
            return [Parameter(QKV, key, tuple(split), tuple(cut))]
        if style.heads and key in HEADS:
            rows, rest = divmod(shape[0], style.heads)
            if rest or not 0 < style.part < rows:
                raise ProblemError(f"has {shape[0]} rows, which are not those of {style.heads} heads")
            split[0], cut[:1] = (style.heads, rows), [(TP,), ()]
            parts = (0, style.part), (style.part, rows)
            names = (f"self_attention.{name}.weight" for name in HEADS[key])
            return [Parameter(name, key, tuple(split), tuple(cut), part) for name, part in zip(names, parts)]
        dimension = cut_of(key, style, self._parallel.tp)
        if dimension is not None:
            cut[dimension] = (TP,)
        gated = FC1.fullmatch(key)
        if gated and self._halves(f"{gated[1]}linear_fc1.weight", f"{gated[1]}linear_fc2.weight") == 2:
            split[0], cut[:1] = (2, shape[0] // 2), [(), (TP,)]
        return [Parameter(self._name(key), key, tuple(split), tuple(cut))]

    def _name(self, key: str) -> str:
        """The live name of a tensor: norms are beside linear layers or within them."""
        latent, local = is_latent(self._shapes), self._style.local
        module, _, kind = key.rpartition(".")
        for norm, inner in _NORMS.items() if local is not None else ():
            if module == norm or (module == inner and kind.startswith("layer_norm_")):
                kind = kind.rpartition("_")[2]
                if norm == "input_layernorm":
                    local = local or latent
                elif norm == "pre_mlp_layernorm":
                    local = local or ROUTER in self._shapes
                elif not latent:
                    return key
                return f"{norm}.{kind}" if local else f"{inner}.layer_norm_{kind}"
        return key

    def _halves(self, first: str, second: str) -> int:
        """Halves of the rows of fc1: the second layer has as many columns as one of them has rows."""
        if first not in self._shapes or second not in self._shapes:
            raise ProblemError(f"is not beside {first} and {second}, which show whether it is gated")
        rows, columns = self._shapes[first][-2], self._shapes[second][-1]
        if rows not in (columns, 2 * columns):
            raise ProblemError(f"has {rows} rows, and the layer after it {columns} columns")
        if rows != columns and self._style.interleaved:
            raise ProblemError(f"is interleaved by {self._style.interleaved} in args, which is not known")
        return rows // columns

    def _experts(self, key: str, linear: str) -> list[Parameter]:
        """The parameters of experts: of each, or of all of a rank."""
        both = [f"mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2)]
        halves, up = self._halves(*both), linear == "linear_fc1"
        count, rows, columns = self._shapes[key]
        ranks = self._parallel.ep * (self._parallel.tp if self._parallel.extended else 1)
        here, rest = divmod(count, ranks)
        if rest:
            raise ProblemError(f"has {count} experts, which do not divide over {ranks} ranks")
        over: tuple[int, ...] = (EP, TP) if self._parallel.extended else (EP,)
        inner: tuple[int, ...] = () if self._parallel.extended else (TP,)
        split = ((halves, rows // halves), (columns,)) if up else ((rows,), (columns,))
        cut = ((), inner, ()) if up else ((), inner)
        style = self._style.experts
        joined: tuple[tuple[int, ...], ...]
        if style is Experts.FUSED:
            name, order = f"mlp.experts.weight{linear[-1]}", (0, 3, 1, 2) if up else (0, 2, 1)
            joined = ((1,), (0, 2, 3)) if up else ((0, 1), (2,))
            return [Parameter(name, key, ((count,), *split), (over, *cut), None, order, joined)]
        if style is Experts.STACKED:
            return [Parameter(f"mlp.experts.{linear}.weight", key, ((count,), *split), (over, *cut))]
        # One expert of each rank is a parameter.
        joined = ((0, 1, 2, 3), (4,)) if up else ((0, 1, 2), (3,))
        name = "mlp.experts.{0}.weight{1}" if style is Experts.GROUPED else "mlp.experts.local_experts.{1}.{0}.weight"
        return [
            Parameter(
                name.format(linear, number),
                key,
                ((ranks, here), *split),
                (over, (), *cut),
                (number, number + 1),
                None,
                joined,
            )
            for number in range(here)
        ]


def cut_of(key: str, style: Style, tp: int) -> int | None:
    """The dimension of a tensor outside of experts that tensor ranks cut; None for none."""
    if DOWN.fullmatch(key):
        return 0 if style.cuts_down else None
    for pattern, dimension in _KINDS:
        if pattern.fullmatch(key):
            return dimension
    if tp == 1:
        return None
    raise ProblemError(f"is a parameter of an unknown kind: how {tp} tensor ranks cut it is not known")


def depends_on_style(key: str) -> bool:
    """Whether a tensor's parameter has one name in local layers and another in Transformer Engine's, or other cuts."""
    module, _, kind = key.rpartition(".")
    norms = _NORMS.values() if kind.startswith("layer_norm_") else _NORMS
    return module in norms or bool(DOWN.fullmatch(key) or _EXPERTS.fullmatch(key))


def is_latent(keys: Mapping[str, object]) -> bool:
    """Whether a module has latent attention."""
    return any(key.startswith("self_attention.linear_kv_") for key in keys)


def interleaving(args: Mapping[str, Any]) -> str:
    """The argument by which the rows of a gated fc1 are interleaved; empty if they are not."""
    return next((name for name in args if name.endswith("glu_interleave_size") and args[name]), "")


def is_of_expert(name: str) -> bool:
    """Whether a parameter, by its live name, is one of experts."""
    return ".experts." in name


def is_decayed(name: str, shape: Sequence[int]) -> bool:
    """Whether Megatron's optimizer decays a parameter, by its live name and its shape on a rank."""
    return not (name.endswith(".bias") or len(shape) == 1)


# Modules of a layer, in the order in which Megatron makes them.
_MODULES = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_EMBEDDINGS = tuple(f"embedding.{name}_embeddings" for name in ("word", "position", "tokentype"))
_AROUND = ("embedding.", "decoder.layers.", "decoder.final_layernorm.", "mtp.", "output_layer.")
_MTP = ("enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm")
_PARAMETERS = ("layer_norm_weight", "layer_norm_bias", "gate_weight", "weight", "bias")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.([0-9]+)\.)?(linear_fc[12]|weight[12])(?:\.weight([0-9]*))?")


def order_of(name: str) -> tuple[object, ...]:
    """The place of a parameter, by its live name, in the order in which Megatron makes a chunk of the model."""
    place = place_of(name)
    module, _, parameter = place.tail.rpartition(".")
    kind = _PARAMETERS.index(parameter) if parameter in _PARAMETERS else len(_PARAMETERS)
    if place.layer is not None:
        return (1, place.layer, *_order_in_layer(place.tail))
    if place.mtp is not None and place.is_layer:
        return (3, place.mtp, 3, *_order_in_layer(place.tail))
    if place.mtp is not None:
        return (3, place.mtp, _MTP.index(module) if module in _MTP else len(_MTP), kind)
    if module in _EMBEDDINGS:
        return (0, _EMBEDDINGS.index(module))
    return (next((number for number, start in enumerate(_AROUND) if name.startswith(start)), len(_AROUND)), kind)


def is_ordered(place: Place) -> bool:
    """Whether `order_of` knows a parameter."""
    module, _, parameter = place.tail.rpartition(".")
    if place.is_layer:
        return _order_in_layer(place.tail)[0] != len(_MODULES)
    modules = (*_EMBEDDINGS, "decoder.final_layernorm", "output_layer") if place.mtp is None else _MTP
    return module in modules and parameter in _PARAMETERS


def _order_in_layer(tail: str) -> tuple[object, ...]:
    expert = _EXPERT.fullmatch(tail)
    if expert:
        # Sequential ones are in the order of their numbers, others in that of their layers.
        return (_MODULES.index("mlp.experts"), int(expert[1] or 0), expert[2], int(expert[3] or 0))
    module, _, parameter = tail.rpartition(".")
    if module not in _MODULES or parameter not in _PARAMETERS:
        return (len(_MODULES), tail)
    return (_MODULES.index(module), _PARAMETERS.index(parameter))


class Held(NamedTuple):
    """A tensor of one layer, or an index of a tensor of all layers."""

    key: str
    layer: int | None
    shape: tuple[int, ...]


def modules_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[tuple[str, int | None], dict[str, Held]]:
    """The tensors of every module, by their keys in it; by the prefix of the module and the number of a layer.

    Raises:
        ProblemError: two keys are of one tensor.
    """
    modules: dict[tuple[str, int | None], dict[str, Held]] = {}
    for key, shape in shapes.items():
        place = place_of(key)
        numbers = range(shape[0] if shape else 0) if place.is_stacked else [place.layer]
        for number in numbers:
            index, rest = (number, shape[1:]) if place.is_stacked else (None, shape)
            module = modules.setdefault((place.prefix, number), {})
            if place.tail in module:
                raise ProblemError(f"holds {quoted(module[place.tail].key)} and {quoted(key)}, which are one tensor")
            module[place.tail] = Held(key, index, rest)
    return modules


def ends_of(keys: Collection[str], first: bool, last: bool, mtp: bool) -> dict[str, str]:
    """The parameters outside of layers of a chunk of the model: by their live names the keys of their tensors.

    Args:
        keys: of the tensors outside of layers.
        first: the chunk begins with the embedding.
        last: it ends with the output layer.
        mtp: it has layers of multi-token prediction, if it is the last one.
    """
    around = (("embedding.",) if first else ()) + (("decoder.final_layernorm.", "output_layer.") if last else ())
    found = {key: key for key in keys if key.startswith(around)}
    if last and not first and EMBEDDING in keys:
        # The last stage has a copy for multi-token prediction, or in place of an output layer.
        found.update({EMBEDDING: EMBEDDING} if mtp else {})
        found.update({OUTPUT: EMBEDDING} if OUTPUT not in keys else {})
    return found
