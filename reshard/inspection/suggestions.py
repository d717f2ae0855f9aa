"""The commands for the usual aims with a checkpoint, from names, headers and the files beside it.

Nothing is guessed. A strategy is used only if it is the only one beside the checkpoint that fits the ranks, names and
shapes in the headers, and the first command checks it. Values that only the user has are placeholders in capitals; what
a conversion asks for itself, in an error that names the option, is not computed here.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError, InputError, ReshardError
from reshard.forms.form import FormOptions, Names
from reshard.forms.ranks.naming import RANK, fixed_directory
from reshard.forms.ranks.tree import find_rank
from reshard.forms.registry import form_of
from reshard.inspection.subject import Subject, subject_of
from reshard.names import Configuration, builtin_names, config_beside, rules_named
from reshard.names.options import settle, side_of
from reshard.plan.editing import edited, words_of_packing
from reshard.plan.edits import NO_TABLE, between_forms, typed_edits
from reshard.plan.missing import needed
from reshard.records.ledger import packing_of, recorded_strategy
from reshard.records.status import status_of
from reshard.storage import absolute, exists, is_directory
from reshard.strategies import NONE, Strategy, read_strategy
from reshard.strategies.beside import equal_layouts, strategies_in
from reshard.text.messages import Report, listing, plural, rank_ranges
from reshard.text.names import WEIGHTS, is_weight, training_globs

SRC_STRATEGY, DST_STRATEGY, DEVICES, CONFIG = "SRC_STRATEGY", "DST_STRATEGY", "DEVICES", "CONFIG"
"""Placeholders of strategies, of the number of devices, and of the model's config.json."""

# Options that no record contains.
_OF_RESUME = ("--endpoint-url",)
# Commands for one aim, where several strategies suit it.
_MAX_TARGETS = 4
_HUGGINGFACE, _DCP, _RANKS = "huggingface", "dcp", "ranks"
# A side of the built-in tables; the other is Hugging Face's.
_MINDFORMERS = "mindformers"
_DTYPE = "BFloat16"


class Missing(NamedTuple):
    """A thing that only the user has.

    Attributes:
        placeholder: the word that stands for it in the command; None if the command runs without it.
        text: what it is and where to get it, a sentence or two.
    """

    placeholder: Optional[str]
    text: str


class Suggestion(NamedTuple):
    """A command for an aim.

    Attributes:
        aim: one word for scripts.
        title: the aim, for people.
        command: its words.
        missing: what has to be added before it runs, or before its result is used.
    """

    aim: str
    title: str
    command: tuple[str, ...]
    missing: tuple[Missing, ...] = ()


class StrategyBeside(NamedTuple):
    """A strategy near the checkpoint.

    Attributes:
        path: its file or directory.
        devices: number of its ranks.
        parameters: number of its parameters.
    """

    path: str
    devices: int
    parameters: int


class Model(NamedTuple):
    """The names of a checkpoint's tensors, by the built-in tables.

    Attributes:
        config: config.json; None if there is none.
        type: its ``model_type``.
        side: ``huggingface`` or ``mindformers``: the side of the tables that the names are on; None if on neither.
        tables: the tables that have these names; only that of the model's type, if there is one.
        undetermined: its options that the user must state, each with its possible values and their meaning.
        packing: the table that the conversion that wrote the checkpoint recorded; see `words_of_packing`.
    """

    config: Optional[Configuration] = None
    type: Optional[str] = None
    side: Optional[str] = None
    tables: Sequence[str] = ()
    undetermined: Sequence[tuple[str, Sequence[str], str]] = ()
    packing: Sequence[str] = ()


