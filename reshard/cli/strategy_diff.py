"""strategy diff: differences between two strategies, and how slices move."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import click

from reshard.cli import completion, options
from reshard.cli.command import command, option
from reshard.cli.errors import exit_different
from reshard.cli.output import echo_json, say, show_notes
from reshard.cli.strategy_show import layout_row, strategy_words
from reshard.plan.changes import (
    CONTRADICTING,
    CUT_DIFFERENTLY,
    MOVED,
    UNCHANGED,
    Change,
    Changes,
    Move,
    Span,
    changes_between,
)
from reshard.strategies import Holding, Strategy, read_strategy
from reshard.text.messages import listing, plural, rank_ranges, some_numbers, stepped_ranges
from reshard.text.names import ACCUMULATED_GRADIENTS, pattern_lines

_MAX_PATTERNS = 20
# In a line of the summary.
_MAX_SUMMED = 3
_EFFECTS = {
    UNCHANGED: "unchanged on every rank of B",
    MOVED: "moved, cut alike but held by other ranks",
    CUT_DIFFERENTLY: "cut differently",
    CONTRADICTING: "not the same tensor in A and B",
}


@command(
    "diff",
    """
reshard strategy diff src_strategy.ckpt dst_strategy.ckpt

In a script:
reshard strategy diff compiled/ made.ckpt --exit-code
""",
)
@click.argument("source", metavar="A", shell_complete=completion.paths)
@click.argument("target", metavar="B", shell_complete=completion.paths)
@option("Checks", "--exit-code", is_flag=True, help="Exit status 4 if they differ.")
@options.json_output
@options.verbose("Name every parameter in the summary.")
@options.common
def strategy_diff(source: str, target: str, exit_code: bool, as_json: bool, verbose: bool) -> None:
    """Show the differences from strategy A to strategy B.

    A and B are files, directories, or none. The summary counts the parameters that are unchanged, move to
    other ranks, are cut differently, or are in one strategy only. Then parameters that change in the same way
    are listed together: cuts, optimizer shards, replicas and stages before and after, how the slices of B are
    made from those of A, and how many source ranks a target rank reads. The exit status is 0, or with
    --exit-code 4 if the strategies differ.
    """
    before, after = read_strategy(source), read_strategy(target)
    show_notes((*before.notes, *after.notes))
    changes = changes_between(before, after)
    if as_json:
        echo_json(
            {
                "source": _strategy_row(before),
                "target": _strategy_row(after),
                "summary": {
                    **{effect: len(names) for effect, names in changes.by_effect().items()},
                    "left_out": len(changes.left_out),
                    "missing": len(changes.missing),
                },
                "changes": [_change_row(change) for change in changes.changes],
                "left_out": changes.left_out,
                "missing": changes.missing,
            }
        )
    else:
        say("\n".join(_lines(before, after, changes, verbose)))
    if exit_code and not _same(before, after, changes):
        exit_different()


def _same(before: Strategy, after: Strategy, changes: Changes) -> bool:
    """Whether every rank holds the same by both."""
    ranks = [[stage.ranks for stage in strategy.stages] for strategy in (before, after)]
    changed = changes.left_out or changes.missing or not all(change.unchanged for change in changes.changes)
    return not changed and ranks[0] == ranks[1]


def _lines(before: Strategy, after: Strategy, changes: Changes, verbose: bool) -> Iterator[str]:
    yield from (f"{letter}: {strategy_words(strategy)}" for letter, strategy in (("A", before), ("B", after)))
    yield ""
    yield from _summary(changes, verbose)
    all_names = {name: None for strategy in (before, after) for name in strategy.parameters}
    for alike in _alike_but_for_stages(changes.changes):
        yield ""
        yield from _change_lines(alike)
        yield from _names([name for change in alike for name in change.names], all_names)
    for names, where in ((changes.left_out, "only in A: left out"), (changes.missing, "only in B: missing")):
        if names:
            yield ""
            yield f"{plural(len(names), 'parameter')} {where}"
            yield from _names(names, all_names)
    if not changes.changes:
        yield ""
        yield "no parameter is in both"
    elif all(change.unchanged for change in changes.changes) and not changes.left_out and not changes.missing:
        yield ""
        yield "nothing changes"
    if any(name.startswith(ACCUMULATED_GRADIENTS) for change in changes.changes for name in change.names):
        yield ""
        yield f"{ACCUMULATED_GRADIENTS}* is shown as recorded; often the optimizer shard is not made"


def _names(names: Sequence[str], all_names: Container[str]) -> list[str]:
    return [f"    {line}" for line in pattern_lines(names, all_names, _MAX_PATTERNS)]


def _summary(changes: Changes, verbose: bool) -> Iterator[str]:
    """A line for all parameters that fare alike: how many, and their names as patterns."""
    by_effect = changes.by_effect()
    counted = [(by_effect[effect], words) for effect, words in _EFFECTS.items()]
    counted += [(changes.left_out, "only in A, left out"), (changes.missing, "only in B, missing")]
    width = max((len(str(len(names))) for names, _ in counted), default=0)
    for names, words in counted:
        if names:
            text = listing(names, _MAX_SUMMED)
            yield f"{len(names):>{width}} {words}: {text.full if verbose else text}"


def _alike_but_for_stages(changes: Sequence[Change]) -> list[list[Change]]:
    """Changes that differ only in which stage goes to which: pipelines make each as often as they have stages."""
    groups: dict[object, list[Change]] = {}
    for number, change in enumerate(changes):
        one = change.problem is None and len(change.sources) == 1 and len(change.targets) == 1
        words = tuple(_layout_words(holding) for holding in (*change.sources, *change.targets))
        key = (change.effect, tuple(_differences(change)), words, tuple(map(tuple, map(_movement, change.moves))))
        groups.setdefault(key if one else number, []).append(change)
    return sorted(groups.values(), key=lambda group: (group[0].unchanged, -sum(len(change.names) for change in group)))


def _change_lines(alike: Sequence[Change]) -> Iterator[str]:
    change = alike[0]
    count = plural(sum(len(change.names) for change in alike), "parameter")
    if change.problem is not None:
        yield f"{count}: not the same tensor in A and B: {change.problem}"
    elif change.unchanged:
        yield f"{count}: unchanged"
    else:
        words = [*_stage_changes(alike), *_differences(change)]
        moved = "every rank keeps its slice" if change.effect == UNCHANGED else "slices on other ranks"
        yield f"{count}: {'; '.join(words) or moved}"
    if len(alike) > 1:
        pairs = [("A", [change.sources[0] for change in alike]), ("B", [change.targets[0] for change in alike])]
        for letter, holdings in pairs[:1] if change.unchanged else pairs:
            ranks = {rank for holding in holdings for rank in holding.stage.ranks}
            where = f"{_stages(sorted({holding.stage.number for holding in holdings}))}: {rank_ranges(ranks)}"
            yield f"  {'A and B' if change.unchanged else letter}: {where}, {_layout_words(holdings[0])}"
    else:
        for letter, of_side in (("A", change.sources), ("B", change.targets)):
            for holding in of_side if not (change.unchanged and letter == "B") else ():
                where = f"{holding.stage.label}, {_layout_words(holding)}"
                yield f"  {'A and B' if change.unchanged else letter}: {where}"
    for move in () if change.unchanged else change.moves:
        where = f" (stage {move.target.stage.number})" if len(change.moves) > 1 else ""
        for line in _movement(move):
            yield f"  slices{where}: {line}"


def _stage_changes(alike: Sequence[Change]) -> list[str]:
    """Which stages' parameters go to which, if any go to others."""
    pairs: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for change in alike:
        before, after = (tuple(h.stage.number for h in holdings) for holdings in (change.sources, change.targets))
        pairs.setdefault(after, set()).add(before)
    if all(before == {after} for after, before in pairs.items()):
        return []
    words = (
        f"{_stages(sorted({number for numbers in before for number in numbers}))} -> {_stages(after)}"
        for after, before in sorted(pairs.items())
    )
    return [", ".join(words)]


