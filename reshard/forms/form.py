"""Interface of forms of checkpoints: a `Form` recognises, reads and writes; `FormOptions` list its options.

No code outside of this room compares the name of a form or the class of a checkpoint: it uses
`registry.form_named`, the options of the form and its methods.

A form's own module recognises sources by names; its methods import the reader and the writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reshard.asked import Source, Target
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.errors import CheckpointError, InputError, UsageError
from reshard.forms.request import Means, Request
from reshard.layout import Box, Layout
from reshard.strategies import Strategy

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
        metadata: keys in the headers of its files that its reader checks.
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
    metadata: tuple[str, ...] = ()

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


class SavedLayout(Protocol):
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


class RecordedCut(Protocol):
    """How the tensors of a checkpoint are cut, by what its files record."""

    def strategy(self) -> Strategy:
        """The strategy that cuts as the files do; an InputError if none does, or not every tensor."""

    def saved_layout(self, name: str) -> SavedLayout | None:
        """The layout of a tensor in metadata; None if metadata lists boxes, or does not list the tensor."""

    def boxes_of(self, name: str) -> Iterable[tuple[Box, int]]:
        """The boxes of a tensor, each with the number of a file that holds it, under the tensor's name."""

    def describe(self) -> Description:
        """Properties for inspection."""


class RecordedTraining(Protocol):
    """The training that the checkpoints of a form record beside tensors: arguments, which --args states, and numbers.

    Attributes:
        counters: the values of a training that are numbers of these records; the form stores no others.
    """

    counters: tuple[str, ...]

    def configuration(self, src: str, step: str, args: str | None) -> Mapping[str, object] | None:
        """The model's configuration that a source records, under the keys of config.json; None if it records none.

        Args:
            src: the source.
            step: the step.
            args: file or directory of --args, whose arguments replace recorded ones.

        Raises:
            InputError: it is damaged, or rows of weights have another meaning than elsewhere.
        """

    def stated_configuration(self, args: str) -> Mapping[str, object]:
        """The model's configuration that a target's --args state, likewise.

        Raises:
            InputError: the file is damaged, or holds no arguments.
        """

    def table_options(self, asked: Target, config: Mapping[str, object] | None) -> Mapping[str, str]:
        """Options of the table of names to this form that follow from what is asked, unless they are stated.

        Args:
            asked: the target.
            config: the model's configuration, if it is known.
        """

    def default_strategy(self, asked: Target) -> str | None:
        """The path of the target's strategy where none is given."""

    def sizes_note(self, src: str, step: str) -> str:
        """A sentence on the sizes at which the trainer loads a source, by its optimizer state.

        Raises:
            CheckpointError: the step is missing, or its metadata is damaged.
        """


class Form(Protocol):
    """A form of checkpoint; `forms.FORM_CLASSES` lists them.

    Attributes:
        name: as --to names it.
        options: its options.
    """

    name: str
    options: FormOptions

    def recognise(self, src: str, names: Sequence[str]) -> bool:
        """Whether a source is of this form, by names alone.

        Args:
            src: a directory, a file, or a path with ``{rank}`` in it.
            names: names in the directory, all or some; none of other sources.
        """

    def read(self, request: Request, means: Means) -> Checkpoint:
        """Read the source of a request from metadata and headers alone.

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

    @property
    def training(self) -> RecordedTraining | None:
        """The facet of forms that record the training."""
        return None

    def cut(self, checkpoint: Checkpoint) -> RecordedCut | None:
        """The facet of forms that record layouts, for a checkpoint of this form, without edits."""
        return None

    def target(self, checkpoint: Checkpoint, request: Request, means: Means) -> TargetForm:
        """The target files of a request for a checkpoint of any form; a ReshardError if the form cannot hold it."""

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


def check_latest(form: Form, request: Request) -> None:
    """Refuse a step of a form without steps."""
    if request.asked.source.step != "latest":
        raise UsageError(f"{request.src}: is of the form {form.name}, which has no steps", hint="leave out --step")


def strategy_of(form: Form, checkpoint: Checkpoint) -> Strategy:
    """The strategy that a checkpoint records; an InputError if it records none, or not for every tensor."""
    cut = form.cut(checkpoint)
    if cut is None:
        raise CheckpointError(f"{checkpoint.place}: does not record the layouts of its tensors", file=checkpoint.place)
    return cut.strategy()
