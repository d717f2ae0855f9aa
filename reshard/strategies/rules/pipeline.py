"""The pipeline stage of every parameter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Optional

from reshard.errors import StrategyError, UsageError
from reshard.storage.toml_tables import quoted_list
from reshard.strategies.rules.model import LAYER, Pipeline
from reshard.strategies.rules.tensors import patterns_for
from reshard.text.globs import Glob, Globs
from reshard.text.messages import listing, plural, quoted

_LAYER_NUMBER = re.compile(r"(?:^|(?<=\.))(0|[1-9][0-9]{0,5})(?=\.)")


def stages_of(
    names: Sequence[str], pipeline: Pipeline, stages: int, chunks: Optional[Sequence[int]], path: str, where: str
) -> dict[str, int]:
    """The stage of every parameter.

    Args:
        names: the weights, without optimizer state.
        pipeline: the patterns of the first and last stage and of layers.
        stages: number of stages.
        chunks: layers per stage; several rounds of the stages if the pipeline is interleaved.
        path: the rules, for messages.
        where: the file that gets missing rules, for messages.

    Raises:
        StrategyError: some parameter's stage is undecided.
        UsageError: the layers cannot be divided in this way.
    """
    if chunks is not None and (len(chunks) % stages or not chunks):
        raise UsageError(
            f"--layers-per-stage has {plural(len(chunks), 'number')}, and there are {stages} stages: give a number "
            "for each, or several rounds of them where they are interleaved (vpp, pp_interleave_num)"
        )
    if stages == 1:
        return dict.fromkeys(names, 0)
    first, last = Globs(pipeline.first), Globs(pipeline.last)
    of_layers = _layers(names, pipeline, first, last, path, where)
    layers = sorted(set(of_layers.values()))
    stage_of_layer = _stage_of_layer(layers, stages, chunks)
    stage_by_name: dict[str, int] = {}
    unsettled: list[str] = []
    for name in names:
        on_first, on_last = first.match(name), last.match(name)
        if on_first and on_last:
            raise StrategyError(
                f"{path}: [pipeline]: {quoted(name)} is on the first stage and on the last", file=path, parameter=name
            )
        if on_first or on_last:
            stage_by_name[name] = 0 if on_first else stages - 1
        elif name in of_layers:
            stage_by_name[name] = stage_of_layer[of_layers[name]]
        else:
            unsettled.append(name)
    if unsettled:
        patterns = quoted_list(patterns_for(unsettled, names))
        raise StrategyError(
            f"{path}: the stage of {plural(len(unsettled), 'parameter')} outside the layers is missing: "
            + listing(unsettled),
            file=path,
            parameter=unsettled[0],
            hint=f"add each to one of these, in {where}:\n[pipeline]\nfirst = {patterns}\nlast = {patterns}",
        )
    empty = sorted(set(range(stages)) - set(stage_by_name.values()))
    if empty:
        raise UsageError(f"{plural(len(layers), 'layer')} in {stages} stages: stage {empty[0]} has no parameter")
    return stage_by_name


def is_numbered(name: str) -> bool:
    """Whether a part of a name is a number, as in names of layers."""
    return _LAYER_NUMBER.search(name) is not None


def layer_numbers(names: Iterable[str], pipeline: Pipeline, path: str, where: str) -> dict[str, int]:
    """The layer of every parameter of a layer."""
    return _layers(list(names), pipeline, Globs(pipeline.first), Globs(pipeline.last), path, where)


def _layers(
    names: Sequence[str], pipeline: Pipeline, first: Globs, last: Globs, path: str, where: str
) -> dict[str, int]:
    inside = [name for name in names if not first.match(name) and not last.match(name)]
    if pipeline.layers:
        globs = [Glob(pattern, LAYER) for pattern in pipeline.layers]
        numbers = {}
        for name in inside:
            spans = next((spans for glob in globs for spans in [glob.numbers(name)] if spans), None)
            if spans:
                numbers[name] = int(name[slice(*spans[0])])
        return numbers
    numbers = {}
    before: dict[str, str] = {}
    for name in inside:
        number = _LAYER_NUMBER.search(name)
        if number is not None:
            numbers[name] = int(number[1])
            before.setdefault(name[: number.start()], name)
    if len(before) > 1:
        patterns = quoted_list([f"{prefix}{LAYER}.*" for prefix in before])
        raise StrategyError(
            f"{path}: names have numbers in several places; the place of the layer number is missing: "
            + listing(list(before.values())),
            file=path,
            hint=f"keep the patterns of layers, in {where}:\n[pipeline]\nlayers = {patterns}",
        )
    return numbers


def _stage_of_layer(layers: Sequence[int], stages: int, chunks: Optional[Sequence[int]]) -> dict[int, int]:
    if layers and layers[-1] - layers[0] + 1 != len(layers):
        missing = sorted(set(range(layers[0], layers[-1])) - set(layers))
        raise StrategyError(f"layers are numbered {layers[0]} to {layers[-1]}, but layer {missing[0]} is missing")
    if chunks is None:
        if len(layers) % stages:
            raise UsageError(
                f"{len(layers)} layers do not divide evenly into {stages} stages",
                hint="give the layers of each stage, like MindFormers' offset or num_layer_list: --layers-per-stage "
                + ",".join(str(len(layers) // stages + (stage < len(layers) % stages)) for stage in range(stages)),
            )
        chunks = [len(layers) // stages] * stages
    if sum(chunks) != len(layers):
        raise UsageError(f"--layers-per-stage has {sum(chunks)} layers in total, and the model has {len(layers)}")
    of_chunks = [chunk % stages for chunk, count in enumerate(chunks) for _ in range(count)]
    return dict(zip(layers, of_chunks))
