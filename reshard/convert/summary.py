"""The summary of a conversion, and what its target files hold by kind."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.plan.plan import Plan
from reshard.source_replicas import ReplicaCheck
from reshard.text.names import KINDS, Total, kind_of

PHASES = ("planning", "checking", "writing")


@dataclass(frozen=True)
class Summary:
    """The result of a conversion, in the order of its JSON.

    Attributes:
        step: the step that was converted, such as ``3_10``; None for file names without a step.
        ranks: target ranks written.
        files: their files, in the order of ``ranks``.
        target_files: file of every requested rank, of this or an earlier run.
        done_before: requested target ranks that an earlier run of the same conversion wrote.
        manifest: the manifest, if every rank of the target strategy is written.
        kept: other files than the source's that the directory held beside the weights, and keeps.
        bytes_written: size of these files together.
        source_ranks: source ranks whose headers were read.
        recovered: ranks that were lost or damaged, when recovering.
        parameters: how many parameters were resharded.
        kinds: totals of the files of all requested ranks, by kind: weights, optimizer
            state, accumulated gradients, other values.
        copied: names of values copied as they are.
        excluded: parameters of the source that --include and --exclude leave out.
        all_names: names of the checkpoint and of the target strategy, from which kinds are derived.
        left_out: others of the source that the target strategy does not have.
        missing: parameters of the target strategy that no source file holds.
        unholdable: values that the target format cannot hold.
        replicas: the test of the source strategy; None without strategy or without work.
        warnings: the warnings.
        notes: the decisions.
        phases: seconds by phase: ``planning`` reads headers, works out the plan and looks at the target directory;
            ``checking`` checks space, the CRCs that source files record, and replicas; ``writing`` the rest.
        seconds: time it took.
        dry_run: nothing was written.
    """

    step: str | None
    ranks: Sequence[int] = ()
    files: Sequence[str] = field(default=(), repr=False)
    target_files: Mapping[int, str] = field(default_factory=dict, repr=False)
    done_before: Sequence[int] = ()
    manifest: str | None = None
    kept: Collection[str] = field(default=(), repr=False)
    bytes_written: int = 0
    source_ranks: Sequence[int] = ()
    recovered: Sequence[int] = ()
    parameters: int = 0
    kinds: Mapping[str, Total] = field(default_factory=dict)
    copied: Sequence[str] = field(default=(), repr=False)
    excluded: Sequence[str] = field(default=(), repr=False)
    all_names: Collection[str] = field(default=(), repr=False)
    left_out: Sequence[str] = field(default=(), repr=False)
    missing: Sequence[str] = field(default=(), repr=False)
    unholdable: Sequence[str] = field(default=(), repr=False)
    replicas: ReplicaCheck | None = None
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    phases: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    seconds: float = 0.0
    dry_run: bool = False


def totals_of(plan: Plan, files: Collection[int]) -> dict[str, Total]:
    """Per kind the names, each once, and the bytes of tensor contents in some target files together."""
    all_names = plan.known_names()
    names: dict[str, set[str]] = defaultdict(set)
    sizes: Counter[str] = Counter()
    for name, elements, nbytes in _tensor_totals(plan, files):
        kind = kind_of(name, elements, all_names)
        names[kind].add(name)
        sizes[kind] += nbytes
    return {kind: Total(len(names[kind]), sizes[kind]) for kind in KINDS if kind in names}


def _tensor_totals(plan: Plan, files: Collection[int]) -> Iterator[tuple[str, int, int]]:
    """Name, number of elements and bytes of the tensors in some files."""
    taken_over = {file: plan.form.copied_file(file) for file in files}
    copies = [plan.checkpoint.indexes[holder] for holder in taken_over.values() if holder is not None]
    resharded = sorted(file for file, holder in taken_over.items() if holder is None)
    for section in plan.sections:
        alike = plan.by_names(section, resharded)
        for kind in plan.kinds_of(section) if alike else ():
            elements = math.prod(kind.tensors[0].shape)
            for names, members in alike.items():
                nbytes = sum(plan.slice_bytes(kind, section, members).values())
                for tensor in kind.tensors:
                    if names is None or tensor.name in names:
                        yield tensor.name, elements, nbytes
    for file in resharded:
        for _, value in plan.values_of(file):
            yield value.name, value.elements, value.nbytes
    # Files that are taken over are copied as they are, many of them built alike.
    tensors = {id(index.tensors): index.tensors for index in copies}
    counts = Counter(id(index.tensors) for index in copies)
    for number, count in counts.items():
        for stored in tensors[number].values():
            yield stored.name, stored.elements, stored.nbytes * count
