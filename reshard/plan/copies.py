"""Values outside the strategies: copied to every target rank as they are.

`global_step`, `learning_rate`, text and the like are usually the same on every rank. They come from
the lowest source rank that has them; where copies differ, a warning names them. A few belong to a
rank by nature (`cur_rank`, the state of random generators): a target gets those of the source rank
with its own number, where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reshard.checkpoints import FileHandles, Tensor, reading_error
from reshard.errors import CheckpointError, InputError
from reshard.messages import listing
from reshard.name_filters import Filters
from reshard.names import as_pattern, belongs_to_rank
from reshard.plan.source import SourceStep
from reshard.report import Report
from reshard.storage import read_range
from reshard.strategies import Strategy
from reshard.wording import quoted, rank_ranges

_BLOCK = 1 << 20


class CopiedValue(NamedTuple):
    """A value for one target rank, and the source rank it comes from."""

    name: str
    rank: int
    tensor: Tensor


class RankCopies(NamedTuple):
    """All copied values of one target rank."""

    values: list[CopiedValue]
    nbytes: int


class CopiedValues:
    """Which values are copied, and from where.

    Attributes:
        names: all copied names, sorted.
        problems: values that a strategy wants cut although nothing tells how they are cut now.
    """

    def __init__(
        self,
        source: Strategy,
        target: Strategy,
        step: SourceStep,
        listed: set[str],
        filters: Filters,
        handles: FileHandles,
        report: Report,
    ) -> None:
        self._source = source
        self._target = target
        self._step = step
        self._handles = handles
        self._report = report
        self.names = sorted(name for name in step.names() - listed if filters.admit(name))
        self.problems: list[InputError] = []
        self._stages = {
            name: frozenset(stage.number for stage in target.stages if name in stage.layouts) for name in self.names
        }
        differing = {name: self._differing(name) for name in self.names}
        self._warn_of_differing(differing)
        for name, ranks in differing.items():
            self._check_layouts(name, bool(ranks))

    def examples(self) -> Iterator[tuple[str, Tensor]]:
        """Every copied name with its tensor on the lowest rank that has it."""
        for name in self.names:
            rank = self._step.holders(name)[0]
            yield name, self._step.indexes[rank].tensors[name]

    def of(self, rank: int) -> RankCopies:
        """What one target rank gets."""
        stage = self._target.stage_of(rank).number
        values = []
        for name in self.names:
            if self._stages[name] and stage not in self._stages[name]:
                continue
            holders = self._step.holders(name)
            source = rank if belongs_to_rank(name) and rank in holders else holders[0]
            values.append(CopiedValue(name, source, self._step.indexes[source].tensors[name]))
        return RankCopies(values, sum(value.tensor.nbytes for value in values))

    def _check_layouts(self, name: str, differing: bool) -> None:
        """A value that the target lists and the source does not must be whole on every rank, beyond doubt."""
        rank = self._step.holders(name)[0]
        tensor = self._step.indexes[rank].tensors[name]
        for stage in self._target.stages:
            layout = stage.layouts.get(name)
            if layout is None:
                continue
            # What several ranks hold may be slices, however alike they look; one element may not.
            sliced = self._source.device_count > 1 and tensor.nbytes > tensor.item_size
            if layout.slice_count > 1 or sliced or differing or layout.recorded_shape not in (None, tensor.shape):
                self.problems.append(
                    CheckpointError(
                        f"{quoted(name)}: the target strategy lays it out, but the source strategy does not say how it "
                        f"is cut in {self._step.files[rank]}",
                        file=self._step.files[rank],
                        rank=rank,
                        parameter=name,
                        hint=f"pass a source strategy that lists it, or leave it out with --exclude {as_pattern(name)}",
                    )
                )
                return

    def _differing(self, name: str) -> tuple[int, ...]:
        """Ranks whose copy differs from that of the lowest rank, though not by nature."""
        if belongs_to_rank(name):
            return ()
        holders = self._step.holders(name)
        return tuple(rank for rank in holders[1:] if not self.same(name, holders[0], rank))

    def _warn_of_differing(self, differing: Mapping[str, tuple[int, ...]]) -> None:
        """Name values whose copies differ, those that do on the same ranks together."""
        alike: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for name, ranks in differing.items():
            if ranks:
                alike.setdefault((self._step.holders(name)[0], ranks), []).append(name)
        for (lowest, ranks), names in alike.items():
            differ = "differs" if len(names) == 1 else "differ"
            self._report.warn(
                listing(names)
                + f" on {rank_ranges(ranks)} {differ} from rank {lowest}'s, which every target rank gets "
                + f"({self._step.files[lowest]})"
            )

    def same(self, name: str, one: int, other: int) -> bool:
        """Whether two source ranks hold the same bytes of a tensor, of the same type and shape.

        Raises:
            ReshardError: a file cannot be read.
        """
        first = self._step.indexes[one].tensors[name]
        second = self._step.indexes[other].tensors[name]
        if (first.dtype, first.shape, first.nbytes) != (second.dtype, second.shape, second.nbytes):
            return False
        blocks = zip(self._blocks(one, first), self._blocks(other, second))
        return all(mine == theirs for mine, theirs in blocks)

    def _blocks(self, rank: int, tensor: Tensor) -> Iterator[bytes]:
        """A tensor's bytes in blocks that do not depend on how it is spread over extents."""
        pending = b""
        path = self._step.files[rank]
        for offset, length in tensor.extents:
            done = 0
            while done < length:
                try:
                    with self._handles.borrow(path) as file:
                        block = read_range(file, offset + done, min(_BLOCK - len(pending), length - done))
                except OSError as error:
                    raise reading_error(path, error) from error
                done += len(block)
                pending += block
                if len(pending) == _BLOCK:
                    yield pending
                    pending = b""
        if pending:
            yield pending