@dataclass
class Suggestions:
    """All commands, and what they are based on.

    Attributes:
        subject: the checkpoint.
        strategy: the path of the strategy that commands use; None if unknown or recorded in the checkpoint.
        fits_headers: it is the only one beside the checkpoint that fits the headers.
        recorded: the records of the conversion that wrote the checkpoint name it.
        beside: other strategies near it.
        model: its names.
        items: the commands.
    """

    subject: Subject
    strategy: Optional[str] = None
    fits_headers: bool = False
    recorded: bool = False
    beside: Sequence[StrategyBeside] = ()
    model: Model = field(default_factory=Model)
    items: Sequence[Suggestion] = ()


def suggest(
    src: str,
    devices: Optional[int] = None,
    src_strategy: Optional[str] = None,
    options: Sequence[str] = (),
    step: str = "latest",
    file_suffix: Optional[str] = None,
) -> Suggestions:
    """The commands for a checkpoint.

    Args:
        src: a checkpoint of any form.
        devices: of the next cluster; None if unknown.
        src_strategy: path of the strategy that it was saved with; None to look beside the checkpoint.
        options: options that every command gets, each followed by its value; they repeat the parameters below.
        step: which step, or ``latest``.
        file_suffix: only files of ranks whose stem ends so.

    Raises:
        UsageError: an option does not go with the form.
        InputError: there is no checkpoint, no such step, or the strategy does not fit.
        RetryableError: reading failed in a way that may pass.
    """

    def inspected(strategy: Optional[Strategy]) -> Subject:
        return subject_of(src, strategy, step, file_suffix)

    strategy = None if src_strategy is None else read_strategy(src_strategy)
    subject = inspected(strategy)
    resumed = [*_resume(src, options)]
    if resumed and subject.checkpoint is None:
        return Suggestions(subject, items=resumed)
    needs_strategy = subject.form.options.needs_strategy
    if subject.problems and (subject.contents is None or (needs_strategy and strategy and subject.checkpoint is None)):
        # Without contents there is nothing to suggest, and every conversion with this strategy would fail.
        raise CheckpointError(subject.problems[0].text, file=src, hint=subject.problems[0].hint)
    places = _places(src)
    if strategy is None and subject.form.options.by_rank and find_rank(places[0]) is not None:
        part = "directory" if subject.one_rank else "file"
        hint = f"pass the directory of all ranks: reshard suggest {shlex.quote(os.path.dirname(absolute(places[0])))}"
        raise CheckpointError(f"{src}: is the {part} of one rank", file=src, hint=hint)
    beside = strategies_in(places)
    fitting: list[Strategy] = []
    recorded = recorded_strategy(src) if needs_strategy and strategy is None else None
    if recorded is not None:
        strategy, subject = recorded.strategy, inspected(recorded.strategy)
    elif needs_strategy and strategy is None:
        judged = []
        for each in _possible(subject, beside):
            with suppress(InputError):
                judged.append((each, inspected(each)))
        judged = [(each, by_it) for each, by_it in judged if by_it.checkpoint is not None]
        fitting = [each for each, _ in judged]
        if len(judged) == 1:
            ((strategy, subject),) = judged
    model = _model(src, subject, places)._replace(packing=packing_of(src))
    advisor = _Advisor(_argument(src), devices, strategy, tuple(options), subject, model, beside, fitting)
    return Suggestions(
        subject,
        None if strategy is None else strategy.path,
        bool(fitting),
        recorded is not None,
        [StrategyBeside(each.path, each.device_count, len(each.parameters)) for each in beside],
        model,
        [*resumed, *advisor.all()],
    )


def _resume(src: str, options: Sequence[str]) -> Iterator[Suggestion]:
    """The command that completes a conversion."""
    with suppress(ReshardError):
        status = status_of(src)
        if status.resumable and not status.complete:
            pairs = zip(options[::2], options[1::2])
            words = (word for pair in pairs if pair[0] in _OF_RESUME for word in pair)
            command = ("reshard", "resume", _argument(src), *words)
            yield Suggestion("resume", "Complete the conversion that writes this checkpoint", command)


