"""Tables of names that a conversion applies: which, in which direction, and what records keep of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from reshard.checkpoints.checkpoint import Packing
from reshard.errors import NamesError, UsageError
from reshard.forms.form import Side
from reshard.forms.request import EditRules, recorded_name
from reshard.names import (
    HUB_SIDE,
    Applied,
    Edge,
    NameRules,
    Path,
    UnknownNamesError,
    apply_rules,
    family_named,
    path,
    published_table,
    settle,
    side_of,
)
from reshard.records.ledger import is_touched
from reshard.storage import absolute
from reshard.text.globs import matcher
from reshard.text.messages import Report, quoted
from reshard.text.names import fused_expert

_OF_OTHERS = "if the files were replaced since, remove .reshard beside them and state their packing with --names"


def path_of(edits: EditRules, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """The tables from the names of the source to those of the target, for tensors of these names and shapes.

    A table alone leads from the side that the names are on to the other. Where an end is on the side of a table for
    all model families, forms decide, except whether other names are Hugging Face's or those of the family's table.

    Raises:
        NamesError: the names are on no side of the tables.
        UsageError: no table of the path has a stated option.
    """
    table, of_side = edits.table, edits.table_of_side
    if table is None or of_side is None:
        return tuple(Edge(rules, edits.reverse) for rules in edits.tables)
    source, target = (HUB_SIDE if side is None else side.value for side in (edits.source_side, edits.side))
    if source != of_side.sides[1]:
        with family_named(edits.table, edits.config):
            settled = settle(table, edits.config, shapes, edits.recorded_options(table))
            # A family without a table of its own has Hugging Face's names alone.
            is_right = edits.reverse or (bool(table.rules) and side_of(table, settled, shapes, None).reverse)
        source = table.sides[is_right]
    chosen = path(edits.tables, source, target)
    applied = {name for edge in chosen for name, _ in edge.rules.chosen}
    unused = [f"{name}={value}" for name, value in table.chosen if name not in applied]
    if unused:
        raise UsageError(
            f"--names {table.path}: {unused[0]} is an option of MindFormers' names, which neither source nor target "
            "has",
            hint=f"leave out {','.join(unused)}",
        )
    return chosen


def apply_table(edits: EditRules, edge: Edge, shapes: Mapping[str, tuple[int, ...]], contents: bool = True) -> Applied:
    """Apply rules of names and packing to tensors of these shapes; see `names.apply_rules`."""
    with family_named(edits.table, edits.config):
        return apply_rules(
            edge.rules,
            shapes,
            edits.config,
            edge.reverse,
            edits.optimizer,
            recorded=edits.recorded_options(edge.rules),
            contents=contents,
            to_huggingface=edits.side is Side.HUGGINGFACE and edits.table_of_side is None,
            left_out=matcher(edits.exclude),
        )


def with_published_names(edits: EditRules, shapes: Mapping[str, tuple[int, ...]], report: Report) -> EditRules:
    """These edits, with the table of the names that `save_pretrained` of transformers gives the model, if it has one.

    Args:
        edits: the edits.
        shapes: of all tensors, by their names in the model.
        report: gets a note where names stay that may be published otherwise.

    Raises:
        NamesError: experts are fused, and no published names are known for the model.
        UsageError: experts are fused, and an adapter is added, too.
    """
    fused = fused_expert(shapes)
    if fused is not None and edits.additions is not None:
        raise UsageError(
            f"{quoted(fused)} holds all experts of a layer, as in transformers 5, and merge-lora does not give "
            "them the names of published models",
            parameter=fused,
            hint="convert BASE first: reshard convert BASE BASE2 --to huggingface --config DIR",
        )
    try:
        table = published_table(edits.config, shapes)
        if table is not None and edits.additions is not None:
            raise UnknownNamesError("merge-lora keeps names")
    except UnknownNamesError as reason:
        report.note(
            f"names stay, and published models may have others: {reason}; transformers 5 loads both, and its "
            "save_pretrained writes the published ones"
        )
        return edits
    return edits if table is None else edits._replace(tables=(table,), reverse=False)


def packing_of(edits: EditRules, applied: Applied) -> Packing:
    """The packing that a table gave."""
    table = applied.rules
    config = None if edits.config_path is None else absolute(edits.config_path)
    recorded = table.packing_options.union(name for name, _ in table.chosen)
    options = {name: applied.options[name] for name in sorted(recorded)}
    return Packing(recorded_name(table), config, options, applied.sizes)


def check_packing(place: str, recorded: Packing, packing: Packing, table: NameRules, report: Report) -> None:
    """Compare the decisive options and the sizes of a table with those that its records list.

    Other values give the right names and shapes with the wrong numbers. Where the records decide, and may be those of
    files that were there before, a note says so.

    Raises:
        NamesError: the same table has other values.
    """
    decisive = {name: value for name, value in packing.options.items() if name in table.packing_options}
    differing = [
        (name, before[name], value)
        for before, now in ((recorded.options, decisive), (recorded.sizes, packing.sizes))
        for name, value in now.items()
        if before.get(name, value) != value
    ]
    if not differing:
        unstated = decisive.keys() & recorded.options.keys() - dict(table.chosen)
        if unstated and recorded.table == packing.table and is_touched(place):
            words = ",".join(f"{name}={value}" for name, value in decisive.items())
            report.note(
                f"{place}: files have other times than its records, as after a copy; the records decide the packing, "
                f"{words}; {_OF_OTHERS}"
            )
        return
    was = ", ".join(f"{name}={value}" for name, value, _ in differing)
    is_now = ", ".join(f"{name}={value}" for name, _, value in differing)
    message = f"{place}: was converted with {was} by the rules {recorded.table}, and {is_now} would be applied"
    hint = f"use the recorded options: {shlex.join(recorded.words)}"
    if is_touched(place):
        hint += f"; {_OF_OTHERS}"
    if recorded.table == packing.table:
        raise NamesError(message, file=place, hint=hint)
    report.warn(f"{message}; {hint}")
