"""Inspection of a rank tree, from names, sizes and headers alone.

Names and sizes are read for the whole tree, headers for one step: the newest, or the requested one. With a
strategy, the code of conversions checks steps, from the newest to the first complete one. Every error of a
conversion is a finding here.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress

from reshard.asked import Source
from reshard.checkpoints import FileHandles
from reshard.defaults import MAX_DEVICES
from reshard.errors import CheckpointError, InputError, ReshardError, UsageError
from reshard.forms.form import Form
from reshard.forms.ranks.checkpoint import RankCheckpoint
from reshard.forms.ranks.naming import Step, saved_at_fault
from reshard.forms.ranks.selection import Incomplete, StepSelector, check_ranks
from reshard.forms.ranks.tree import SourceTree, find_checkpoints, find_rank, skipped_directories
from reshard.forms.request import Means, Request
from reshard.inspection.checkpoint import Inspected, InspectedFile, InspectedStep
from reshard.inspection.contents import Finding, contents_of, conversion_findings
from reshard.records.ledger import ledger_in
from reshard.records.manifest import MANIFEST_NAME
from reshard.records.status import status_of
from reshard.storage import absolute, exists, is_directory, status_of_each
from reshard.strategies import Strategy
from reshard.strategies.replicas import replicas_of_strategy
from reshard.text.messages import Report, plural, rank_ranges, some_names
from reshard.text.names import CURRENT_RANK

# Maximum names in a line.
_MAX_PATTERNS = 6


def inspect_tree(read: Source, form: Form, strategy: Strategy | None) -> Inspected:
    """Inspect a rank tree, the directory of one rank, or one file; see `inspect`."""
    path = read.path
    one_rank = None
    try:
        tree = find_checkpoints(read)
    except CheckpointError as error:
        one_rank = find_rank(read)
        if one_rank is None:
            if is_directory(path) and _converted(path):
                raise CheckpointError(
                    f"{path}: holds records of a conversion, and no checkpoints yet",
                    file=path,
                    hint=f"`reshard status {shlex.quote(path)}` shows what is done and what is missing",
                ) from error
            raise
        tree = one_rank
    if one_rank is not None and strategy is not None:
        raise UsageError(
            f"{path} is the directory of one rank; --strategy is for a rank tree",
            hint=f"pass the directory of all ranks, {os.path.dirname(absolute(path))}",
        )
    requested = None if read.step == "latest" else tree.named(read.step)
    inspection = _Inspection(Inspected(path, form, ranks=tree.ranks), tree, strategy, one_rank is not None)
    return inspection.run(requested)


def _converted(path: str) -> bool:
    return exists(os.path.join(path, MANIFEST_NAME)) or ledger_in(path) is not None


class _Inspection:
    """Inspection of a tree."""

    def __init__(self, inspected: Inspected, tree: SourceTree, strategy: Strategy | None, one_rank: bool) -> None:
        self._inspected = inspected
        inspected.one_rank = one_rank
        self._tree = tree
        self._strategy = strategy
        self._groups: list[tuple[int, ...]] = []
        # Without a strategy, the last rank is the highest one with a directory.
        last = tree.ranks[-1]
        ranks: Collection[int] = tree.ranks if one_rank or last >= MAX_DEVICES else range(last + 1)
        if strategy is not None:
            self._groups = [group.ranks for group in replicas_of_strategy(strategy).groups]
            ranks = range(strategy.device_count)
        self._expected = ranks
        paths = [file.path for file in tree.files]
        # None for files that training removed after the listing.
        sizes = {path: status and status.size for path, status in zip(paths, status_of_each(paths))}
        self._steps = {number: self._by_names(number, sizes) for number in tree.steps}
        inspected.steps = list(self._steps.values())
        self._find_in_names()

    def _find_conversion(self, name: str) -> None:
        text = f"{self._tree.root}: was written by reshard"
        hint = f"`reshard status {name}` shows what is done and what is missing"
        with suppress(ReshardError):
            status = status_of(self._tree.root)
            if status.missing:
                written = len(status.record.wanted) - len(status.missing)
                text += f", and is not complete: {written} of {plural(len(status.record.wanted), 'rank')} written"
                hint = f"`reshard resume {name}` completes it" if status.record.is_repeatable else hint
        self._note("conversion", text, hint=hint)

    def run(self, requested: Step | None) -> Inspected:
        """The inspection, with headers of the ``requested`` step, or of the newest."""
        inspected = self._inspected
        with FileHandles() as handles:
            if self._strategy is not None:
                inspected.strategy = self._strategy.path
                latest = self._judge(requested, handles)
                inspected.latest = latest if requested is None else None
            if all(step.contents is None for step in inspected.steps):
                self._read_headers(requested or self._tree.steps[0], handles)
        readable = [step for step in inspected.steps if step.contents is not None]
        cut = [step for step in readable if step.checkpoint is not None]
        inspected.shown = inspected.latest or next(iter([*cut, *readable]), inspected.shown)
        shown = inspected.shown
        shown.files = [file._replace(state="damaged") if file.number in shown.damaged else file for file in shown.files]
        return inspected

    def _note(self, kind: str, text: str, hint: str | None = None, step: str | None = None) -> None:
        self._add(Finding(kind, text, hint, step))

    def _add_refusal(self, kind: str, error: InputError, step: Step | None = None) -> None:
        self._add(Finding(kind, error.message, error.hint, _named(step), refuses=True))

    def _add(self, finding: Finding) -> None:
        if all(finding.text != earlier.text for earlier in self._inspected.findings):
            self._inspected.findings.append(finding)

    def _by_names(self, number: Step | None, sizes: Mapping[str, int | None]) -> InspectedStep:
        files = []
        for file in self._tree.by_step[number]:
            size = sizes[file.path]
            if size is None:
                self._note("vanished", f"{file.path}: vanished during the inspection", step=_named(number))
            else:
                files.append(InspectedFile(file.rank, file.path, size))
        step = InspectedStep(_named(number), files)
        holders = set(step.ranks)
        step.absent = tuple(rank for rank in self._expected if rank not in holders)
        marks = {saved_at_fault(file.path) for file in self._tree.by_step[number]}
        step.saved_at = marks.pop() if len(marks) == 1 else None
        if self._strategy is not None and any(len(group) > 1 for group in self._groups):
            step.one_per_group = all(len(holders.intersection(group)) == 1 for group in self._groups)
        return step

    def _find_in_names(self) -> None:
        """Add findings that need no headers."""
        tree = self._tree
        if not tree.single_file and is_directory(tree.root) and _converted(tree.root):
            self._find_conversion(shlex.quote(tree.root))
        unfinished, saves = ([], []) if tree.single_file else skipped_directories(tree.root)
        for path in unfinished:
            self._note("unfinished", f"{path}: is unfinished (its name ends in _tmp) and is skipped")
        for path in saves:
            self._note(
                "save_at_fault", f"{path}: a save at a fault, a checkpoint of its own", hint="inspect it by itself"
            )
        gaps = sorted(set(self._expected) - set(tree.ranks))
        if gaps:
            self._note("gap", f"{rank_ranges(gaps)}: no directory and no file")
        with_files = {file.rank for file in tree.files}
        empty = [rank for rank in tree.ranks if rank not in with_files]
        if empty:
            self._note("empty_rank", f"{rank_ranges(empty)}: a directory without a matching checkpoint file")
        try:
            tree.check_comparable()
        except CheckpointError as error:
            self._add_refusal("series", error)
        for number, step in self._steps.items():
            nothing = [file.path for file in step.files if file.path is not None and not file.nbytes]
            if nothing:
                self._note(
                    "empty_file",
                    f"{plural(len(nothing), 'file')} of no bytes: {some_names(nothing, 3)}",
                    step=step.step,
                )
            try:
                for note in tree.of_step(number).notes:
                    self._note("different_saves", note, step=step.step)
            except CheckpointError as error:
                step.ambiguous = True
                self._add_refusal("ambiguous", error, number)

    def _read_headers(self, number: Step | None, handles: FileHandles) -> None:
        """The contents of the files of one step, complete or not."""
        try:
            source = RankCheckpoint(self._tree.of_step(number), handles)
        except InputError as error:
            self._add_refusal("unreadable", error, number)
            return
        self._note_contents(source)

    def _judge(self, requested: Step | None, handles: FileHandles) -> InspectedStep | None:
        """Check steps as a conversion does, newest first; the step that it would read."""
        assert self._strategy is not None
        selector = StepSelector(
            Request.of_source(Source(self._tree.root), self._inspected.form, self._strategy), Means(handles, Report())
        )
        source: RankCheckpoint | None = None
        number: Step | None = None
        try:
            check_ranks(self._tree, self._strategy, handles)
            for candidate in self._tree.candidates(_named(requested)):
                number = candidate.step
                source = RankCheckpoint(candidate, handles)
                missing = selector.judge(source)
                step = self._note_contents(source)
                _note_verdict(step, source, missing)
                if missing is None:
                    return step
                source = number = None
        except InputError as error:
            self._add_refusal("refused", error, number)
            if source is not None:
                # The headers are valid, but do not fit the strategy.
                self._note_contents(source)
        return None

    def _note_contents(self, source: RankCheckpoint) -> InspectedStep:
        step = self._steps[source.step_files.step]
        step.damaged = dict(source.damaged)
        step.contents = contents_of(source.indexes)
        for text in source.damaged.values():
            self._note("damaged", text, step=step.step)
        for finding in conversion_findings(step.contents):
            self._add(finding._replace(step=step.step))
        if any(item.name == CURRENT_RANK for item in step.contents.stored):
            step.saved_at = step.saved_at or "end of life"
        return step


def _note_verdict(step: InspectedStep, checkpoint: RankCheckpoint, missing: Incomplete | None) -> None:
    step.complete = missing is None
    step.checkpoint = checkpoint
    if missing is not None:
        step.missing, step.lost = missing.lines(_MAX_PATTERNS), missing.lost
    tensors = checkpoint.tensors
    step.not_saved = sorted(checkpoint.laid_out - tensors.keys())
    step.full_bytes = sum(tensor.nbytes for tensor in tensors.values())


def _named(step: Step | None) -> str | None:
    return None if step is None else str(step)
