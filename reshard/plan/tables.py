"""Tables of names that a conversion applies: which, in which direction, and what records keep of them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

from reshard.errors import NamesError, UsageError
from reshard.forms.form import Side
from reshard.names import (
    HUB_SIDE,
    Applied,
    Edge,
    NameRules,
    Path,
    apply_rules,
    experts_table,
    is_reversed,
    path,
)
from reshard.plan.edits import EditRules, recorded_name
from reshard.storage import absolute
from reshard.text.globs import Globs
from reshard.text.messages import Report, quoted
from reshard.text.names import fused_expert


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
        # A family without a table of its own has Hugging Face's names alone.
        recorded = edits.recorded_options(table)
        is_right = edits.reverse or (bool(table.rules) and is_reversed(table, shapes, edits.config, recorded))
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
    return apply_rules(
        edge.rules,
        shapes,
        edits.config,
        edge.reverse,
        edits.optimizer,
        recorded=edits.recorded_options(edge.rules),
        contents=contents,
        to_huggingface=edits.side is Side.HUGGINGFACE and edits.table_of_side is None,
        left_out=Globs(edits.exclude).match,
    )


def for_experts(edits: EditRules, names: Iterable[str]) -> EditRules:
    """These edits, with the table for experts that transformers 5 fuses where the model has some.

    Args:
        edits: the edits.
        names: of all tensors, in a model.

    Raises:
        NamesError: no published names are known for the model.
        UsageError: an adapter is added, too.
    """
    fused = fused_expert(names)
    if fused is None:
        return edits
    if edits.additions is not None:
        raise UsageError(
            f"{quoted(fused)} holds all experts of a layer, as in transformers 5, and merge-lora does not give "
            "them the names of published models",
            parameter=fused,
            hint="convert BASE first: reshard convert BASE BASE2 --to huggingface --config DIR",
        )
    return edits._replace(tables=(experts_table(fused, edits.config),), reverse=False)


def packing_of(edits: EditRules, table: NameRules, applied: Applied) -> tuple[str, ...]:
    """The applied table, its typed and its decisive options, and the sizes, as ``KEY=VALUE``."""
    texts = [f"table={recorded_name(table)}"]
    if edits.config_path is not None:
        texts.append(f"config={absolute(edits.config_path)}")
    recorded = table.packing_options.union(name for name, _ in table.chosen)
    texts += (f"option {name}={applied.options[name]}" for name in sorted(recorded))
    return (*texts, *(f"size {name}={value}" for name, value in applied.sizes.items()))


def words_of_packing(packing: Sequence[str]) -> list[str]:
    """The options --names and --config of a recorded `EditedCheckpoint.packing`."""
    values = dict(text.split("=", 1) for text in packing)
    options = (f"{key.split()[1]}={value}" for key, value in values.items() if key.startswith("option "))
    config = ["--config", values["config"]] if "config" in values else []
    return ["--names", ",".join([values["table"], *options]), *config]


def check_packing(
    place: str, recorded: Sequence[str], packing: Sequence[str], options: Collection[str], report: Report
) -> None:
    """Compare the decisive options and the sizes of a table with those that its records list.

    Other values give the right names and shapes with the wrong numbers.

    Raises:
        NamesError: the same table has other values.
    """
    old, new = (dict(text.split("=", 1) for text in texts) for texts in (recorded, packing))
    compared = {f"option {name}" for name in options}
    differing = [
        key for key in new if (key in compared or key.startswith("size ")) and old.get(key, new[key]) != new[key]
    ]
    if not differing:
        return
    was, is_now = (", ".join(f"{key.split()[1]}={values[key]}" for key in differing) for values in (old, new))
    message = f"{place}: was converted with {was} by the rules {old['table']}, and {is_now} would be applied"
    hint = f"use the recorded options: {shlex.join(words_of_packing(recorded))}"
    if old["table"] == new["table"]:
        raise NamesError(message, file=place, hint=hint)
    report.warn(f"{message}; {hint}")
