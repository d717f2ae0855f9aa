"""The commands for the usual aims with a checkpoint, from names, headers and the files beside it.

Nothing is guessed. A strategy is used only if it is the only one beside the checkpoint that fits the ranks, names and
shapes in the headers, and the first command checks it. Values that only the user has are placeholders in capitals; what
a conversion asks for itself, in an error that names the option, is not computed here.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.asked import Edits, Source
from reshard.checkpoints.checkpoint import Checkpoint, Packing
from reshard.errors import CheckpointError, InputError, ReshardError
from reshard.forms.form import FormOptions, Names
from reshard.forms.ranks.naming import RANK, fixed_directory
from reshard.forms.ranks.tree import find_rank
from reshard.forms.registry import form_named
from reshard.inspection.checkpoint import Inspected, Problem, inspect, problems_of
from reshard.names import Configuration, builtin_names, config_beside, families_of, rules_named, table_of_model
from reshard.names.rules import settle, side_of
from reshard.plan.checks import needed
from reshard.plan.editing import Editing
from reshard.plan.edits import NO_TABLE, edit_rules
from reshard.records.ledger import recorded_packing, recorded_strategy
from reshard.records.status import status_of
from reshard.storage import absolute, exists, is_directory
from reshard.strategies import NONE, Strategy, read_strategy
from reshard.strategies.read import equal_layouts, strategies_in
from reshard.text.messages import Report, listing, plural, rank_ranges
from reshard.text.names import WEIGHTS, is_weight, training_globs

SRC_STRATEGY, DST_STRATEGY, DEVICES, TABLE, CONFIG = "SRC_STRATEGY", "DST_STRATEGY", "DEVICES", "TABLE", "CONFIG"
"""Placeholders of strategies, of the number of devices, of a table of names, and of the model's config.json."""

# The options of stores, which no record contains.
_OF_STORES = ("--endpoint-url",)
# Commands for one aim, where several strategies suit it.
_MAX_TARGETS = 4
_OPTIMIZER = (
    "Optimizer state, if there is any, follows its weights with --optimizer keep. The table may need options of the "
    "MindFormers run, such as gate_up; an error lists them."
)
_HUGGINGFACE, _DCP = "huggingface", "dcp"
# A side of the built-in tables; the other is Hugging Face's.
_MINDFORMERS = "mindformers"
_DTYPE = "BFloat16"
_NUMBER = re.compile(r"[0-9]+")


class Missing(NamedTuple):
    """Information that only the user has: its placeholder, None if the command runs without it, and a text."""

    placeholder: str | None
    text: str


class Suggestion(NamedTuple):
    """A command for an aim, and what has to be added before it runs, or before its result is used."""

    aim: str
    title: str
    command: tuple[str, ...]
    missing: tuple[Missing, ...] = ()


class Model(NamedTuple):
    """The names of a checkpoint's tensors, by the built-in tables.

    Attributes:
        config: config.json; None if there is none.
        type: its ``model_type``.
        side: the side of the tables that the names are on, such as ``huggingface``; None if on none.
        tables: the tables that have these names; only that of the model's type, if there is one.
        undetermined: its options that the user must state, each with its possible values and their meaning.
        packing: of the conversion that wrote the checkpoint.
        names: of the tensors as a conversion without a table writes them, and of the values; None if unknown.
    """

    config: Configuration | None = None
    type: str | None = None
    side: str | None = None
    tables: Sequence[str] = ()
    undetermined: Sequence[tuple[str, Sequence[str], str]] = ()
    packing: Packing | None = None
    names: tuple[Sequence[str], Sequence[str]] | None = None

    @property
    def by_family(self) -> bool:
        """Whether one table leads from the side to Hugging Face for all models, so that tables are their families."""
        return self.side is not None and bool(families_of(self.side))


@dataclass
class Suggestions:
    """All commands, and what they are based on.

    Attributes:
        strategy: the path of the strategy that commands use; None if unknown or recorded in the checkpoint.
        found_by: why it is this one, where none was named.
        beside: other strategies near it.
    """

    inspected: Inspected
    problems: list[Problem]
    strategy: str | None = None
    found_by: str | None = None
    beside: Sequence[Strategy] = ()
    model: Model = field(default_factory=Model)
    items: Sequence[Suggestion] = ()


