"""What the files of one step hold, by a strategy: a reading of its own, which knows of no plan.

Nothing is kept per parameter and rank: ranks whose files are built alike share their tensors, and
parameters that the same ranks hold share the list of them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Callable, Optional

from reshard.checkpoints import CheckpointIndex, FileHandles, KnownStructures, Tensor
from reshard.checkpoints.formats.headers import read_headers
from reshard.errors import DamagedCheckpointError, InputError, one_error
from reshard.layout import Box, whole_box
from reshard.strategies import Strategy
from reshard.text.names import ACCUMULATED_GRADIENTS
from reshard.verification.parameter import Parameter, Slice
from reshard.verification.parts import Part, Readable
from reshard.verification.true_layouts import is_text, true_parameter

if TYPE_CHECKING:
    from reshard.verification.products import Product


@dataclass
class Tree:
    """The files of one step.

    Attributes:
        indexes: what each rank's file holds.
        damaged: why a rank's file counts as absent.
        parameters: what the strategy lists and the files hold, by name.
        problems: listed parameters that files and strategy contradict each other about.
        outside: names that the strategy does not list, with the ranks that have them, ascending.
    """

    indexes: dict[int, CheckpointIndex]
    damaged: dict[int, str]
    parameters: dict[str, Parameter] = field(default_factory=dict)
    problems: dict[str, InputError] = field(default_factory=dict)
    outside: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def check_readings(self) -> None:
        """Refuse a tree that does not fit its strategy.

        Raises:
            InputError: names every parameter that does not fit.
        """
        if self.problems:
            problems = [*self.problems.values()]
            raise one_error(problems, f"{len(problems)} parameters do not fit the strategy")

    def only(self, admit: Callable[[str], bool]) -> Tree:
        """The tree with the names alone that are looked at."""
        chosen = {name: parameter for name, parameter in self.parameters.items() if admit(name)}
        problems = {name: problem for name, problem in self.problems.items() if admit(name)}
        outside = {name: ranks for name, ranks in self.outside.items() if admit(name)}
        return replace(self, parameters=chosen, problems=problems, outside=outside)

    @property
    def names(self) -> set[str]:
        """Everything that some file holds, whatever of it is looked at."""
        return set().union(*(tensors for tensors, _ in self.alike()))

    def alike(self) -> list[tuple[Mapping[str, Tensor], tuple[int, ...]]]:
        """What files hold, with the ranks, ascending, whose files are built so."""
        ranks: dict[int, list[int]] = defaultdict(list)
        for rank, index in self.indexes.items():
            ranks[id(index.tensors)].append(rank)
        return [(self.indexes[same[0]].tensors, tuple(same)) for same in ranks.values()]

    @property
    def files_read(self) -> list[CheckpointIndex]:
        """The files whose contents are read where any copy will do: per slice that of the lowest rank that has it."""
        ranks = {holders[0] for holders in self.outside.values()}
        known = set()
        for parameter in self.parameters.values():
            # Parameters that are cut alike and held by the same ranks share what says so.
            key = (parameter.shape, *((id(layout), id(held)) for _, layout, held in parameter.holdings))
            if key not in known:
                known.add(key)
                ranks.update(held.holders[0] for held in parameter.slices if held.holders)
        return [self.indexes[rank] for rank in sorted(ranks)]

    def tensor(self, name: str, rank: int) -> Tensor:
        """A rank's tensor of a name."""
        return self.indexes[rank].tensors[name]

    def sample(self, parameter: Parameter) -> Tensor:
        """A rank's slice of a parameter, with elements if any has some."""
        tensors = (self.tensor(parameter.name, rank) for rank in parameter.holders)
        first = next(tensors)
        return first if first.nbytes else next((tensor for tensor in tensors if tensor.nbytes), first)

    def part(self, name: str, rank: int, shape: tuple[int, ...], held: Box, box: Optional[Box] = None) -> Part:
        """What has to be read for a box, by default all, of the slice that a rank holds."""
        return Part(self.indexes[rank].path, self.tensor(name, rank), shape, held, held if box is None else box)

    def slice_part(self, parameter: Parameter, held: Slice) -> Readable:
        """What has to be read for a slice that some rank holds: that of the lowest."""
        return self.part(parameter.name, held.holders[0], parameter.shape, held.box)

    @property
    def told_by(self) -> str:
        """Words for where types and the like are told: ``is Float32, but Float16 in the source``."""
        return "in the source"

    def like_type(self, name: str) -> Optional[str]:
        """The floating point type of a parameter of which all that is no number counts as the same."""
        return None

    def product(self, name: str) -> Optional[Product]:
        """What was added to a parameter, so that its elements are not compared bit by bit; None for most."""
        return None

    def parts(self, parameter: Parameter, boxes: Iterable[Box]) -> Iterator[tuple[int, Readable]]:
        """What has to be read for some boxes of a parameter, with the number of the box; what is lost is left out."""
        slices = parameter.slices
        cells = parameter.cells
        for number, box in enumerate(boxes):
            for inside, at in cells.within(box):
                rank = slices[at].holders[0]
                yield number, self.part(parameter.name, rank, parameter.shape, slices[at].box, inside)

    def whole_part(self, name: str, rank: int) -> Part:
        """What has to be read for a tensor that is nothing but itself."""
        shape = self.tensor(name, rank).shape
        return self.part(name, rank, shape, whole_box(shape))


