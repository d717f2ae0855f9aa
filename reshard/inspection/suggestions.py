"""The commands for the usual aims with a checkpoint, from names, headers and the files beside it.

Nothing is guessed. A strategy is used only if it is the only one beside the checkpoint that fits the ranks, names and
shapes in the headers, and the first command checks it. Values that only the user has are placeholders in capitals.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Callable, Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError, InputError, ReshardError
from reshard.forms.form import Names
from reshard.forms.ranks.steps import RANK, fixed_directory
from reshard.forms.ranks.tree import find_rank
from reshard.forms.registry import form_of
from reshard.inspection.subject import Subject, subject_of
from reshard.named_tuple import NamedTuple
from reshard.names import Configuration, UndeterminedError, builtin_names, config_beside, rules_named
from reshard.names.options import settle, side_of
from reshard.plan.editing import edited, words_of_packing
from reshard.plan.edits import NO_TABLE, between_forms, typed_edits
from reshard.plan.missing import needed
from reshard.quantised.schemes import stated_settings
from reshard.records.ledger import packing_of, recorded_strategy
from reshard.records.status import status_of
from reshard.storage import absolute, exists, is_directory
from reshard.strategies import NONE, Strategy, read_strategy
from reshard.strategies.beside import equal_layouts, strategies_in
from reshard.text.messages import listing
from reshard.text.names import WEIGHTS, fused_expert, is_weight, training_globs
from reshard.text.report import Report
from reshard.text.wording import plural, rank_ranges

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
        fits: whether slices in the headers have its shapes; None if that was not checked.
    """

    path: str
    devices: int
    parameters: int
    fits: Optional[bool]