def suggest(source: Source, devices: int | None = None, options: Sequence[str] = ()) -> Suggestions:
    """The commands for a checkpoint of any form.

    Args:
        source: the checkpoint; without a strategy, one beside it is looked for.
        devices: of the next cluster; None if unknown.
        options: options that every command gets, each followed by its value.

    Raises:
        UsageError: an option does not go with the form.
        InputError: there is no checkpoint, no such step, or the strategy does not fit.
        RetryableError: reading failed in a way that may pass.
    """
    src, strategy = source.path, None if source.strategy is None else read_strategy(source.strategy)
    inspected = inspect(source, strategy)
    problems = problems_of(inspected)
    resumed = [*_resume(src, options)]
    if resumed and inspected.shown.checkpoint is None:
        return Suggestions(inspected, problems, items=resumed)
    needs_strategy = inspected.form.options.needs_strategy
    unreadable = inspected.shown.contents is None
    if problems and (unreadable or (needs_strategy and strategy and inspected.shown.checkpoint is None)):
        # Without contents there is nothing to suggest, and every conversion with this strategy would fail.
        raise CheckpointError(problems[0].text, file=src, hint=problems[0].hint)
    places = _places(src)
    if strategy is None and inspected.form.options.by_rank and find_rank(places[0]) is not None:
        part = "directory" if inspected.one_rank else "file"
        hint = f"pass the directory of all ranks: reshard suggest {shlex.quote(os.path.dirname(absolute(places[0])))}"
        raise CheckpointError(f"{src}: is the {part} of one rank", file=src, hint=hint)
    beside = strategies_in(places)
    fitting: list[Strategy] = []
    found_by = None
    recorded = recorded_strategy(src) if needs_strategy and strategy is None else None
    if recorded is not None:
        strategy, inspected = recorded.strategy, inspect(source, recorded.strategy)
        found_by = "recorded by the conversion that wrote this checkpoint"
    elif needs_strategy and strategy is None:
        judged = []
        for each in _possible(inspected, beside):
            with suppress(InputError):
                by_it = inspect(source, each)
                judged += [] if by_it.shown.checkpoint is None else [(each, by_it)]
        fitting = [each for each, _ in judged]
        if len(judged) == 1:
            ((strategy, inspected),) = judged
            found_by = "the only one here that fits the ranks, names and shapes in the headers"
    problems = problems_of(inspected)
    model = _model(src, inspected, places, problems)._replace(packing=recorded_packing(src))
    advisor = _Advisor(_argument(src), devices, strategy, tuple(options), inspected, model, beside, fitting)
    return Suggestions(
        inspected,
        problems,
        None if strategy is None else strategy.path,
        found_by,
        beside,
        model,
        [*resumed, *advisor.all()],
    )


def _resume(src: str, options: Sequence[str]) -> Iterator[Suggestion]:
    """The command that completes a conversion."""
    with suppress(ReshardError):
        status = status_of(src)
        if status.record.is_repeatable and not status.complete:
            command = ("reshard", "resume", _argument(src), *_of_stores(options))
            yield Suggestion("resume", "Complete the conversion that writes this checkpoint", command)


def _of_stores(options: Sequence[str]) -> list[str]:
    return [word for pair in zip(options[::2], options[1::2]) if pair[0] in _OF_STORES for word in pair]


def _places(src: str) -> list[str]:
    """The directory of a checkpoint, and its parent."""
    place = fixed_directory(src) if RANK in src else src
    if not is_directory(place or os.curdir):
        place = os.path.dirname(place) or os.curdir
    place = place.rstrip("/") or ("/" if place.startswith("/") else "")
    if "://" in place:
        parent = os.path.dirname(place)
        return [place] if parent.endswith(":/") else [place, parent]
    if place in ("", os.curdir, os.pardir) or place.endswith(os.sep + os.pardir):
        return [place, os.path.join(place, os.pardir)]
    return [place, os.path.dirname(place)]


