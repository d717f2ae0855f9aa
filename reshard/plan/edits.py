"""The rules of names, packing and types that options ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reshard.asked import Edits, Target, has_changes
from reshard.checkpoints.formats.dtypes import CAST_TO, dtype_named
from reshard.errors import UsageError
from reshard.forms.form import Form, Names, Side
from reshard.forms.registry import form_of
from reshard.forms.request import NO_EDITS, PLAIN_ALL, PLAIN_KNOWN, PLAIN_WEIGHTS, EditRules
from reshard.storage import is_directory, is_regular_file

if TYPE_CHECKING:
    from reshard.names import NameRules
    from reshard.quantised import Quantisation


NO_TABLE = "none"
"""--names none: names stay, where transformers publishes others, too."""


def _with_implied(edits: EditRules, src: str, form: Form, to: Form, named: bool) -> EditRules:
    """The edits, with the renaming that a conversion between two forms implies.

    A trainer's names become those of a model where the target has only these, or where a table needs them, and a
    model's names those of a trainer's state where the target's trainers expect them. --rename turns this off.
    Tensors of PyTorch's trainers get the names that transformers publishes, unless --names is given, perhaps as none.
    """
    source, target = form.options, to.options
    edits = edits._replace(source_side=source.side, side=target.side)
    published = target.names is Names.MODEL and target.side is Side.HUGGINGFACE
    if published and source.side is Side.HUGGINGFACE and form.name != to.name and not named:
        config, config_path = edits.config, edits.config_path
        # verl stores the configuration in a directory of its own.
        for path in (os.path.join(src, _CONFIG), os.path.join(src, "huggingface", _CONFIG)):
            if config is None and is_regular_file(path):
                from reshard.names import read_config

                config, config_path = read_config(path), path
        edits = edits._replace(published_names=True, config=config, config_path=config_path)
    if edits.renames is not None:
        return edits
    plain = None
    trains = source.names is not Names.MODEL
    if trains and target.names is Names.MODEL:
        plain = PLAIN_ALL if target.mindspore or edits.optimizer else PLAIN_WEIGHTS
    elif trains and (edits.table is not None or to.training is not None):
        plain, trains = PLAIN_ALL, False
    return edits._replace(from_trainer=plain, to_trainer=not trains and target.names is Names.TRAINER)


def edits_to_model(form: Form) -> EditRules:
    """The edits that give tensors of a source the names in the model, and MindSpore's names for optimizer state."""
    return NO_EDITS if form.options.names is Names.MODEL else EditRules(from_trainer=PLAIN_KNOWN)


_CONFIG = "config.json"


def edit_rules(
    src: str, asked: Edits, to: Form | None = None, step: str = "latest", target: Target | None = None
) -> EditRules:
    """The rules of names, packing and types that are asked for; empty for unchanged ones.

    Args:
        src: the source; its config.json is the default.
        asked: what is asked.
        to: the form of the target, which may have other names; None if nothing is written.
        step: the step of the source, whose configuration may be recorded.
        target: what is asked of the target, which may decide options of a table.

    Raises:
        UsageError: options contradict each other, or name an unknown type.
        ReshardError: a table cannot be read.
    """
    rules = _asked_rules(src, asked, to, step, None if target is None else target.args)
    if to is None:
        return rules
    if target is not None and to.training is not None and rules.table_of_side is not None:
        from reshard.names import with_options

        options = {**to.training.table_options(target, rules.config), **dict(rules.table_of_side.chosen)}
        rules = rules._replace(tables=(rules.tables[0], with_options(rules.table_of_side, options)))
    return _with_implied(rules, src, form_of(src), to, named=asked.names is not None)


def _asked_rules(src: str, asked: Edits, to: Form | None, step: str, args: str | None) -> EditRules:
    names, config, exactly = asked.names, asked.config, asked.exactly
    for option, is_set in (("reverse", asked.reverse), ("optimizer", asked.optimizer is not None)):
        if is_set and names in (None, NO_TABLE):
            raise UsageError(f"--{option} needs --names", hint="name a table: `reshard names list`")
    if not has_changes(asked):
        return NO_EDITS._replace(renamed_one_by_one=exactly)
    if not (is_directory(src) or form_of(src).options.by_rank):
        # An index or the one file of a model.
        src = os.path.dirname(src)
    form, named = form_of(src), names not in (None, NO_TABLE)
    if named and config is None and is_regular_file(os.path.join(src, _CONFIG)):
        config = os.path.join(src, _CONFIG)
    # Loaded only here: most conversions have no rules.
    from reshard.names import merged, parse_renames, read_config, tables_named
    from reshard.plan.casts import CastRule
    from reshard.records.ledger import recorded_packing

    tables: tuple[NameRules, ...] = ()
    if names is not None and named:
        target = form if to is None else to
        tables = tables_named(names, form.options.side.value, target.options.side.value)
    stated = None if config is None else read_config(config)
    sizes: Mapping[str, object] | None = stated
    target_training = None if to is None else to.training
    recorded: Mapping[str, object] | None = None
    if named and form.training is not None:
        of_source = None if to is None or target_training is not None else args
        recorded = form.training.configuration(src, step, of_source)
    if named and recorded is None and target_training is not None and args is not None:
        recorded = target_training.stated_configuration(args)
    if recorded is not None:
        sizes = merged(recorded, stated, set().union(*(rules.config_keys for rules in tables)))
    by_form = any(rules.families and rules.sides[1] == form.options.side.value for rules in tables)
    if by_form and asked.reverse:
        raise UsageError(f"--reverse: the names of {form.name} decide the direction", hint="leave it out")
    return EditRules(
        tables=tables,
        renames=parse_renames(asked.rename) if asked.rename else None,
        config=sizes,
        reverse=True if asked.reverse else None,
        optimizer=asked.optimizer is not None,
        casts=tuple(map(CastRule.parse, asked.cast)),
        renamed_one_by_one=exactly,
        quantisation=None if asked.dequantize is None else _quantisation(asked.dequantize, src, sizes),
        config_path=config,
        source_packing=recorded_packing(src) if tables else None,
        source_side=form.options.side,
        exclude=asked.exclude if tables else (),
    )


def _quantisation(dequantize: str, src: str, config: Mapping[str, object] | None) -> Quantisation:
    """How quantised tensors are recognised, from the source's other files.

    Raises:
        UsageError: the type is not floating point.
        ReshardError: a file cannot be read.
    """
    from reshard.quantised import quantisation_of

    dtype = dtype_named(dequantize) if isinstance(dequantize, str) else None
    if dtype not in CAST_TO:
        raise UsageError(f"--dequantize {dequantize}: is none of {', '.join(CAST_TO)}")
    return quantisation_of(src, dtype, config)
