"""strategy show: layouts of all parameters, or the slices of one; strategy diff: differences between two strategies."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import click

from reshard.cli import options
from reshard.cli.command import argument, command, nearest, option
from reshard.cli.output import (
    echo_json,
    exit_different,
    fill,
    is_json,
    is_verbose,
    say,
    show_notes,
    shown_text,
    terminal_width,
)
from reshard.cli.tables import table
from reshard.errors import LayoutError, StrategyError, UsageError
from reshard.layout import Layout
from reshard.strategies import Holding, Stage, Strategy, read_strategy
from reshard.strategies.arrangement import Arrangement, shown_positions
from reshard.text.globs import Filters
from reshard.text.messages import (
    listing,
    one_line,
    plural,
    quoted,
    rank_ranges,
    some_numbers,
    stepped_ranges,
    stepped_rank_ranges,
)
from reshard.text.names import ACCUMULATED_GRADIENTS, pattern_lines

_MAX_PATTERNS = 40
# Lists up to this length are printed in full.
_MAX_LISTED = 20
_MAX_SLICES = 32
# In a line of the summary of differences.
_MAX_SUMMED = 3
_WILD = frozenset("*?[")


@command(
    "show",
    """
reshard strategy show output/strategy
reshard strategy show src.ckpt backbone.blocks.0.attention.dense1.weight
""",
)
@argument("path", metavar="FILE|DIR")
@click.argument("parameter", required=False, metavar="[PARAM]")
@options.verbose("Without PARAM: list every parameter.")
@options.json_output
@options.common
def strategy_show(path: str, parameter: str | None) -> None:
    """Show layouts, or the slices of one PARAM.

    FILE is a strategy file, DIR a directory of them. Without PARAM, parameters are grouped by layout; names
    are shortened to patterns with counts. With PARAM, the axes of the device matrix are shown, and which
    ranks hold which slice. PARAM may be a GLOB; if several names match, their layouts are shown. Only JSON
    strategies contain full shapes; without them, slices are fractions such as 1/8..2/8 of a dimension.
    """
    strategy = read_strategy(path)
    show_notes(strategy.notes)
    chosen = strategy.parameters if parameter is None else _chosen(strategy, parameter)
    if parameter is not None and len(chosen) == 1:
        _show_parameter(strategy, chosen[0])
        return
    names = frozenset(chosen)
    stages = [
        stage._replace(layouts={name: layout for name, layout in stage.layouts.items() if name in names})
        for stage in strategy.stages
    ]
    if is_json():
        rows = ((stage, name, layout) for stage in stages for name, layout in stage.layouts.items())
        echo_json(
            [
                {"stage": stage.number, "parameter": name, **_layout_row(layout), "shape": layout.recorded_shape}
                for stage, name, layout in rows
            ]
        )
        return
    say(strategy_words(strategy))
    if parameter is not None:
        say(f"{len(chosen)} parameters match {quoted(parameter)}")
    for stage in stages:
        if parameter is not None and not stage.layouts:
            continue
        if is_verbose() or len(stage.layouts) <= _MAX_LISTED:
            rows_of = [[name, *_layout_words(layout).values()] for name, layout in stage.layouts.items()]
            columns = ["device matrix", "tensor map", "cuts", "optimizer shards", "replicas"]
            table(stage.label, ["parameter", *columns], rows_of)
        else:
            _group_parameters(stage)


def _chosen(strategy: Strategy, typed: str) -> Sequence[str]:
    """The parameters that match a name or pattern, in the order of the strategy."""
    if any(typed in stage.layouts for stage in strategy.stages):
        return [typed]
    matches = list(filter(Filters((typed,)).admit, strategy.parameters)) if _WILD.intersection(typed) else []
    if not matches:
        raise UsageError(
            f"{strategy.path} lists no parameter {quoted(typed)}.{nearest(typed, strategy.parameters)}",
            parameter=typed,
            hint="reshard strategy show lists them, without PARAM; a part of a name is a pattern: '*.weight'",
        )
    return matches


def _group_parameters(stage: Stage) -> None:
    groups: dict[str, list[str]] = {}
    # Thousands of parameters share tens of layout objects.
    words: dict[int, str] = {}
    for name, layout in stage.layouts.items():
        if id(layout) not in words:
            words[id(layout)] = _layout_line(layout)
        groups.setdefault(words[id(layout)], []).append(name)
    say(f"{stage.label}: {plural(len(stage.layouts), 'parameter')}, {plural(len(groups), 'different layout')}")
    for text, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        say(f"\n{plural(len(names), 'parameter')}")
        _say_filled(f"  {text}")
        _say_names(names, stage.layouts)
    say("")


def _say_names(names: Sequence[str], all_names: Container[str]) -> None:
    for line in pattern_lines(names, all_names, _MAX_PATTERNS):
        say(f"    {line}")


def _layout_words(layout: Layout) -> dict[str, str]:
    by_hand = "" if layout.uneven is None else f", by hand {some_numbers(layout.uneven)}"
    return {
        "device matrix": str(list(layout.device_matrix)),
        "tensor map": layout.map_text,
        "cuts": f"{list(layout.tensor_cuts)}{by_hand}",
        "optimizer shards": str(layout.shards) if layout.shards != 1 else "-",
        "replicas": str(layout.copies),
    }


def _layout_line(layout: Layout) -> str:
    return ", ".join(f"{title} {text}" for title, text in _layout_words(layout).items())


def _layout_row(layout: Layout) -> dict[str, object]:
    """A layout as JSON has it, without the shape, in which layouts differ that cut alike."""
    return {
        "device_matrix": layout.device_matrix,
        "tensor_map": layout.tensor_map,
        "cuts": layout.tensor_cuts,
        "optimizer_shards": layout.shards,
        "uneven": layout.uneven,
        "replicas": layout.copies,
    }


def strategy_words(strategy: Strategy) -> str:
    devices, stages = plural(strategy.device_count, "device"), plural(len(strategy.stages), "stage")
    parameters = "" if strategy.is_none else f", {plural(len(strategy.parameters), 'parameter')}"
    return f"{strategy.path}: {devices} in {stages}{parameters}"


def _show_parameter(strategy: Strategy, name: str) -> None:
    arrangements = [_arranged(strategy, stage, name) for stage in strategy.stages if name in stage.layouts]
    if is_json():
        echo_json({"parameter": name, "stages": [_stage_row(arrangement) for arrangement in arrangements]})
        return
    say(one_line(name))
    for arrangement in arrangements:
        layout = arrangement.layout
        say(f"\n{arrangement.holding.stage.label}")
        say(f"device matrix {list(layout.device_matrix)}, tensor map {layout.map_text}")
        for line in (*arrangement.axis_lines(), *arrangement.dimension_lines()):
            _say_filled(f"  {line}")
        _show_slices(arrangement)
        for reading in arrangement.readings:
            _say_filled(reading)
        if name.startswith(ACCUMULATED_GRADIENTS) and layout.shards > 1:
            say("accumulated gradients are often stored without the optimizer shard that is recorded")


def _say_filled(line: str) -> None:
    say("\n".join(fill(line, terminal_width(), "    ")))


def _show_slices(arrangement: Arrangement) -> None:
    """The slices and their ranks; where they are many, optimizer shards are not distinguished."""
    say(arrangement.summary())
    drawn = arrangement
    if arrangement.layout.shards > 1 and arrangement.layout.slice_count > _MAX_SLICES:
        drawn = arrangement.without_shards
        _say_filled(str(arrangement.shard_order()))
    rows = []
    for number in shown_positions(drawn.layout.slice_count, _MAX_SLICES):
        if number is None:
            rows.append([*("..." for _ in drawn.cut_dimensions), "see --json"])
            continue
        one = drawn.slice(number)
        places = [
            drawn.interval(dimension, one.place[dimension]) + ("" if dimension else drawn.shard_text(one.place[0]))
            for dimension in drawn.cut_dimensions
        ]
        rows.append([*places, stepped_rank_ranges(one.ranks)])
    table("", [*(f"dimension {dimension}" for dimension in drawn.cut_dimensions), "held by"], rows)


def _arranged(strategy: Strategy, stage: Stage, name: str) -> Arrangement:
    try:
        return Arrangement(Holding(stage, stage.layouts[name]))
    except LayoutError as error:
        where = f"{strategy.path}: stage {stage.number}: {quoted(name)}"
        raise StrategyError(f"{where}: {error.message}", file=strategy.path, parameter=name) from error


def _stage_row(arrangement: Arrangement) -> dict[str, object]:
    layout = arrangement.layout
    return {
        "stage": arrangement.holding.stage.number,
        **_layout_row(layout),
        "shape": layout.recorded_shape,
        "extents": arrangement.extents,
        "in_elements": arrangement.in_elements,
        "slices": [
            {
                "box": part.box,
                "shard": part.place[0] % layout.shards if layout.shards > 1 else None,
                "ranks": part.ranks,
            }
            for part in arrangement.slices()
        ],
    }


@command(
    "diff",
    """