def _differences(change: Change) -> list[str]:
    """Differences per target stage; once if equal in all."""
    lines: dict[str, None] = {}
    for move in change.moves:
        before, after = move.source.layout, move.target.layout
        for dimension, (old, new) in enumerate(zip(before.tensor_cuts, after.tensor_cuts)):
            by_hand = dimension == 0 and before.uneven != after.uneven
            if old != new or by_hand:
                cuts = [
                    f"{count} by hand" if by_hand and layout.uneven else str(count) if count > 1 else "whole"
                    for layout, count in ((before, old), (after, new))
                ]
                lines[f"cut of dimension {dimension}: {cuts[0]} -> {cuts[1]}"] = None
        numbers = {
            "optimizer shards": (before.shards, after.shards),
            "replicas": (before.copies, after.copies),
            "devices of the stage": (before.device_count, after.device_count),
        }
        for title, (old, new) in numbers.items():
            if old != new:
                words = [
                    "none" if title == "optimizer shards" and number == 1 else str(number) for number in (old, new)
                ]
                lines[f"{title}: {words[0]} -> {words[1]}"] = None
    return list(lines)


def _movement(move: Move) -> Iterator[str]:
    if move.unchanged:
        yield "every rank has its slice already"
        return
    unchanged = True
    for dimension, (joined, divided) in enumerate(zip(move.joined, move.divided)):
        along = f"dimension {dimension}"
        if joined.most > 1 and divided.most > 1:
            yield (
                f"along {along}, each target slice joins parts of {_span(joined)} source slices, "
                f"and each source slice goes to {_span(divided)} target slices"
            )
        elif joined.most > 1:
            yield f"each target slice joins {_span(joined)} source slices of {along}"
        elif divided.most > 1:
            yield f"each source slice is cut in {_span(divided)} along {along}"
        unchanged = unchanged and joined.most <= 1 and divided.most <= 1
    if unchanged:
        yield "unchanged; each is copied from a rank that holds the same slice"
    ranks = "rank" if move.ranks_read.most == 1 else "ranks"
    yield f"each target rank reads {_span(move.ranks_read)} source {ranks}"


