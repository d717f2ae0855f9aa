"""Shell completion of values beyond click's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def paths(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    # Loaded only here: a command runs without it.
    from click.shell_completion import CompletionItem

    return [CompletionItem(typed, type="file")]


def tables(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Built-in tables of names; files where none fits: click's script for bash shows one or the other."""
    from click.shell_completion import CompletionItem

    from reshard.names.tables import builtin_names

    names = [CompletionItem(name) for name in builtin_names() if name.startswith(typed)]
    return names or paths(ctx, param, typed)


def types(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from reshard.checkpoints.formats.dtypes import CAST_TO

    return [CompletionItem(name) for name in CAST_TO if name.lower().startswith(typed.lower())]
