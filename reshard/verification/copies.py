"""Whether the copies of slices within one checkpoint agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Callable, Optional

from reshard.strategies import Strategy
from reshard.text.names import belongs_to_rank
from reshard.text.wording import rank_ranges
from reshard.verification.difference import Difference, kind_of_tensor
from reshard.verification.parameter import Parameter, Slice, is_empty
from reshard.verification.reading import Means, batches, sum_parts
from reshard.verification.sums import PRIME
from reshard.verification.tree import Tree, read_tree


def compare_replicas(
    files: Mapping[int, str], strategy: Strategy, means: Means, admit: Optional[Callable[[str], bool]] = None
) -> list[Difference]:
    """Where copies of one slice within a checkpoint differ.

    With three or more copies the rank that differs from most is named, with two both are. Ranks may be
    missing: what is there is compared.

    Args:
        files: files of one step, by rank.
        strategy: their strategy.
        means: what may be used for reading.
        admit: which parameters are compared, by name; all where None.

    Returns:
        Every difference, by parameter; none where all copies agree.

    Raises:
        ReshardError: a file is missing or cannot be read.
    """
    return compare_copies(read_tree(files, strategy, means.handles, admit), means)


def compare_copies(tree: Tree, means: Means) -> list[Difference]:
    """Where copies of one slice within a checkpoint that was read differ; see `compare_replicas`.

    Raises:
        ReshardError: a file cannot be read.
    """
    found = [Difference("file", None, (rank,), text) for rank, text in tree.damaged.items()]
    for name, problem in tree.problems.items():
        found.append(Difference("strategy", name, () if problem.rank is None else (problem.rank,), problem.message))
    shared = {name: ranks for name, ranks in tree.outside.items() if len(ranks) > 1 and not belongs_to_rank(name)}
    total = sum(tree.tensor(name, rank).nbytes for name, ranks in shared.items() for rank in ranks)
    for parameter in tree.parameters.values():
        for held in _copied_slices(parameter):
            total += len(held.holders) * tree.tensor(parameter.name, held.holders[0]).nbytes
    means.progress.begin(total, "comparing copies")
    try:
        for batch in batches(tree.parameters.values(), lambda parameter: sum(1 for _ in parameter.holders)):
            found += _differing_slices(tree, batch, means)
        for names in batches(shared, lambda name: len(shared[name])):
            parts = [tree.whole_part(name, rank) for name in names for rank in shared[name]]
            copies = iter(zip(parts, sum_parts(parts, means)))
            for name in names:
                kinds = {}
                for rank in shared[name]:
                    part, number = next(copies)
                    kinds[rank] = (kind_of_tensor(part.tensor), number)
                found += _minority(name, kinds)
    finally:
        means.progress.end()
    return sorted(found, key=lambda difference: (difference.parameter or "", difference.kind, difference.ranks))


def has_copies(parameter: Parameter) -> bool:
    """Whether several files hold some slice of a parameter, or stages that share it."""
    return any(not is_empty(held.box) for held in _copied_slices(parameter))


def _copied_slices(parameter: Parameter) -> list[Slice]:
    """The slices of a parameter that can be compared with something."""
    tied = len(parameter.holdings) > 1
    return [held for held in parameter.slices if len(held.holders) > 1 or (held.holders and tied)]


def _differing_slices(tree: Tree, parameters: Iterable[Parameter], means: Means) -> Iterator[Difference]:
    compared = [(parameter, held) for parameter in parameters for held in _copied_slices(parameter)]
    parts = [
        tree.part(parameter.name, rank, parameter.shape, held.box)
        for parameter, held in compared
        for rank in held.holders
    ]
    coming = iter(sum_parts(parts, means))
    stages: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    doubtful = set()
    by_name: dict[str, Parameter] = {}
    for parameter, held in compared:
        name = by_name.setdefault(parameter.name, parameter).name
        copies = {rank: next(coming) for rank in held.holders}
        stages[name][held.stage] += Counter(copies.values()).most_common(1)[0][0]
        for difference in _minority(name, copies):
            doubtful.add(name)
            yield difference
    for name, totals in stages.items():
        if name not in doubtful and len(totals) > 1:
            whole = {parts[0].stage for parts in by_name[name].whole_stages()}
            if len({totals[stage] % PRIME for stage in whole & set(totals)}) > 1:
                yield Difference("stages", name, (), "pipeline stages hold different values of it")


def _minority(name: str, copies: Mapping[int, Hashable]) -> Iterator[Difference]:
    """The ranks whose copy is not that of most."""
    ranked = Counter(copies.values()).most_common(2)
    if len(ranked) == 1:
        return
    if ranked[0][1] > ranked[1][1]:
        wrong = [rank for rank, copy in copies.items() if copy != ranked[0][0]]
        most = rank_ranges(set(copies) - set(wrong))
        yield Difference("replica", name, tuple(wrong), f"differs from the copies on {most}")
    else:
        yield Difference("replicas", name, tuple(copies), "copies differ, and no majority tells which is wrong")


def not_held(tree: Tree, strategy: Strategy) -> dict[str, list[int]]:
    """Ranks, ascending, whose files lack a parameter that other ranks' files hold and theirs could too.

    A de-duplicated save is so by intention, and conversions take the copy of any rank.
    """
    lacking: dict[str, list[int]] = defaultdict(list)
    for tensors, same in tree.alike():
        for stage in strategy.stages:
            ranks = [rank for rank in same if 0 <= rank - stage.first_rank < stage.device_count]
            for name in stage.layouts if ranks else ():
                if name in tree.parameters and name not in tensors:
                    lacking[name] += ranks
    return {name: sorted(ranks) for name, ranks in sorted(lacking.items())}