def _possible(inspected: Inspected, candidates: Sequence[Strategy]) -> list[Strategy]:
    """The strategies that list all weights, for the ranks with files; for more only where some are evidently lost."""
    weights = _weights(inspected)
    present = set(inspected.shown.ranks)
    if not weights or not present:
        return []
    evident = present != set(range(len(present)))
    return [
        each
        for each in candidates
        if weights.issubset(each.parameters)
        and (each.device_count > max(present) if evident else each.device_count == len(present))
    ]


def _weights(inspected: Inspected) -> frozenset[str]:
    """Names of weights in the files."""
    stored = () if inspected.shown.contents is None else inspected.shown.contents.stored
    return frozenset(item.name for item in stored if item.kind == WEIGHTS)


def _model(src: str, inspected: Inspected, places: Sequence[str], problems: list[Problem]) -> Model:
    """The names of the tensors, and the table for them."""
    config = None
    for place in places:
        try:
            config = config or config_beside(place or os.curdir)
        except ReshardError as error:
            problems.insert(0, Problem(0, error.message, error.hint))
    value = None if config is None else config.get("model_type")
    type = value if isinstance(value, str) else None
    table = table_of_model(type)
    written, contents = _written(src, inspected), inspected.shown.contents
    names = None if written is None else ([*written.tensors], [*written.values()])
    families = families_of(inspected.form.options.side.value)
    if families:
        return _by_family(src, inspected, Model(config, type, names=names), families)
    if written is not None:
        # Of tensors whose names differ in numbers only, those of the smallest: a weight and its scale are of one layer.
        ordered = sorted(written.tensors, key=lambda each: (len(each), each), reverse=True)
        examples = {_NUMBER.sub("*", name): name for name in ordered}
        shapes = {name: written.tensors[name].shape for name in examples.values()}
    else:
        # Slices, if it is unknown how they are cut.
        shapes = {item.name: item.shapes[0] for item in contents.stored} if contents else {}
    sides: dict[str, list[str]] = {}
    undetermined: list[tuple[str, Sequence[str], str]] = []
    for name in builtin_names() if table is None else [table]:
        rules = rules_named(name)
        if rules.keeps_others:
            # It has no names of MindFormers.
            continue
        with suppress(InputError):
            settled = settle(rules, None if table is None else config, shapes)
            side = rules.sides[side_of(rules, settled, shapes, None).reverse]
            sides.setdefault(side, []).append(name)
            about = {option.name: option.about for option in rules.options}
            undetermined = [
                (option, values, f"{' or '.join(values)}. {about[option]}")
                for option, values in settled.undetermined.items()
                if name == table
            ]
    if not sides:
        return Model(config, type, names=names)
    side = max(sides, key=lambda each: len(sides[each]))
    return Model(config, type, side, sides[side], undetermined, names=names)


def _by_family(src: str, inspected: Inspected, model: Model, families: Sequence[str]) -> Model:
    """The same with those families of the form's side whose table has the names of the checkpoint."""
    path = None if model.config is None else model.config.path
    written = {name: _written(src, inspected, name, path) for name in families}
    fitting = {name: frozenset(each.tensors) for name, each in written.items() if each is not None}
    # A mixture of experts may have none: its table then gives the same names.
    table = table_of_model(model.type) or model.type
    tables = [table] if table in fitting else [*fitting][: 1 if len({*fitting.values()}) == 1 else None]
    side = inspected.form.options.side.value
    return model._replace(side=side, tables=tables) if tables else model


def _written(src: str, inspected: Inspected, table: str = NO_TABLE, config: str | None = None) -> Checkpoint | None:
    """The checkpoint as a conversion names its tensors; None if the table does not fit."""
    checkpoint = inspected.shown.checkpoint
    asked = Edits(names=table, config=config, dequantize=_DTYPE if inspected.quantised else None)
    with suppress(InputError):
        edits = edit_rules(src, asked, form_named(_HUGGINGFACE))
        complete = bool(inspected.shown.complete)
        return None if checkpoint is None else Editing(checkpoint, edits, Report(), complete=complete).edited()
    return None