class Model(NamedTuple):
    """The names of a checkpoint's tensors, by the built-in tables.

    Attributes:
        config: config.json; None if there is none.
        type: its ``model_type``.
        side: ``huggingface`` or ``mindformers``: the side of the tables that the names are on; None if on neither.
        tables: the tables that have these names; only that of the model's type, if there is one.
        refusal: why that table cannot be applied.
        undetermined: its options that the user must state, each with its possible values and their meaning.
        packing: the table that the conversion that wrote the checkpoint recorded; see `words_of_packing`.
    """

    config: Optional[Configuration] = None
    type: Optional[str] = None
    side: Optional[str] = None
    tables: Sequence[str] = ()
    refusal: Optional[str] = None
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
    if subject.contents is None and subject.problems:
        if resumed:
            return Suggestions(subject, items=resumed)
        raise CheckpointError(subject.problems[0].text, file=src, hint=subject.problems[0].hint)
    places = _places(src)
    if strategy is None and subject.form.options.by_rank and find_rank(places[0]) is not None:
        part = "directory" if subject.one_rank else "file"
        hint = f"pass the directory of all ranks: reshard suggest {shlex.quote(os.path.dirname(absolute(places[0])))}"
        raise CheckpointError(f"{src}: is the {part} of one rank", file=src, hint=hint)
    beside = strategies_in(places)
    fitting: list[Strategy] = []
    recorded = None
    if subject.form.options.needs_strategy and strategy is None:
        recorded = recorded_strategy(src)
    if recorded is not None:
        strategy, subject = recorded.strategy, inspected(recorded.strategy)
    elif subject.form.options.needs_strategy and strategy is None:
        judged = _fitting(subject, beside, inspected)
        fitting = [each for each, _ in judged]
        if len(judged) == 1 and not _may_be_larger(subject, fitting[0]):
            strategy, subject = judged[0]
        elif judged:
            subject.checkpoint = None
    model = _model(src, subject, places)._replace(packing=packing_of(src))
    if src_strategy is not None and subject.form.options.needs_strategy and subject.checkpoint is None and not resumed:
        # Every conversion with this strategy would fail.
        problem = subject.problems[0]
        raise CheckpointError(problem.text, file=src, hint=problem.hint)
    if strategy is not None and not resumed:
        _add_lost(subject)
    advisor = _Advisor(src, devices, strategy, tuple(options), subject, model, beside, fitting)
    judged_all = subject.form.options.needs_strategy and src_strategy is None and recorded is None
    return Suggestions(
        subject,
        None if strategy is None else strategy.path,
        bool(fitting),
        recorded is not None,
        [
            StrategyBeside(
                each.path,
                each.device_count,
                len(each.parameters),
                any(each is other for other in fitting) if judged_all else None,
            )
            for each in beside
        ],
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


def _add_lost(subject: Subject) -> None:
    """A problem, if ranks are lost and no replicas of theirs exist."""
    lost = _lost(subject)
    if subject.form.options.by_rank and subject.complete is False and lost:
        subject.add(
            0,
            f"nothing can restore {rank_ranges(lost)}: by the strategy, no other rank holds a copy of all lost slices",
            "take an older step, or bring the files back",
        )


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


def _present(subject: Subject) -> list[int]:
    """Ranks with a file, ascending."""
    return sorted({file.number for file in subject.files if file.number is not None and file.state != "missing"})


def _may_be_larger(subject: Subject, strategy: Strategy) -> bool:
    """Whether a strategy may be that of another, larger cluster: ranks from 0 on have files, and others do not."""
    present = _present(subject)
    return strategy.device_count > len(present) and present == list(range(len(present)))


def _fitting(
    subject: Subject, candidates: Sequence[Strategy], inspected: Callable[[Strategy], Subject]
) -> list[tuple[Strategy, Subject]]:
    """The strategies that list all weights and whose shapes the slices have, each with the checkpoint by it.

    Of those that place every slice in the same way, only the one with the fewest devices.
    """
    stored = () if subject.contents is None else subject.contents.stored
    weights = {item.name for item in stored if item.kind == WEIGHTS}
    present = _present(subject)
    fitting: list[tuple[Strategy, Subject]] = []
    for strategy in sorted(candidates, key=lambda each: each.device_count):
        if not weights or not weights.issubset(strategy.parameters) or strategy.device_count <= present[-1]:
            continue
        with suppress(InputError):
            judged = inspected(strategy)
            if judged.checkpoint is None or (judged.complete is False and _may_be_larger(subject, strategy)):
                continue
            ranks = frozenset(present)
            if not any(_boxes(judged, ranks) == _boxes(other, ranks) for _, other in fitting):
                fitting.append((strategy, judged))
    return fitting


def _boxes(subject: Subject, ranks: frozenset[int]) -> dict[str, object]:
    """The boxes of every tensor, and which of these ranks hold them."""
    checkpoint = subject.checkpoint
    return {
        name: {
            (sharding.stored_box(number), ranks.intersection(sharding.holders(number)))
            for sharding in tensor.shardings
            for number in range(sharding.grid.slice_count)
        }
        for name, tensor in ({} if checkpoint is None else checkpoint.tensors).items()
    }


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
    undetermined: Iterable[tuple[str, Sequence[str]]] = ()
    try:
        if subject.checkpoint is None:
            undetermined = settle(rules, config, shapes).undetermined.items()
        else:
            _written(src, subject, table, config.path, _RANKS if side == _HUGGINGFACE else _HUGGINGFACE)
    except UndeterminedError as error:
        undetermined = error.options
    except InputError as error:
        return model._replace(refusal=error.message)
    about = {option.name: option.about for option in rules.options}
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


class _Advisor:
    """The commands for one checkpoint."""

    def __init__(
        self,
        src: str,
        devices: Optional[int],
        strategy: Optional[Strategy],
        options: tuple[str, ...],
        subject: Subject,
        model: Model,
        beside: Sequence[Strategy],
        fitting: Sequence[Strategy],
    ) -> None:
        self._src = _argument(src)
        self._devices = devices
        self._strategy = strategy
        self._options = options
        self._subject = subject
        self._model = model
        self._beside = beside
        self._fitting = fitting
        self._form = subject.form.options
        self._outputs: set[str] = set()
        # By path of a strategy, parameters that the checkpoint lacks.
        self._unfit: dict[str, list[str]] = {}

    def all(self) -> Iterator[Suggestion]:
        """The commands, in the order of the work."""
        yield from self._check_strategy()
        if self._strategy is not None and self._form.needs_strategy and self._subject.checkpoint is None:
            # The strategy does not fit: problems list why, and every conversion would fail.
            return
        yield from self._recover()
        if self._subject.complete is False:
            # No step can be converted: problems list what is missing.
            return
        if self._form.shards:
            words, missing = self._shards(self._subject.form.name)
            yield self._convert(
                "cluster", self._cluster_title(self._devices), self._suffix(self._devices), words, missing
            )
        if self._subject.undecoded and not self._lacks_settings:
            # Codes of an unknown scheme: other forms and programs have no use for them.
            return
        yield from self._for_strategies()
        if self._subject.form.name != _HUGGINGFACE:
            yield self._huggingface()
        if self._form.names is Names.MODEL:
            words, missing = _together(self._shards(_DCP), self._names(_MINDFORMERS))
            yield self._convert("pytorch", "PyTorch, a distributed checkpoint (DCP)", _DCP, words, missing)
        if self._subject.quantised or self._lacks_settings:
            same = ("--dst-strategy", "same") if self._form.cut else ()
            words = (*self._same_form(), *same) if self._form.written else ("--to", _HUGGINGFACE)
            yield self._convert("dequantize", f"Quantised weights as {_DTYPE}", _DTYPE.lower(), words)

    def _check_strategy(self) -> Iterator[Suggestion]:
        strategies = self._fitting if self._strategy is None else [self._strategy]
        for strategy in strategies if self._form.needs_strategy else ():
            if not strategy.is_none:
                command = ("reshard", "strategy", "check", _argument(strategy.path), self._src, *self._options)
                yield Suggestion(
                    "check-strategy", f"Check that this checkpoint was saved with {strategy.path}", command
                )

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
                yield self._convert(
                    "cluster", self._cluster_title(count) + laid_out, self._suffix(count), words, lacking
                )
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
        stored = () if self._subject.contents is None else self._subject.contents.stored
        if not words and fused_expert(item.name for item in stored) is not None:
            config = self._model.config
            words = ("--config", CONFIG if config is None else _argument(config.path))
            if config is None:
                text = "The model's config.json, which decides the names of the experts."
                missing = (*missing, Missing(CONFIG, text))
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
        if (self._subject.quantised or self._lacks_settings) and aim != "cluster":
            words += ("--dequantize", _DTYPE)
        if "--dequantize" in words and self._lacks_settings:
            at = words.index("--config") if "--config" in words else len(words)
            words = (*words[:at], *words[at + 2 :], "--config", CONFIG)
            text = "The config.json of the quantised model, with its quantization_config."
            missing = (*(each for each in missing if each.placeholder != CONFIG), Missing(CONFIG, text))
        if aim in ("huggingface", "mindspore") and self._names_undecided():
            words += ("--rename", "RENAME")
            text = "'*=*' keeps model.* as a model's own names; 'model.*=*' removes it as a key of a trainer's state."
            missing = (*missing, Missing("RENAME", text))
        command = ("reshard", "convert", self._src, self._out(suffix), "--verify", *source, *words)
        return Suggestion(aim, title, (*command, *self._options), (*lacking, *missing))

    def _names_undecided(self) -> bool:
        """Whether nothing shows which names are the model's."""
        checkpoint = self._subject.checkpoint
        if checkpoint is None or self._form.names is Names.MODEL:
            return False
        from reshard.names import plain_names

        keys = getattr(checkpoint, "nested", {})
        return bool(plain_names([*checkpoint.tensors], checkpoint.objects, keys, True).undecided)

    @property
    def _lacks_settings(self) -> bool:
        """Whether tensors are quantised and only the model's settings are missing."""
        config = self._model.config
        return self._subject.undecoded and (config is None or not stated_settings(config))

    def _source(self) -> Words:
        """The source's strategy."""
        if not self._form.needs_strategy:
            return (), ()
        if self._strategy is not None:
            return ("--src-strategy", _argument(self._strategy.path)), ()
        return ("--src-strategy", SRC_STRATEGY), (Missing(SRC_STRATEGY, self._src_strategy_text()),)

    def _src_strategy_text(self) -> str:
        if len(self._fitting) > 1:
            several = ", ".join(f"{each.path} ({plural(each.device_count, 'device')})" for each in self._fitting)
            return f"The strategy that this checkpoint was saved with. The headers fit several: {several}."
        if self._fitting:
            (strategy,) = self._fitting
            present = _present(self._subject)
            absent = range(len(present), strategy.device_count)
            return (
                f"The strategy that this checkpoint was saved with. It is {strategy.path} "
                f"({plural(strategy.device_count, 'device')}) only if {rank_ranges(absent)} are lost."
            )
        return (
            "The strategy that this checkpoint was saved with: a file, a directory, or none if it is not sharded. Rank "
            "files do not record it, and no strategy beside them fits."
        )

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
        if model.refusal is not None:
            return (), (Missing(None, f"Names stay unchanged, because the table does not fit: {model.refusal}"),)
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

    @staticmethod
    def _cluster_title(count: Optional[int]) -> str:
        return "Another cluster" if count is None else f"Another cluster: {plural(count, 'device')}"

    @staticmethod
    def _suffix(count: Optional[int]) -> str:
        return "resharded" if count is None else f"on-{count}"

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
