"""Parameters of every rank of a run, in the order of ``named_parameters()``, from keys and chunks of ``torch_dist``.

The keys name the tensors of the whole model; a chunk of one is what a rank has of it. The order within a layer is that
in which Megatron makes its modules: a table. Local layers and Transformer Engine's differ in the place of the norm
before queries, keys and values, and in how experts are put together: each possible order is a `Variant`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from reshard.checkpoints.formats.archives import c_strides
from reshard.forms.megatron.keys import EMBEDDING, LAYER, MTP, MTP_INNER, OUTPUT
from reshard.forms.megatron.live import LOCAL_NORMS, TensorPart
from reshard.forms.megatron.problems import ProblemError
from reshard.forms.pytorch.dcp import DescribedTensor
from reshard.text.messages import quoted

_EXPERTS = "mlp.experts.experts."
# Saved, and no parameters.
BUFFERS = ("mlp.router.expert_bias",)

# Modules of a layer, in the order in which they are made.
MODULES = (
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
    "mlp.experts.experts",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
PARAMETERS = ("layer_norm_weight", "layer_norm_bias", "gate_weight", "weight", "bias")
# Modules around the layers of the model.
_BEFORE = (EMBEDDING, "embedding.position_embeddings.weight", "embedding.tokentype_embeddings.weight")
_AFTER = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias")
_HEAD = (OUTPUT, "output_layer.bias")
_MTP_BEFORE = ("enorm.weight", "enorm.bias", "hnorm.weight", "hnorm.bias", "eh_proj.weight", "eh_proj.bias")
_MTP_AFTER = ("final_layernorm.weight", "final_layernorm.bias")


class Experts(Enum):
    """How a rank's experts are put together."""

    SEQUENTIAL = "one after the other"
    GROUPED = "all of the first linear layer, then all of the second"
    FUSED = "two parameters, transposed"


class Variant(NamedTuple):
    """An order of parameters: of local layers or Transformer Engine's, and of experts."""

    local: bool
    experts: Experts


class Holding(Enum):
    """What a rank's optimizer holds: parameters that all data-parallel ranks share, those of experts, or both."""

    DENSE = "dense"
    EXPERTS = "experts"
    ALL = "all"


class Parameter(NamedTuple):
    """A parameter of a rank.

    Attributes:
        dtype: MindSpore's name of its type.
        elements: how many it has.
        parts: the boxes that it is; empty for a copy of what another rank has.
        shared: whether pipeline stages share it.
    """

    dtype: str
    elements: int
    parts: tuple[TensorPart, ...]
    shared: bool = False


class Rank(NamedTuple):
    """A rank of the groups that weights are cut over; ``expert_size`` is the number of expert parallel ranks."""

    tensor: int
    expert: int = 0
    expert_tensor: int = 0
    expert_size: int = 1


class _At(NamedTuple):
    """A tensor, or the part of one at an index of its first dimensions."""

    key: str
    place: tuple[int, ...]


_Layer = dict[str, _At]
_Cell = tuple[tuple[int, ...], tuple[int, ...]]


class _MtpLayer(NamedTuple):
    """A layer of multi-token prediction: one of the usual parameters, and others around it, in their order."""

    before: Sequence[_At]
    inner: _Layer
    after: Sequence[_At]

    @classmethod
    def of(cls, layer: _Layer) -> _MtpLayer:
        inner = {match[1]: at for name, at in layer.items() for match in [MTP_INNER.fullmatch(name)] if match}
        around = {name: at for name, at in layer.items() if not MTP_INNER.fullmatch(name)}
        unknown = sorted(around.keys() - {*_MTP_BEFORE, *_MTP_AFTER})
        if unknown:
            raise ProblemError(f"has an unknown order: where {quoted(around[unknown[0]].key)} belongs is not known")
        before, after = ([around[name] for name in names if name in around] for names in (_MTP_BEFORE, _MTP_AFTER))
        return cls(before, inner, after)