reshard strategy diff src_strategy.ckpt dst_strategy.ckpt

In a script:
reshard strategy diff compiled/ made.ckpt --exit-code
""",
)
@argument("source", metavar="A")
@argument("target", metavar="B")
@option("Checks", "--exit-code", is_flag=True, help="Exit status 4 if they differ.")
@options.json_output
@options.verbose("Name every parameter in the summary.")
@options.common
def strategy_diff(source: str, target: str, exit_code: bool) -> None:
    """Show the differences from strategy A to strategy B.

    A and B are files, directories, or none. The summary counts the parameters that are unchanged, move to
    other ranks, are cut differently, or are in one strategy only. Then parameters that change in the same way
    are listed together, with their layouts and stages before and after. The exit status is 0, or with
    --exit-code 4 if the strategies differ.
    """
    # Loaded only here: `show` does without.
    from reshard.plan.changes import CONTRADICTING, CUT_DIFFERENTLY, MOVED, UNCHANGED, changes_between

    before, after = read_strategy(source), read_strategy(target)
    show_notes((*before.notes, *after.notes))
    changes = changes_between(before, after)
    by_effect = changes.by_effect()
    only = {"left_out": changes.left_out, "missing": changes.missing}
    if is_json():
        sides = {
            side: {"path": each.path, "devices": each.device_count, "stages": len(each.stages)}
            for side, each in (("source", before), ("target", after))
        }
        rows = [
            {
                "effect": change.effect,
                "problem": change.problem,
                "source": [_holding_row(holding) for holding in change.sources],
                "target": [_holding_row(holding) for holding in change.targets],
                "parameters": change.names,
            }
            for change in changes.changes
        ]
        summary = {effect: len(names) for effect, names in {**by_effect, **only}.items()}
        echo_json({**sides, "summary": summary, "changes": rows, **only})
    else:
        words = {
            UNCHANGED: "unchanged on every rank of B",
            MOVED: "moved, cut alike but held by other ranks",
            CUT_DIFFERENTLY: "cut differently",
            CONTRADICTING: "not the same tensor in A and B",
            "left_out": "only in A, left out",
            "missing": "only in B, missing",
        }
        say(f"A: {strategy_words(before)}\nB: {strategy_words(after)}\n")
        for effect, names in {**by_effect, **only}.items():
            if names:
                text = listing(names, _MAX_SUMMED)
                say(f"{len(names)} {words[effect]}: {shown_text(text)}")
        all_names = {*before.parameters, *after.parameters}
        for change in changes.changes:
            say(f"\n{plural(len(change.names), 'parameter')}: {change.problem or words[change.effect]}")
            _say_layouts(change.sources, change.targets)
            _say_names(change.names, all_names)
        for side, names in only.items():
            if names:
                say(f"\n{plural(len(names), 'parameter')} {words[side]}")
                _say_names(names, all_names)
        if not changes.changes:
            say("\nno parameter is in both")
        elif changes.equal:
            say("\nnothing changes")
        if any(name.startswith(ACCUMULATED_GRADIENTS) for change in changes.changes for name in change.names):
            say(f"\n{ACCUMULATED_GRADIENTS}* is shown as recorded; often the optimizer shard is not made")
    if exit_code and not changes.equal:
        exit_different()


def _holding_row(holding: Holding) -> dict[str, object]:
    return {"stage": holding.stage.number, "first_rank": holding.stage.first_rank, **_layout_row(holding.layout)}


def _say_layouts(sources: Sequence[Holding], targets: Sequence[Holding]) -> None:
    """The stages before and after, with their layouts; once where they are equal."""
    before, after = list(_stage_lines(sources)), list(_stage_lines(targets))
    for letters, lines in (("A and B", before),) if before == after else (("A", before), ("B", after)):
        for line in lines:
            _say_filled(f"  {letters}: {line}")


def _stage_lines(holdings: Sequence[Holding]) -> Iterator[str]:
    alike: dict[str, list[Stage]] = {}
    for holding in holdings:
        alike.setdefault(_layout_line(holding.layout), []).append(holding.stage)
    for words, stages in alike.items():
        numbers = f"{'stage' if len(stages) == 1 else 'stages'} {stepped_ranges(stage.number for stage in stages)}"
        yield f"{numbers}: {rank_ranges(rank for stage in stages for rank in stage.ranks)}, {words}"
