"""Strategies in the neighbourhood of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from reshard.errors import ReshardError
from reshard.storage import is_directory, names_in
from reshard.strategies.model import Strategy
from reshard.strategies.one_file import ENDINGS, read_strategy_file
from reshard.strategies.read import read_strategy

# Files to open in a directory; those with "strateg" in their names are the first.
_MAX_FILES = 64
_WORD = "strateg"


def strategies_in(directories: Sequence[str]) -> list[Strategy]:
    """The strategies in some directories, each content once.

    Files and directories of stages are read whose names do not rule that out; directories in them only if their names
    contain "strateg". What cannot be read is skipped.
    """
    strategies: list[Strategy] = []
    for directory in directories:
        for strategy in _strategies_in(directory):
            if not any(equal_layouts(strategy, other) for other in strategies):
                strategies.append(strategy)
    return strategies


def equal_layouts(strategy: Strategy, other: Strategy) -> bool:
    """Whether two strategies have the same layouts. Recorded shapes do not count: only JSON has them."""
    return len(strategy.stages) == len(other.stages) and all(
        stage.ranks == its.ranks
        and stage.layouts.keys() == its.layouts.keys()
        and all(
            replace(layout, recorded_shape=None) == replace(its.layouts[name], recorded_shape=None)
            for name, layout in stage.layouts.items()
        )
        for stage, its in zip(strategy.stages, other.stages)
    )


def _strategies_in(directory: str) -> Iterator[Strategy]:
    try:
        names = names_in(directory or os.curdir)
    except ReshardError:
        return
    names.sort(key=lambda name: _WORD not in name.lower())
    for name in names:
        path = os.path.join(directory, name)
        if _WORD in name.lower() and not name.endswith(ENDINGS) and is_directory(path):
            yield from _of_stages(path)
    files = [name for name in names if name.endswith(ENDINGS) and not name.startswith(".")]
    yield from _of_files(directory, files[:_MAX_FILES])


def _of_stages(directory: str) -> Iterator[Strategy]:
    """The strategy of a directory, or those of its subdirectories."""
    try:
        yield read_strategy(directory)
        return
    except ReshardError:
        pass
    with suppress(ReshardError):
        names = names_in(directory)
        yield from _of_files(directory, [name for name in names if name.endswith(ENDINGS)][:_MAX_FILES])
        for name in names:
            with suppress(ReshardError):
                if is_directory(os.path.join(directory, name)):
                    yield read_strategy(os.path.join(directory, name))


def _of_files(directory: str, names: Sequence[str]) -> Iterator[Strategy]:
    """The strategies of single files, or that of all files together, if they are stages of one."""
    stages = False
    for name in names:
        path = os.path.join(directory, name)
        try:
            yield read_strategy(path)
        except ReshardError:
            with suppress(ReshardError):
                read_strategy_file(path)
                stages = True
    if stages:
        with suppress(ReshardError):
            yield read_strategy(directory or os.curdir)
