"""Layers of the stages of a pipeline, by their numbers in the model, from Megatron's or MindSpeed-LLM's arguments.

A rank of the pipeline has one chunk of the model, or several with a virtual pipeline. Files number the layers of each
chunk from 0 on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.checkpoints.formats.pickles import PickledInstance
from reshard.forms.recorded import ProblemError

_LAYOUT = "pipeline_model_parallel_layout"
_REPEATED = (re.compile(r"\(([^()]*)\)\*([0-9]{1,6})"), re.compile(r"(.)\*([0-9]{1,6})"))
_MAX_LAYOUT = 1 << 16


Stages = tuple[tuple[tuple[int | None, ...], ...], ...]
"""Per rank of the pipeline its chunks, and per local number of a layer there its number in the model; None where
MindSpeed's models have a layer that does nothing."""


def stages_of(args: Mapping[str, Any], ranks: int, chunks: int = 1) -> Stages:
    """The layers of every stage.

    Args:
        args: arguments of the run, or of MindSpeed-LLM's converter.
        ranks: of the pipeline.
        chunks: of each rank: more than 1 with a virtual pipeline.

    Raises:
        ProblemError: the arguments do not determine them.
    """
    stated = chunks_stated(args, ranks)
    if stated is not None and stated != chunks:
        raise ProblemError(f"has {chunks} model chunks per rank of the pipeline, and {stated} by its args")
    dealt, positions = _dealt(args, ranks, chunks)
    empty = numbers_in(args, "noop_layers") or ()
    wrong = [layer for layer in empty if not 0 <= layer < positions]
    if wrong or len(set(empty)) < len(empty):
        raise ProblemError(f"has {positions} layers, and noop_layers {[*empty]} by its args")
    real = iter(range(positions - len(empty)))
    number = {position: None if position in empty else next(real) for position in range(positions)}
    return tuple(tuple(tuple(map(number.__getitem__, layers)) for layers in of_rank) for of_rank in dealt)


def chunks_stated(args: Mapping[str, Any], ranks: int) -> int | None:
    """Chunks of each rank by the arguments; None where these do not state it."""
    if args.get("schedules_method") == "dualpipev":
        return 2
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        if _number(args, name) is not None:
            return _number(args, name)
    per_chunk, layers = _number(args, "num_layers_per_virtual_pipeline_stage"), _number(args, "num_layers")
    if per_chunk and layers and ranks > 1 and args.get(_LAYOUT) is None:
        return layers // ranks // per_chunk
    return None


def _dealt(args: Mapping[str, Any], ranks: int, chunks: int) -> tuple[Sequence[Sequence[Sequence[int]]], int]:
    """Per rank and chunk the positions of its layers, and how many there are."""
    if args.get(_LAYOUT) is not None:
        return _in_order(_counts_of_layout(args[_LAYOUT], ranks, chunks))
    layers = _number(args, "num_layers")
    if layers is None:
        layers = _number(args, "num_hidden_layers")
    if layers is None:
        raise ProblemError("does not record num_layers in its args")
    listed = numbers_in(args, "num_layer_list")
    if listed is not None:
        if chunks > 1 or len(listed) != ranks or sum(listed) != layers:
            raise ProblemError(f"has {layers} layers in {ranks} stages, and num_layer_list {[*listed]} by its args")
        return _in_order([[count] for count in listed])
    if args.get("schedules_method") == "dualpipev":
        return _from_both_ends(layers, ranks), layers
    return _in_order(_counts(args, layers, ranks, chunks))


def _in_order(counts: Sequence[Sequence[int]]) -> tuple[Sequence[Sequence[Sequence[int]]], int]:
    """Positions of layers by their counts: the first chunk of all ranks, then the second one, and so on."""
    dealt: list[list[range]] = [[] for _ in counts]
    start = 0
    for chunk in range(len(counts[0])):
        for of_rank, mine in zip(counts, dealt):
            mine.append(range(start, start + of_rank[chunk]))
            start += of_rank[chunk]
    return dealt, start


def _from_both_ends(layers: int, ranks: int) -> Sequence[Sequence[Sequence[int]]]:
    count, more = divmod(layers, 2 * ranks)
    if more:
        raise ProblemError(f"has {layers} layers, which dualpipev cannot deal to {ranks} ranks of a pipeline")
    return [
        [range(rank * count, (rank + 1) * count), range(layers - (rank + 1) * count, layers - rank * count)]
        for rank in range(ranks)
    ]


