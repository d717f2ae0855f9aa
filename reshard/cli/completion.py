"""Shell completion of values beyond click's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Optional

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def paths(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    """Files and directories."""
    return [_item(typed, "file")]


def directories(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    """Directories."""
    return [_item(typed, "dir")]


def strategies(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    """Files, directories and ``none``."""
    return _words_or_files(["none"], typed)


def target_strategies(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    """Files, directories, ``none`` and ``same``."""
    return _words_or_files(["none", "same"], typed)


def tables(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    """Built-in tables of names, and files."""
    from reshard.names.tables import builtin_names

    return _words_or_files(builtin_names(), typed)


def _words_or_files(words: Iterable[str], typed: str) -> list[CompletionItem]:
    """Words that begin with the text, and files; words alone if no file begins with it."""
    items = [_item(word) for word in words if word.startswith(typed)]
    if items and typed and not _begins_a_name(typed):
        return items
    return [*items, _item(typed, "file")]


def steps(ctx: click.Context, _: click.Parameter, typed: str) -> list[CompletionItem]:
    """The steps of the checkpoint that was typed, newest first, from names alone."""
    from reshard.errors import ReshardError
    from reshard.forms.ranks import find_checkpoints

    names = ["latest"]
    path = ctx.params.get("src") or ctx.params.get("out") or ctx.params.get("path")
    # The command reports unreadable files later.
    with contextlib.suppress(OSError, ReshardError):
        names += [str(step) for step in find_checkpoints(path).steps if step] if path else []
    return [_item(step) for step in names if step.startswith(typed)]


def parameters(ctx: click.Context, _: click.Parameter, typed: str) -> list[CompletionItem]:
    """Parameters of the typed strategy that begin with the text, or else contain it."""
    from reshard.errors import ReshardError
    from reshard.strategies import read_strategy

    names: tuple[str, ...] = ()
    path = ctx.params.get("path")
    # The command reports unreadable files later.
    with contextlib.suppress(OSError, ReshardError):
        names = read_strategy(path).parameters if path else ()
    begin = [name for name in names if name.startswith(typed)]
    return [_item(name) for name in begin or (name for name in names if typed in name)]


def tensors(ctx: click.Context, _: click.Parameter, typed: str) -> list[CompletionItem]:
    """Tensors of the typed checkpoint, or of one rank, that begin with the text, or else contain it."""
    from reshard.errors import ReshardError

    names: list[str] = []
    src, strategy = ctx.params.get("src"), ctx.params.get("strategy")
    # The command reports unreadable files later; an object store may be too slow for completion.
    with contextlib.suppress(OSError, ReshardError):
        names = _names_in(src, strategy) if src and "://" not in src else []
    begin = [name for name in names if name.startswith(typed)]
    return [_item(name) for name in begin or (name for name in names if typed in name)]


def _names_in(src: str, strategy: Optional[str]) -> list[str]:
    from reshard.checkpoints import FileHandles, read_index
    from reshard.forms.ranks import find_checkpoints
    from reshard.forms.registry import form_named, form_of
    from reshard.opened import open

    if strategy is None and form_named(form_of(src)).options.needs_strategy:
        tree = find_checkpoints(src)
        files = next(tree.candidates()).files
        with FileHandles() as handles:
            return [*read_index(handles, files[min(files)]).tensors]
    with open(src, src_strategy=strategy) as opened:
        return [*opened]


def types(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    """Types for casts."""
    from reshard.checkpoints.formats.dtypes import CAST_TO

    return [_item(name) for name in CAST_TO if name.lower().startswith(typed.lower())]


def _begins_a_name(typed: str) -> bool:
    with os.scandir() as entries:
        return any(entry.name.startswith(typed) for entry in entries)


def _item(value: str, kind: str = "plain") -> CompletionItem:
    # Loaded only here: a command runs without it.
    from click.shell_completion import CompletionItem

    return CompletionItem(value, type=kind)