def _lost(subject: Subject) -> list[int]:
    """Ranks without a readable file."""
    return [file.number for file in subject.files if file.number is not None and file.state != "ok"]


def _places(src: str) -> list[str]:
    """The directory of a checkpoint, and its parent."""
    place = fixed_directory(src) if RANK in src else src
    if not is_directory(place or os.curdir):
        place = os.path.dirname(place)
    place = place.rstrip("/") or ("/" if place.startswith("/") else "")
    if "://" in place:
        parent = os.path.dirname(place)
        return [place] if parent.endswith(":/") else [place, parent]
    if place in ("", os.curdir, os.pardir) or place.endswith(os.sep + os.pardir):
        return [place, os.path.join(place, os.pardir)]
    return [place, os.path.dirname(place)]


def _possible(subject: Subject, candidates: Sequence[Strategy]) -> list[Strategy]:
    """The strategies that list all weights, for the ranks with files; for more only where some are evidently lost."""
    stored = () if subject.contents is None else subject.contents.stored
    weights = {item.name for item in stored if item.kind == WEIGHTS}
    present = {file.number for file in subject.files if file.number is not None and file.state != "missing"}
    if not weights or not present:
        return []
    evident = present != set(range(len(present)))
    return [
        each
        for each in candidates
        if weights.issubset(each.parameters)
        and (each.device_count > max(present) if evident else each.device_count == len(present))
    ]


def _model(src: str, subject: Subject, places: Sequence[str]) -> Model:
    """The names of the tensors, and the table for them."""
    config = None
    for place in places:
        try:
            config = config or config_beside(place or os.curdir)
        except ReshardError as error:
            subject.add(0, error.message, error.hint)
    value = None if config is None else config.get("model_type")
    type = value if isinstance(value, str) else None
    table = type if type in builtin_names() else None
    shapes = _model_shapes(src, subject)
    sides: dict[str, list[str]] = {}
    for name in builtin_names() if table is None else [table]:
        rules = rules_named(name)
        if rules.keeps_others:
            # It has no names of MindFormers.
            continue
        with suppress(InputError):
            settled = settle(rules, None if table is None else config, shapes)
            side = rules.sides[side_of(rules, settled, shapes, None).reverse]
            sides.setdefault(side, []).append(name)
    if not sides:
        return Model(config, type)
    side = max(sides, key=lambda each: len(sides[each]))
    model = Model(config, type, side, sides[side])
    if table is None or config is None:
        return model
    rules = rules_named(table)
    about = {option.name: option.about for option in rules.options}
    undetermined = settle(rules, config, shapes).undetermined.items()
    return model._replace(
        undetermined=[(name, values, f"{' or '.join(values)}. {about[name]}") for name, values in undetermined]
    )


def _model_shapes(src: str, subject: Subject) -> Mapping[str, tuple[int, ...]]:
    """Shapes of tensors under a model's own names; of slices, if it is unknown how they are cut."""
    if subject.checkpoint is not None:
        with suppress(InputError):
            return {name: tensor.shape for name, tensor in _written(src, subject).tensors.items()}
    return {} if subject.contents is None else {item.name: item.shapes[0] for item in subject.contents.stored}


def _written(
    src: str, subject: Subject, table: Optional[str] = None, config: Optional[str] = None, to: str = _HUGGINGFACE
) -> Checkpoint:
    """The checkpoint as a conversion names its tensors.

    Raises:
        InputError: the table does not fit.
    """
    assert subject.checkpoint is not None
    dequantize = _DTYPE if subject.quantised else None
    edits = typed_edits(src, names=table or NO_TABLE, config=config, dequantize=dequantize)
    edits = between_forms(edits, src, form_of(src), to)
    return edited(subject.checkpoint, edits, Report(), complete=bool(subject.complete))


Words = tuple[tuple[str, ...], tuple[Missing, ...]]
"""Words of a command, and what is missing for them."""


