"""Legacy trees of Megatron that were written: the names that a run asks each rank for, their order, and its groups.

To compare a tree, tensors of all layers are divided, and aliases of norms get one name. Names follow from these and
from the arguments in the tree. Written for proof alone: it shares no code with `reshard.forms.megatron`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.names.operations import SizedOperation
from reshard.verification.boxes import Shape
from reshard.verification.operations import DerivedTensor
from reshard.verification.rank_parts import EMBEDDING, RankFile, layers_of, places_of
from reshard.verification.rank_trees import OUTPUT, is_decayed, is_parameter
from reshard.verification.stored import Content, Source

_STATE = "optimizer.state."
_STACKED = re.compile(r"((?:optimizer\.state\.\w+\.)?decoder\.layers\.)(?![0-9]+\.)(.+)")
_MINDSPEED = frozenset({"mla_mm_split", "moe_tp_extend_ep", "schedules_method"})
# Modules of a layer, and parameters of a module, as Megatron makes them: the optimizer numbers its state so.
_ATTENTION = ("proj", "qkv", "q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
_ORDER = (
    "input_layernorm",
    *(f"self_attention.linear_{name}" for name in _ATTENTION),
    *(f"self_attention.{name}_layernorm" for name in ("q", "k", "kv")),
    *("pre_mlp_layernorm", "mlp.router", "mlp.experts", "mlp.shared_experts"),
    *(f"mlp.{module}linear_fc{number}" for module in ("shared_experts.", "") for number in (1, 2)),
)
_PARAMETERS = ("layer_norm_weight", "layer_norm_bias", "gate_weight", "weight", "bias")
_KINDS = ("weight", "bias")
_FIRST = tuple(f"embedding.{kind}_embeddings.weight" for kind in ("word", "position", "tokentype"))
_NORM, _HEAD = (tuple(f"{module}.{kind}" for kind in _KINDS) for module in ("final_layernorm", "output_layer"))
_MTP = tuple(f"{module}.{kind}" for module in ("enorm", "hnorm", "eh_proj") for kind in _KINDS)
# Parts of the heads of MindSpeed's projections.
_SPLIT = {
    "self_attention.linear_q_up_proj.weight": ("qk_nope", "qk_rope"),
    "self_attention.linear_kv_up_proj.weight": ("kv_nope", "v"),
}
_FEWER = "num_layers_per_virtual_pipeline_stage"
# The same norm beside a linear layer and within it. Queries and keys have norms of other names and meanings, where no
# projection leads up to them.
_ALIASES = (
    (re.compile(r"\.pre_mlp_layernorm\.(weight|bias)$"), r".mlp.linear_fc1.layer_norm_\1"),
    (re.compile(r"\.input_layernorm\.(weight|bias)$"), r".self_attention.linear_qkv.layer_norm_\1"),
    (re.compile(r"\.linear_q_up_proj\.layer_norm_(weight|bias)$"), r".q_layernorm.\1"),
    (re.compile(r"\.linear_kv_up_proj\.layer_norm_(weight|bias)$"), r".kv_layernorm.\1"),
)


def as_layers(source: Source, written: Source) -> Source:
    """A source with a tensor for each layer, and norms under the names that the tree has them under."""
    in_tree = {_one_name(name): name for name in written.tensors}
    tensors: dict[str, Content] = {}
    for content in source.tensors.values():
        for each in _layers(content):
            name = in_tree.get(_one_name(each.name), each.name)
            tensors[name] = each if name == each.name else replace(each, name=name)
    return replace(source, tensors=tensors, model_names={name: name for name in tensors})


def _one_name(name: str) -> str:
    for alias, other in _ALIASES:
        name = alias.sub(other, name)
    return name


def _layers(content: Content) -> Iterator[Content]:
    match = _STACKED.fullmatch(content.name)
    if match is None:
        yield content
        return
    count = content.shape[0]
    unstack = SizedOperation("unstack", count=count)
    for layer in range(count):
        name = f"{match[1]}{layer}.{match[2]}"
        yield DerivedTensor(
            name, content.dtype, content.item_size, content.shape[1:], (content,), (unstack,), layer, content.cast
        )


def problems_of(expected: Collection[Content], ranks: Sequence[RankFile]) -> Iterator[tuple[str, str]]:
    """Files that a run with their arguments would not ask for, each with what is wrong.

    Args:
        expected: the tensors of the model and their state, as `as_layers` names them.
        ranks: the files.
    """
    shapes = {_one_name(each.name): each.shape for each in expected if not each.name.startswith(_STATE)}
    saved = any(each.name.startswith(_STATE) for each in expected)
    for rank, (tensor, stage, expert) in zip(ranks, places_of(ranks)):
        run = _Run(shapes, rank.args)
        directory = run.directory(tensor, stage, expert)
        if os.path.basename(os.path.dirname(rank.path)) != directory:
            yield rank.path, f"is not in {directory}, where a run with its args looks for it"
        places = [place for place in run.layers if place[0] == stage]
        keys = ["model"] if len(places) == 1 else [f"model{chunk}" for _, chunk in sorted(places)]
        found = sorted(key for key in rank.keys if key.startswith("model"))
        if found != keys:
            yield rank.path, f"has the models {found}, not {keys}"
            continue
        parameters = []
        for place, model in zip(sorted(places), rank.models):
            names = run.names(*place)
            # Without state of an optimizer, models are loaded by name alone.
            wanted, there = ([*filter(is_parameter, each)] if saved else sorted(each) for each in (names, model))
            if wanted != there or {*names} != model.keys():
                wrong = next((pair for pair in zip(there, wanted) if pair[0] != pair[1]), (len(model), len(names)))
                yield (
                    rank.path,
                    f"names its tensors otherwise than a run with its args does: {wrong[0]}, not {wrong[1]}",
                )
            parameters += [(name, model[name].shape) for name in there if is_parameter(name)]
        optimizers = [*run.groups(parameters)] if saved else []
        groups = [
            [(bool(group.settings.get("wd_mult", 1.0)), bool(group.settings.get("is_decoupled_lr"))) for group in each]
            for each in rank.optimizers
        ]
        if groups != optimizers:
            yield rank.path, f"has the parameter groups {groups} (decayed, with a rate of their own), not {optimizers}"


class _Run:
    """A run that loads a tree.

    Args:
        shapes: of the tensors of the model, by name.
        args: its arguments.

    Attributes:
        layers: per rank of the pipeline and chunk the numbers of its layers.
    """

    def __init__(self, shapes: Mapping[str, Shape], args: Mapping[str, Any]) -> None:
        self._shapes, self._args = shapes, args
        self._tp, self._pp, self._ep = (
            args.get(f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline", "expert")
        )
        self._has_experts = any(".experts." in name for name in shapes)
        self._mindspeed = not _MINDSPEED.isdisjoint(args)
        numbers = {int(name.split(".")[2]) for name in shapes if name.startswith("decoder.layers.")}
        self.layers = layers_of(args, self._pp, self._chunks(len(numbers)), len(numbers))
        order = [*self.layers]
        self._first, self._last = order[0], order[-1]

    def directory(self, tensor: int, stage: int, expert: int) -> str:
        numbers = [f"_{stage:03d}"] * (self._pp > 1) + [f"_{expert:03d}"] * (self._ep > 1)
        return f"mp_rank_{tensor:02d}{''.join(numbers)}"

    def _chunks(self, count: int) -> int:
        args = self._args
        if args.get("schedules_method") == "dualpipev":
            return 2
        if args.get(_FEWER) and self._pp > 1 and args.get("virtual_pipeline_model_parallel_size") is None:
            return int(count // self._pp // args[_FEWER])
        stated = (args.get("virtual_pipeline_model_parallel_size"), args.get("num_virtual_stages_per_pipeline_rank"))
        return next((each for each in stated if each is not None), 1)

    def names(self, stage: int, chunk: int) -> list[str]:
        """The names of a chunk of a rank, in the order of ``named_parameters()``."""
        place, last = (stage, chunk), (stage, chunk) == self._last
        copies = last and self._last != self._first
        mtp = sorted({int(name.split(".")[2]) for name in self._shapes if name.startswith("mtp.layers.")})
        names = self._there(_FIRST) if place == self._first else [EMBEDDING] if copies and mtp else []
        for local, number in enumerate(self.layers[place]):
            names += self._layer(f"decoder.layers.{number}.", f"decoder.layers.{local}.")
        names += self._there(_NORM, "decoder.") if last else []
        for number in mtp if last else ():
            prefix = f"mtp.layers.{number}."
            names += self._there(_MTP, prefix)
            names += self._layer(f"{prefix}transformer_layer.", f"{prefix}transformer_layer.")
            names += self._there(_NORM, prefix)
        if last:
            names += [OUTPUT] if copies and OUTPUT not in self._shapes and not mtp else self._there(_HEAD)
        if self._args.get("mtp_num_layers") and self._mindspeed:
            names = [
                re.sub(r"^mtp\.layers\.(\d+)\.final_layernorm\.", r"mtp.final_layernorms.\1.", name) for name in names
            ]
            names = [re.sub(r"^decoder\.final_layernorm\.", "final_layernorm.", name) for name in names]
        return names

    def _there(self, names: Iterable[str], prefix: str = "") -> list[str]:
        return [prefix + name for name in names if prefix + name in self._shapes]

    def _layer(self, prefix: str, local_prefix: str) -> list[str]:
        """The names of a layer."""
        tails = {name[len(prefix) :]: shape for name, shape in self._shapes.items() if name.startswith(prefix)}
        latent = any("linear_kv_" in tail for tail in tails)
        mindspeed = latent and self._mindspeed
        local = mindspeed or self._args.get("transformer_impl") == "local"
        names = []
        for tail, shape in tails.items():
            module, _, parameter = tail.rpartition(".")
            kind = parameter.rpartition("_")[2]
            if module.startswith("mlp.experts.experts.linear_fc"):
                names += self._experts(int(module[-1]), shape[0], local)
            elif tail.startswith("self_attention.linear_qkv.layer_norm_") and (local or latent):
                names.append(f"input_layernorm.{kind}")
            elif tail.startswith("mlp.linear_fc1.layer_norm_") and (local or "mlp.router.weight" in tails):
                names.append(f"pre_mlp_layernorm.{kind}")
            elif latent and not local and module.endswith(("q_layernorm", "kv_layernorm")):
                names.append(f"{module[: -len('_layernorm')].replace('.', '.linear_')}_up_proj.layer_norm_{kind}")
            elif mindspeed and module.endswith(("linear_q_proj", "linear_q_down_proj")):
                names.append("self_attention.linear_qkv.weight")
            elif mindspeed and self._args.get("mla_mm_split") and tail in _SPLIT:
                names += [f"self_attention.linear_{part}.weight" for part in _SPLIT[tail]]
            elif not (mindspeed and module.endswith("linear_kv_down_proj")):
                names.append(tail)
        return [local_prefix + name for name in sorted(names, key=_place)]

    def _experts(self, number: int, count: int, local: bool) -> list[str]:
        here = count // (self._ep * (self._tp if self._args.get("moe_tp_extend_ep") else 1))
        if self._args.get("moe_grouped_gemm") and local:
            return [f"mlp.experts.weight{number}"]
        if self._args.get("moe_grouped_gemm"):
            return [f"mlp.experts.linear_fc{number}.weight{expert}" for expert in range(here)]
        return [f"mlp.experts.local_experts.{expert}.linear_fc{number}.weight" for expert in range(here)]

    def groups(self, parameters: Sequence[tuple[str, Shape]]) -> Iterator[list[tuple[bool, bool]]]:
        """Per optimizer its groups, in the order of their first parameters: decayed, with a rate of their own."""
        apart = self._ep > 1 and self._has_experts
        rates = self._args.get("decoupled_lr") is not None
        for experts in (False, True)[: 1 + apart]:
            mine = [each for each in parameters if not apart or (".experts." in each[0]) == experts]
            kinds = ((is_decayed(*each), rates and each[0] in (EMBEDDING, OUTPUT)) for each in mine)
            yield [*dict.fromkeys(kinds)]


def _place(name: str) -> tuple[int, ...]:
    """The place of a tensor in its layer."""
    if name.startswith("mlp.experts."):
        return (_ORDER.index("mlp.experts"), *map(int, re.findall("[0-9]+", name)))
    module, _, parameter = name.rpartition(".")
    if module not in _ORDER or parameter not in _PARAMETERS:
        return (len(_ORDER),)
    return (_ORDER.index(module), _PARAMETERS.index(parameter))
