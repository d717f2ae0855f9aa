"""Parameters of ranks that the tensors of a module become: their live names, how ranks cut them, and their order.

Names depend on the arguments of a run: local layers hold norms beside linear layers, Transformer Engine's within them;
experts are parameters of their own, or one for all of a rank; MindSpeed joins projections of latent attention.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.errors import CheckpointError
from reshard.forms.megatron.live import COLUMNS, FC1, HEADS, KV_DOWN, LOCAL_NORMS, QUERY, ROUTER, ROWS, WHOLE
from reshard.forms.megatron.parameters import MODULES, PARAMETERS
from reshard.forms.recorded import tensor_fault
from reshard.layout.views import View
from reshard.text.messages import quoted

_EXPERTS = re.compile(r"mlp\.experts\.experts\.(linear_fc[12])\.weight")
_DOWN = re.compile(r"self_attention\.linear_(q|kv)_down_proj\.weight")
# Norms beside a linear layer, and the layer that Transformer Engine holds them in.
_NORMS = {
    **LOCAL_NORMS,
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}
_IMPLEMENTATIONS = ('"local"', '"transformer_engine"', '"inference_optimized"')

MINDSPEED = frozenset({"mla_mm_split", "moe_tp_extend_ep", "schedules_method"})
_TP, _EP = 0, 1
"""Axes of a device matrix of expert ranks and tensor ranks, counted from the right."""


class Run(NamedTuple):
    """A run: its arguments, its tensor and expert parallel sizes, and the place of its source for messages."""

    args: Mapping[str, Any]
    tp: int
    ep: int
    place: str

    def fault(self, name: str, problem: str) -> CheckpointError:
        return tensor_fault(self.place, name, problem)


class LiveForm(NamedTuple):
    """How a parameter is made of a tensor, or of two.

    Attributes:
        name: its name in the module.
        axes: see `LiveTensor`.
        joined: see `LiveTensor`.
        shape: the shape that the tensor gets first; None for its own.
        part: then, the part of dimension 1 that is taken; None for all.
        order: then, the order of its dimensions; None for the same.
        beside: the key of another tensor whose rows come after; empty for none.
    """

    name: str
    axes: tuple[tuple[int, ...], ...]
    joined: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...] | None = None
    part: tuple[int, int] | None = None
    order: tuple[int, ...] | None = None
    beside: str = ""

    def make(self, view: View) -> View:
        if self.shape is not None:
            view = view.reshape(self.shape)
        if self.part is not None:
            view = view.part(1, *self.part)
        return view if self.order is None else view.transpose(self.order)


class ModuleForms:
    """The parameters of a layer, or of the model outside of layers.

    Args:
        run: the run that is to load them.
        prefix: of names.
        shapes: of its tensors, by key.
    """

    def __init__(self, run: Run, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._run = run
        self._prefix = prefix
        self._shapes = shapes
        self._latent = any(name.startswith("self_attention.linear_kv_") for name in shapes)
        self._mindspeed = self._latent and not MINDSPEED.isdisjoint(run.args)

    def _stated(self, name: str, *choices: str) -> Any:
        value = self._run.args.get(name)
        stated = " or ".join(f'{{"{name}": {choice}}}' for choice in choices or ("...",))
        hint = f"add --args FILE.json with {stated}, as the run that loads the tree has it"
        if value is None:
            raise CheckpointError(
                f"{self._run.place}: does not record {name} in its args, which the names in files depend on",
                file=self._run.place,
                hint=hint,
            )
        if choices and json.dumps(value) not in choices:
            raise CheckpointError(
                f"{self._run.place}: has {name} {quoted(str(value))} in its args, which is not known",
                file=self._run.place,
                hint=hint,
            )
        return value

    @property
    def _local(self) -> bool:
        return self._mindspeed or self._stated("transformer_impl", *_IMPLEMENTATIONS) == "local"

    def forms(self, tail: str) -> list[LiveForm]:
        """The parameters that a tensor becomes."""
        shape = self._shapes[tail]
        experts = _EXPERTS.fullmatch(tail)
        if experts:
            return self._experts(experts[1])
        if self._mindspeed and (_DOWN.fullmatch(tail) or tail == QUERY):
            return self._joined_down(tail)
        if self._mindspeed and self._run.args.get("mla_mm_split") and tail in HEADS:
            return self._parts_of_heads(tail)
        name = self._name(tail)
        whole = tuple((dimension,) for dimension in range(len(shape)))
        rest: tuple[tuple[int, ...], ...] = ((),) * (len(shape) - 1)
        gated = FC1.fullmatch(tail)
        if gated and self._halves(gated[1]) == 2:
            joined = ((0, 1), *((dimension + 1,) for dimension in range(1, len(shape))))
            return [LiveForm(name, ((), (_TP,), *rest), joined, (2, shape[0] // 2, *shape[1:]))]
        if gated or ROWS.fullmatch(tail) or (_DOWN.fullmatch(tail) and self._local):
            return [LiveForm(name, ((_TP,), *rest), whole)]
        if COLUMNS.fullmatch(tail):
            return [LiveForm(name, (*rest, (_TP,)), whole)]
        if WHOLE.fullmatch(tail) or _DOWN.fullmatch(tail) or self._run.tp == 1:
            return [LiveForm(name, ((),) * len(shape), whole)]
        raise self._run.fault(
            self._prefix + tail,
            f"is a parameter of an unknown kind: how {self._run.tp} tensor ranks cut it is not known",
        )

    def _name(self, tail: str) -> str:
        """The live name of a tensor: norms are beside linear layers or within them."""
        for module, inner in _NORMS.items():
            for kind in ("weight", "bias"):
                if tail in (f"{module}.{kind}", f"{inner}.layer_norm_{kind}"):
                    beside = self._local
                    if module == "input_layernorm":
                        beside = self._latent or beside
                    elif module == "pre_mlp_layernorm":
                        beside = ROUTER in self._shapes or beside
                    elif not self._latent:
                        return tail
                    return f"{module}.{kind}" if beside else f"{inner}.layer_norm_{kind}"
        return tail

    def _joined_down(self, tail: str) -> list[LiveForm]:
        """MindSpeed's one layer of queries or their down projection, and of the other down projection."""
        if tail == KV_DOWN:
            return []
        if KV_DOWN not in self._shapes:
            raise self._run.fault(self._prefix + tail, f"is not beside {KV_DOWN}")
        return [LiveForm("self_attention.linear_qkv.weight", ((), ()), ((0,), (1,)), beside=KV_DOWN)]

    def _parts_of_heads(self, tail: str) -> list[LiveForm]:
        """MindSpeed's two layers of an up projection, each a part of every head."""
        heads, size = self._stated("num_attention_heads"), self._stated("qk_head_dim")
        rows, width = self._shapes[tail]
        if rows % heads or not 0 < size < rows // heads:
            raise self._run.fault(self._prefix + tail, f"has {rows} rows, which are not those of {heads} heads")
        shape, parts = (heads, rows // heads, width), ((0, size), (size, rows // heads))
        return [
            LiveForm(f"self_attention.{name}.weight", ((_TP,), (), ()), ((0, 1), (2,)), shape, part)
            for name, part in zip(HEADS[tail], parts)
        ]

    def _halves(self, module: str) -> int:
        name, second = (f"{module}linear_fc{number}.weight" for number in (1, 2))
        if name not in self._shapes or second not in self._shapes:
            raise self._run.fault(self._prefix + name, "is not beside the layer after it")
        return self._halves_of(name, self._shapes[name][0], self._shapes[second][-1])

    def _halves_of(self, name: str, rows: int, columns: int) -> int:
        interleaved = [each for each, value in self._run.args.items() if each.endswith("glu_interleave_size") and value]
        if rows not in (columns, 2 * columns):
            raise self._run.fault(self._prefix + name, f"has {rows} rows, and the layer after it {columns} columns")
        if rows != columns and interleaved:
            raise self._run.fault(self._prefix + name, f"is interleaved by {interleaved[0]} in args, and not written")
        return rows // columns

    def _experts(self, linear: str) -> list[LiveForm]:
        """The parameters of experts: of each, or of all of a rank, transposed."""
        first, second = (self._shapes[f"mlp.experts.experts.linear_fc{number}.weight"] for number in (1, 2))
        count, rows, width = first
        size = second[2]
        halves = self._halves_of("mlp.experts", rows, size)
        extended = bool(self._run.args.get("moe_tp_extend_ep"))
        ranks = self._run.ep * (self._run.tp if extended else 1)
        if count % ranks:
            raise CheckpointError(
                f"{self._run.place}: {self._prefix}mlp.experts has {count} experts, which do not divide over {ranks} "
                "ranks",
                file=self._run.place,
                hint="choose an ep in --sizes that divides them",
            )
        over: tuple[int, ...] = (_EP, _TP) if extended else (_EP,)
        inner: tuple[int, ...] = () if extended else (_TP,)
        grouped, up = bool(self._stated("moe_grouped_gemm", "true", "false")), linear == "linear_fc1"
        if grouped and self._local and up:
            shape, order = (count, halves, size, width), (0, 3, 1, 2)
            return [LiveForm("mlp.experts.weight1", (over, (), (), inner), ((1,), (0, 2, 3)), shape, None, order)]
        if grouped and self._local:
            return [LiveForm("mlp.experts.weight2", (over, inner, ()), ((0, 1), (2,)), order=(0, 2, 1))]
        # One expert of each rank is a tensor.
        here = count // ranks
        each, joined = ((halves, size, width), ((0, 1, 2, 3), (4,))) if up else ((width, size), ((0, 1, 2), (3,)))
        axes = (over, (), (), inner, ())[: len(each) + 2]
        return [
            LiveForm(self._expert(linear, number, grouped), axes, joined, (ranks, here, *each), (number, number + 1))
            for number in range(here)
        ]

    def _expert(self, linear: str, number: int, grouped: bool) -> str:
        inner = f"{linear}.weight{number}" if grouped else f"local_experts.{number}.{linear}.weight"
        return f"mlp.experts.{inner}"


def is_ordered(local: str) -> bool:
    """Whether the place of a parameter is known; see `order_of`."""
    match = re.match(r"decoder\.layers\.[0-9]+\.|mtp\.layers\.[0-9]+\.transformer_layer\.", local)
    return match is None or _place(local[match.end() :])[0] != len(MODULES)


def order_of(local: str) -> tuple[object, ...]:
    """The place of a parameter in the order in which Megatron makes a chunk of the model."""
    module, _, parameter = local.rpartition(".")
    kind = PARAMETERS.index(parameter) if parameter in PARAMETERS else len(PARAMETERS)
    layer = re.match(r"decoder\.layers\.([0-9]+)\.", local)
    if layer:
        return (1, int(layer[1]), *_place(local[layer.end() :]))
    mtp = re.match(r"mtp\.layers\.([0-9]+)\.(transformer_layer\.)?", local)
    if mtp and mtp[2]:
        return (3, int(mtp[1]), 3, *_place(local[mtp.end() :]))
    if mtp:
        names = ("enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm")
        return (3, int(mtp[1]), names.index(module[mtp.end() :]), kind)
    embeddings = [f"embedding.{name}_embeddings" for name in ("word", "position", "tokentype")]
    if module in embeddings:
        return (0, embeddings.index(module))
    around = ("embedding.", "decoder.layers.", "decoder.final_layernorm.", "mtp.", "output_layer.")
    return (next((number for number, start in enumerate(around) if local.startswith(start)), len(around)), kind)


def _place(tail: str) -> tuple[object, ...]:
    module, _, parameter = tail.rpartition(".")
    expert = re.fullmatch(r"mlp\.experts\.(?:local_experts\.([0-9]+)\.)?(linear_fc[12])", module)
    numbered = re.fullmatch(r"weight([0-9]+)", parameter)
    if expert and expert[1]:
        return (MODULES.index("mlp.experts.experts"), int(expert[1]), expert[2])
    if expert and numbered:
        return (MODULES.index("mlp.experts.experts"), expert[2], int(numbered[1]))
    if module == "mlp.experts":
        return (MODULES.index("mlp.experts.experts"), parameter)
    if module not in MODULES or parameter not in PARAMETERS:
        return (len(MODULES), tail)
    return (MODULES.index(module), PARAMETERS.index(parameter))