@dataclass
class _Advisor:
    """The commands for one checkpoint."""

    _src: str
    _devices: int | None
    _strategy: Strategy | None
    _options: tuple[str, ...]
    _inspected: Inspected
    _model: Model
    _beside: Sequence[Strategy]
    _fitting: Sequence[Strategy]
    _outputs: set[str] = field(default_factory=set)
    # What each placeholder stands for.
    _texts: dict[str, str] = field(default_factory=dict)

    @property
    def _form(self) -> FormOptions:
        return self._inspected.form.options

    def all(self) -> Iterator[Suggestion]:
        """The commands, in the order of the work."""
        shown, form = self._inspected.shown, self._form
        for strategy in self._fitting if self._strategy is None else [self._strategy]:
            if form.needs_strategy and not strategy.is_none:
                title = f"Check that this checkpoint was saved with {strategy.path}"
                yield self._suggestion(
                    "check-strategy", title, "strategy", "check", _argument(strategy.path), self._src
                )
        if self._strategy is not None and form.needs_strategy and shown.checkpoint is None:
            # The recorded strategy does not fit: problems list why, and every conversion would fail.
            return
        lost = sorted({*shown.absent, *shown.damaged})
        if form.by_rank and lost and shown.complete is not False:
            title = f"Restore {rank_ranges(lost)} from replicas" + ("" if shown.complete else ", if replicas exist")
            source = self._source()[1]
            yield self._suggestion("recover", title, "recover", self._src, self._out("recovered"), "--strategy", source)
        if shown.complete is False:
            # No step can be converted: problems list what is missing.
            return
        if form.shards:
            training = self._inspected.form.training
            notes = [] if training is None else [training.sizes_note(self._inspected.path, shown.step or "latest")]
            yield self._cluster(self._devices, "", *self._shards(self._inspected.form.name), notes=notes)
        if self._inspected.undecoded:
            # Codes of an unknown scheme: other forms and programs have no use for them.
            return
        yield from self._for_strategies()
        if self._inspected.form.name != _HUGGINGFACE:
            yield self._huggingface()
        if form.names is Names.MODEL:
            words = (*self._shards(_DCP), *self._names(_MINDFORMERS))
            yield self._convert("pytorch", "PyTorch, a distributed checkpoint (DCP)", _DCP, *words)
        if self._inspected.quantised:
            same = ("--dst-strategy", "same") if form.cut else ()
            words = (*self._same_form(), *same) if form.written else ("--to", _HUGGINGFACE)
            yield self._convert("dequantize", f"Quantised weights as {_DTYPE}", _DTYPE.lower(), *words)

    def _for_strategies(self) -> Iterator[Suggestion]:
        """Rank files, or the same form, with the layouts of a strategy."""
        same_form = self._form.cut and not self._form.shards and self._form.written
        # A table gives other names than those in the files; the conversion compares them with the strategy.
        renamed = not same_form and self._model.side not in (None, _MINDFORMERS)
        targets, unfit = ([], "") if renamed else self._targets()
        of = [(each.device_count, _argument(each.path)) for each in targets[:_MAX_TARGETS]]
        if not of:
            of = [(self._devices or 0, NONE if self._devices == 1 else DST_STRATEGY)]
            cluster = "the new cluster" if self._devices is None else plural(self._devices, "device")
            self._texts[DST_STRATEGY] = (
                f"The strategy of {cluster}: a file or a directory. MindSpore writes it when it compiles the network "
                "for them; `reshard strategy derive` and `make` compute it on any machine." + unfit
            )
            saved = self._strategy
            if same_form and self._form.needs_strategy and saved and not saved.is_none and self._devices != 1:
                yield self._derive(saved)
        for count, strategy in of:
            laid_out = f", laid out as in {strategy}" if len(of) > 1 else ""
            words = ("--dst-strategy", strategy)
            if same_form:
                yield self._cluster(count, laid_out, *self._same_form(), *words)
            else:
                title = "MindSpore, a file for each rank" + (f": {plural(count, 'device')}" if count else "") + laid_out
                notes = [_OPTIMIZER] if self._model.by_family else []
                yield self._convert("mindspore", title, "ranks", *words, *self._names(_HUGGINGFACE), notes=notes)

    def _huggingface(self) -> Suggestion:
        """Whole weights for inference engines."""
        words, notes = self._names(_MINDFORMERS), []
        excluded: list[str] = [] if words else self._training_globs()
        if self._model.side is None:
            notes.append("Names stay unchanged, and engines expect those of Hugging Face: --names takes another table.")
        checkpoint = self._inspected.shown.checkpoint
        if checkpoint is None or not any(os.path.basename(name) == "config.json" for name in checkpoint.extra_files):
            lacking = "the tokenizer's files" if "--config" in words else "config.json and the tokenizer's files"
            notes.append(f"Engines also need {lacking}: --config with the directory of the base model copies them.")
        words = ("--to", _HUGGINGFACE, *words, *(word for glob in excluded for word in ("--exclude", glob)))
        return self._convert("huggingface", "Hugging Face, for inference", _HUGGINGFACE, *words, notes=notes)

    def _cluster(self, count: int | None, more: str, *words: str, notes: Sequence[str] = ()) -> Suggestion:
        """Another number of devices."""
        title = f"Another cluster: {plural(count, 'device')}" if count else "Another cluster"
        return self._convert("cluster", title + more, f"on-{count}" if count else "resharded", *words, notes=notes)

    def _derive(self, saved: Strategy) -> Suggestion:
        """The strategy of the new cluster from that of this checkpoint."""
        rest = f",pp={len(saved.stages)}" if len(saved.stages) > 1 else ""
        count = plural(saved.device_count, "device")
        saved_by = f"of the run that saved this checkpoint, on {count}"
        cluster = "the new cluster" if self._devices is None else plural(self._devices, "device")
        texts = {
            "DP": f"data_parallel {saved_by}.",
            "MP": f"model_parallel {saved_by}.",
            "NEW_DP": f"data_parallel of {cluster}.",
            "NEW_MP": f"model_parallel of {cluster}.",
        }
        out = self._out(f"strategy-{self._devices or 'new'}") + ".ckpt"
        sizes = ("--src-sizes", f"dp=DP,mp=MP{rest}", "--dst-sizes", f"dp=NEW_DP,mp=NEW_MP{rest}")
        settings = (*sizes, "--shapes", self._src, "--optimizer-shards", "off", *_of_stores(self._options))
        command = ("reshard", "strategy", "derive", _argument(saved.path), out, *settings)
        missing = (Missing(placeholder, text) for placeholder, text in texts.items())
        title = f"If no run compiled it: the strategy of {cluster}, which is then DST_STRATEGY"
        return Suggestion("derive", title, command, tuple(missing))

    def _convert(self, aim: str, title: str, suffix: str, *words: str, notes: Sequence[str] = ()) -> Suggestion:
        """A conversion, proved at its end."""
        # Other forms and programs have no use for codes and scales.
        if self._inspected.quantised and aim != "cluster":
            words += ("--dequantize", _DTYPE)
        start = ("convert", self._src, self._out(suffix), "--verify", *self._source())
        return self._suggestion(aim, title, *start, *words, notes=notes)

    def _suggestion(self, aim: str, title: str, *words: str, notes: Sequence[str] = ()) -> Suggestion:
        parts = {part for word in words for part in re.split("[,=]", word)}
        missing = [Missing(placeholder, text) for placeholder, text in self._texts.items() if placeholder in parts]
        missing += [Missing(None, note) for note in notes]
        return Suggestion(aim, title, ("reshard", *words, *self._options), tuple(missing))

    def _source(self) -> tuple[str, ...]:
        """The source's strategy."""
        if not self._form.needs_strategy:
            return ()
        if self._strategy is not None:
            return ("--src-strategy", _argument(self._strategy.path))
        text = "The strategy that this checkpoint was saved with: a file, a directory, or none if it is not sharded. "
        if self._fitting:
            text += f"The headers fit several: {', '.join(each.path for each in self._fitting)}."
        else:
            text += "Rank files do not record it, and no strategy beside them fits."
        self._texts[SRC_STRATEGY] = text
        return ("--src-strategy", SRC_STRATEGY)

    def _shards(self, form: str) -> tuple[str, ...]:
        """A form of PyTorch, cut by rows."""
        self._texts[DEVICES] = "The number of ranks of the new job."
        return ("--to", form, "--shards", DEVICES if self._devices is None else str(self._devices))

    def _same_form(self) -> tuple[str, ...]:
        return () if self._form.by_rank else ("--to", self._inspected.form.name)

    def _names(self, side: str) -> tuple[str, ...]:
        """The table for a target with the names of the other side."""
        model = self._model
        if model.by_family:
            # The arguments of the training are the configuration; other families are as they are named.
            if len(model.tables) > 1:
                self._texts[TABLE] = f"The family of the model: {', '.join(model.tables)}."
            return ("--names", TABLE if len(model.tables) > 1 else model.tables[0])
        if model.side != side:
            return ()
        if model.packing is not None:
            return tuple(model.packing.words)
        table = table_of_model(model.type)
        if model.config is None or table is None or table not in model.tables:
            self._texts[TABLE] = (
                f"The table for the model; of the built-in ones, {', '.join(model.tables)} have such names. State its "
                "options that only change numbers, as in qwen3,gate_up=halves: `reshard names show TABLE`."
            )
            self._texts[CONFIG] = "The model's config.json."
            return ("--names", TABLE, "--config", CONFIG)
        self._texts.update((name.upper(), text) for name, _, text in model.undetermined)
        stated = [f"{name}={name.upper()}" for name, _, _ in model.undetermined]
        words: tuple[str, ...] = ("--names", ",".join([table, *stated]))
        if absolute(model.config.path) != absolute(os.path.join(self._inspected.path, "config.json")):
            words += ("--config", _argument(model.config.path))
        return words

    def _targets(self) -> tuple[list[Strategy], str]:
        """Strategies beside the checkpoint that list its weights and no others, and are not its own; why not others."""
        names = _weights(self._inspected) if self._model.names is None else frozenset(self._model.names[0])
        weights = {name for name in names if is_weight(name, names)}
        own = self._fitting if self._strategy is None else [self._strategy]
        targets, unfit = [], ""
        for each in self._beside if weights else ():
            listed = frozenset(each.parameters)
            suits = weights <= listed and self._devices in (None, each.device_count)
            if suits and not any(equal_layouts(each, other) for other in own):
                missing = needed(sorted(listed - names), listed & names, each, listed | names)
                if missing:
                    unfit += f" {each.path} does not suit: it lists {listing(missing, 2)}, which this checkpoint lacks."
                else:
                    targets.append(each)
        return targets, unfit

    def _training_globs(self) -> list[str]:
        """Patterns for optimizer state and values under the names that a conversion writes."""
        contents, names = self._inspected.shown.contents, self._model.names
        if contents is None or all(item.kind == WEIGHTS for item in contents.stored):
            return []
        written = [item.name for item in contents.stored] if names is None else [*names[0], *names[1]]
        return training_globs(written, frozenset(written))

    def _out(self, suffix: str) -> str:
        """A new directory: in this one, or for an object beside it."""
        path = (fixed_directory(self._src) if RANK in self._src else self._src).rstrip("/")
        base, ending = os.path.splitext(os.path.basename(path))
        name = base if ending in (".ckpt", ".safetensors") else os.path.basename(path)
        if name in ("", os.curdir, os.pardir):
            name = os.path.basename(absolute(path or os.curdir)) or "checkpoint"
        place, here = "", absolute(path or os.curdir)
        if "://" in path:
            place = os.path.dirname(path)
        elif (absolute(os.curdir) + os.sep).startswith(here + os.sep):
            # A target cannot be in its source.
            place = os.path.relpath(os.path.dirname(here))
        out = _argument(os.path.join(place, f"{name}-{suffix}"))
        free, number = out, 1
        while free in self._outputs or exists(free):
            number += 1
            free = f"{out}-{number}"
        self._outputs.add(free)
        return free


def _argument(path: str) -> str:
    """A path that no command takes for an option."""
    return f"./{path}" if path.startswith("-") else path