@dataclass
class _Advisor:
    """The commands for one checkpoint."""

    _src: str
    _devices: Optional[int]
    _strategy: Optional[Strategy]
    _options: tuple[str, ...]
    _subject: Subject
    _model: Model
    _beside: Sequence[Strategy]
    _fitting: Sequence[Strategy]
    _outputs: set[str] = field(default_factory=set)
    # By path of a strategy, parameters that the checkpoint lacks.
    _unfit: dict[str, list[str]] = field(default_factory=dict)

    @property
    def _form(self) -> FormOptions:
        return self._subject.form.options

    def all(self) -> Iterator[Suggestion]:
        """The commands, in the order of the work."""
        for strategy in self._fitting if self._strategy is None else [self._strategy]:
            if self._form.needs_strategy and not strategy.is_none:
                title = f"Check that this checkpoint was saved with {strategy.path}"
                command = ("reshard", "strategy", "check", _argument(strategy.path), self._src, *self._options)
                yield Suggestion("check-strategy", title, command)
        if self._strategy is not None and self._form.needs_strategy and self._subject.checkpoint is None:
            # The recorded strategy does not fit: problems list why, and every conversion would fail.
            return
        yield from self._recover()
        if self._subject.complete is False:
            # No step can be converted: problems list what is missing.
            return
        if self._form.shards:
            yield self._cluster(self._devices, self._shards(self._subject.form.name))
        if self._subject.undecoded:
            # Codes of an unknown scheme: other forms and programs have no use for them.
            return
        yield from self._for_strategies()
        if self._subject.form.name != _HUGGINGFACE:
            yield self._huggingface()
        if self._form.names is Names.MODEL:
            words, missing = _together(self._shards(_DCP), self._names(_MINDFORMERS))
            yield self._convert("pytorch", "PyTorch, a distributed checkpoint (DCP)", _DCP, words, missing)
        if self._subject.quantised:
            same = ("--dst-strategy", "same") if self._form.cut else ()
            words = (*self._same_form(), *same) if self._form.written else ("--to", _HUGGINGFACE)
            yield self._convert("dequantize", f"Quantised weights as {_DTYPE}", _DTYPE.lower(), words)

    def _recover(self) -> Iterator[Suggestion]:
        """Lost ranks from replicas, where every slice is on some rank."""
        lost = _lost(self._subject)
        if not self._form.by_rank or not lost or self._subject.complete is False:
            return
        strategy, missing = self._source()
        command = ("reshard", "recover", self._src, self._out("recovered"), "--strategy", strategy[1], *self._options)
        condition = "" if self._subject.complete else ", if replicas exist"
        yield Suggestion("recover", f"Restore {rank_ranges(lost)} from replicas{condition}", command, missing)

    def _for_strategies(self) -> Iterator[Suggestion]:
        """Rank files, or the same form, with the layouts of a strategy."""
        same_form = self._form.cut and not self._form.shards and self._form.written
        to = self._same_form() if same_form else ()
        names: Words = ((), ()) if same_form else self._names(_HUGGINGFACE)
        targets = self._targets()
        of: list[tuple[Optional[int], str, tuple[Missing, ...]]] = [
            (each.device_count, _argument(each.path), ()) for each in targets[:_MAX_TARGETS]
        ]
        if not of and self._devices == 1:
            of.append((1, NONE, ()))
        elif not of:
            of.append((self._devices, DST_STRATEGY, (Missing(DST_STRATEGY, self._dst_strategy_text()),)))
        for count, strategy, missing in of:
            laid_out = f", laid out as in {strategy}" if len(of) > 1 else ""
            words, lacking = _together(((*to, "--dst-strategy", strategy), missing), names)
            if same_form:
                yield self._cluster(count, (words, lacking), laid_out)
            else:
                devices = "" if count is None else f": {plural(count, 'device')}"
                title = f"MindSpore, a file for each rank{devices}{laid_out}"
                yield self._convert("mindspore", title, "ranks", words, lacking)

    def _huggingface(self) -> Suggestion:
        """Whole weights for inference engines."""
        words, missing = self._names(_MINDFORMERS)
        excluded: list[str] = [] if words else self._training_globs()
        if self._model.side is None:
            text = "Names stay unchanged, and engines expect those of Hugging Face: --names takes a table of your own."
            missing = (*missing, Missing(None, text))
        checkpoint = self._subject.checkpoint
        if checkpoint is None or not any(os.path.basename(name) == "config.json" for name in checkpoint.extra_files):
            text = "Engines also need config.json and the tokenizer's files: add --config DIR of the base model."
            if "--config" in words:
                text = "Engines also need the tokenizer's files: --config with the base model's directory copies them."
            missing = (*missing, Missing(None, text))
        words = ("--to", _HUGGINGFACE, *words, *(word for glob in excluded for word in ("--exclude", glob)))
        return self._convert("huggingface", "Hugging Face, for inference", _HUGGINGFACE, words, missing)

    def _convert(
        self, aim: str, title: str, suffix: str, words: tuple[str, ...], missing: Sequence[Missing] = ()
    ) -> Suggestion:
        """A conversion, proved at its end."""
        source, lacking = self._source()
        # Other forms and programs have no use for codes and scales.
        if self._subject.quantised and aim != "cluster":
            words += ("--dequantize", _DTYPE)
        command = ("reshard", "convert", self._src, self._out(suffix), "--verify", *source, *words)
        return Suggestion(aim, title, (*command, *self._options), (*lacking, *missing))

    def _source(self) -> Words:
        """The source's strategy."""
        if not self._form.needs_strategy:
            return (), ()
        if self._strategy is not None:
            return ("--src-strategy", _argument(self._strategy.path)), ()
        text = "The strategy that this checkpoint was saved with: a file, a directory, or none if it is not sharded. "
        if self._fitting:
            text += f"The headers fit several: {', '.join(each.path for each in self._fitting)}."
        else:
            text += "Rank files do not record it, and no strategy beside them fits."
        return ("--src-strategy", SRC_STRATEGY), (Missing(SRC_STRATEGY, text),)

    def _dst_strategy_text(self) -> str:
        devices = "the new cluster" if self._devices is None else f"{plural(self._devices, 'device')}"
        return (
            f"The strategy of {devices}: a file or a directory. MindSpore writes it when it compiles the network "
            "for them; `reshard strategy derive` and `make` compute it on any machine."
            + "".join(
                f" {path} does not suit: it lists {listing(names, 2)}, which this checkpoint lacks."
                for path, names in self._unfit.items()
            )
        )

    def _targets(self) -> list[Strategy]:
        """Strategies beside the checkpoint that list its weights and no others, and are not its own."""
        if not self._beside:
            return []
        names = self._written_names()
        weights = {name for name in names if is_weight(name, names)}
        own = self._fitting if self._strategy is None else [self._strategy]
        targets = []
        for each in self._beside:
            listed = frozenset(each.parameters)
            if (
                weights
                and weights <= listed
                and self._devices in (None, each.device_count)
                and not any(equal_layouts(each, other) for other in own)
            ):
                missing = needed(sorted(listed - names), listed & names, each, listed | names)
                if missing:
                    self._unfit[each.path] = missing
                else:
                    targets.append(each)
        return targets

    def _written_names(self) -> frozenset[str]:
        """Names of tensors in rank files."""
        model = self._model
        table = None
        if model.side == _HUGGINGFACE and model.type is not None and model.type in model.tables:
            table = ",".join([model.type, *(f"{name}={values[0]}" for name, values, _ in model.undetermined)])
        path = None if model.config is None else model.config.path
        if self._subject.checkpoint is not None:
            with suppress(InputError):
                return frozenset(_written(self._src, self._subject, table, path if table else None, _RANKS).tensors)
        stored = () if self._subject.contents is None else self._subject.contents.stored
        return frozenset(item.name for item in stored if item.kind == WEIGHTS)

    def _training_globs(self) -> list[str]:
        """Patterns for optimizer state and values under the names that a conversion writes."""
        stored = () if self._subject.contents is None else self._subject.contents.stored
        names = [item.name for item in stored]
        if self._subject.checkpoint is not None:
            with suppress(InputError):
                written = _written(self._src, self._subject)
                names = [*written.tensors, *written.values()]
        return training_globs(names, frozenset(names))

    def _names(self, side: str) -> Words:
        """The table for a target with the names of the other side."""
        model = self._model
        if model.side != side:
            return (), ()
        if model.packing:
            recorded = tuple(words_of_packing(model.packing))
            if "--config" not in recorded or exists(recorded[-1]):
                return recorded, ()
            text = f"The model's config.json: {recorded[-1]}, which the records list, does not exist."
            return (*recorded[:-1], CONFIG), (Missing(CONFIG, text),)
        if model.config is None or model.type is None or model.type not in model.tables:
            tables = ", ".join(model.tables)
            return ("--names", "TABLE", "--config", CONFIG), (
                Missing(
                    "TABLE",
                    f"The table for the model; of the built-in ones, {tables} have such names. State its options that "
                    "only change numbers, as in qwen3,gate_up=halves: `reshard names show TABLE`.",
                ),
                Missing(CONFIG, "The model's config.json."),
            )
        stated = [f"{name}={name.upper()}" for name, _, _ in model.undetermined]
        words: tuple[str, ...] = ("--names", ",".join([model.type, *stated]))
        if absolute(model.config.path) != absolute(os.path.join(self._subject.path, "config.json")):
            words += ("--config", _argument(model.config.path))
        return words, tuple(Missing(name.upper(), text) for name, _, text in model.undetermined)

    def _shards(self, form: str) -> Words:
        """A form of PyTorch, cut by rows."""
        if self._devices is not None:
            return ("--to", form, "--shards", str(self._devices)), ()
        return ("--to", form, "--shards", DEVICES), (Missing(DEVICES, "The number of ranks of the new job."),)

    def _same_form(self) -> tuple[str, ...]:
        return () if self._form.by_rank else ("--to", self._subject.form.name)

    def _cluster(self, count: Optional[int], words: Words, more: str = "") -> Suggestion:
        """Another number of devices."""
        title = "Another cluster" if count is None else f"Another cluster: {plural(count, 'device')}"
        return self._convert("cluster", title + more, "resharded" if count is None else f"on-{count}", *words)

    def _out(self, suffix: str) -> str:
        """A new directory: in this one, or for an object beside it."""
        path = fixed_directory(self._src) if RANK in self._src else self._src
        path = path.rstrip("/")
        base, _, ending = os.path.basename(path).rpartition(".")
        name = base if base and ending in ("ckpt", "safetensors") else os.path.basename(path)
        if name in ("", os.curdir, os.pardir):
            name = os.path.basename(absolute(path or os.curdir)) or "checkpoint"
        out = f"{name}-{suffix}"
        if "://" in path:
            out = os.path.join(os.path.dirname(path), out)
        elif (absolute(os.curdir) + os.sep).startswith(absolute(path or os.curdir) + os.sep):
            # A target cannot be in its source.
            above = os.path.relpath(os.path.dirname(absolute(path or os.curdir)))
            out = os.path.join(above, out)
        free, number = _argument(out), 1
        while free in self._outputs or exists(free):
            number += 1
            free = _argument(f"{out}-{number}")
        self._outputs.add(free)
        return free


def _together(*parts: Words) -> Words:
    return tuple(word for words, _ in parts for word in words), tuple(each for _, missing in parts for each in missing)


def _argument(path: str) -> str:
    """A path that no command takes for an option."""
    return f"./{path}" if path.startswith("-") else path
