"""Comparison of the copies of slices within one checkpoint."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Callable, Optional

from reshard.checkpoints import files_alike
from reshard.errors import InputError
from reshard.forms.ranks.checkpoint import rank_checkpoint_of
from reshard.strategies import Strategy
from reshard.text.messages import rank_ranges
from reshard.text.names import belongs_to_rank
from reshard.verification.boxes import Box, volume_of, whole_box
from reshard.verification.difference import Difference, kind_of_tensor
from reshard.verification.reading import Means, sums
from reshard.verification.stored import SliceSet, StoredSource, StoredTensor, value_content
from reshard.verification.sums import PRIME


def compare_copies(
    source: StoredSource,
    means: Means,
    admit: Callable[[str], bool] = lambda name: True,
    problems: Optional[Mapping[str, InputError]] = None,
) -> list[Difference]:
    """Compare the copies of each slice within a checkpoint.

    Of three or more copies, the minority is reported; of two, both files. Missing files are skipped.

    Args:
        source: the checkpoint.
        means: files, threads and memory.
        admit: whether a parameter is compared, by name.
        problems: contradictions with the strategy, by parameter.

    Returns:
        Every difference, by parameter.

    Raises:
        ReshardError: a file cannot be read.
    """
    ranks = rank_checkpoint_of(source.checkpoint)
    damaged = {} if ranks is None else ranks.damaged
    differences = [Difference("file", None, (rank,), text) for rank, text in damaged.items()]
    for name, problem in (problems or {}).items():
        differences.append(
            Difference("strategy", name, () if problem.rank is None else (problem.rank,), problem.message)
        )
    values = {name: files for name, files in source.values.items() if len(files) > 1 and not belongs_to_rank(name)}
    values = {name: files for name, files in values.items() if admit(name)}
    tensors = [tensor for name, tensor in source.tensors.items() if admit(name) and isinstance(tensor, StoredTensor)]
    total = sum(source.value(name, file).nbytes for name, files in values.items() for file in files)
    for tensor in tensors:
        slices = _copied_slices(tensor)
        total += sum(tensor.item_size * volume_of(box) * len(files) for _, box, files in slices)
    with means.counting(total, "comparing copies"):
        differences += _differing_slices(tensors, means)
        kinds: dict[str, dict[int, Hashable]] = defaultdict(dict)
        for (name, file), number in sums(_value_copies(source, values), means):
            kinds[name][file] = (kind_of_tensor(source.value(name, file)), number)
        for name, copies in kinds.items():
            differences += _minority(name, copies)
    return sorted(differences, key=lambda difference: (difference.parameter or "", difference.kind, difference.ranks))


def _value_copies(
    source: StoredSource, values: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[tuple[str, int], StoredTensor, Box]]:
    for name, files in values.items():
        for file in files:
            content = value_content(source.indexes, name, file)
            yield (name, file), content, whole_box(content.shape)


def has_copies(tensor: StoredTensor) -> bool:
    """Whether several files hold the same slice of a parameter, or several stages share it."""
    return any(volume_of(box) for _, box, _ in _copied_slices(tensor))


def _copied_slices(tensor: StoredTensor) -> list[tuple[SliceSet, Box, tuple[int, ...]]]:
    """The slices of a parameter in several files or stages."""
    tied = len(tensor.slice_sets) > 1
    return [
        (slices, box, files)
        for slices in tensor.slice_sets
        for box, files in slices.files_of.items()
        if len(files) > 1 or (files and tied)
    ]


def _differing_slices(tensors: Iterable[StoredTensor], means: Means) -> Iterator[Difference]:
    copies = (
        (
            (tensor, slices.number, box, file),
            replace(tensor, slice_sets=(SliceSet(slices.number, {box: (file,)}),)),
            box,
        )
        for tensor in tensors
        for slices, box, files in _copied_slices(tensor)
        for file in files
    )
    for _, tensor_sums in itertools.groupby(sums(copies, means), key=lambda item: item[0][0].name):
        totals: dict[int, int] = defaultdict(int)
        agree = True
        for (tensor, stage, _), slice_sums in itertools.groupby(tensor_sums, key=lambda item: item[0][:3]):
            by_file = {file: total for (*_, file), total in slice_sums}
            totals[stage] += Counter(by_file.values()).most_common(1)[0][0]
            for difference in _minority(tensor.name, by_file):
                agree = False
                yield difference
        complete = {slices.number for slices in tensor.whole_slice_sets()}
        if agree and len({totals[stage] % PRIME for stage in complete & set(totals)}) > 1:
            yield Difference("stages", tensor.name, (), "pipeline stages hold different values of it")


def _minority(name: str, copies: Mapping[int, Hashable]) -> Iterator[Difference]:
    """The files whose copy differs from the majority, or all files without a majority."""
    ranked = Counter(copies.values()).most_common(2)
    if len(ranked) == 1:
        return
    if ranked[0][1] > ranked[1][1]:
        wrong = [file for file, copy in copies.items() if copy != ranked[0][0]]
        most = rank_ranges(set(copies) - set(wrong))
        yield Difference("replica", name, tuple(wrong), f"differs from the copies on {most}")
    else:
        yield Difference("replicas", name, tuple(copies), "copies differ, without a majority that shows the wrong one")


def not_held(source: StoredSource, strategy: Strategy, admit: Callable[[str], bool]) -> dict[str, list[int]]:
    """Per parameter the ranks of its stages, ascending, whose files lack it although other files hold it.

    This is not a difference: de-duplicated saves omit replicas, and conversions read any rank's copy.
    """
    lacking: dict[str, list[int]] = defaultdict(list)
    for group in files_alike(source.indexes):
        tensors = source.indexes[group[0]].tensors
        for stage in strategy.stages:
            ranks = [rank for rank in group if rank in stage.ranks]
            for name in stage.layouts if ranks else ():
                if name in source.tensors and name not in tensors and admit(name):
                    lacking[name] += ranks
    return {name: sorted(ranks) for name, ranks in sorted(lacking.items())}
