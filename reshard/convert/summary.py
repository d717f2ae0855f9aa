"""What a conversion did."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Optional

from reshard.source_replicas import ReplicaCheck
from reshard.text.names import Total


@dataclass
class Phases:
    """Where the time of a conversion went, in seconds.

    Attributes:
        planning: reading headers, working out the plan, looking at the target directory.
        checking: checking space, the CRCs that source files record, and replicas.
        writing: moving bytes, and recording what is done.
    """

    planning: float
    checking: float
    writing: float


@dataclass
class Summary:
    """What a conversion did.

    Attributes:
        step: the step that was converted, such as ``3_10``; None where file names tell none.
        ranks: target ranks written.
        files: their files, in the order of ``ranks``.
        target_files: file of every rank asked for, whenever it was written.
        done_before: target ranks, of those asked for, that an earlier run of the same conversion wrote.
        manifest: the manifest, if every rank of the target strategy is there now.
        bytes_written: size of these files together.
        source_ranks: source ranks whose headers were read.
        recovered: ranks that were lost or damaged, when recovering.
        parameters: how many parameters were resharded.
        kinds: what the files of all ranks asked for hold, whenever they were written, by kind: weights, optimizer
            state, accumulated gradients, other values.
        copied: names of values copied as they are.
        excluded: parameters of the source that --include and --exclude leave out.
        known: names that decide of which kind a name is: those of the checkpoint and of the target strategy.
        left_out: others of the source that the target strategy does not have.
        missing: parameters of the target strategy that no source file holds.
        unholdable: values that the target format cannot hold.
        replicas: how well the source strategy was tested; None where it says nothing, or nothing was left to do.
        warnings: what was warned of.
        notes: what was decided.
        phases: where the time went.
        seconds: time it took.
        dry_run: nothing was written.
        bytes_copied: bytes of tensors that the file system copied by itself.
    """

    step: Optional[str]
    ranks: list[int]
    files: list[str]
    target_files: dict[int, str]
    done_before: list[int]
    manifest: Optional[str]
    bytes_written: int
    source_ranks: list[int]
    recovered: list[int]
    parameters: int
    kinds: dict[str, Total]
    copied: list[str]
    excluded: list[str]
    known: Collection[str]
    left_out: list[str]
    missing: list[str]
    unholdable: list[str]
    replicas: Optional[ReplicaCheck]
    warnings: list[str]
    notes: list[str]
    phases: Phases
    seconds: float
    dry_run: bool
    bytes_copied: int = 0
