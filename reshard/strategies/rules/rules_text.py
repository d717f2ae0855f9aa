"""Rules learned from strategies as a TOML file, with marks where the strategies do not show what is true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from reshard.storage.toml_tables import one_or_list, quoted_list, toml_string
from reshard.strategies.rules.learn import Learned
from reshard.strategies.rules.model import DEFAULT_MATRIX, NOT_SHOWN, WHOLE, Matrix, Reading
from reshard.strategies.rules.pipeline import is_numbered
from reshard.strategies.rules.shown import Source
from reshard.strategies.rules.shown_shards import ShownShards
from reshard.strategies.rules.tensors import ModelTensors, patterns_for

_WHY = {
    "mp": "code may cap a cut, at the number of key and value heads for one",
    "cp": "what context parallelism cuts",
    "ep": "what expert parallelism cuts",
}
_NOT_SHOWN = toml_string(NOT_SHOWN)
_NOTHING_OF_MP = "what model parallelism cuts"


@dataclass(frozen=True)
class _Said:
    """What is said of a weight: equal for weights that share a rule."""

    matrices: tuple[Matrix, ...]
    entries: tuple[str, ...]
    nested: bool
    shard: Optional[str]
    trained: bool
    unexplained: str


def rules_text(learned: Learned, sources: Sequence[Source], model: ModelTensors, shapes_known: bool) -> str:
    """The file.

    Args:
        learned: what the strategies show.
        sources: the strategies.
        model: the weights.
        shapes_known: whether their shapes are; if not, it cannot be told what is whole because it does not divide.
    """
    said = _grouped(learned, sources, model, shapes_known)
    no_shards = all(one.shard == _NOT_SHOWN for one in said)
    return "\n".join([*_head(learned, sources, model, no_shards), *_parameters(said, model, no_shards)]) + "\n"


def _head(learned: Learned, sources: Sequence[Source], model: ModelTensors, no_shards: bool) -> Iterator[str]:
    said = ", ".join(f"{source.strategy.path} ({source.sizes.text})" for source in sources)
    yield f"# What this shows, as rules for `reshard strategy make`: {said}"
    yield f"shown_with = {quoted_list([source.sizes.text for source in sources])}"
    shown_for = learned.rules.shown_for
    if shown_for:
        yield ""
        yield "# Nothing is shown beyond these. What is true beyond them, too, may be taken out."
        yield "shown_for = ["
        for condition, _ in shown_for:
            name = condition.text.partition("<=")[0]
            why = _NOTHING_OF_MP if condition.text == "mp<=1" else _WHY[name]
            yield f"    {toml_string(condition.text)},  # {why}"
        yield "]"
    if no_shards:
        yield ""
        yield "# Which parameters have opted out of optimizer shards is not shown: true or false, here or in a rule."
        yield f"optimizer_shard = {_NOT_SHOWN}"
    states = Counter(model.states.values())
    if states:
        yield ""
        yield f"optimizer_states = {quoted_list(states.most_common(1)[0][0])}"
    yield ""
    yield "[pipeline]"
    pipeline = learned.rules.pipeline
    names = list(model.weights)
    for key, placed in (("first", pipeline.first), ("last", pipeline.last)):
        yield f"{key} = {quoted_list(patterns_for(placed, names))}"
    left = [
        name for name in names if name not in pipeline.first and name not in pipeline.last and not is_numbered(name)
    ]
    if left:
        yield "# Of these the stage is not shown; a target with several needs them in one of the lists:"
        yield from (f"#     {toml_string(pattern)}," for pattern in patterns_for(left, names))


def _grouped(
    learned: Learned, sources: Sequence[Source], model: ModelTensors, shapes_known: bool
) -> dict[_Said, list[str]]:
    """Weights by what is said of them."""
    largest = {name: max(source.sizes[name] for source in sources) for name in ("mp", "cp")}
    # What is whole may be of a size that did not divide.
    wider = "".join(f"|{cut}?" for cut, name in (("mp", "mp"), ("mp*cp", "cp")) if largest[name] > 1)
    said: dict[_Said, list[str]] = {}
    for name, weight in learned.weights.items():
        matrices, entries = _cuts(weight.readings, len(weight.tensor.shape), largest["mp"] > 1)
        unexplained = "" if weight.readings else _layout_words(sources, name)
        if not shapes_known:
            entries = tuple(entry + wider if entry == "None" else entry for entry in entries)
        nested = any(reading.nested for reading in weight.readings)
        trained = not model.states or name in model.states
        one = _Said(matrices, entries, nested, _shard(learned.shards[name]), trained, unexplained)
        said.setdefault(one, []).append(name)
    return said


def _parameters(said: Mapping[_Said, list[str]], model: ModelTensors, no_shards: bool) -> Iterator[str]:
    for one, names in said.items():
        yield ""
        match = f"match = {one_or_list(patterns_for(names, list(model.weights)))}"
        if one.unexplained:
            yield f"# No size explains {one.unexplained}. What does has to be said:"
            yield "# [[parameter]]"
            yield f"# {match}"
            continue
        yield "[[parameter]]"
        yield match
        if len(one.matrices) > 1:
            yield "# which order of devices is not shown"
            yield f"matrix = [{', '.join(map(_axes, one.matrices))}]"
        elif one.matrices and one.matrices[0] != DEFAULT_MATRIX:
            yield f"matrix = {_axes(one.matrices[0])}"
        yield f"map = {quoted_list(one.entries)}"
        if one.nested:
            yield "nested = true"
        if one.shard is not None and not no_shards:
            yield f"optimizer_shard = {one.shard}"
        if not one.trained:
            yield "trained = false"


def _layout_words(sources: Sequence[Source], name: str) -> str:
    layout = next(layout for source in sources for _, layout in source.holding(name))
    return f"device matrix {list(layout.device_matrix)}, tensor map {layout.map_text}"


def _cuts(readings: Sequence[Reading], dimensions: int, mp_shown: bool) -> tuple[tuple[Matrix, ...], tuple[str, ...]]:
    """Matrices, and a cut per dimension."""
    if all(cut == WHOLE for reading in readings for cut in reading.cuts):
        readings = readings[:1]
    entries = [dict.fromkeys(reading.cuts[dimension].text for reading in readings) for dimension in range(dimensions)]
    said = [NOT_SHOWN if list(entry) == [WHOLE.text] and not mp_shown else "|".join(entry) for entry in entries]
    return tuple(dict.fromkeys(reading.matrix for reading in readings)), tuple(said)


def _shard(shown: ShownShards) -> Optional[str]:
    """What is said of optimizer shards; None where it is what holds if nothing is said."""
    may_shard, shown_for = shown
    if may_shard is None or shown_for is not None:
        return _NOT_SHOWN
    if isinstance(may_shard, bool):
        return None if may_shard else "false"
    return toml_string(may_shard.text)


def _axes(matrix: Matrix) -> str:
    return quoted_list([axis.text for axis in matrix])
