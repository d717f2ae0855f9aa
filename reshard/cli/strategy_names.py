"""--names of strategy make and derive: shapes of a checkpoint under other names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from reshard.cli import completion
from reshard.cli.command import option
from reshard.errors import InputError, StrategyError, UsageError
from reshard.storage import is_directory
from reshard.text.messages import listing
from reshard.text.wording import plural

if TYPE_CHECKING:
    from reshard.names import Configuration
    from reshard.strategies.rules import LayoutRules, ModelTensors

F = TypeVar("F", bound=Callable[..., Any])


def names(command: F) -> F:
    """--names and --config, for `under_names`."""
    for decorator in (
        option(
            "Source",
            "--config",
            metavar="FILE|DIR",
            shell_complete=completion.paths,
            show_default="config.json beside --shapes",
            help="File with the sizes that the table of names needs.",
        ),
        option(
            "Source",
            "--names",
            metavar="TABLE",
            shell_complete=completion.tables,
            show_default="unchanged",
            help="Apply this table of names to --shapes first, as convert --names does.",
        ),
    ):
        command = decorator(command)
    return command


def under_names(tensors: ModelTensors, table: Optional[str], config: Optional[str]) -> ModelTensors:
    """The tensors that a table makes of a model's.

    Raises:
        UsageError: a configuration without a table.
        NamesError: the table does not fit.
    """
    if table is None:
        if config is not None:
            raise UsageError("--config needs --names", hint="name a table: `reshard names list`")
        return tensors
    # Loaded only here: most strategies are made for names as they are.
    from reshard.names import apply_rules, rules_named
    from reshard.strategies.rules import FullTensor, model_tensors

    sizes = _configuration(tensors, config)
    shapes = {name: tensor.shape for name, tensor in tensors.weights.items()}
    applied = apply_rules(rules_named(table), shapes, sizes)
    found = []
    for name, made in applied.views.items():
        (dtype, *others) = {tensors.weights[source].dtype for source in made.sources}
        found.append(FullTensor(name, made.view.shape, None if others else dtype))
    return model_tensors(tensors.path, found, tensors.item_sizes)


def _configuration(tensors: ModelTensors, config: Optional[str]) -> Optional[Configuration]:
    """The file of --config, or the config.json of the checkpoint's directory."""
    from reshard.names import config_beside, read_config

    place = tensors.path if is_directory(tensors.path) else os.path.dirname(tensors.path)
    return config_beside(place) if config is None else read_config(config)


def check_named(rules: LayoutRules, tensors: ModelTensors, config: Optional[str]) -> None:
    """Refuse parameters without a rule where built-in tables of names give all of them names that rules fit.

    Raises:
        StrategyError: names the option that does so.
    """
    from reshard.names.tables import builtin_names

    without = _without_rule(rules, tensors)
    if not without:
        return
    fitting = []
    for table in builtin_names():
        with contextlib.suppress(InputError):
            if not _without_rule(rules, under_names(tensors, table, config)):
                fitting.append(table)
    if fitting:
        sizes = _configuration(tensors, config)
        model_type = None if sizes is None else sizes.get("model_type")
        options = [f"--names {table}" for table in fitting if table == model_type or model_type not in fitting]
        raise StrategyError(
            f"{rules.path}: no rule fits {len(without)} of {plural(len(tensors.weights), 'parameter')} of "
            f"{tensors.path}, which has names of another model code: " + listing(without),
            file=tensors.path,
            parameter=without[0],
            hint=f"add {' or '.join(options)}",
        )


def _without_rule(rules: LayoutRules, tensors: ModelTensors) -> list[str]:
    return [name for name in tensors.weights if not any(rule.matches(name) for rule in rules.rules)]
