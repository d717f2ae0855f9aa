"""All forms of checkpoints, and the form of a source."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence

from reshard.asked import Source
from reshard.errors import CheckpointError, UsageError
from reshard.forms import DEFAULT_FORM, FORM_CLASSES, READ_ONLY_CLASSES
from reshard.forms.form import Form, Layouts
from reshard.forms.ranks.naming import RANK
from reshard.forms.ranks.tree import find_checkpoints, missing_hint, named_for_rank
from reshard.storage import exists, is_directory, names_in
from reshard.storage.store import OWN
from reshard.strategies import NONE


@functools.cache
def form_named(name: str) -> Form:
    module, _, class_name = {**FORM_CLASSES, **READ_ONLY_CLASSES}[name].partition(":")
    form: Form = getattr(importlib.import_module(module), class_name)()
    return form


def all_forms() -> Iterator[Form]:
    """All forms, in the order of `FORM_CLASSES`, and those that are only read; each is loaded when it is reached."""
    return map(form_named, (*FORM_CLASSES, *READ_ONLY_CLASSES))


def counted_as(form: str) -> str:
    """The unit of a form's file numbers in messages: ``rank`` or ``file``."""
    return form_named(form).options.unit


def form_of(src: str) -> Form:
    """The form of a source, by names alone; `DEFAULT_FORM` if no form recognises it, even for a missing source."""
    names = names_in(src) if RANK not in src and is_directory(src) else []
    return next((form for form in all_forms() if form.recognise(src, names)), form_named(DEFAULT_FORM))


def check_exists(src: str) -> None:
    """Refuse a missing source. A path with ``{rank}`` passes: only its readers look for it."""
    if RANK not in src and not exists(src):
        raise CheckpointError(f"{src}: does not exist", file=src, hint=missing_hint(src))


def check_options(source: Source, form: Form) -> None:
    """Refuse options that make no sense with the form of a source.

    Raises:
        UsageError: an option is for rank files.
    """
    # Full weights are unsharded; a form that records its layouts may be sharded.
    unsharded = (None, NONE) if form.options.layouts is Layouts.WHOLE else (None,)
    if not form.options.needs_strategy and source.strategy not in unsharded:
        raise UsageError(
            f"{source.path}: is of the form {form.name}, which needs no strategy", hint="leave out --src-strategy"
        )
    for name, value in (("--file-suffix", source.file_suffix), ("--without-ranks", source.without_ranks)):
        if not form.options.by_rank and value:
            raise UsageError(f"{name} is for rank files", hint=f"remove {name}")


def check_holds_ranks(src: str) -> None:
    """Refuse a source without rank files; called before a missing strategy is reported."""
    check_exists(src)
    find_checkpoints(src)


def forms_among(directory: str, names: Sequence[str]) -> set[str]:
    """The forms that recognise these entries of a directory, rank directories and records of runs apart."""
    others = [name for name in names if name != OWN and not named_for_rank(name)]
    if not others:
        return set()
    return {form.name for form in all_forms() if form.name != DEFAULT_FORM and form.recognise(directory, others)}
