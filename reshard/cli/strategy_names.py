"""--names of strategy make and derive: shapes under other names than the checkpoint's that tells them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from reshard.cli import completion
from reshard.cli.command import option
from reshard.errors import UsageError
from reshard.storage import is_directory

if TYPE_CHECKING:
    from reshard.strategies.rules import ModelTensors

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
            help="What tells the sizes that the table of names needs.",
        ),
        option(
            "Source",
            "--names",
            metavar="TABLE",
            shell_complete=completion.tables,
            show_default="names stay",
            help="The strategy is for what this table of names makes of --shapes, as convert --names does.",
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
            raise UsageError("--config goes with --names", hint="name a table: `reshard names list`")
        return tensors
    # Loaded only here: most strategies are made for names as they are.
    from reshard.names import apply_rules, config_beside, read_config, rules_named
    from reshard.strategies.rules import FullTensor, model_tensors

    place = tensors.path if is_directory(tensors.path) else os.path.dirname(tensors.path)
    told = config_beside(place) if config is None else read_config(config)
    shapes = {name: tensor.shape for name, tensor in tensors.weights.items()}
    applied = apply_rules(rules_named(table), shapes, told)
    found = []
    for name, made in applied.made.items():
        (dtype, *others) = {tensors.weights[source].dtype for source in made.sources}
        found.append(FullTensor(name, made.view.shape, None if others else dtype))
    return model_tensors(tensors.path, found, tensors.item_sizes)
