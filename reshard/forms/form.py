"""What a form of checkpoint is: a `Form` recognises, reads, writes and describes; `FormOptions` say what goes with it.

Nothing outside of this room compares the name of a form or asks of which class a checkpoint is: it goes through
`registry.form_named`, the options of the form and its methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Callable, NamedTuple, Optional, Protocol, Union

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.errors import CheckpointError, InputError
from reshard.forms.target import TargetForm
from reshard.layout import Layout
from reshard.strategies import Strategy
from reshard.text.name_filters import Filters
from reshard.text.report import Report


class Layouts(Enum):
    """Where it is recorded how the tensors of a form are cut."""

    GIVEN = "in a strategy, which the user names"
    RECORDED = "in the checkpoint itself"
    WHOLE = "nowhere: tensors are whole"


class Names(Enum):
    """What names of tensors look like."""

    MODEL = "those of a model's own parameters"
    ANY = "those of a model, or of a trainer's state that it is part of"
    TRAINER = "likewise; trainers expect those of their state"


class FormOptions(NamedTuple):
    """Which options go with a form, and its words in messages.

    Attributes:
        unit: what numbers of files count, ``rank`` or ``file``; ranks load their files by themselves.
        title: what the form is called in sentences.
        layouts: where it is recorded how tensors are cut.
        steps: a source may hold several steps, for --step.
        formats: formats of its files, for --format.
        shard_size: the size of target files can be chosen, with --max-shard-size.
        shards: tensors may be cut by rows over a number of files, with --shards.
        mindspore: MindSpore loads its files.
        names: what names of tensors look like.
        metadata: keys in the headers of its files that its reader checks.
    """

    unit: str = "file"
    title: str = ""
    layouts: Layouts = Layouts.WHOLE
    steps: bool = False
    formats: tuple[str, ...] = ("safetensors",)
    shard_size: bool = False
    shards: bool = False
    mindspore: bool = True
    names: Names = Names.MODEL
    metadata: tuple[str, ...] = ()

    @property
    def by_rank(self) -> bool:
        """Whether every rank has a file of its own, whose number is the rank."""
        return self.unit == "rank"

    @property
    def needs_strategy(self) -> bool:
        """Whether a source can be read only with the strategy that it was saved with."""
        return self.layouts is Layouts.GIVEN

    @property
    def cut(self) -> bool:
        """Whether tensors are cut, so that a target needs a strategy."""
        return self.layouts is not Layouts.WHOLE


class Written(NamedTuple):
    """What a conversion would write of a step.

    Attributes:
        tensors: by the names that are written.
        target: how these are laid out.
        unseen: per parameter that the strategy lists and no file holds, the name that it would get; None where that is
            unknown.
    """

    tensors: Mapping[str, GlobalTensor]
    target: Strategy
    unseen: Mapping[str, Optional[str]]


def _all(name: str) -> bool:
    return True


@dataclass(frozen=True)
class Reading:
    """What is to be read. Only the first three have to be said; a form takes of the others what concerns it.

    Attributes:
        src: the source, or the file of each rank.
        handles: open files.
        report: told of what is passed over.
        step: ``latest``, or a step in words of the form.
        damaged: files that count as absent, and why, by path.
        wanted: whether the tensor of a name has to be there whole.
        complete: what is not complete is refused.
        source: the strategy that it was saved with, where the form needs one.
        target: the strategy that it is converted to.
        ranks: the target ranks asked for; None for all.
        filters: which names will be written.
        file_suffix: only files whose stem ends so.
        fallback: whether ``latest`` may be an older step than the newest, where that is not complete.
        written: what edits make of a checkpoint, complete or not; raises an InputError where they do not fit. None
            where names and types stay.
    """

    src: Union[str, Mapping[int, str]]
    handles: FileHandles
    report: Report
    step: str = "latest"
    damaged: Mapping[str, str] = field(default_factory=dict)
    wanted: Callable[[str], bool] = _all
    complete: bool = True
    source: Strategy = field(default_factory=Strategy.none)
    target: Strategy = field(default_factory=Strategy.none)
    ranks: Optional[Sequence[int]] = None
    filters: Filters = field(default_factory=Filters)
    file_suffix: Optional[str] = None
    fallback: bool = True
    written: Optional[Callable[[Checkpoint], Written]] = None

    @property
    def path(self) -> str:
        """The source; only files of ranks are named one by one."""
        return str(self.src)


@dataclass(frozen=True)
class Wanted:
    """What is to be written. A form takes of it what concerns it.

    Attributes:
        dst: the target directory, or the exact file.
        source: the strategy of the source.
        target: the strategy of the target; `none` where tensors are whole.
        handles: open source files.
        report: told of what the user should know.
        admit: whether a name is written.
        format: of the files, or ``same``.
        prefix: target file names begin so; None for the names of the source's files.
        max_shard_size: bytes of tensors in a file; None for what is usual.
        on_disk: a directory is written, not one exact file or none.
        config: the file that told the sizes of the model, where one did.
        cast: casts were asked for.
        dequantised: quantised weights are written as numbers.
    """

    dst: str
    source: Strategy
    target: Strategy
    handles: FileHandles
    report: Report
    admit: Callable[[str], bool]
    format: str = "same"
    prefix: Optional[str] = None
    max_shard_size: Optional[int] = None
    on_disk: bool = True
    config: Optional[str] = None
    cast: bool = False
    dequantised: bool = False


class SavedStep(NamedTuple):
    """A step of a source that holds several.

    Attributes:
        number: its number.
        path: its directory.
        finished: whether it is not newer than the last finished one; None where nothing tells which that is.
        latest: whether it is the last finished one.
    """

    number: int
    path: str
    finished: Optional[bool]
    latest: bool


class Description(NamedTuple):
    """What a form tells of a checkpoint beside what every checkpoint does.

    Attributes:
        ranks: over how many ranks each tensor is laid out, where that is known.
        lost: how many slices of a tensor are in no readable file, where some are.
        incomplete: why it is not complete, if so.
        unplaced: a sentence on tensors that are left out, if there are any.
    """

    ranks: Mapping[str, int] = {}
    lost: Mapping[str, int] = {}
    incomplete: Optional[InputError] = None
    unplaced: Optional[str] = None


class SavedCut(Protocol):
    """How the metadata of a checkpoint records that a tensor is cut.

    Attributes:
        layout: the layout; None where every file holds the whole tensor.
        ranks: the ranks that the layout is over, in its order; without a layout, all that hold the tensor.
        rank_of: the files that hold a slice, each with the rank whose slice it is; empty without a layout.
    """

    @property
    def layout(self) -> Optional[Layout]:
        """The layout."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that the layout is over."""

    @property
    def rank_of(self) -> Sequence[tuple[int, int]]:
        """The files that hold a slice, each with the rank whose slice it is."""


