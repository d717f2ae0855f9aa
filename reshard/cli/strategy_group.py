"""The strategy group: show, compare, check and make strategies."""

from __future__ import annotations

import click

from reshard.cli.command import Group
from reshard.cli.strategy_check import strategy_check
from reshard.cli.strategy_derive import strategy_derive, strategy_rules
from reshard.cli.strategy_diff import strategy_diff
from reshard.cli.strategy_make import strategy_make
from reshard.cli.strategy_show import strategy_show


@click.group("strategy", cls=Group)
def strategy() -> None:
    """Show strategy files, check them against a checkpoint, and make new ones."""


strategy.add_command(strategy_show)
strategy.add_command(strategy_diff)
strategy.add_command(strategy_check)
strategy.add_command(strategy_make)
strategy.add_command(strategy_derive)
strategy.add_command(strategy_rules)
