"""Parameters of every rank of a run, in the order of ``named_parameters()``, from keys and chunks of ``torch_dist``.

Chunks of the weights show over how many ranks they were cut. Local layers and Transformer Engine's differ in the place
of norms, and in how experts are put together: each possible `Style` is tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from reshard.forms.megatron.keys import DECODER, EMBEDDING, OUTPUT, place_of
from reshard.forms.megatron.placing import (
    DOWN,
    TP,
    Experts,
    Held,
    Module,
    Parallel,
    Parameter,
    Rank,
    Style,
    TensorPart,
    ends_of,
    is_of_expert,
    is_ordered,
    modules_of,
    order_of,
)
from reshard.forms.pytorch.dcp import DescribedTensor
from reshard.forms.recorded import ProblemError
from reshard.text.messages import quoted

BUFFERS = ("mlp.router.expert_bias",)
"""Saved, and no parameters."""

_SECOND = "mlp.experts.experts.linear_fc2.weight"


class Holding(Enum):
    """What a rank's optimizer holds: parameters that all data-parallel ranks share, those of experts, or both."""

    DENSE = "dense"
    EXPERTS = "experts"
    ALL = "all"


class RankParameter(NamedTuple):
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


class ModelChunk(NamedTuple):
    """A chunk of the model.

    Attributes:
        stage: its rank in the pipeline.
        number: its number there.
        layers: its layers.
        first: it begins with the embedding.
        last: it ends with the output layer.
    """

    stage: int
    number: int
    layers: range
    first: bool
    last: bool


_Ordered = list[tuple[tuple[object, ...], RankParameter]]