def _span(span: Span) -> str:
    return str(span.most) if span.least == span.most else f"{span.least} to {span.most}"


def _stages(numbers: Sequence[int]) -> str:
    return f"{'stage' if len(numbers) == 1 else 'stages'} {stepped_ranges(numbers)}"


def _layout_words(holding: Holding) -> str:
    layout = holding.layout
    words = f"device matrix {list(layout.device_matrix)}, tensor map {layout.map_text}"
    if layout.uneven is not None:
        words += f", dimension 0 by hand {some_numbers(layout.uneven)}"
    return words + (f", optimizer shards {layout.shards}" if layout.shards > 1 else "")


def _strategy_row(strategy: Strategy) -> dict[str, object]:
    return {"path": strategy.path, "devices": strategy.device_count, "stages": len(strategy.stages)}


def _change_row(change: Change) -> dict[str, object]:
    return {
        "parameters": change.names,
        "unchanged": change.unchanged,
        "problem": change.problem,
        "source": [_holding_row(holding) for holding in change.sources],
        "target": [_holding_row(holding) for holding in change.targets],
        "moves": [
            {
                "source_stage": move.source.stage.number,
                "target_stage": move.target.stage.number,
                "joined": [list(span) for span in move.joined],
                "divided": [list(span) for span in move.divided],
                "ranks_read": list(move.ranks_read),
                "kept": move.unchanged,
            }
            for move in change.moves
        ],
    }


def _holding_row(holding: Holding) -> dict[str, object]:
    return {"stage": holding.stage.number, "first_rank": holding.stage.first_rank, **layout_row(holding.layout)}
