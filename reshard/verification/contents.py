"""Comparing the slices of a target with what the source makes of them, through sums (see `sums`)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from reshard.layout import Box
from reshard.verification.difference import Difference
from reshard.verification.parameter import Parameter, Slice, is_empty
from reshard.verification.parts import Part, Readable
from reshard.verification.products import is_sum, tiles
from reshard.verification.reading import Means, sum_boxes, sum_parts
from reshard.verification.sums import PRIME
from reshard.verification.tree import Tree


class Copies(NamedTuple):
    """A slice that target ranks hold, and what it has to be.

    Attributes:
        parameter: the source's parameter.
        slice: the target's slice; its holders are those of the right type and shape.
        alone: whether it is compared with its own box of the source from the beginning, because the slices that
            are compared, or those of any one stage of the source, are not all of the parameter.
    """

    parameter: Parameter
    slice: Slice
    alone: bool


class Contents:
    """Compares what files hold.

    Args:
        source: the source.
        target: the target.
        means: what may be used for reading.

    Attributes:
        differences: what was found so far.
    """

    def __init__(self, source: Tree, target: Tree, means: Means) -> None:
        self._source, self._target, self._means = source, target, means
        self.differences: list[Difference] = []

    def compare(self, copies: list[Copies]) -> None:
        """Sum both sides; where they are not plainly equal, find out which ranks are wrong.

        What an adapter's product was added to is compared number by number.
        """
        self._compare_sums([copy for copy in copies if self._source.product(copy.parameter.name) is not None])
        copies = [copy for copy in copies if self._source.product(copy.parameter.name) is None]
        parameters = {copy.parameter.name: copy.parameter for copy in copies if not copy.alone}
        stored = [(name, *one) for name, parameter in parameters.items() for one in self.stored(parameter)]
        parts: list[Readable] = [part for _, _, part in stored]
        for parameter, held, _ in copies:
            like = self._source.like_type(parameter.name)
            parts += [
                self._target.part(parameter.name, rank, parameter.shape, held.box).with_like(like)
                for rank in held.holders
            ]
        sums = sum_parts(parts, self._means)
        source = self._source_sums([(name, stage) for name, stage, _ in stored], sums)
        coming = iter(sums[len(stored) :])
        found = [(copy, {rank: next(coming) for rank in copy.slice.holders}) for copy in copies]

        plain: dict[tuple[str, int], int] = defaultdict(int)
        doubtful: set[tuple[str, int]] = set()
        for (parameter, held, alone), by_rank in found:
            key = (parameter.name, held.stage)
            if alone:
                continue
            if len(set(by_rank.values())) == 1:
                plain[key] += next(iter(by_rank.values()))
            elif by_rank or not is_empty(held.box):
                doubtful.add(key)
        doubtful |= {key for key, total in plain.items() if total % PRIME != source[key[0]]}
        self._find_wrong([one for one in found if one[0].alone], told=True)
        again = [one for one in found if (one[0].parameter.name, one[0].slice.stage) in doubtful]
        self._find_wrong(again, told=False)

    def _compare_sums(self, copies: list[Copies]) -> None:
        """Compare weights to which a product was added; of copies that are alike one."""
        parts = [
            (copy, rank, self._target.part(copy.parameter.name, rank, copy.parameter.shape, copy.slice.box))
            for copy in copies
            for rank in copy.slice.holders
        ]
        found = sum_parts([part for _, _, part in parts], self._means)
        alike: dict[tuple[str, Box, int], tuple[Part, list[int]]] = {}
        for (copy, rank, part), total in zip(parts, found):
            alike.setdefault((copy.parameter.name, copy.slice.box, total), (part, []))[1].append(rank)
        parameters = {copy.parameter.name: copy.parameter for copy in copies}
        tasks = [(key, part.of_box(tile)) for key, (part, _) in alike.items() for tile in tiles(part.box)]

        def fits(task: tuple[tuple[str, Box, int], Part]) -> bool:
            (name, _, _), part = task
            product = self._source.product(name)
            assert product is not None
            return is_sum(part, part.tensor.dtype, self._source, parameters[name], product, self._means.handles)

        wrong: dict[str, set[int]] = defaultdict(set)
        with ThreadPoolExecutor(max(1, min(self._means.jobs, len(tasks)))) as pool:
            for (key, _), right in zip(tasks, pool.map(fits, tasks)):
                if not right:
                    wrong[key[0]].update(alike[key][1])
        for name, ranks in wrong.items():
            detail = "is not the source's with the product of the adapter's matrices added"
            self.differences.append(Difference("content", name, tuple(sorted(ranks)), detail))

    def stored(self, parameter: Parameter) -> Iterator[tuple[int, Readable]]:
        """Every slice of a parameter in the source's stages that have all of it, with the stage."""
        like = self._source.like_type(parameter.name)
        for slices in parameter.whole_stages():
            for held in slices:
                if held.holders:
                    yield held.stage, self._source.slice_part(parameter, held).with_like(like)

    def _source_sums(self, owners: list[tuple[str, int]], sums: list[int]) -> dict[str, int]:
        """The sum of every source parameter, by the first stage that has all of it."""
        by_stage: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for (name, stage), total in zip(owners, sums):
            by_stage[name][stage] = (by_stage[name][stage] + total) % PRIME
        for name, totals in by_stage.items():
            if len(set(totals.values())) > 1:
                self.differences.append(
                    Difference("stages", name, (), "the source's pipeline stages hold different values of it")
                )
        return {name: next(iter(totals.values())) for name, totals in by_stage.items()}

    def _find_wrong(self, check: list[tuple[Copies, dict[int, int]]], told: bool) -> None:
        """Compare each copy with the source's own sum over the slice's box."""
        check = [one for one in check if one[1]]
        expected = sum_boxes(self._parts_of_boxes([copy for copy, _ in check]), len(check), self._means, told)
        wrong: dict[str, list[int]] = defaultdict(list)
        for (copy, by_rank), right in zip(check, expected):
            wrong[copy.parameter.name] += [rank for rank, total in by_rank.items() if total != right]
        for name, ranks in wrong.items():
            if ranks:
                self.differences.append(Difference("content", name, tuple(sorted(ranks)), "differs from the source"))

    def _parts_of_boxes(self, check: list[Copies]) -> Iterator[tuple[int, Readable]]:
        """What has to be read of the source for every slice, with its number."""
        for _, group in itertools.groupby(enumerate(check), key=lambda one: one[1].parameter.name):
            numbers, copies = zip(*group)
            parameter = copies[0].parameter
            like = self._source.like_type(parameter.name)
            for at, part in self._source.parts(parameter, [copy.slice.box for copy in copies]):
                yield numbers[at], part.with_like(like)
