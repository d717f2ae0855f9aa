"""strategy show: layouts of all parameters, or the slices of one, as a table and a picture."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Callable, Optional

import click

from reshard.cli import completion, options
from reshard.cli.command import command, nearest
from reshard.cli.output import echo_json, fill, say, show_notes, terminal_width, write_picture
from reshard.cli.strategy_make import sizes_option
from reshard.cli.tables import table
from reshard.errors import LayoutError, StrategyError, UsageError
from reshard.layout import Layout
from reshard.pictures.slices import Arrangement, shown_positions
from reshard.storage import exists
from reshard.strategies import Holding, Stage, Strategy, read_strategy
from reshard.text.globs import Filters
from reshard.text.messages import one_line, plural, quoted, some_numbers, stepped_rank_ranges
from reshard.text.names import ACCUMULATED_GRADIENTS, pattern_lines

AxisNames = Callable[[str, tuple[int, ...]], tuple[str, ...]]
"""As in `reshard.strategies.rules.shown`, which is imported only when names exist."""

_MAX_PATTERNS = 40
# Lists up to this length are printed in full.
_MAX_LISTED = 20
_MAX_CANDIDATES = 12
_MAX_SLICES = 32
_WILD = frozenset("*?[")


@command(
    "show",
    """
reshard strategy show output/strategy

reshard strategy show src_strategy.ckpt \\
    backbone.blocks.0.attention.dense1.weight --svg dense1.svg
