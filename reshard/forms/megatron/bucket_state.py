"""State of the distributed optimizer that is stored without names, as tensors of the shapes of their weights.

``dp_reshardable`` writes buckets as tensors, and ``dp_zero_gather_scatter`` all buckets of a rank, joined, in one
pickled object. Both have groups by rank: tensor and pipeline rank, or those of experts. `parameters` lists what each
rank should hold, and `buckets` where that has to lie.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.dtypes import FROM_TORCH
from reshard.checkpoints.placed import Run
from reshard.errors import CheckpointError, InputError
from reshard.forms.megatron.buckets import places_by_edges, places_by_size
from reshard.forms.megatron.common import opened, stored_in
from reshard.forms.megatron.keys import STATE, weight_of
from reshard.forms.megatron.legacy_state import MASTER, JoinedBuffer, flat_buffers
from reshard.forms.megatron.parameters import BUFFERS, Holding, ModelChunk, RankParameter, Weights
from reshard.forms.megatron.placing import Experts, Parallel, Rank, Style
from reshard.forms.megatron.proofs import CURE, LEAVE_OUT
from reshard.forms.pytorch.dcp import DescribedTensor, ReadMetadata, Record, joined_chunk, run_of
from reshard.forms.recorded import ProblemError, tensor_fault
from reshard.text.messages import quoted
from reshard.text.names import UNNAMED_STATE

_GROUP = r"(?:chained_([0-9]{1,6})\.)?optimizer\.distributed\.dp_group_idx_([0-9]{1,6})\."
_BUCKET = re.compile(
    _GROUP + r"gbuf_idx_([0-9]{1,6})\.dtype_\((torch\.\w+), torch\.\w+\)\.bucket_idx_([0-9]{1,6})\.(\w+)"
)
_GATHERED = re.compile(_GROUP + r"param_state/shard_\S+")
_OF_OPTIMIZER = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.")


class Flat(NamedTuple):
    """One state of a bucket, or of all buckets of a buffer joined.

    Attributes:
        dtype: MindSpore's name of its type.
        edges: where its runs begin, ascending, and its size.
        runs: its runs, in order.
    """

    dtype: str
    edges: Sequence[int]
    runs: Sequence[Run]

    def between(self, first: int, count: int) -> tuple[Run, ...]:
        """The runs of some elements."""
        runs: list[Run] = []
        number = bisect_right(self.edges, first) - 1
        while count:
            run, inside = self.runs[number], first - self.edges[number]
            taken = min(count, run.elements - inside)
            runs.append(run._replace(first=run.first + inside, elements=taken))
            first, count, number = first + taken, count - taken, number + 1
        return tuple(runs)


class Buffer(NamedTuple):
    """The buckets of the parameters of one type, of a chunk of the model on a rank.

    Attributes:
        dtype: MindSpore's name of the type of the parameters.
        buckets: per bucket its states by name.
        joined: there is one bucket, in which others are joined without the padding at their ends.
    """

    dtype: str
    buckets: Sequence[Mapping[str, Flat]]
    joined: bool

    def places(
        self, parameters: Sequence[RankParameter], bucket_sizes: Sequence[int | None]
    ) -> list[tuple[Mapping[str, Flat], int]] | None:
        """The bucket of each parameter and its first element there; None where they do not fit."""
        lengths = [parameter.elements for parameter in parameters]
        if self.joined:
            alone = {number for number, parameter in enumerate(parameters) if parameter.shared}
            places = places_by_size(lengths, self._edges(self.buckets[0])[-1], alone, bucket_sizes)
        else:
            edges = [self._edges(bucket) for bucket in self.buckets]
            places = places_by_edges(lengths, edges) or places_by_edges(lengths, edges, padded=True)
        return None if places is None else [(self.buckets[place.bucket], place.start) for place in places]

    @staticmethod
    def _edges(bucket: Mapping[str, Flat]) -> Sequence[int]:
        return next(iter(bucket.values())).edges


Groups = Mapping[int, Sequence[Buffer]]
"""By the rank of a group its buffers, in order."""


def holds_buckets(name: str) -> bool:
    """Whether a tensor or an object of metadata is state without names."""
    return bool(_BUCKET.fullmatch(name) or _GATHERED.fullmatch(name))


def read_buckets(directory: str, tensors: Mapping[str, DescribedTensor]) -> dict[int, Groups]:
    """The buckets among the tensors of metadata: by the number of the optimizer, its groups."""
    found: dict[int, dict[int, dict[int, dict[str, dict[int, dict[str, Flat]]]]]] = {}
    for name, tensor in tensors.items():
        match = _BUCKET.fullmatch(name)
        if match is None:
            continue
        chained, group, buffer, bucket = (int(each or 0) for each in match.group(1, 2, 3, 5))
        by_dtype = found.setdefault(chained, {}).setdefault(group, {}).setdefault(buffer, {})
        by_dtype.setdefault(match[4], {}).setdefault(bucket, {})[match[6]] = _flat(directory, name, tensor)
    return {
        chained: {
            group: [_buffer(directory, buffers[number]) for number in sorted(buffers)]
            for group, buffers in groups.items()
        }
        for chained, groups in found.items()
    }


def _flat(directory: str, name: str, tensor: DescribedTensor) -> Flat:
    edges, runs = [0], []
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.offsets):
        offsets, sizes = chunk.offsets, chunk.sizes
        if len(offsets) != 1 or offsets[0] != edges[-1] or not sizes[0]:
            raise fault(directory, f"has a bucket with holes or overlaps: {quoted(name)}")
        edges.append(offsets[0] + sizes[0])
        runs.append(run_of(chunk, directory))
    if (edges[-1],) != tensor.shape:
        raise fault(directory, f"has a bucket that is not complete: {quoted(name)}")
    return Flat(tensor.dtype, edges, runs)


def _buffer(directory: str, by_dtype: Mapping[str, Mapping[int, Mapping[str, Flat]]]) -> Buffer:
    (name, buckets), *others = by_dtype.items()
    states = [bucket.keys() for bucket in buckets.values()]
    edges = [{tuple(flat.edges) for flat in bucket.values()} for bucket in buckets.values()]
    if (
        others
        or buckets.keys() != set(range(len(buckets)))
        or any(each != states[0] or MASTER not in each for each in states)
        or any(len(each) > 1 for each in edges)
    ):
        raise fault(directory, "has buckets that are missing, or without masters, or whose states are cut differently")
    return Buffer(_dtype(directory, name), [buckets[number] for number in range(len(buckets))], False)


def read_gathered(directory: str, objects: Mapping[str, Record], handles: FileHandles) -> dict[int, Groups]:
    """The buckets in pickled objects of metadata: by the number of the optimizer, its groups."""
    found: dict[int, dict[int, Sequence[Buffer]]] = {}
    for name, record in objects.items():
        match = _GATHERED.fullmatch(name)
        if match is None:
            continue
        path = os.path.join(directory, record.file)
        try:
            with opened(stored_in(directory, record), handles) as (state, archive, _):
                # An object is in a list of one.
                optimizers = flat_buffers(archive, state)
        except ProblemError as error:
            raise fault(path, str(error)) from error
        buffers = [each for flats in optimizers for each in flats or () if MASTER in each.tensors]
        if len(optimizers) != 1 or len(buffers) != len(optimizers[0] or ()):
            raise fault(path, "has buffers of several optimizers, or without masters")
        found.setdefault(int(match[1] or 0), {})[int(match[2])] = [_joined(path, record, each) for each in buffers]
    return dict(found)


def _joined(path: str, record: Record, buffer: JoinedBuffer) -> Buffer:
    flats: dict[str, Flat] = {}
    for state, elements in buffer.tensors.items():
        (size,) = elements.shape
        flats[state] = Flat(elements.dtype, (0, size), (Run(path, record.offset, record.length, 0, size, elements),))
    return Buffer(buffer.dtype, [flats], True)


def _dtype(path: str, name: str) -> str:
    dtype = FROM_TORCH.get(name)
    if dtype is None:
        raise fault(path, f"is of parameters of the type {name}, which are not read")
    return dtype


def fault(path: str, problem: str) -> CheckpointError:
    """The error of all state without names."""
    error = tensor_fault(path, UNNAMED_STATE, problem)
    error.hint = f"{CURE}, {LEAVE_OUT}"
    return error


def name_state(directory: str, metadata: ReadMetadata, args: Mapping[str, Any], handles: FileHandles) -> set[str]:
    """Replace state without names by tensors in the shapes of their weights; a fault of all of it where none fit.

    Args:
        directory: of the checkpoint.
        metadata: is changed.
        args: arguments of the run, which decide what lengths do not.
        handles: open files; pickles are read, and no elements.

    Returns:
        The names of the new tensors, which are not proved yet.
    """
    names = {name for name in metadata.tensors if holds_buckets(name)}
    if not names and not any(map(holds_buckets, metadata.objects)):
        return set()
    damaged = [metadata.faults.pop(name) for name in sorted(names & metadata.faults.keys())]
    buckets = {name: metadata.tensors.pop(name) for name in names}
    try:
        if damaged:
            raise damaged[0]
        optimizers = read_buckets(directory, buckets) or read_gathered(directory, metadata.objects, handles)
        weights = {name: each for name, each in metadata.tensors.items() if not _OF_OPTIMIZER.match(name)}
        state = BucketMap(directory, weights, optimizers, args).tensors()
        twice = sorted(state.keys() & metadata.tensors.keys())
        if twice:
            raise fault(directory, f"is stored twice: {quoted(twice[0])} is a tensor, too")
    except InputError as error:
        metadata.faults[UNNAMED_STATE] = error
        return set()
    except ProblemError as error:
        metadata.faults[UNNAMED_STATE] = fault(directory, str(error))
        return set()
    metadata.tensors.update(state)
    return {*state}


_Placed = tuple[RankParameter, Mapping[str, Flat], int]


class BucketMap:
    """State without names as tensors in the shapes of their weights.

    Args:
        directory: of the files.
        weights: the tensors of the model, with the chunks that they were saved in.
        optimizers: by the number of the optimizer, its groups.
        args: arguments of the run, which decide what lengths do not.

    Raises:
        ProblemError: the lengths of the parameters are not those in the buckets.
    """

    def __init__(
        self,
        directory: str,
        weights: Mapping[str, DescribedTensor],
        optimizers: Mapping[int, Groups],
        args: Mapping[str, Any],
    ) -> None:
        self._directory = directory
        self._weights = weights
        self._optimizers = [optimizers[number] for number in sorted(optimizers)]
        self._model = Weights(weights)
        buffers = [each for groups in self._optimizers for group in groups.values() for each in group]
        other = {buffer.dtype for buffer in buffers} - {weight.dtype for weight in weights.values()}
        if other:
            raise ProblemError(f"is of parameters of other types than the weights: {', '.join(sorted(other))}")
        self._args = args
        size = args.get("ddp_bucket_size")
        self._bucket_sizes = (size,) if type(size) is int else ()
        local, experts = args.get("transformer_impl") == "local", Experts.SEQUENTIAL
        if args.get("moe_grouped_gemm"):
            experts = Experts.FUSED if local or args.get("moe_use_legacy_grouped_gemm") else Experts.GROUPED
        self._styles = self._model.styles(local, experts)
        # The first misfit of any style; the error names it.
        self._problem = ""

    def tensors(self) -> dict[str, DescribedTensor]:
        for style in self._styles:
            placed = self._placed(style)
            if placed is not None:
                return self._mapped(placed)
        raise ProblemError(f"has no map: {self._problem}")

    def _placed(self, style: Style) -> list[_Placed] | None:
        """All parameters in an order, with their places; None where they do not fit."""
        first, *others = self._optimizers
        holding = Holding.DENSE if others or not self._model.expert_count else Holding.ALL
        if len(others) > 1 or (others and not self._model.expert_count):
            raise ProblemError(f"is that of {len(self._optimizers)} optimizers: one, or another of experts, is read")
        if holding is Holding.ALL and self._model.etp != self._model.tp:
            raise ProblemError("lacks that of experts, which are cut over other ranks")
        stages, rest = divmod(len(first), self._model.tp)
        if rest or first.keys() != set(range(len(first))):
            raise ProblemError(
                f"is in {len(first)} groups, which are not those of {self._model.tp} tensor parallel ranks"
            )
        chunks = self._chunks(first, stages, holding, style)
        if chunks is None:
            return None
        placed = self._on_ranks(first, stages, chunks, holding, style)
        for groups in others if placed is not None else ():
            of_experts = self._on_ranks(groups, stages, chunks, Holding.EXPERTS, style)
            placed = None if of_experts is None else [*(placed or ()), *of_experts]
        return placed

    def _chunks(self, groups: Groups, stages: int, holding: Holding, style: Style) -> list[ModelChunk] | None:
        """The layers of every chunk: as many as fit. All first chunks have layers before those of any second one."""
        numbers = {len(_by_chunk(groups[group])) for group in groups}
        if len(numbers) > 1:
            raise ProblemError("has other numbers of buffers on some ranks than on others")
        chunks: list[ModelChunk] = []
        begin, total = 0, self._model.layer_count
        for number in range(numbers.pop()):
            for stage in range(stages):
                first, last = not chunks, len(chunks) + 1 == stages * len(_by_chunk(groups[0]))
                buffers = _by_chunk(groups[stage * self._model.tp])[number]
                for end in (total,) if last else range(begin, total + 1):
                    chunk = ModelChunk(stage, number, range(begin, end), first, last)
                    parameters = self._parameters(chunk, Rank(0), 1, holding, style, stages)
                    if self._fit(buffers, parameters) is not None:
                        break
                else:
                    where = f"rank {stage} of the pipeline" + (f", chunk {number}" if number else "")
                    self._problem = self._problem or (
                        f"the lengths in the buckets of {where} are those of no layers from number {begin} on"
                    )
                    return None
                chunks.append(chunk)
                begin = end
        return chunks

    def _on_ranks(
        self, groups: Groups, stages: int, chunks: Sequence[ModelChunk], holding: Holding, style: Style
    ) -> list[_Placed] | None:
        size = self._model.tp
        if holding is Holding.EXPERTS:
            # Stages without experts have no groups.
            expert_size = self._args.get("expert_model_parallel_size")
            if not isinstance(expert_size, int) or expert_size < 1:
                expert_size = -(-(1 + max(groups)) // (stages * self._model.etp))
            size = expert_size * self._model.etp
        if max(groups) >= stages * size:
            raise ProblemError(f"is in {1 + max(groups)} groups, which are not those of {stages} pipeline ranks")
        placed: list[_Placed] = []
        for stage in range(stages):
            for number in range(size):
                group = stage * size + number
                buffers = iter(_by_chunk(groups.get(group, ())))
                rank, over = Rank(number), 1
                if holding is Holding.EXPERTS:
                    rank, over = (
                        Rank(number % self._model.etp, stage, number // self._model.etp),
                        size // self._model.etp,
                    )
                for chunk in chunks:
                    if chunk.stage != stage:
                        continue
                    parameters = self._parameters(chunk, rank, over, holding, style, stages)
                    found = self._fit(next(buffers, []), parameters) if parameters else []
                    if found is None:
                        whose = "experts" if holding is Holding.EXPERTS else "parameters"
                        self._problem = (
                            self._problem or f"the lengths in the buckets of group {group} are not those of its {whose}"
                        )
                        return None
                    placed += found
                if next(buffers, None):
                    self._problem = self._problem or f"group {group} has more buffers than chunks of the model"
                    return None
        return placed

    def _parameters(
        self, chunk: ModelChunk, rank: Rank, over: int, holding: Holding, style: Style, stages: int
    ) -> list[RankParameter]:
        """The parameters of a chunk on an expert rank, in the order of buckets."""
        parallel = Parallel(self._model.tp, over, self._model.etp)
        return self._model.parameters(rank, parallel, chunk, holding, style, stages)[::-1]

    def _fit(self, buffers: Sequence[Buffer], parameters: Sequence[RankParameter]) -> list[_Placed] | None:
        """The places of parameters in the buffers of their types; None where they do not fit."""
        dtypes = {parameter.dtype for parameter in parameters}
        if dtypes != {buffer.dtype for buffer in buffers}:
            return None
        placed: list[_Placed] = []
        for buffer in buffers:
            of_type = [parameter for parameter in parameters if parameter.dtype == buffer.dtype]
            places = buffer.places(of_type, self._bucket_sizes)
            if places is None:
                return None
            placed += [(parameter, bucket, start) for parameter, (bucket, start) in zip(of_type, places)]
        return placed

    def _mapped(self, placed: Sequence[_Placed]) -> dict[str, DescribedTensor]:
        tensors: dict[str, DescribedTensor] = {}
        for parameter, bucket, start in placed:
            for part in parameter.parts:
                # One box may be far apart in the bucket: strides of a transposed expert.
                span = 1 + sum((size - 1) * stride for size, stride in zip(part.sizes, part.strides))
                for state, flat in bucket.items():
                    name = f"{STATE}{state}.{part.key}"
                    tensor = tensors.setdefault(name, DescribedTensor(flat.dtype, part.shape, []))
                    runs = flat.between(start + part.first, span)
                    tensor.chunks.append(joined_chunk(part.start, part.sizes, runs, self._directory, part.strides))
        # Each tensor is checked for holes where files are placed; one that is absent would only be missed.
        with_state = {weight_of(name) for name in tensors}
        missing = [key for key in self._weights if key not in with_state and not key.endswith(BUFFERS)]
        if missing:
            raise ProblemError(f"lacks that of {quoted(missing[0])}")
        return tensors


def _by_chunk(buffers: Sequence[Buffer]) -> list[list[Buffer]]:
    """Buffers by chunk of the model: a chunk has one of each type."""
    chunks: list[list[Buffer]] = []
    for buffer in buffers:
        if not chunks or buffer.dtype in {other.dtype for other in chunks[-1]}:
            chunks.append([])
        chunks[-1].append(buffer)
    return chunks
