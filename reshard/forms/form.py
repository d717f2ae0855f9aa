"""Interface of forms of checkpoints: a `Form` recognises, reads, writes and describes; `FormOptions` list its options.

No code outside of this room compares the name of a form or the class of a checkpoint: it uses
`registry.form_named`, the options of the form and its methods.

A form's own module recognises sources by names; its methods import the reader and the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.asked import Source, Target
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.errors import CheckpointError, InputError, UsageError
from reshard.layout import Layout
from reshard.strategies import Strategy
from reshard.text.globs import Filters
from reshard.text.messages import Report

if TYPE_CHECKING:
    from reshard.forms.target import TargetForm


class Layouts(Enum):
    """The place where a form's layouts are recorded."""

    GIVEN = "in a strategy, which the user names"
    RECORDED = "in the checkpoint itself"
    WHOLE = "nowhere: tensors are whole"


class Names(Enum):
    """Names that tensors of a form have."""

    MODEL = "names of a model's parameters"
    ANY = "names of a model's parameters, or of a trainer's state"
    TRAINER = "likewise; trainers expect the names of their state"


class Side(Enum):
    """The model code whose names and packing the loaders of a form expect: a side of the tables of names."""

    HUGGINGFACE = "huggingface"
    MINDFORMERS = "mindformers"
    MEGATRON = "megatron"

    @property
    def has_masters(self) -> bool:
        """Whether its trainers save master copies beside weights, and one step of the optimizer for all parameters."""
        return self is Side.MEGATRON


class FormOptions(NamedTuple):
    """The options of a form, and its words in messages.

    Attributes:
        unit: the unit of file numbers, ``rank`` or ``file``; each rank loads its own file.
        title: the form's name on pages.
        layouts: where layouts are recorded.
        steps: a source may hold several steps, for --step.
        formats: formats of its files, for --format; none for a form that is only read.
        shard_size: the size of target files can be chosen, with --max-shard-size.
        prefix: names of target files can be chosen, with --prefix.
        shards: tensors may be cut by rows over a number of files, with --shards.
        mindspore: MindSpore loads its files.
        side: whose names and packing its loaders expect.
        names: the names that its tensors have.
        spellings: its trainers have saved the same state under several names, and a copy gets those of today.
        metadata: keys in the headers of its files that its reader checks.
        arguments: it records the arguments of the training, which --args states.
        counters: the values of a training that it records, as numbers of its own; None for all, as they are.
    """

    unit: str = "file"
    title: str = ""
    layouts: Layouts = Layouts.WHOLE
    steps: bool = False
    formats: tuple[str, ...] = ("safetensors",)
    shard_size: bool = False
    prefix: bool = False
    shards: bool = False
    mindspore: bool = True
    side: Side = Side.MINDFORMERS
    names: Names = Names.MODEL
    spellings: bool = False
    metadata: tuple[str, ...] = ()
    arguments: bool = False
    counters: tuple[str, ...] | None = None

    @property
    def by_rank(self) -> bool:
        """Whether every rank has its own file, whose number is the rank."""
        return self.unit == "rank"

    @property
    def written(self) -> bool:
        return bool(self.formats)

    @property
    def needs_strategy(self) -> bool:
        return self.layouts is Layouts.GIVEN

    @property
    def cut(self) -> bool:
        """Whether tensors are cut, so that a target needs a strategy."""
        return self.layouts is not Layouts.WHOLE


class EditedStep(NamedTuple):
    """A step with the edits of a conversion; ``unseen``: the target name, if known, of each parameter in no file."""

    tensors: Mapping[str, GlobalTensor]
    target: Strategy
    unseen: Mapping[str, str | None]


def _all(name: str) -> bool:
    return True


class ReadRequest(NamedTuple):
    """A request to read a checkpoint. Forms ignore attributes that do not concern them.

    Attributes:
        asked: the source.
        handles: open files.
        report: gets notes on skipped parts.
        damaged: per path of a file that counts as absent, the reason.
        required: whether a tensor has to be complete.
        complete: refuse an incomplete step.
        source: the strategy of the source, where the form needs one.
        target: the strategy of the target.
        ranks: the requested target ranks; None for all, and for forms without rank files: the tensors of such a file
            depend on all tensors of the step.
        filters: the selection of names.
        edit: edits a checkpoint, complete or not; raises an InputError if the edits do not fit. None without
            edits.
    """

    asked: Source
    handles: FileHandles
    report: Report
    damaged: Mapping[str, str] = {}
    required: Callable[[str], bool] = _all
    complete: bool = True
    source: Strategy = Strategy.none()
    target: Strategy = Strategy.none()
    ranks: Sequence[int] | None = None
    filters: Filters = Filters()
    edit: Callable[[Checkpoint], EditedStep] | None = None

    @property
    def path(self) -> str:
        """The path of the source."""
        return self.asked.path


