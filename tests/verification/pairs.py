"""Two trees to compare, without the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from reshard import asked
from reshard.convert.replicas import differing_copies
from reshard.execute import Budget, Progress
from reshard.forms.ranks.checkpoint import read_some_ranks
from reshard.forms.ranks.form import RanksForm
from reshard.forms.ranks.selection import StepSelector
from reshard.forms.ranks.tree import StepFiles
from reshard.forms.request import Means, Request
from reshard.storage.store import LOCAL
from reshard.strategies import Strategy
from reshard.text.globs import Filters
from reshard.text.messages import Report
from reshard.verification.ranks import compare_ranks
from reshard.verification.reading import Difference, Reading
from reshard.verification.stored import Source, stored_source


class Quiet:
    """Sums read bytes."""

    def __init__(self) -> None:
        self.total = self.read = 0

    def begin(self, total: int, doing: str) -> None:
        self.total += total

    def wrote(self, count: int) -> None:
        self.read += count

    def end(self) -> None:
        pass


def files_of(root: Path) -> dict[int, str]:
    return {int(path.parent.name[len("rank_") :]): str(path) for path in root.glob("rank_*/*")}


def read_source(
    files: Mapping[int, str],
    strategy: Strategy,
    means: Reading,
    target: Strategy | None = None,
    ranks: Iterable[int] | None = None,
) -> Source:
    chosen = None if ranks is None else tuple(sorted(ranks))
    target = Strategy.none() if target is None else target
    conversion = asked.Conversion(asked.Source("source"), asked.Target("target"), files=chosen)
    request = Request(conversion, RanksForm(), strategy, RanksForm(), target)
    return stored_source(
        StepSelector(request, Means(means.handles, Report())).select([StepFiles(None, dict(files))]), strategy
    )


def compare_trees(
    source_files: Mapping[int, str],
    source: Strategy,
    target_files: Mapping[int, str],
    target: Strategy,
    means: Reading,
    *,
    ranks: Iterable[int] | None = None,
    admit: Callable[[str], bool] = lambda name: True,
) -> list[Difference]:
    """The differences of a target checkpoint from its source."""
    ranks = None if ranks is None else tuple(sorted(ranks))
    read = read_source(source_files, source, means, target, ranks)
    differences, _ = compare_ranks(read, target_files, target, means, ranks=ranks, admit=admit)
    return differences


def compare_replicas(files: Mapping[int, str], strategy: Strategy, means: Reading) -> list[Difference]:
    """Differing copies of slices in the files of ranks."""
    step_files, budget = StepFiles(None, dict(files)), Budget.of(2, means.max_memory, LOCAL)
    checkpoint, problems = read_some_ranks(step_files, strategy, means.handles, Report(), lambda name: True)
    differences, _ = differing_copies(checkpoint, problems, Filters(), budget, means.handles, Progress())
    return differences