""",
)
@click.argument("path", metavar="FILE|DIR", shell_complete=completion.paths)
@click.argument("parameter", required=False, metavar="[PARAM]")
@sizes_option(
    "Strategies",
    "--sizes",
    text="Sizes of its run; axes of device matrices get these names where the sizes determine them.",
)
@options.svg("With PARAM: draw its slices and the ranks that hold them.")
@options.verbose("Without PARAM: list every parameter.")
@options.json_output
@options.common
def strategy_show(
    path: str, parameter: Optional[str], sizes: Any, svg: Optional[str], verbose: bool, as_json: bool
) -> None:
    """Show layouts, or the slices of one PARAM.

    FILE is a strategy file, DIR a directory of them. Without PARAM, parameters are grouped by layout; names
    are shortened to patterns with counts. With PARAM, the axes of the device matrix are shown, and which
    ranks hold which slice. PARAM may be a GLOB; if several names match, their layouts are shown. Only JSON
    strategies contain full shapes; without them, slices are fractions such as 1/8..2/8 of a dimension. Axes
    have names such as dp and mp if strategy make or derive wrote the file, or with --sizes.
    """
    if svg is not None and parameter is None:
        raise UsageError("--svg draws one parameter: name it after the strategy")
    strategy = read_strategy(path)
    show_notes(strategy.notes)
    names = _axis_names(path, sizes)
    chosen = strategy.parameters if parameter is None else _chosen(strategy, parameter)
    if parameter is not None and len(chosen) == 1:
        _show_parameter(strategy, chosen[0], names, svg, as_json)
        return
    if svg is not None and parameter is not None:
        raise UsageError(f"--svg draws one parameter: {len(chosen)} fit {quoted(parameter)}", parameter=parameter)
    # Nearly always all of them.
    stages = (
        strategy.stages if parameter is None else [_narrowed(stage, frozenset(chosen)) for stage in strategy.stages]
    )
    if as_json:
        echo_json([row for stage in stages for row in _layout_rows(stage, names)])
        return
    say(strategy_words(strategy))
    if parameter is not None:
        say(f"{len(chosen)} parameters match {quoted(parameter)}")
    for stage in stages:
        if parameter is not None and not stage.layouts:
            continue
        if verbose or len(stage.layouts) <= _MAX_LISTED:
            _list_parameters(stage, names)
        else:
            _group_parameters(stage, names)


def _chosen(strategy: Strategy, typed: str) -> Sequence[str]:
    """The parameters that match a name or pattern, in the order of the strategy."""
    if any(typed in stage.layouts for stage in strategy.stages):
        return [typed]
    matches = list(filter(Filters((typed,)).admit, strategy.parameters)) if _WILD.intersection(typed) else []
    if not matches:
        raise _unknown(strategy, typed)
    return matches


def _narrowed(stage: Stage, names: Container[str]) -> Stage:
    return stage._replace(layouts={name: layout for name, layout in stage.layouts.items() if name in names})


def _list_parameters(stage: Stage, names: AxisNames) -> None:
    rows = [
        [name, *_layout_words(layout, names(name, layout.device_matrix)).values()]
        for name, layout in stage.layouts.items()
    ]
    table(stage.label, ["parameter", "device matrix", "tensor map", "cuts", "optimizer shards", "replicas"], rows)


def _group_parameters(stage: Stage, names: AxisNames) -> None:
    groups: dict[tuple[str, ...], list[str]] = {}
    words: dict[tuple[int, tuple[str, ...]], tuple[str, ...]] = {}
    for name, layout in stage.layouts.items():
        # Thousands of parameters share tens of layout objects.
        key = id(layout), names(name, layout.device_matrix)
        if key not in words:
            words[key] = tuple(f"{title} {text}" for title, text in _layout_words(layout, key[1]).items())
        groups.setdefault(words[key], []).append(name)
    lines = [f"{stage.label}: {plural(len(stage.layouts), 'parameter')}, {plural(len(groups), 'different layout')}"]
    for text, of in sorted(groups.items(), key=lambda group: -len(group[1])):
        lines += ["", plural(len(of), "parameter"), *_flowing(text)]
        lines += [f"    {line}" for line in pattern_lines(of, stage.layouts, _MAX_PATTERNS)]
    click.echo("\n".join([*lines, ""]))


def _flowing(parts: Sequence[str]) -> list[str]:
    """Parts side by side, as many in a line as the width allows."""
    lines = [f"  {parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 2 > min(100, terminal_width()):
            lines.append(f"  {part}")
        else:
            lines[-1] += f"  {part}"
    return lines


def _layout_words(layout: Layout, axes: tuple[str, ...]) -> dict[str, str]:
    by_hand = "" if layout.uneven is None else f", by hand {some_numbers(layout.uneven)}"
    matrix, tensor_map = str(list(layout.device_matrix)), layout.map_text
    if axes:
        matrix = f"[{', '.join(f'{name} {size}' for name, size in zip(axes, layout.device_matrix))}]"
        cut_by = ["*".join(axes[len(axes) - 1 - axis] for axis in over) or "None" for over in layout.tensor_map]
        tensor_map = f"[{', '.join(cut_by)}]"
    return {
        "device matrix": matrix,
        "tensor map": tensor_map,
        "cuts": f"{list(layout.tensor_cuts)}{by_hand}",
        "optimizer shards": str(layout.shards) if layout.shards != 1 else "-",
        "replicas": str(layout.copies),
    }


def _layout_rows(stage: Stage, names: AxisNames) -> list[dict[str, object]]:
    return [
        {"stage": stage.number, "parameter": name, **_layout_row(layout, names(name, layout.device_matrix))}
        for name, layout in stage.layouts.items()
    ]


def _layout_row(layout: Layout, axes: tuple[str, ...]) -> dict[str, object]:
    shape = None if layout.recorded_shape is None else list(layout.recorded_shape)
    return {**layout_row(layout), "axes": list(axes) or None, "shape": shape}


def strategy_words(strategy: Strategy) -> str:
    """A strategy with the numbers of its devices, stages and parameters."""
    devices, stages = plural(strategy.device_count, "device"), plural(len(strategy.stages), "stage")
    parameters = "" if strategy.is_none else f", {plural(len(strategy.parameters), 'parameter')}"
    return f"{strategy.path}: {devices} in {stages}{parameters}"


def layout_row(layout: Layout) -> dict[str, object]:
    """A layout as JSON has it, without the shape, in which layouts differ that cut alike."""
    return {
        "device_matrix": list(layout.device_matrix),
        "tensor_map": [list(axes) for axes in layout.tensor_map],
        "cuts": list(layout.tensor_cuts),
        "optimizer_shards": layout.shards,
        "uneven": list(layout.uneven) if layout.uneven is not None else None,
        "replicas": layout.copies,
    }


def _axis_names(path: str, sizes: Any) -> AxisNames:
    """Names of axes: from --sizes, or from the record of a made strategy."""
    if sizes is not None:
        from reshard.strategies.read import read_recorded
        from reshard.strategies.rules.shown import SourceRun, names_by_sizes

        return names_by_sizes(SourceRun(*read_recorded(path), sizes))
    from reshard.strategies.one_file import record_paths

    if any(map(exists, record_paths(path))):
        from reshard.strategies.rules.write import recorded_names

        return recorded_names(path) or _no_names
    return _no_names


def _no_names(name: str, matrix: tuple[int, ...]) -> tuple[str, ...]:
    return ()


def _show_parameter(strategy: Strategy, name: str, names: AxisNames, svg: Optional[str], as_json: bool) -> None:
    arrangements = [_arranged(strategy, stage, name, names) for stage in strategy.stages if name in stage.layouts]
    if svg is not None:
        from reshard.pictures.slices import parameter_picture

        write_picture(svg, parameter_picture(name, arrangements))
    if as_json:
        echo_json({"parameter": name, "stages": [_stage_row(arrangement) for arrangement in arrangements]})
        return
    click.echo(one_line(name))
    for arrangement in arrangements:
        layout = arrangement.layout
        click.echo(f"\n{arrangement.holding.stage.label}")
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


def _arranged(strategy: Strategy, stage: Stage, name: str, names: AxisNames) -> Arrangement:
    try:
        layout = stage.layouts[name]
        return Arrangement(Holding(stage, layout), names(name, layout.device_matrix))
    except LayoutError as error:
        where = f"{strategy.path}: stage {stage.number}: {quoted(name)}"
        raise StrategyError(f"{where}: {error.message}", file=strategy.path, parameter=name) from error


def _unknown(strategy: Strategy, name: str) -> UsageError:
    holding = [parameter for parameter in strategy.parameters if name.lower() in parameter.lower()]
    if len(holding) > 1:
        lines = pattern_lines(holding, frozenset(strategy.parameters), _MAX_CANDIDATES)
        return UsageError(
            f"{strategy.path} lists no parameter {quoted(name)}; names that hold this:",
            parameter=name,
            hint="\n".join([*lines, "pass one of these names, or a pattern such as '*.weight'"]),
        )
    advice_text = f" Did you mean {quoted(holding[0])}?" if holding else nearest(name, strategy.parameters)
    return UsageError(
        f"{strategy.path} lists no parameter {quoted(name)}.{advice_text}",
        parameter=name,
        hint="reshard strategy show lists them, without PARAM",
    )


def _stage_row(arrangement: Arrangement) -> dict[str, object]:
    layout = arrangement.layout
    return {
        "stage": arrangement.holding.stage.number,
        **_layout_row(layout, arrangement.axis_names),
        "extents": list(arrangement.extents),
        "in_elements": list(arrangement.in_elements),
        "slices": [
            {
                "box": [list(interval) for interval in part.box],
                "shard": part.place[0] % layout.shards if layout.shards > 1 else None,
                "ranks": list(part.ranks),
            }
            for part in arrangement.slices()
        ],
    }