class WriteRequest(NamedTuple):
    """A request to write a checkpoint. Forms ignore attributes that do not concern them.

    Attributes:
        asked: the target.
        source: the strategy of the source.
        target: the strategy of the target; `none` where tensors are whole.
        handles: open source files.
        report: gets warnings and notes.
        admit: whether a name is written.
        in_memory: nothing is written.
        config: the model's configuration, or its directory; None if none was read.
        cast: casts were requested.
        dequantised: quantised weights are written as numbers.
    """

    asked: Target
    source: Strategy
    target: Strategy
    handles: FileHandles
    report: Report
    admit: Callable[[str], bool]
    in_memory: bool = False
    config: str | None = None
    cast: bool = False
    dequantised: bool = False

    @property
    def on_disk(self) -> bool:
        """Whether a directory is written, not one exact file or none."""
        return not (self.asked.is_file or self.in_memory)


class SavedStep(NamedTuple):
    """A step of a source that holds several.

    Attributes:
        finished: whether it is at most as new as the last finished step; None if unknown.
        latest: whether it is the last finished step.
    """

    number: int
    path: str
    finished: bool | None
    latest: bool


class Description(NamedTuple):
    """Properties of a checkpoint that only some forms have.

    Attributes:
        ranks: the number of ranks that each tensor is laid out over, if known.
        lost: per tensor, the number of slices that no readable file holds.
        incomplete: the reason, if the checkpoint is not complete.
        unplaced: a sentence on skipped tensors, if any.
    """

    ranks: Mapping[str, int] = {}
    lost: Mapping[str, int] = {}
    incomplete: InputError | None = None
    unplaced: str | None = None


class SavedCut(Protocol):
    """The layout of a tensor in a checkpoint's metadata."""

    @property
    def layout(self) -> Layout | None:
        """The layout; None where every file holds the whole tensor."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of the layout, in its order; without one, all ranks that hold the tensor."""

    @property
    def rank_of(self) -> Sequence[tuple[int, int]]:
        """The files that hold a slice, each with its rank; empty without a layout."""


class Form(Protocol):
    """A form of checkpoint; `forms.FORM_CLASSES` lists them.

    Attributes:
        name: as --to names it.
        options: its options.
    """

    name: str
    options: FormOptions

    def recognise(self, src: str, names: Sequence[str] | None = None) -> bool:
        """Whether a source is of this form, by names alone: of the directory all, or only these.

        The source is a directory, a file, or a path with ``{rank}`` in it.
        """

    def read(self, request: ReadRequest) -> Checkpoint:
        """Read a source from metadata and headers alone.

        Raises:
            UsageError: the text is not a step of this form.
            InputError: the source is incomplete, damaged, or contradicts itself.
            RetryableError: reading failed in a way that may pass.
        """

    def for_target(self, source: Source, to: Form, renamed: bool) -> Form:
        """The form that reads a source for a target: this one, or a simpler one where files are only rewritten.

        Args:
            source: the source.
            to: the form of the target.
            renamed: a table gives other names and packing.
        """
        return self

    def strategy_of(self, checkpoint: Checkpoint) -> Strategy:
        """The strategy that a checkpoint records; an InputError if it records none, or not for every tensor."""
        raise CheckpointError(f"{checkpoint.place}: does not record the layouts of its tensors", file=checkpoint.place)

    def saved_cut(self, checkpoint: Checkpoint, name: str) -> SavedCut | None:
        """The layout of a tensor in metadata; None if metadata does not list it."""
        return None

    def table_options(self, asked: Target, config: Mapping[str, object] | None) -> Mapping[str, str]:
        """Options of the table of names to this form that follow from what is asked, unless they are stated.

        Args:
            asked: the target.
            config: the model's configuration, if it is known.
        """
        return {}

    def default_strategy(self, asked: Target) -> str | None:
        """The path of the target's strategy where none is given; None if one has to be."""
        return None

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        """The target files for a checkpoint of any form; a ReshardError if the form cannot hold it."""

    def marks(self, files: Sequence[str]) -> list[str]:
        """Small files that mark a complete directory of these files of tensors, in the order of writing."""
        return []

    def check_written(self, directory: str, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        """Defects of a written directory that the reader of the form tolerates, each with a relative file."""
        return iter(())

    def check_step(self, src: str, step: str) -> None:
        """Refuse a missing step, or a text that is no step of this form, before anything is read."""
        return

    def steps(self, src: str) -> list[SavedStep]:
        """All steps of a source that holds several, oldest first."""
        return []

    def configuration(self, src: str, step: str, args: str | None = None) -> Mapping[str, object] | None:
        """The model's configuration that a source records, under the keys of config.json; None if it records none.

        Args:
            src: the source.
            step: the step.
            args: file or directory of --args, whose arguments replace recorded ones.

        Raises:
            InputError: it is damaged, or rows of weights have another meaning than elsewhere.
        """
        return None

    def stated_configuration(self, args: str) -> Mapping[str, object] | None:
        """The model's configuration that a target's --args state, likewise; None for a form without this option.

        Raises:
            InputError: the file is damaged, or holds no arguments.
        """
        return None

    def describe(self, checkpoint: Checkpoint) -> Description:
        """Properties for inspection."""
        return Description()


def check_latest(form: Form, request: ReadRequest) -> None:
    """Refuse a step of a form without steps."""
    if request.asked.step != "latest":
        raise UsageError(f"{request.path}: is of the form {form.name}, which has no steps", hint="leave out --step")