def _counts(args: Mapping[str, Any], layers: int, ranks: int, chunks: int) -> list[list[int]]:
    """Layers of each rank and chunk."""
    embedding = bool(args.get("account_for_embedding_in_pipeline_split"))
    loss = bool(args.get("account_for_loss_in_pipeline_split"))
    first, last = _ends(args, ranks)
    if first is None and last is None:
        count, more = divmod(layers + embedding + loss, ranks * chunks)
        if more:
            raise ProblemError(f"has {layers} layers by its args, which do not divide into {ranks * chunks} stages")
        counts = [[count] * chunks for _ in range(ranks)]
        counts[0][0] -= embedding
        counts[-1][-1] -= loss
    else:
        if embedding or loss:
            raise ProblemError("has both counts of layers and account_for_... in its args")
        middle = ranks - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        if rest < 0 or (rest % middle if middle else rest):
            raise ProblemError(f"has {rest} layers by its args, which do not divide into {middle} middle stages")
        of_rank = [rest // middle if middle else 0] * ranks
        of_rank[0] = of_rank[0] if first is None else first
        of_rank[-1] = of_rank[-1] if last is None else last
        if any(count % chunks for count in of_rank):
            raise ProblemError(f"has stages of {of_rank} layers by its args, which do not divide into {chunks} chunks")
        counts = [[count // chunks] * chunks for count in of_rank]
    if min(map(min, counts)) < 0:
        raise ProblemError(f"has {layers} layers by its args, fewer than its stages need")
    return counts


def _ends(args: Mapping[str, Any], ranks: int) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage, where they are stated."""
    if ranks == 1:
        return None, None
    stated = []
    for end in ("first", "last"):
        names = (f"decoder_{end}_pipeline_num_layers", f"num_layers_in_{end}_pipeline_stage")
        stated.append(next((_number(args, name) for name in names if _number(args, name) is not None), None))
    return stated[0], stated[1]


def _counts_of_layout(layout: Any, ranks: int, chunks: int) -> list[list[int]]:
    """Decoder layers of each rank and chunk in a text such as ``Et*3|(tt|)*29,m|L``, or in such a list."""
    layout = getattr(layout, "fields", {}).get("input_data", layout)
    if isinstance(layout, str):
        text = layout.replace(",", "").replace(" ", "")
        for pattern in _REPEATED:
            text = pattern.sub(_repeat, text)
        stages = [*map(list, text.split("|"))]
    elif isinstance(layout, (list, tuple)) and all(isinstance(stage, (list, tuple)) for stage in layout):
        stages = [list(stage) for stage in layout]
    else:
        raise ProblemError(f"has a {_LAYOUT} in its args that is not read")
    kinds = {"E": 0, "L": 0, "m": 0, "t": 1, "embedding": 0, "loss": 0, "mtp": 0, "decoder": 1}
    unknown = [kind for stage in stages for kind in stage if not isinstance(kind, str) or kind.strip() not in kinds]
    if unknown or len(stages) != ranks * chunks:
        raise ProblemError(f"has a {_LAYOUT} in its args that is none of {ranks * chunks} stages")
    counts = [sum(kinds[kind.strip()] for kind in stage) for stage in stages]
    return [[counts[chunk * ranks + rank] for chunk in range(chunks)] for rank in range(ranks)]


def _repeat(match: re.Match[str]) -> str:
    if len(match[1]) * int(match[2]) > _MAX_LAYOUT:
        raise ProblemError(f"has a {_LAYOUT} in its args that is too long")
    return match[1] * int(match[2])


def _number(args: Mapping[str, Any], name: str) -> int | None:
    """A number among the arguments; None where it is not set."""
    value = args.get(name)
    if value is None or (type(value) is int and value >= 0):
        return value
    raise ProblemError(f"has {name} = {str(value)[:40]} in its args, which is no number")


def numbers_in(args: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """A list of numbers among the arguments, or a text of them; None where it is not set."""
    value = args.get(name)
    if isinstance(value, PickledInstance) and value.name.endswith((".set", ".frozenset")) and value.args:
        value = value.args[0]
    if value is None or value == "" or value == []:
        return None
    parts = value.split(",") if isinstance(value, str) else value
    try:
        return tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        raise ProblemError(f"has {name} = {str(value)[:40]} in its args, which lists no numbers") from None