class Model:
    """The tensors of a model by their keys, as ranks hold them.

    Attributes:
        layer_count: layers of the decoder.
        tp: tensor parallel size.
        etp: tensor parallel size of experts.
        expert_count: experts of a layer; 0 without any.
        tied: whether the output layer is the embedding.

    Raises:
        ProblemError: keys or chunks are not Megatron's.
    """

    def __init__(self, weights: Mapping[str, DescribedTensor]) -> None:
        self._weights = weights
        self._cells: dict[tuple[str, int], dict[tuple[int, ...], list[_Cell]]] = {}
        self._of_layer: dict[object, list[Parameter]] = {}
        layers: dict[int, _Layer] = {}
        mtp: dict[int, _Layer] = {}
        for key, tensor in weights.items():
            match, of_mtp = LAYER.fullmatch(key), MTP.fullmatch(key)
            if match and match[1] is None:
                for number in range(tensor.shape[0] if tensor.shape else 0):
                    layers.setdefault(number, {})[match[2]] = _At(key, (number,))
            elif match:
                layers.setdefault(int(match[1]), {})[match[2]] = _At(key, ())
            elif of_mtp:
                mtp.setdefault(int(of_mtp[1]), {})[of_mtp[2]] = _At(key, ())
            elif key not in (*_BEFORE, *_AFTER, *_HEAD):
                raise ProblemError(f"has an unknown order: where {quoted(key)} belongs is not known")
        self.layer_count = len(layers)
        self._layers = [layers[number] for number in range(self.layer_count)] if _are_all(layers) else []
        self._mtp = [_MtpLayer.of(mtp[number]) for number in range(len(mtp))] if _are_all(mtp) else []
        if len(self._layers) < len(layers) or len(self._mtp) < len(mtp) or not layers:
            raise ProblemError("is of a model some of whose layers are missing")
        self.tied = OUTPUT not in weights
        vocabulary = EMBEDDING if EMBEDDING in weights else OUTPUT
        self.tp = len(self._cells_of(_At(vocabulary, ()))) if vocabulary in weights else 1
        inner = (layer.inner for layer in self._mtp)
        second = f"{_EXPERTS}linear_fc2.weight"
        experts = next((layer[second] for layer in (*self._layers, *inner) if second in layer), None)
        self.expert_count, self.etp = 0, 1
        if experts is not None:
            if len(weights[experts.key].shape) != len(experts.place) + 3:
                raise ProblemError(f"has an unknown order: {quoted(experts.key)} is not that of experts")
            index = (*experts.place, 0)
            self.expert_count = weights[experts.key].shape[len(experts.place)]
            self.etp = len(self._cells_of(_At(experts.key, index)))

    def variants(self, local: bool, experts: Experts) -> list[Variant]:
        """The possible orders, those that are likely first."""
        kinds = sorted(Experts, key=lambda each: each is not experts) if self.expert_count else [experts]
        return [Variant(first, kind) for kind in kinds for first in (local, not local)]

    def parameters(
        self,
        rank: Rank,
        layers: range,
        first: bool,
        last: bool,
        holding: Holding,
        variant: Variant,
        stages: int,
    ) -> list[Parameter]:
        """The parameters of a chunk of the model on a rank, in the order of ``named_parameters()``.

        Args:
            rank: the rank.
            layers: the chunk's.
            first: the chunk begins with the embedding.
            last: it ends with the output layer.
            holding: which parameters.
            variant: their order.
            stages: pipeline parallel size.
        """
        parameters: list[Parameter] = []
        dense = holding is not Holding.EXPERTS
        mtp = self._mtp if last else []
        if dense and (first or mtp):
            # The stage of multi-token prediction has a copy of the embedding.
            shared = stages > 1 and (self.tied or bool(self._mtp))
            names = _BEFORE if first else _BEFORE[:2]
            parameters += self._around(names, rank, shared, copies=not first)
        for number in layers:
            parameters += self._layer(self._layers[number], rank, holding, variant)
        if dense and last:
            parameters += self._around(_AFTER, rank)
        for before, inner, after in mtp:
            parameters += (self._parameter(at, rank) for at in before if dense)
            parameters += self._layer(inner, rank, holding, variant)
            parameters += (self._parameter(at, rank) for at in after if dense)
        if dense and last and self.tied and not first:
            # An output layer of its own, although a stage of multi-token prediction has the embedding beside it.
            parameters += self._around((EMBEDDING,), rank, shared=not mtp, copies=True)
        elif dense and last:
            parameters += self._around(_HEAD, rank)
        return parameters

    def _around(
        self, names: Sequence[str], rank: Rank, shared: bool = False, copies: bool = False
    ) -> Iterator[Parameter]:
        for key in names:
            if key in self._weights:
                parameter = self._parameter(_At(key, ()), rank)
                if copies:
                    parameter = parameter._replace(parts=())
                yield parameter._replace(shared=shared and key == EMBEDDING)

    def _layer(self, layer: _Layer, rank: Rank, holding: Holding, variant: Variant) -> list[Parameter]:
        """The parameters of a layer."""
        key = (id(layer), rank, holding, variant)
        known = self._of_layer.get(key)
        if known is not None:
            return known
        by_order: list[tuple[tuple[int, int], list[Parameter]]] = []
        experts: dict[str, _At] = {}
        for tail, at in layer.items():
            if tail in BUFFERS:
                continue
            if tail.startswith(_EXPERTS):
                experts[tail[len(_EXPERTS) :]] = at
            elif holding is not Holding.EXPERTS:
                by_order.append((_order(tail, variant.local, at.key), [self._parameter(at, rank)]))
        if experts and holding is not Holding.DENSE:
            by_order.append(((MODULES.index("mlp.experts.experts"), 0), self._of_experts(experts, rank, variant)))
        by_order.sort(key=lambda each: each[0])
        parameters = list(itertools.chain.from_iterable(some for _, some in by_order))
        self._of_layer[key] = parameters
        return parameters

    def _of_experts(self, experts: Mapping[str, _At], rank: Rank, variant: Variant) -> list[Parameter]:
        unknown = sorted(experts.keys() - {f"linear_fc{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")})
        if unknown or self.expert_count % rank.expert_size:
            raise ProblemError("has experts of an unknown order")
        count = self.expert_count // rank.expert_size
        numbers = range(rank.expert * count, (rank.expert + 1) * count)
        names = [f"linear_fc{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")]
        names = [name for name in names if name in experts]
        if variant.experts is Experts.FUSED:
            return [self._fused(experts[name], rank, numbers) for name in names]
        pairs = [(number, name) for number in numbers for name in names]
        if variant.experts is Experts.GROUPED:
            pairs.sort(key=lambda pair: names.index(pair[1]))
        tensor = rank.expert_tensor
        return [
            self._parameter(_At(at.key, (*at.place, number)), rank, self.etp, tensor)
            for number, name in pairs
            for at in [experts[name]]
        ]

    def _fused(self, at: _At, rank: Rank, numbers: range) -> Parameter:
        """The experts of a rank as one parameter, each transposed: its rows are the columns of all cells."""
        parts: list[TensorPart] = []
        first = 0
        for number in numbers:
            index = (*at.place, number)
            cells = self._on_rank(_At(at.key, index), self.etp, rank.expert_tensor)
            if any(len(sizes) != 2 for _, sizes in cells):
                raise ProblemError("has experts of an unknown order")
            width = sum(sizes[0] for _, sizes in cells)
            for (start, sizes), before in zip(cells, itertools.accumulate((s[0] for _, s in cells), initial=0)):
                strides = (*(0,) * len(index), 1, width)
                box = (*index, *start), (*(1,) * len(index), *sizes)
                parts.append(TensorPart(at.key, self._weights[at.key].shape, *box, first + before, strides))
            first += sum(math.prod(sizes) for _, sizes in cells)
        return Parameter(self._weights[at.key].dtype, first, tuple(parts))

    def _parameter(self, at: _At, rank: Rank, size: int | None = None, tensor: int | None = None) -> Parameter:
        """What a rank has of a tensor, or of an index of it."""
        size, tensor = self.tp if size is None else size, rank.tensor if tensor is None else tensor
        cells = self._on_rank(at, size, tensor)
        elements = sum(math.prod(sizes) for _, sizes in cells)
        parts: list[TensorPart] = []
        # Every tensor rank has a copy of what is not cut.
        if not tensor or len(self._cells_of(at)) > 1:
            first = 0
            for start, sizes in cells:
                box = (*at.place, *start), (*(1,) * len(at.place), *sizes)
                strides = (*(0,) * len(at.place), *c_strides(sizes))
                parts.append(TensorPart(at.key, self._weights[at.key].shape, *box, first, strides))
                first += math.prod(sizes)
        return Parameter(self._weights[at.key].dtype, elements, tuple(parts))

    def _on_rank(self, at: _At, size: int, tensor: int) -> list[_Cell]:
        """The cells of a tensor that a tensor rank has: one, or one in each half of the rows, or all of it."""
        cells = self._cells_of(at)
        if len(cells) == 1:
            return cells
        if len(cells) == size:
            return [cells[tensor]]
        if len(cells) == 2 * size and "linear_fc1." in at.key and len({start[1:] for start, _ in cells}) == 1:
            return [cells[tensor], cells[size + tensor]]
        raise ProblemError(
            f"does not fit the weights: {quoted(at.key)} is in {len(cells)} chunks, and the embedding in {self.tp}"
        )

    def _cells_of(self, at: _At) -> list[_Cell]:
        """The distinct chunks of a tensor at an index, without the dimensions of that, ascending.

        Raises:
            ProblemError: they are not all of it, one after the other along one dimension.
        """
        depth = len(at.place)
        if (at.key, depth) not in self._cells:
            shape = self._weights[at.key].shape
            by_index: dict[tuple[int, ...], set[_Cell]] = {}
            for chunk in self._weights[at.key].chunks:
                offsets, sizes = chunk.offsets, chunk.sizes
                stops = (min(first + count, whole) for first, count, whole in zip(offsets, sizes, shape[:depth]))
                ranges = map(range, offsets, stops)
                for index in itertools.product(*ranges):
                    by_index.setdefault(index, set()).add((offsets[depth:], sizes[depth:]))
            self._cells[at.key, depth] = {
                index: _in_order(at.key, found, shape[depth:]) for index, found in by_index.items()
            }
        cells = self._cells[at.key, depth].get(at.place)
        if cells is None:
            raise ProblemError(f"does not fit the weights: {quoted(at.key)} has no chunk at {list(at.place)}")
        return cells