def read_tree_headers(
    files: Mapping[int, str], handles: FileHandles, damaged: Mapping[str, str] = MappingProxyType({})
) -> Tree:
    """Read what every rank's file holds; damaged files count as absent.

    Args:
        files: path per rank.
        handles: open files.
        damaged: files that are known to be damaged, and why, by path.

    Raises:
        CheckpointError: a file is missing, unreadable or encrypted.
        RetryableError: reading failed.
    """
    tree = Tree({}, {rank: damaged[path] for rank, path in sorted(files.items()) if path in damaged})
    sound = {rank: path for rank, path in sorted(files.items()) if path not in damaged}
    for rank, result in read_headers(handles, sound, KnownStructures(handles)):
        if isinstance(result, DamagedCheckpointError):
            tree.damaged[rank] = result.message
        else:
            tree.indexes[rank] = result
    return tree


def read_tree(
    files: Mapping[int, str],
    strategy: Strategy,
    handles: FileHandles,
    admit: Optional[Callable[[str], bool]] = None,
    damaged: Mapping[str, str] = MappingProxyType({}),
) -> Tree:
    """Read what the files of one step hold.

    Args:
        files: path per rank; ranks may be missing.
        strategy: what the checkpoint was saved with. `none` lists every tensor but those of one element.
        handles: open files.
        admit: tells which names are looked at; all of them where None. How a parameter is cut follows from
            all files and names nevertheless.
        damaged: files that are known to be damaged, and why, by path.

    Raises:
        CheckpointError: a file is missing, unreadable or encrypted.
        RetryableError: reading failed.
    """
    tree = read_tree_headers(files, handles, damaged)
    holders = _Holders(tree)
    # Accumulated gradients are compared with the parameter they belong to, so they come last.
    for name in sorted(holders.names, key=lambda name: (name.startswith(ACCUMULATED_GRADIENTS), name)):
        ranks = holders.of(name)
        if not _lists(strategy, name, tree.tensor(name, ranks[0])):
            tree.outside[name] = ranks
            continue
        try:
            parameter = true_parameter(name, strategy, tree.indexes, holders.of, tree.parameters)
        except InputError as error:
            tree.problems[name] = error
            continue
        if parameter is not None:
            tree.parameters[name] = parameter
    return tree if admit is None else tree.only(admit)


class _Holders:
    """Which ranks have which tensors; those of the same files share one tuple of ranks."""

    def __init__(self, tree: Tree) -> None:
        self._ranks: list[tuple[int, ...]] = []
        self._files: dict[str, list[int]] = defaultdict(list)
        for number, (tensors, ranks) in enumerate(tree.alike()):
            self._ranks.append(ranks)
            for name in tensors:
                self._files[name].append(number)
        self._found: dict[tuple[tuple[int, ...], int, int], tuple[int, ...]] = {}

    @property
    def names(self) -> Iterable[str]:
        return self._files.keys()

    def of(self, name: str, first: int = 0, count: int = 1 << 62) -> tuple[int, ...]:
        """The ranks of a stage (default: all) that have a tensor, ascending."""
        key = (tuple(self._files[name]), first, count)
        found = self._found.get(key)
        if found is None:
            ranks = sorted(itertools.chain.from_iterable(self._ranks[number] for number in key[0]))
            found = self._found[key] = tuple(rank for rank in ranks if first <= rank < first + count)
        return found


def _lists(strategy: Strategy, name: str, tensor: Tensor) -> bool:
    if strategy.is_none:
        return not is_text(tensor.dtype) and math.prod(tensor.shape) != 1
    return any(name in stage.layouts for stage in strategy.stages)
