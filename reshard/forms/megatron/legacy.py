"""Reading legacy trees of Megatron: a directory for each tensor, pipeline and expert rank, with pickles of tensors.

Live names, layers numbered in each stage and parts of tensors become the tensors that Megatron writes as ``torch_dist``
with a key for each layer. Directories of MindSpeed-LLM's converter are read alike.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard.checkpoints import FileHandles
from reshard.errors import CheckpointError, InputError, one_error
from reshard.forms.megatron.gathered import Gathered
from reshard.forms.megatron.keys import EMBEDDING, MODEL_FILE, OUTPUT, RANK_DIRECTORY, STATE, rank_directory
from reshard.forms.megatron.legacy_state import KINDS, Owner, states_of_buffers, states_of_groups
from reshard.forms.megatron.live import LiveModule, is_parameter, parse
from reshard.forms.megatron.placing import Parallel, Rank, TensorPart
from reshard.forms.megatron.rank_files import HINT, RankFile, read_file
from reshard.forms.megatron.stages import Stages, stages_of
from reshard.forms.recorded import ChunkedCheckpoint, ProblemError
from reshard.forms.request import Means, Request
from reshard.forms.tracker import Iteration
from reshard.storage import for_each, names_in
from reshard.text.messages import plural, some_names

_VERSION = 3.0
_FINAL_NORMS = ("decoder.final_layernorm.weight", "final_layernorm.weight")
_CURE = "save it with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"


def read_legacy(form: str, iteration: Iteration, request: Request, means: Means) -> ChunkedCheckpoint:
    """A legacy tree from its pickles alone.

    Raises:
        InputError: it is incomplete, damaged, of an unknown layout, or contradicts itself.
    """
    tree = _Tree(iteration.path, request, means.handles)
    tree.files[0].common.check_directory(iteration)
    checkpoint = tree.checkpoint(form)
    checkpoint.step = iteration.step
    checkpoint.label = iteration.label
    if tree.lacking is not None and any(map(request.required, checkpoint.faults)):
        raise tree.lacking
    checkpoint.check(request.required)
    if tree.lacking is not None:
        if checkpoint.faults and not request.complete:
            checkpoint.faults = {str(tree.lacking.file): tree.lacking, **checkpoint.faults}
        means.report.warn(f"{tree.lacking.message}; replicas in other files are read")
    return checkpoint


class _Tree:
    """The files of a tree.

    Attributes:
        lacking: the error of files that are missing or damaged; None if there are none.
        lost_stages: ranks of the pipeline without any file.
    """

    def __init__(self, directory: str, request: Request, handles: FileHandles) -> None:
        self._directory = directory
        self._handles = handles
        names = sorted(filter(RANK_DIRECTORY.fullmatch, names_in(directory)))
        paths = [os.path.join(directory, name, MODEL_FILE) for name in names]
        results = dict(zip(names, for_each(lambda path: read_file(path, request.damaged, handles), paths)))
        read = {name: each for name, each in results.items() if isinstance(each, RankFile)}
        problems = [each for each in results.values() if not isinstance(each, RankFile)]
        if not read:
            raise one_error(problems, f"{directory} is not complete")
        self.args = next(iter(read.values())).common.args
        self._check_alike(read)
        ranks, self.parallel, self.stages_count = self._sizes(names, read)
        self.files = [each._replace(rank=ranks[name]) for name, each in read.items()]
        problems += self._missing(names, ranks)
        problems += [each.optimizer.problem for each in read.values() if each.optimizer.problem is not None]
        self.lacking: InputError | None = one_error(problems, f"{directory} is not complete") if problems else None
        self.lost_stages = sorted({*range(self.stages_count)}.difference(file.rank.stage for file in self.files))
        if self.lost_stages and request.complete and self.lacking is not None:
            raise self.lacking
        self.stages = self._stages()
        self._check_order()

    def _refused(self, problem: str, hint: str = HINT, path: str | None = None) -> CheckpointError:
        return CheckpointError(f"{path or self._directory}: {problem}", file=path or self._directory, hint=hint)

    def _check_alike(self, read: Mapping[str, RankFile]) -> None:
        """See that files are of one save."""
        first_name, first = next(iter(read.items()))
        for each in read.values():
            version = each.common.state.get("checkpoint_version")
            if not isinstance(version, (int, float)) or version < _VERSION:
                raise self._refused(
                    f"has checkpoint_version {version!r}, and 3.0 is read: rows of queries, keys and values were in "
                    "another order before",
                    "load it in Megatron and save it again",
                    each.path,
                )
            if each.common.iteration != first.common.iteration or len(each.models) != len(first.models):
                raise self._refused(f"is of another save than {first_name}", path=each.path)
            for arg in _SIZES_OF_RUNS:
                if each.common.args.get(arg) != first.common.args.get(arg):
                    raise self._refused(
                        f"has {arg} {each.common.args.get(arg)} in its args, and {first_name} has "
                        f"{first.common.args.get(arg)}",
                        path=each.path,
                    )

    def _sizes(self, names: Sequence[str], read: Mapping[str, RankFile]) -> tuple[dict[str, Rank], Parallel, int]:
        """The ranks of directories, the sizes of groups, and the number of pipeline ranks."""
        numbers = {name: _numbers_of(name) for name in names}
        lengths = {len(each) for each in numbers.values()}
        if len(lengths) > 1:
            raise self._refused("holds directories of several saves: " + some_names(names))
        length = lengths.pop()
        tp, pp, ep = (
            self._argument(name) for name in ("tensor_model_parallel_size", _PIPELINE, "expert_model_parallel_size")
        )
        second_is_expert = length == 2 and self._second_is_expert(pp, ep, numbers, read)
        ranks: dict[str, Rank] = {}
        for name, each in numbers.items():
            tensor, *rest = each
            if length == 2:
                rest = [0, rest[0]] if second_is_expert else [rest[0], 0]
            stage, expert = rest if rest else (0, 0)
            ranks[name] = Rank(tensor, stage, expert)
        counts = [max(each) + 1 for each in zip(*ranks.values())]
        stated = [tp, pp, ep]
        for kind, count, size, name in zip(Rank._fields, counts, stated, names):
            if size is not None and count > size:
                raise self._refused(f"holds {name} and others, and has {size} {kind} ranks by its args")
        tensors, pipelines, experts = (count if size is None else size for count, size in zip(counts, stated))
        etp = self._argument("expert_tensor_parallel_size") or tensors
        extended = bool(self.args.get("moe_tp_extend_ep"))
        return ranks, Parallel(tensors, experts, etp, extended), pipelines

    def _argument(self, name: str) -> int | None:
        value = self.args.get(name)
        if value is None or (type(value) is int and value > 0):
            return value
        raise self._refused(f"has {name} = {str(value)[:40]} in its args")

    def _second_is_expert(
        self,
        pp: int | None,
        ep: int | None,
        numbers: Mapping[str, Sequence[int]],
        read: Mapping[str, RankFile],
    ) -> bool:
        """Whether the second number of a directory's name is the expert rank, and not the pipeline rank."""
        if ((pp or 1) > 1) != ((ep or 1) > 1):
            return (ep or 1) > 1
        if (pp or 1) > 1 and (ep or 1) > 1:
            raise self._refused(f"has {pp} pipeline ranks and {ep} expert ranks by its args, and one number for both")
        # Stages share the ends of a model; expert ranks all have both.
        everywhere = {numbers[name][1] for name in read}
        first, last = (
            {
                numbers[name][1]
                for name, each in read.items()
                if any(end in model for model in each.models for end in ends)
            }
            for ends in ((EMBEDDING,), _FINAL_NORMS)
        )
        if first == last == everywhere and len(everywhere) > 1:
            return True
        if first == {0} and last != first:
            return False
        raise self._refused(
            "does not record in its args whether directories are numbered by pipeline ranks or by expert ranks"
        )

    def _missing(self, names: Sequence[str], ranks: Mapping[str, Rank]) -> list[InputError]:
        """The error of directories that should exist."""
        existing = {*ranks.values()}
        tp, ep, etp, _ = self.parallel
        expected = [Rank(*numbers) for numbers in itertools.product(range(tp), range(self.stages_count), range(ep))]
        if etp != tp:
            # Some pairs of a tensor rank and an expert rank are never written; coverage finds missing experts.
            held = {rank[:2] for rank in existing}
            expected = [rank for rank in expected if rank.expert == 0 and rank[:2] not in held]
        missing = [self._name_of(rank, names) for rank in expected if rank not in existing]
        if not missing:
            return []
        sizes = f"tensor_model_parallel_size {tp}, {_PIPELINE} {self.stages_count}, expert_model_parallel_size {ep}"
        text = f"{plural(len(missing), 'rank')} of {len(expected)} missing: {some_names(missing)} (args: {sizes})"
        path = os.path.join(self._directory, missing[0])
        return [CheckpointError(f"{self._directory}: {text}", file=path, hint=HINT)]

    def _name_of(self, rank: Rank, names: Sequence[str]) -> str:
        length = len(_numbers_of(names[0]))
        numbers = [rank.stage, rank.expert] if length == 3 else [rank.stage or rank.expert][: length - 1]
        return rank_directory(rank.tensor, numbers)

    def _stages(self) -> Stages:
        """Layers of every stage, which should be those in the files."""
        chunks = len(self.files[0].models)
        try:
            stages = stages_of(self.args, self.stages_count, chunks)
        except ProblemError as error:
            raise self._refused(f"{error}") from error
        for file in self.files:
            for number, model in enumerate(file.models):
                layers = {parsed.layer for parsed in map(parse, model) if parsed.layer is not None}
                expected = {local for local, layer in enumerate(stages[file.rank.stage][number]) if layer is not None}
                if layers != expected:
                    raise self._refused(
                        f"holds the layers {_ranges(layers)} of its stage, and {_ranges(expected)} by its args",
                        path=file.path,
                    )
        return stages

    def _check_order(self) -> None:
        """See that directories have the names of their ranks, where files or their contents show it."""
        ranks: list[Any] = [file.common.args.get("rank") for file in self.files]
        world = self._argument("world_size")
        # Converters run one process, whose rank all files have.
        if len(set(ranks)) > 1 and all(type(rank) is int for rank in ranks) and world is not None:
            for file, rank in zip(self.files, ranks):
                if not self._is_at(rank, world, file.rank):
                    raise self._refused(f"was saved by rank {rank}, which is none of its directory's", path=file.path)
        met: dict[tuple[object, ...], RankFile] = {}
        for file in self.files:
            contents = [
                (name, each.shape, each.offset - each.entry.offset, each.entry.crc)
                for model in file.models
                for name, each in model.items()
            ]
            other = met.setdefault(tuple(contents), file)
            if other is not file and all(crc for *_, crc in contents):
                raise self._refused(f"holds the same tensors as {other.path}: one is a copy", path=file.path)
        firsts = [file for file in self.files if file.rank.stage == 0]
        others = [file for file in self.files if file.rank.stage]
        if any(EMBEDDING in model for file in others for model in file.models):
            wrong = [file for file in firsts if EMBEDDING not in file.models[0]]
            if wrong:
                raise self._refused("holds no embedding, and a later stage does", path=wrong[0].path)

    def _is_at(self, number: int, world: int, rank: Rank) -> bool:
        """Whether the number of a process is that of a rank: tensor ranks come first, then experts' or contexts'."""
        args, (tp, ep, etp, extended) = self.args, self.parallel
        pipelined = not args.get("use_tp_pp_dp_mapping") and world % self.stages_count == 0
        stage = number // (world // self.stages_count) if pipelined else rank.stage
        # Before tensor ranks of experts, expert ranks were those of data.
        before = {etp, tp * (self._argument("context_parallel_size") or 1)}
        experts = {rank.expert} if extended else {number // each % ep for each in before}
        return (number % tp, stage) == rank[:2] and rank.expert in experts

    def checkpoint(self, form: str) -> ChunkedCheckpoint:
        gathered = Gathered(self._directory)
        for stage in range(self.stages_count):
            self._add_stage([file for file in self.files if file.rank.stage == stage], gathered)
        common = self.files[0].common
        gathered.add_step(common, {step for file in self.files for step in file.common.steps})
        if self.lacking is not None:
            for stage in self.lost_stages:
                gathered.faults[f"the layers of stage {stage}"] = self.lacking
        return gathered.checkpoint(form, self._handles, self._is_tied())

    def _is_tied(self) -> bool:
        return self.args.get("untie_embeddings_and_output_weights") is False

    def _add_stage(self, files: Sequence[RankFile], gathered: Gathered) -> None:
        tied = self._is_tied()
        several = {EMBEDDING: tied or bool(self.args.get("mtp_num_layers")), OUTPUT: tied}
        owners: list[list[Owner]] = [[] for _ in files]
        for number in range(len(files[0].models) if files else 0):
            modules = self._modules(files, number)
            for file, of_file in zip(files, owners):
                for name, elements in file.models[number].items():
                    key, module, within = modules[name]
                    parts: list[TensorPart] = []
                    try:
                        parts = module.parts(within, file.rank)
                    except ProblemError as error:
                        gathered.fault(file.path, key, str(error))
                    for part in parts:
                        gathered.add((file.path, file.size), (file.rank.stage, number), part.key, part, elements)
                    if is_parameter(name):
                        shared = self.stages_count > 1 and several.get(name, False)
                        of_file.append(Owner(number, name, elements, parts, shared))
        for file, of_file in zip(files, owners):
            for name, why in file.others.items():
                gathered.fault(file.path, name, why)
            if file.optimizer.saved:
                self._add_state(file, of_file, gathered)

    def _add_state(self, file: RankFile, owners: Sequence[Owner], gathered: Gathered) -> None:
        """Add the state of a rank's optimizer, in the boxes of its parameters."""
        optimizer, stage = file.optimizer, file.rank.stage
        for owner in owners:
            for part in owner.parts:
                gathered.expect(part.key, owner.elements.dtype)
        problem = optimizer.refusal
        try:
            sizes = self._bucket_sizes(stage)
            states = (
                states_of_groups(optimizer.groups, owners)
                if optimizer.groups
                else states_of_buffers(optimizer.flats, owners, sizes)
            )
            for state in () if problem else states:
                for part in state.owner.parts:
                    key = f"{STATE}{state.kind}.{part.key}"
                    gathered.add(
                        (optimizer.path, optimizer.size), (stage, state.owner.chunk), key, part, state.elements
                    )
        except ProblemError as error:
            problem = str(error)
        if problem is not None:
            for owner in owners:
                for part in owner.parts:
                    for kind in dict.fromkeys(KINDS.values()):
                        gathered.fault(optimizer.path, f"{STATE}{kind}.{part.key}", problem, _CURE)

    def _bucket_sizes(self, stage: int) -> list[int | None]:
        """Sizes of buckets to try first: those that Megatron makes with the arguments of the run."""
        size, over = self.args.get("ddp_bucket_size"), self.args.get("data_parallel_size")
        usual = size if type(size) is int else max(40_000_000, 1_000_000 * (over if type(over) is int else 1))
        return [None, usual] if stage or not self.args.get("overlap_grad_reduce") else [usual, None]

    def _modules(self, files: Sequence[RankFile], number: int) -> dict[str, tuple[str, LiveModule, str]]:
        """Per live name of a chunk its key, its module and its name there."""
        shapes: dict[str, dict[str, dict[Rank, tuple[int, ...]]]] = {}
        places: dict[str, tuple[str, str]] = {}
        for file in files:
            for name, elements in file.models[number].items():
                parsed = parse(name)
                prefix = parsed.prefix
                if parsed.layer is not None:
                    prefix += f"{self.stages[file.rank.stage][number][parsed.layer]}."
                places[name] = prefix, parsed.tail
                shapes.setdefault(prefix, {}).setdefault(parsed.tail, {})[file.rank] = elements.shape
        modules = {prefix: LiveModule(prefix, each, self.parallel, self.args) for prefix, each in shapes.items()}
        return {name: (prefix + within, modules[prefix], within) for name, (prefix, within) in places.items()}


_PIPELINE = "pipeline_model_parallel_size"
_SIZES_OF_RUNS = (
    *("tensor_model_parallel_size", _PIPELINE, "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("num_layers", "hidden_size", "num_experts", "padded_vocab_size", "virtual_pipeline_model_parallel_size"),
)


def _numbers_of(name: str) -> list[int]:
    match = RANK_DIRECTORY.fullmatch(name)
    return [int(group) for group in match.groups() if group is not None] if match else []


def _ranges(numbers: Iterable[int]) -> str:
    return str(sorted(numbers)[:16])