class Form(Protocol):
    """A form of checkpoint; `registry.FORMS` lists them.

    Attributes:
        name: as --to names it.
        options: which options go with it.
    """

    name: str
    options: FormOptions

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        """Whether a source is of this form, by names alone.

        Args:
            src: a directory, a file, or a path with ``{rank}`` in it.
            names: what of the contents of a directory counts; by default everything.

        Raises:
            ReshardError: nobody can tell what is there.
        """

    def read(self, reading: Reading) -> Checkpoint:
        """Read a source from metadata and headers alone.

        Raises:
            UsageError: the step is none of this form.
            InputError: it is not complete, damaged, or contradicts itself.
            RetryableError: reading failed in a way that may pass.
        """

    def strategy_of(self, checkpoint: Checkpoint) -> Strategy:
        """The strategy that a checkpoint was saved with, where it is recorded in it.

        Raises:
            InputError: it is not, or not of every tensor.
        """
        raise CheckpointError(f"{checkpoint.place}: does not say how its tensors were laid out", file=checkpoint.place)

    def saved_cut(self, checkpoint: Checkpoint, name: str) -> Optional[SavedCut]:
        """How metadata records that a tensor is cut; None where it does not list the tensor."""
        return None

    def problems(self, checkpoint: Checkpoint, source: Strategy, strict: bool, report: Report) -> list[InputError]:
        """What a source's files contradict in its strategy without being refused for it.

        Args:
            checkpoint: the source.
            source: its strategy.
            strict: what is a warning otherwise is an error.
            report: told of what is no error.
        """
        return []

    def target(self, checkpoint: Checkpoint, wanted: Wanted) -> TargetForm:
        """What is to be written of a checkpoint of any form.

        Raises:
            ReshardError: it cannot be told, or not be read what it has to say.
        """

    def marks(self, files: Sequence[str]) -> list[str]:
        """Small files that make a complete directory what it is, in the order in which they are written.

        Args:
            files: names of its files of tensors, relative to the directory.
        """
        return []

    def check_written(self, directory: str, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        """What in a directory that was written here the reader of the form had to forgive.

        Yields:
            The name of a file relative to the directory, and what is wrong with it.
        """
        return iter(())

    def check_beside(
        self, directory: str, written: Checkpoint, source: Checkpoint, cast: bool, report: Report
    ) -> Iterator[tuple[str, str]]:
        """Compare what lies beside the weights of a source with what was written beside them.

        Args:
            directory: the target directory.
            written: the checkpoint in it.
            source: the checkpoint that was converted.
            cast: whether weights were cast, so that a configuration may name another type.
            report: warned of files that differ.

        Yields:
            The name of a file that is missing, relative to the directory, and where the source has it.

        Raises:
            ReshardError: a file cannot be read.
        """
        return iter(())

    def check_step(self, src: str, step: str) -> None:
        """Refuse a step that is asked for and that a source does not have, before anything is read.

        Raises:
            UsageError: there are no steps of such words.
            InputError: there is no such step.
        """
        return

    def steps(self, src: str) -> list[SavedStep]:
        """All steps of a source that holds several, oldest first."""
        return []

    def describe(self, checkpoint: Checkpoint) -> Description:
        """What inspection shows of a checkpoint of this form."""
        return Description()