class Weights:
    """The tensors of a model by their keys.

    Attributes:
        layer_count: layers of the decoder.
        tp: tensor parallel size.
        etp: tensor parallel size of experts.
        expert_count: experts of a layer; 0 without any.

    Raises:
        ProblemError: keys are not Megatron's.
    """

    def __init__(self, weights: Mapping[str, DescribedTensor]) -> None:
        self._weights = weights
        self._modules = modules_of({key: tensor.shape for key, tensor in weights.items()})
        self._outside = self._modules.pop(("", None), {})
        unknown = [key for key in self._outside if not is_ordered(place_of(key))]
        unknown += [key for key in weights if place_of(key).prefix.startswith("encoder.")]
        if unknown:
            raise ProblemError(f"has an unknown order: where {quoted(unknown[0])} belongs is not known")
        layers = {number for prefix, number in self._modules if prefix == DECODER}
        mtp = {place_of(key).mtp for key in weights} - {None}
        if not layers or layers != {*range(len(layers))} or mtp != {*range(len(mtp))}:
            raise ProblemError("is of a model some of whose layers are missing")
        self.layer_count = len(layers)
        self._has_mtp = bool(mtp)
        self._tied = OUTPUT not in weights
        self._known: dict[object, _Ordered] = {}
        vocabulary = EMBEDDING if EMBEDDING in weights else OUTPUT
        self.tp = self._cuts(vocabulary, 0) if vocabulary in weights else 1
        self.etp, self.expert_count = 1, 0
        experts = next((module[_SECOND] for module in self._modules.values() if _SECOND in module), None)
        if experts is not None:
            if len(experts.shape) != 3:
                raise ProblemError(f"has an unknown order: {quoted(experts.key)} is not that of experts")
            self.etp, self.expert_count = self._cuts(experts.key, -1), experts.shape[0]

    def _cuts(self, key: str, dimension: int) -> int:
        """Into how many parts a tensor was cut along a dimension."""
        return len({chunk.offsets[dimension] for chunk in self._weights[key].chunks})

    def styles(self, local: bool, experts: Experts) -> list[Style]:
        """How parameters may be put together, likely ones first: local layers or not, and each kind of experts."""
        kinds = (Experts.SEQUENTIAL, Experts.GROUPED, Experts.FUSED) if self.expert_count else (experts,)
        downs = [key for key in self._weights if DOWN.fullmatch(place_of(key).tail)]
        cuts = any(self._cuts(key, -2) > 1 for key in downs)
        return [
            Style(each or None, kind, cuts)
            for kind in sorted(kinds, key=lambda kind: kind is not experts)
            for each in (local, not local)
        ]

    def parameters(
        self,
        rank: Rank,
        parallel: Parallel,
        chunk: ModelChunk,
        holding: Holding,
        style: Style,
        stages: int,
    ) -> list[RankParameter]:
        """The parameters of a chunk of the model on a rank, in the order of ``named_parameters()``.

        Args:
            rank: the rank.
            parallel: sizes of the groups.
            chunk: the chunk.
            holding: which parameters.
            style: how they are put together.
            stages: pipeline parallel size.
        """
        of_rank = (rank, parallel, holding, style)
        around: _Ordered = []
        ends = ends_of(self._outside, chunk.first, chunk.last, self._has_mtp) if holding is not Holding.EXPERTS else {}
        module = Module({name: self._outside[key].shape for name, key in ends.items()}, parallel, style)
        for name, key in ends.items():
            (parameter,) = module.parameters(name)
            stored = self._stored(parameter, self._outside[key], rank, parallel)
            if key == EMBEDDING:
                # An output layer is one of its own where a stage of multi-token prediction has the embedding, too.
                shared = not self._has_mtp if name == OUTPUT else self._tied or self._has_mtp
                stored = stored._replace(shared=shared and stages > 1, parts=stored.parts if chunk.first else ())
            around.append((order_of(name), stored))
        for prefix, number in self._modules if chunk.last else ():
            if number is None:
                around += self._module(prefix, number, *of_rank)
        around.sort(key=lambda each: each[0])
        inner = [each for number in chunk.layers for _, each in self._module(DECODER, number, *of_rank)]
        before = [each for order, each in around if order < (1,)]
        return [*before, *inner, *(each for order, each in around if order > (1,))]

    def _module(
        self, prefix: str, number: int | None, rank: Rank, parallel: Parallel, holding: Holding, style: Style
    ) -> _Ordered:
        """The parameters of a layer, in order."""
        known = (prefix, number, rank, parallel, holding, style)
        if known in self._known:
            return self._known[known]
        held = self._modules[prefix, number]
        module = Module({tail: each.shape for tail, each in held.items()}, parallel, style)
        left_out = {Holding.DENSE: True, Holding.EXPERTS: False}.get(holding)
        before = prefix if number is None else f"{prefix}{number}."
        found: _Ordered = []
        for tail, each in held.items():
            if tail in BUFFERS or is_of_expert(tail) is left_out:
                continue
            for parameter in module.parameters(tail):
                name = before + parameter.name
                if not is_ordered(place_of(name)):
                    raise ProblemError(f"has an unknown order: where {quoted(each.key)} belongs is not known")
                found.append((order_of(name), self._stored(parameter, each, rank, parallel)))
        found.sort(key=lambda pair: pair[0])
        self._known[known] = found
        return found

    def _stored(self, parameter: Parameter, held: Held, rank: Rank, parallel: Parallel) -> RankParameter:
        """What a rank has of a tensor, or of an index of it."""
        parts = [part._replace(key=held.key) for part in parameter.parts("", parallel, rank)]
        if held.layer is not None:
            count, *_ = self._weights[held.key].shape
            parts = [
                TensorPart(
                    part.key,
                    (count, *part.shape),
                    (held.layer, *part.start),
                    (1, *part.sizes),
                    part.first,
                    (0, *part.strides),
                )
                for part in parts
            ]
        elements = sum(math.prod(part.sizes) for part in parts)
        # Every tensor rank has a copy of what is not cut.
        is_copy = rank.tensor and not any(TP in axes for axes in parameter.cut)
        return RankParameter(self._weights[held.key].dtype, elements, () if is_copy else tuple(parts))
