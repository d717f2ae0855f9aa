"""Legacy trees to be written, as Megatron-Core 0.12.1 and MindSpeed-LLM load them with ``--ckpt-format torch``.

Each file holds the parameters of a tensor, pipeline and expert rank under their live names, and the optimizer in the
plain form: state by numbers, and FP32 copies by group. A parameter of all ranks of a stage is made a tensor that a
layout over these ranks cuts into the parameters: `LiveTensor`. So the ordinary plan reads and writes their elements.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints.checkpoint import Checkpoint, EditedCheckpoint, GlobalTensor, Recipe
from reshard.checkpoints.formats.archives import Added, lay_out_archive
from reshard.checkpoints.formats.dtypes import PT
from reshard.checkpoints.formats.output import OutputLayout, OutputTensor
from reshard.checkpoints.formats.pickles import PickledInstance, pickled
from reshard.errors import CheckpointError, UsageError
from reshard.forms.megatron.keys import DECODER, EMBEDDING, MEGATRON, MODEL_FILE, OUTPUT, STATE, rank_directory
from reshard.forms.megatron.legacy_state import HALF, MASTER
from reshard.forms.megatron.live import is_parameter, parse
from reshard.forms.megatron.placing import (
    HEADS,
    KV_DOWN,
    QKV,
    Experts,
    Held,
    Module,
    Parallel,
    Parameter,
    Style,
    depends_on_style,
    ends_of,
    interleaving,
    is_decayed,
    is_latent,
    is_of_expert,
    is_ordered,
    modules_of,
    order_of,
)
from reshard.forms.megatron.stages import Stages, chunks_stated, stages_of
from reshard.forms.megatron.written import directory_of, prepared
from reshard.forms.pytorch.form import ITERATIONS
from reshard.forms.ranks.naming import FileNames
from reshard.forms.recorded import ProblemError, tensor_fault
from reshard.forms.request import Means, Request
from reshard.forms.target import FinishingFile, Section, TargetForm
from reshard.forms.tracker import TRACKER
from reshard.layout import Box, Layout, shape_of
from reshard.layout.views import View
from reshard.text.messages import quoted

_STATE = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|param)\.(.+)")
_LATENT = re.compile(r"\.(kv_layernorm|linear_kv_up_proj|linear_kv_nope)\.")
_IMPLEMENTATIONS = ('"local"', '"transformer_engine"', '"inference_optimized"')
MINDSPEED = frozenset({"mla_mm_split", "moe_tp_extend_ep", "schedules_method"})

# Arguments that divide layers otherwise; they are those of a run of as many pipeline ranks.
_OF_STAGES = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "schedules_method"),
    *("virtual_pipeline_model_parallel_size", "num_layer_list"),
)


class LiveTensor(NamedTuple):
    """A parameter on all ranks of a stage, or its state.

    Attributes:
        name: unique in the checkpoint.
        local: its name in a file.
        stage: the rank of the pipeline that has it.
        chunk: the number of its model chunk.
        kind: of the optimizer's state; empty for the parameter itself.
        parameter: how it is made of a tensor.
    """

    name: str
    local: str
    stage: int
    chunk: int
    kind: str
    parameter: Parameter


class LegacyFiles(TargetForm):
    """The files of one iteration; see `TargetForm`. Raises as `prepared`."""

    name = MEGATRON
    by_rank = False
    takes_everything = True
    format = PT
    metadata: Mapping[str, str] | None = None

    def __init__(self, checkpoint: Checkpoint, request: Request, means: Means) -> None:
        _, model, training = prepared(checkpoint, request, means)
        tensors = model.tensors
        sizes = dict(request.asked.target.sizes or ())
        self.tp, self.pp, self.ep = (sizes.get(kind, 1) for kind in ("tp", "pp", "ep"))
        self._groups = training.optimizers or ()
        self._args = _arguments(training.args, self.tp, self.pp, self.ep)
        self._training = training._replace(args=self._args)
        self._place = checkpoint.place
        self._parallel = Parallel(self.tp, self.ep, self.tp, bool(self._args.get("moe_tp_extend_ep")))
        self._recipes: dict[str, Recipe] = {}
        self.live: dict[str, LiveTensor] = {}
        self._stages = self._divided(tensors)
        self._add(tensors)
        if self._groups:
            self._check_state(tensors)
        for name in self.live:
            if not request.filters.admit(name):
                raise UsageError(f"--include or --exclude leaves out {quoted(name)}, which Megatron's files need")
        base = checkpoint.base if isinstance(checkpoint, EditedCheckpoint) else checkpoint
        self.checkpoint: Checkpoint | None = EditedCheckpoint(
            base,
            self._recipes,
            (),
            checkpoint.identity if isinstance(checkpoint, EditedCheckpoint) else "",
            checkpoint.tied_tensors()[len(base.tied_tensors()) :],
        )
        self.sections: Sequence[Section] = [*self._sections()]
        self._counts = [len(section.layouts) for section in self.sections]
        self.iteration = directory_of(training.iteration)
        self.names = FileNames("file{rank}", dict(enumerate(self._paths())))

    @property
    def settings(self) -> bytes:
        groups = [[*map(dict, each)] for each in self._groups]
        schedule = None if self._training.schedule is None else dict(self._training.schedule)
        return pickled([dict(self._args), groups, schedule, self._training.iteration])

    @property
    def count(self) -> int:
        return self.tp * self.pp * self.ep

    def _refused(self, problem: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self._place}: {problem}", file=self._place, hint=hint)

    def _divided(self, tensors: Mapping[str, GlobalTensor]) -> Stages:
        """The layers of every stage."""
        try:
            layers = {number for prefix, number in modules_of(_shapes(tensors)) if prefix == DECODER}
            args = {**self._args, "num_layers": self._args.get("num_layers") or len(layers)}
            stages = stages_of(args, self.pp, chunks_stated(args, self.pp) or 1)
        except ProblemError as error:
            raise self._refused(
                f"{error} (--sizes pp={self.pp})", "choose another pp, or state it in --args"
            ) from error
        stated = {layer for chunks in stages for numbers in chunks for layer in numbers if layer is not None}
        if layers != stated:
            raise self._refused(f"has {len(layers)} layers, and {len(stated)} by its args")
        return stages

    def _add(self, tensors: Mapping[str, GlobalTensor]) -> None:
        """Add the parameters of all tensors, and their state, in the order of the model."""
        kinds: dict[str, dict[str, GlobalTensor]] = {}
        for name, tensor in tensors.items():
            state = _STATE.fullmatch(name)
            if state is None and name.startswith(STATE):
                raise tensor_fault(self._place, name, "is state that Megatron's optimizer does not have")
            kind, key = (state[1], state[2]) if state else ("", name)
            kinds.setdefault(key, {})[kind] = tensor
        for key, of_key in kinds.items():
            if "" not in of_key:
                raise tensor_fault(self._place, key, "has state of the optimizer, and is not there")
        modules = modules_of(_shapes(tensors))
        outside = modules.pop(("", None), {})
        places_of_layers = {
            layer: (rank, chunk, local)
            for rank, chunks in enumerate(self._stages)
            for chunk, layers in enumerate(chunks)
            for local, layer in enumerate(layers)
            if layer is not None
        }
        chunks = len(self._stages[0])
        last = (0 if self._args.get("schedules_method") == "dualpipev" else self.pp - 1, chunks - 1)
        for (prefix, number), held in modules.items():
            if prefix == DECODER and number is not None:
                stage, chunk, local = places_of_layers[number]
                self._add_module(f"{prefix}{number}.", f"{prefix}{local}.", held, kinds, stage, chunk)
            elif prefix.startswith("mtp."):
                self._add_module(prefix, prefix, held, kinds, *last)
            else:
                outside = {**outside, **{each.key: each for each in held.values()}}
        mtp = any(prefix.startswith("mtp.") for prefix, _ in modules)
        known = ends_of(outside, True, True, mtp)
        others = outside.keys() - known.keys()
        if others:
            raise tensor_fault(self._place, min(others), "is of no part of a model that is known")
        if mtp and EMBEDDING in outside and OUTPUT not in outside and last != (0, 0):
            raise self._refused("has tied weights and multi-token prediction, which is written with pp=1 only")
        for place in dict.fromkeys([(0, 0), last]):
            for name, key in ends_of(outside, place == (0, 0), place == last, mtp).items():
                copied = place == last != (0, 0) and key == EMBEDDING
                self._add_module("copy." if copied else "", "", {name: outside[key]}, kinds, *place)

    def _add_module(
        self,
        prefix: str,
        local: str,
        held: Mapping[str, Held],
        kinds: Mapping[str, Mapping[str, GlobalTensor]],
        stage: int,
        chunk: int,
    ) -> None:
        """Add the parameters of a layer, or some of those outside of layers.

        Args:
            prefix: of names in the checkpoint.
            local: of names in files.
            held: its tensors, by their keys in it.
            kinds: every tensor and its state, by kind.
            stage: the rank of the pipeline that has it.
            chunk: the chunk of the model.
        """
        shapes = {tail: each.shape for tail, each in held.items()}
        module = Module(shapes, self._parallel, self._style(prefix, shapes))
        sources: dict[str, list[tuple[Parameter, Held]]] = {}
        # Rows of the one projection come before those of the other.
        for tail in sorted(held, key=KV_DOWN.__eq__):
            try:
                for parameter in module.parameters(tail):
                    sources.setdefault(parameter.name, []).append((parameter, held[tail]))
            except ProblemError as error:
                raise tensor_fault(self._place, prefix + tail, str(error)) from error
        for short, made in sources.items():
            parameter = made[0][0]
            keys = [each.key for _, each in made]
            if len(made) != 1 + (short == QKV and parameter.key != QKV):
                raise tensor_fault(self._place, prefix + parameter.key, f"is there twice, or lacks {KV_DOWN} beside it")
            if len({tuple(sorted(kinds[key])) for key in keys}) > 1:
                raise tensor_fault(self._place, keys[1], "has no such state as the one before it")
            for kind in kinds[keys[0]]:
                name = f"{STATE}{kind}.{prefix}{short}" if kind else prefix + short
                self.live[name] = LiveTensor(name, self._local_name(local + short), stage, chunk, kind, parameter)
                self._recipes[name] = _recipe([(kinds[each.key][kind], each) for _, each in made], parameter, name)

    def _style(self, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Style:
        """How the run puts the parameters of a module together.

        Raises:
            CheckpointError: its arguments do not record it.
        """
        args, stated = self._args, self._stated
        mindspeed = is_latent(shapes) and not MINDSPEED.isdisjoint(args)
        experts = any(map(is_of_expert, shapes))
        local = mindspeed
        if not mindspeed and any(map(depends_on_style, shapes)):
            local = stated("transformer_impl", *_IMPLEMENTATIONS) == "local"
        style = Style(local, Experts.SEQUENTIAL, local, mindspeed, interleaved=interleaving(args))
        if experts and stated("moe_grouped_gemm", "true", "false"):
            style = style._replace(experts=Experts.FUSED if local else Experts.GROUPED)
        if mindspeed and args.get("mla_mm_split") and not HEADS.keys().isdisjoint(shapes):
            style = style._replace(heads=stated("num_attention_heads"), part=stated("qk_head_dim"))
        over = self.ep * (self.tp if self._parallel.extended else 1)
        count = next((shape[0] for tail, shape in shapes.items() if is_of_expert(tail)), 0)
        if count % over:
            raise self._refused(
                f"{prefix}mlp.experts has {count} experts, which do not divide over {over} ranks",
                "choose an ep in --sizes that divides them",
            )
        return style

    def _stated(self, name: str, *choices: str) -> Any:
        """An argument that names in files depend on."""
        value = self._args.get(name)
        stated = " or ".join(f'{{"{name}": {choice}}}' for choice in choices or ("...",))
        hint = f"add --args FILE.json with {stated}, as the run that loads the tree has it"
        if value is None:
            raise self._refused(f"does not record {name} in its args, which the names in files depend on", hint)
        if choices and json.dumps(value) not in choices:
            raise self._refused(f"has {name} {quoted(str(value))} in its args, which is not known", hint)
        return value

    def _check_state(self, tensors: Mapping[str, GlobalTensor]) -> None:
        """Refuse state of parameters without masters, or whose place among others is not known: it has numbers."""
        for name, tensor in tensors.items():
            if is_parameter(name) and tensor.dtype not in HALF and not name.startswith(STATE):
                raise CheckpointError(
                    f"{self._place}: {quoted(name)} is {tensor.dtype}, and a legacy tree has optimizer state of "
                    "Float16 and BFloat16 weights alone",
                    file=self._place,
                    parameter=name,
                    hint="write torch_dist: leave out --format torch; for weights alone: --exclude 'optimizer.*'",
                )
        mindspeed = not MINDSPEED.isdisjoint(self._args)
        for each in self.live.values():
            unknown = mindspeed and _LATENT.search(each.local)
            if unknown or (is_parameter(each.local) and not is_ordered(parse(each.local))):
                raise tensor_fault(
                    self._place,
                    each.name,
                    "has a place among the parameters of the optimizer that is not known",
                    "convert weights alone with --exclude 'optimizer.*', or write torch_dist",
                )

    def _local_name(self, name: str) -> str:
        """The name in a file; MindSpeed-LLM has norms of multi-token prediction under other names."""
        if self._args.get("mtp_num_layers") and not MINDSPEED.isdisjoint(self._args):
            name = re.sub(r"^mtp\.layers\.([0-9]+)\.final_layernorm\.", r"mtp.final_layernorms.\1.", name)
            name = re.sub(r"^decoder\.final_layernorm\.", "final_layernorm.", name)
        return name

    def _sections(self) -> Iterator[Section]:
        """The files of each stage."""
        assert self.checkpoint is not None
        over = self.tp * self.ep
        names: list[list[str]] = [[] for _ in range(self.pp)]
        for name, live in self.live.items():
            names[live.stage].append(name)
        layouts: dict[tuple[tuple[int, ...], ...], Layout] = {}
        for stage, of_stage in enumerate(names):
            laid_out = {}
            for name in of_stage:
                axes = self.live[name].parameter.axes
                layout = layouts.setdefault(axes, Layout((self.ep, self.tp), axes))
                for size, each in zip(self.checkpoint.tensors[name].shape, axes):
                    parts = math.prod((self.tp, self.ep)[axis] for axis in each)
                    if size % parts:
                        raise CheckpointError(
                            f"{self._place}: {quoted(name)} has {size} elements along a dimension that {parts} ranks "
                            f"are to cut (--sizes tp={self.tp},ep={self.ep})",
                            file=self._place,
                            parameter=name,
                            hint="choose sizes that divide it",
                        )
                laid_out[name] = layout
            yield Section(stage, range(stage * over, (stage + 1) * over), laid_out, self.pp > 1, f"stage {stage}")

    def _paths(self) -> Iterator[str]:
        for stage in range(self.pp):
            for expert in range(self.ep):
                for tensor in range(self.tp):
                    numbers = [*([stage] if self.pp > 1 else []), *([expert] if self.ep > 1 else [])]
                    yield f"{self.iteration}/{rank_directory(tensor, numbers)}/{MODEL_FILE.rpartition('.')[0]}"

    def section_of(self, file: int) -> Section:
        return self.sections[file // (self.tp * self.ep)]

    def takes_value(self, name: str, file: int) -> bool:
        return False

    def lay_out(self, tensors: Sequence[OutputTensor], boxes: Sequence[Box]) -> OutputLayout:
        live = [self.live[tensor.name] for tensor in tensors]
        shapes = [each.parameter.shape_in_file(shape_of(box)) for each, box in zip(live, boxes)]

        def describe(described: Sequence[PickledInstance], add: Added) -> Any:
            if len(live) < self._counts[live[0].stage if live else 0]:
                # A part of a file, to count its bytes.
                return [*described]
            return self._state([*zip(live, shapes, described)], add)

        return lay_out_archive(tensors, shapes, describe)

    def _state(
        self, tensors: Sequence[tuple[LiveTensor, tuple[int, ...], PickledInstance]], add: Added
    ) -> dict[str, Any]:
        """What a file holds."""
        chunks = len(self._stages[0])
        ordered = sorted(tensors, key=lambda each: (each[0].chunk, order_of(each[0].local), each[0].local))
        parameters = [each for each in ordered if not each[0].kind]
        states = {(each.chunk, each.local, each.kind): tensor for each, _, tensor in ordered if each.kind}
        models = {
            "model" if chunks == 1 else f"model{chunk}": {
                each.local: tensor for each, _, tensor in parameters if each.chunk == chunk
            }
            for chunk in range(chunks)
        }
        owned = [(each, shape) for each, shape, _ in parameters if is_parameter(each.local)]
        several = len(self._groups) > 1
        optimizers = []
        for number, groups in enumerate(self._groups):
            mine = [each for each in owned if not several or is_of_expert(each[0].local) == bool(number)]
            optimizers.append(self._optimizer(groups, mine, states, add))
        return self._training.common(models, optimizers if several else next(iter(optimizers), None))

    def _optimizer(
        self,
        groups: Sequence[Mapping[str, Any]],
        owned: Sequence[tuple[LiveTensor, tuple[int, ...]]],
        states: Mapping[tuple[int, str, str], PickledInstance],
        add: Added,
    ) -> dict[str, Any]:
        """The plain form of an optimizer: groups in the order of their first parameters."""
        of_groups: dict[tuple[bool, bool], list[LiveTensor]] = {}
        decoupled = any(group.get("is_decoupled_lr") for group in groups)
        for each, shape in owned:
            decayed = is_decayed(each.local, shape)
            key = (decayed, decoupled and each.local in (EMBEDDING, OUTPUT))
            of_groups.setdefault(key, []).append(each)
        written, masters = [], []
        numbered: dict[int, Any] = {}
        for (decayed, is_decoupled), members in of_groups.items():
            numbers = range(len(numbered), len(numbered) + len(members))
            written.append({**self._group(groups, decayed, is_decoupled, add), "params": [*numbers]})
            for number, each in zip(numbers, members):
                of_parameter = {kind: states[each.chunk, each.local, kind] for kind in ("exp_avg", "exp_avg_sq")}
                numbered[number] = {"step": add("Float32", struct.pack("<f", self._step(groups))), **of_parameter}
            masters.append([states[each.chunk, each.local, MASTER] for each in members])
        return {"optimizer": {"state": numbered, "param_groups": written}, "fp32_from_fp16_params": masters}

    def _group(self, groups: Sequence[Mapping[str, Any]], decayed: bool, decoupled: bool, add: Added) -> dict[str, Any]:
        for group in groups:
            if bool(group.get("wd_mult", 1.0)) == decayed and bool(group.get("is_decoupled_lr")) == decoupled:
                # MindSpeed's AdamW counts in a tensor.
                step = add("Int64", self._step(groups).to_bytes(8, "little"))
                return {**{name: value for name, value in group.items() if name != "params"}, "step": step}
        kind = "with" if decayed else "without"
        raise self._refused(f"has no group of parameters {kind} weight decay in the settings of its optimizer")

    def _step(self, groups: Sequence[Mapping[str, Any]]) -> int:
        return int(groups[0]["step"])

    def finishing(self) -> Sequence[FinishingFile]:
        number = ITERATIONS.tracked_as(self.iteration)
        return [FinishingFile(TRACKER, lambda: [number.encode()])]


def _shapes(tensors: Mapping[str, GlobalTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items() if not name.startswith(STATE)}


def _recipe(made: Sequence[tuple[GlobalTensor, Held]], parameter: Parameter, name: str) -> Recipe:
    """The elements of a parameter, from the sources of its tensors, whose rows come one after the other."""
    sources: list[str] = []
    stored: list[GlobalTensor] = []
    views = []
    for tensor, held in made:
        if tensor.added is not None:
            raise tensor_fault("", name, "gets an addition, which is written as torch_dist only")
        view = View.whole(0, tensor.shape) if tensor.view is None else tensor.view
        if held.layer is not None:
            view = view.part(0, held.layer, held.layer + 1).reshape(held.shape)
        mine = tensor.sources
        views.append(view.with_sources(range(len(sources), len(sources) + len(mine))))
        sources += (source.name for source in mine)
        stored += mine
    view = parameter.view(views[0] if len(views) == 1 else View.concat(views, 0))
    needed, view = view.with_needed_sources()
    dtype = made[0][0].dtype
    cast = dtype if any(source.dtype != dtype for source in stored) else None
    same = len(needed) == 1 and view.is_all_of(stored[needed[0]].shape)
    return Recipe(tuple(sources[number] for number in needed), None if same else view, cast)


def _arguments(args: Mapping[str, Any], tp: int, pp: int, ep: int) -> dict[str, Any]:
    """The arguments of a run of these sizes."""
    written = dict(args)
    if written.get("pipeline_model_parallel_size") != pp:
        written.update((name, None) for name in _OF_STAGES if name in written)
    written.update(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        transformer_pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        ckpt_format="torch",
        use_distributed_optimizer=False,
    )
    for name in ("world_size", "data_parallel_size", "rank", "local_rank", "dist_ckpt_optim_fully_reshardable"):
        written.pop(name, None)
    return written
