"""Whether the copies of slices within one checkpoint agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Callable, Optional

from reshard.errors import InputError
from reshard.strategies import Strategy
from reshard.text.names import belongs_to_rank
from reshard.text.report import Report
from reshard.text.wording import rank_ranges
from reshard.verification.boxes import Box, volume_of, whole_box
from reshard.verification.difference import Difference, kind_of_tensor
from reshard.verification.reading import Means, batches, sum_boxes
from reshard.verification.sources import read_files_of_ranks
from reshard.verification.stored import Source, Stored, Way, value_content
from reshard.verification.sums import PRIME


def compare_replicas(
    files: Mapping[int, str],
    strategy: Strategy,
    means: Means,
    admit: Callable[[str], bool] = lambda name: True,
) -> list[Difference]:
    """Where copies of one slice within a checkpoint of ranks differ; see `compare_copies`."""
    source, problems = read_files_of_ranks(files, strategy, means.handles, Report(), {}, admit)
    return compare_copies(source, means, admit, problems)


def compare_copies(
    source: Source,
    means: Means,
    admit: Callable[[str], bool] = lambda name: True,
    problems: Optional[Mapping[str, InputError]] = None,
) -> list[Difference]:
    """Where copies of one slice within a checkpoint differ.

    With three or more copies the file that differs from most is named, with two both are. Files may be missing: what
    is there is compared.

    Args:
        source: the checkpoint.
        means: what may be used for reading.
        admit: which parameters are compared, by name.
        problems: why parameters contradict the strategy, by name.

    Returns:
        Every difference, by parameter; none where all copies agree.

    Raises:
        ReshardError: a file cannot be read.
    """
    damaged = getattr(getattr(source.checkpoint, "source", None), "damaged", {})
    found = [Difference("file", None, (rank,), text) for rank, text in damaged.items()]
    for name, problem in (problems or {}).items():
        found.append(Difference("strategy", name, () if problem.rank is None else (problem.rank,), problem.message))
    values = {name: files for name, files in source.values.items() if len(files) > 1 and not belongs_to_rank(name)}
    values = {name: files for name, files in values.items() if admit(name)}
    tensors = [tensor for name, tensor in source.tensors.items() if admit(name) and isinstance(tensor, Stored)]
    total = sum(source.value(name, file).nbytes for name, files in values.items() for file in files)
    for tensor in tensors:
        slices = _copied_slices(tensor)
        total += sum(tensor.item_size * volume_of(box) * len(files) for _, box, files in slices)
    means.progress.begin(total, "comparing copies")
    try:
        for some in batches(tensors, lambda tensor: sum(map(len, _files(tensor)))):
            found += _differing_slices(some, means)
        copies = [(name, file) for name, files in values.items() for file in files]
        contents = [value_content(source.indexes, name, file) for name, file in copies]
        boxes = ((number, content, whole_box(content.shape)) for number, content in enumerate(contents))
        kinds: dict[str, dict[int, Hashable]] = defaultdict(dict)
        for (name, file), number in zip(copies, sum_boxes(boxes, len(copies), means)):
            kinds[name][file] = (kind_of_tensor(source.value(name, file)), number)
        for name, each in kinds.items():
            found += _minority(name, each)
    finally:
        means.progress.end()
    return sorted(found, key=lambda difference: (difference.parameter or "", difference.kind, difference.ranks))


def _files(tensor: Stored) -> Iterator[tuple[int, ...]]:
    return (files for way in tensor.ways for files in way.held.values())


def has_copies(tensor: Stored) -> bool:
    """Whether several files hold some slice of a parameter, or stages that share it."""
    return any(volume_of(box) for _, box, _ in _copied_slices(tensor))


def _copied_slices(tensor: Stored) -> list[tuple[Way, Box, tuple[int, ...]]]:
    """The slices of a parameter that can be compared with something."""
    tied = len(tensor.ways) > 1
    return [
        (way, box, files)
        for way in tensor.ways
        for box, files in way.held.items()
        if len(files) > 1 or (files and tied)
    ]


def _differing_slices(tensors: Iterable[Stored], means: Means) -> Iterator[Difference]:
    compared = [(tensor, way, box, files) for tensor in tensors for way, box, files in _copied_slices(tensor)]
    copies = [(tensor, way, box, file) for tensor, way, box, files in compared for file in files]
    boxes = (
        (number, replace(tensor, ways=(Way(way.number, {box: (file,)}),)), box)
        for number, (tensor, way, box, file) in enumerate(copies)
    )
    coming = iter(sum_boxes(boxes, len(copies), means))
    stages: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    doubtful = set()
    by_name: dict[str, Stored] = {}
    for tensor, way, _, files in compared:
        name = by_name.setdefault(tensor.name, tensor).name
        sums = {file: next(coming) for file in files}
        stages[name][way.number] += Counter(sums.values()).most_common(1)[0][0]
        for difference in _minority(name, sums):
            doubtful.add(name)
            yield difference
    for name, totals in stages.items():
        if name not in doubtful and len(totals) > 1:
            whole = {way.number for way in by_name[name].whole_ways()}
            if len({totals[stage] % PRIME for stage in whole & set(totals)}) > 1:
                yield Difference("stages", name, (), "pipeline stages hold different values of it")


def _minority(name: str, copies: Mapping[int, Hashable]) -> Iterator[Difference]:
    """The files whose copy is not that of most."""
    ranked = Counter(copies.values()).most_common(2)
    if len(ranked) == 1:
        return
    if ranked[0][1] > ranked[1][1]:
        wrong = [file for file, copy in copies.items() if copy != ranked[0][0]]
        most = rank_ranges(set(copies) - set(wrong))
        yield Difference("replica", name, tuple(wrong), f"differs from the copies on {most}")
    else:
        yield Difference("replicas", name, tuple(copies), "copies differ, and no majority tells which is wrong")


def not_held(source: Source, strategy: Strategy, admit: Callable[[str], bool]) -> dict[str, list[int]]:
    """Ranks, ascending, whose files lack a parameter that other ranks' files hold and theirs could too.

    A de-duplicated save is so by intention, and conversions take the copy of any rank.
    """
    alike: dict[int, list[int]] = defaultdict(list)
    for rank, index in source.indexes.items():
        alike[id(index.tensors)].append(rank)
    lacking: dict[str, list[int]] = defaultdict(list)
    for same in alike.values():
        tensors = source.indexes[same[0]].tensors
        for stage in strategy.stages:
            ranks = [rank for rank in same if rank in stage.ranks]
            for name in stage.layouts if ranks else ():
                if name in source.tensors and name not in tensors and admit(name):
                    lacking[name] += ranks
    return {name: sorted(ranks) for name, ranks in sorted(lacking.items())}