def _in_order(key: str, cells: set[_Cell], shape: tuple[int, ...]) -> list[_Cell]:
    ordered = sorted(cells)
    if len(ordered) == 1 and ordered[0][1] == shape:
        return ordered
    for dimension in range(len(shape)):
        others = [each for at, each in enumerate(shape) if at != dimension]
        ends = [0, *itertools.accumulate(sizes[dimension] for _, sizes in ordered)]
        if ends[-1] == shape[dimension] and all(
            start[dimension] == end and [*sizes[:dimension], *sizes[dimension + 1 :]] == others
            for (start, sizes), end in zip(ordered, ends)
        ):
            return ordered
    raise ProblemError(f"does not fit the weights: the chunks of {quoted(key)} are not those of tensor parallel ranks")


def _order(tail: str, local: bool, key: str) -> tuple[int, int]:
    """The place of a parameter in its layer."""
    module, _, name = tail.rpartition(".")
    if local and name.startswith("layer_norm_"):
        module = next((norm for norm, within in LOCAL_NORMS.items() if within == module), module)
    if module not in MODULES or name not in PARAMETERS:
        raise ProblemError(f"has an unknown order: where {quoted(key)} belongs in its layer is not known")
    return MODULES.index(module), PARAMETERS.index(name)


def _are_all(numbered: Mapping[int, object]) -> bool:
    return numbered.keys() == set(range(len(numbered)))
