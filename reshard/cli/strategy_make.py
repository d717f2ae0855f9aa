"""Strategies without a compile: strategy make, from rules; strategy derive, from another run's; strategy rules."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reshard._version import __version__
from reshard.cli import options
from reshard.cli.command import Parsed, argument, command, nearest, option, paths, tables
from reshard.cli.output import is_quiet, say, show_notes
from reshard.errors import StrategyError, UsageError
from reshard.storage import is_directory
from reshard.strategies import Strategy
from reshard.text.globs import matcher
from reshard.text.messages import plural, rank_ranges

if TYPE_CHECKING:
    from reshard.names import NameRules
    from reshard.strategies.rules import AxisSizes, LayoutRules, MadeStage, ModelTensors, TargetRun
    from reshard.strategies.rules.derive import SourceRun

F = TypeVar("F", bound=Callable[..., Any])


def _parse_sizes(text: str) -> object:
    """Devices per kind of parallelism: ``dp=2,mp=4``."""
    # Loaded only here: help does without.
    from reshard.strategies.rules import parse_sizes

    return parse_sizes(text)


def _parse_layers(text: str) -> tuple[int, ...]:
    """Layers per stage: ``8,8``."""
    if not re.fullmatch(r"\s*[0-9]{1,6}(\s*,\s*[0-9]{1,6})*\s*", text):
        raise ValueError(f"{text!r} is not a list of layer counts such as 8,8")
    return tuple(int(number) for number in text.split(","))


def _parse_shards(text: str) -> int:
    """Optimizer shards per weight: ``-1`` or a number, and 0 for ``off``."""
    if text == "off":
        return 0
    if re.fullmatch(r"-1|[1-9][0-9]{0,6}", text):
        return int(text)
    raise ValueError(f"{text!r} is neither off, nor -1, nor a number of shards")


def _sizes(group: str, *names: str, text: str, **attributes: Any) -> Callable[[F], F]:
    return option(group, *names, type=Parsed("sizes", _parse_sizes), metavar="dp=N,mp=N", help=text, **attributes)


def _shapes(text: str, **attributes: Any) -> Callable[[F], F]:
    metavar = "CKPT|INDEX|STRATEGY.json"
    return option("Source", "--shapes", metavar=metavar, shell_complete=paths, help=text, **attributes)


_target_options = options.together(
    option(
        "Target",
        "--layers-per-stage",
        type=Parsed("layers", _parse_layers),
        metavar="N,N",
        show_default="even",
        help="Layers per pipeline stage (MindFormers: offset, num_layer_list); in rounds of all stages where "
        "they are interleaved (vpp, pp_interleave_num).",
    ),
    option(
        "Target",
        "--optimizer-shards",
        type=Parsed("shards", _parse_shards),
        metavar="off|-1|N",
        show_default="off",
        help="How the optimizer shards each weight: not at all, over all replicas, or in N.",
    ),
    option(
        "Target",
        "--optimizer-threshold",
        type=click.IntRange(min=0, max=2**31),
        metavar="KIB",
        show_default="64, as in MindSpore",
        help="Smaller tensors are not sharded.",
    ),
    options.flag("Target", "--weights-only", text="Leave optimizer state out, as for inference."),
    options.flag("Target", "--overwrite", text="Replace existing strategies at OUT."),
    options.verbose("Name every parameter in messages."),
    options.common,
)

_names = options.together(
    option(
        "Source",
        "--names",
        metavar="TABLE",
        shell_complete=tables,
        show_default="unchanged",
        help="Apply this table of names to --shapes first, as convert --names does.",
    ),
    option(
        "Source",
        "--config",
        metavar="FILE|DIR",
        shell_complete=paths,
        show_default="config.json beside --shapes",
        help="File with the sizes that the table of names needs.",
    ),
)


@command(
    "make",
    """
reshard strategy make model.toml target.ckpt \\
    --shapes model.safetensors.index.json --sizes dp=1,mp=8 --weights-only

Sizes of another run, with its optimizer; a file per pipeline stage:
reshard strategy make model.toml target/ --shapes ckpt/ \\
    --src-strategy src.ckpt --sizes dp=4,mp=4,pp=2 --optimizer-shards -1

For a model with Hugging Face's names:
reshard strategy make mcore target.ckpt --shapes qwen3-hf/ --names qwen3 \\
    --set vocab_emb_dp=false --sizes mp=2,pp=2 --weights-only
""",
)
@argument("rules", metavar="RULES")
@argument("out", metavar="OUT")
@_shapes("Full shapes: a checkpoint of any form, the index of one, or a JSON strategy.", required=True)
@option(
    "Source",
    "--src-strategy",
    metavar="FILE|DIR",
    shell_complete=paths,
    help="Strategy of --shapes, if that is a rank tree.",
)
@_names
@option(
    "Parameters",
    "--set",
    "stated",
    multiple=True,
    metavar="NAME=VALUE",
    help="A switch of the model's configuration that RULES declare, such as vocab_emb_dp=false (repeatable).",
)
@_sizes("Target", "--sizes", text="Devices: dp, mp, pp, cp, ep; 1 where left out.", required=True)
@_target_options
def strategy_make(
    rules: str,
    out: str,
    shapes: str,
    src_strategy: str | None,
    names: str | None,
    config: str | None,
    stated: tuple[str, ...],
    sizes: AxisSizes,
    **typed: Any,
) -> None:
    """Make the strategy of a cluster from rules, without the cluster.

    RULES is a TOML file or the name of built-in rules: how parameters are cut, in named axes. OUT is what
    a compile on that cluster would write: a file, .ckpt or .json, of all stages, or a directory for a
    file per stage. If RULES are incomplete, an error prints the missing lines. OUT.made records how OUT
    was made.
    """
    from reshard.strategies import read_strategy
    from reshard.strategies.rules import is_builtin, make_strategy, rules_named

    switches = dict(_switch(text) for text in stated)
    model_rules = rules_named(rules, switches)
    source = None if src_strategy is None else read_strategy(src_strategy)
    show_notes(source.notes if source is not None else ())
    tensors = _under_names(_read_shapes(shapes, source), names, config)
    target = _target(sizes, typed)
    where = f"a copy of {rules} (reshard strategy rules {rules} > model.toml)" if is_builtin(rules) else rules
    try:
        stages = make_strategy(model_rules, tensors, target, where)
    except StrategyError as error:
        unmatched = (name for name in tensors.weights if not any(rule.matches(name) for rule in model_rules.rules))
        if names is None and any(unmatched):
            error.add_hint("if the model has another code's names: --names TABLE")
        raise
    more = {
        "rules_file": rules,
        **({"set": switches} if switches else {}),
        **({} if names is None else {"names": names}),
    }
    made_of = (rules, shapes, src_strategy, names, config)
    _write("make", out, stages, model_rules, tensors, target, more, made_of, typed["overwrite"])


def _switch(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise UsageError(f"--set {text}: is not NAME=VALUE, for example vocab_emb_dp=false")
    return name, value


@command(
    "derive",
    """
reshard strategy derive src.ckpt inference.ckpt --shapes ckpt/ \\
    --src-sizes dp=4,mp=2 --dst-sizes mp=2 --weights-only

A larger mp, where another strategy shows that cuts grow:
reshard strategy derive src.json dst.ckpt --src-sizes dp=4,mp=2 \\
    --also wide.json --also-sizes mp=8 --dst-sizes dp=2,mp=8

With shapes of a model with Hugging Face's names:
reshard strategy derive src.ckpt dst.ckpt --shapes qwen3-hf/ --names qwen3 \\
    --src-sizes dp=4,mp=2 --dst-sizes mp=2 --weights-only
""",
)
@argument("src", metavar="SRC")
@argument("out", metavar="OUT")
@_sizes("Source", "--src-sizes", text="Devices of SRC's run: dp, mp, pp, cp, ep.", required=True)
@option(
    "Source",
    "--also",
    multiple=True,
    metavar="FILE|DIR",
    shell_complete=paths,
    help="One more strategy of the model (repeatable, with --also-sizes).",
)
@_sizes("Source", "--also-sizes", text="Devices of --also's run.", multiple=True)
@_shapes("Full shapes, if SRC does not list them: a checkpoint of any form, the index of one, or a JSON strategy.")
@_names
@option(
    "Parameters",
    "--rules",
    "stated",
    metavar="FILE",
    shell_complete=paths,
    help="Rules for parameters that the strategies leave open.",
)
@_sizes("Target", "--dst-sizes", text="Devices of OUT's run.", required=True)
@_target_options
def strategy_derive(
    src: str,
    out: str,
    src_sizes: AxisSizes,
    also: tuple[str, ...],
    also_sizes: tuple[AxisSizes, ...],
    shapes: str | None,
    names: str | None,
    config: str | None,
    stated: str | None,
    dst_sizes: AxisSizes,
    **typed: Any,
) -> None:
    """Derive the strategy of another run from that of one at hand.

    SRC is the strategy of a run with --src-sizes; OUT is what a compile with other sizes would write,
    as with make. Only facts shown by SRC, and the strategies of --also, are used: everything they leave open
    is an error that prints the lines that would settle it, for a file that --rules names.
    """
    from reshard.forms.model_shapes import strategy_shapes
    from reshard.strategies.rules import make_strategy, read_rules
    from reshard.strategies.rules.derive import learn, model_of, uneven_source
    from reshard.strategies.rules.make import layer_numbers

    if len(also) != len(also_sizes):
        raise UsageError(
            "each --also needs its --also-sizes", hint="pass the sizes of each run: --also-sizes dp=4,mp=2"
        )
    sources = list(map(_source, (src, *also), (src_sizes, *also_sizes)))
    sharded = [source.strategy.path for source in sources if source.has_shards]
    if typed["optimizer_shards"] is None and not typed["weights_only"] and sharded:
        raise UsageError(
            f"--optimizer-shards is missing: {sharded[0]} has optimizer shards, the target may have others",
            hint="pass --optimizer-shards off, -1 for all replicas, or N",
        )
    user_rules = read_rules(stated, partial=True) if stated is not None else None
    if shapes is not None:
        tensors = _read_shapes(shapes, sources[0].strategy)
    else:
        listed = (strategy_shapes(source.strategy) for source in sources)
        known = next((each for each in listed if each is not None), None)
        if names is not None or config is not None:
            raise UsageError("--shapes is missing", hint="--names and --config apply to the tensors of --shapes")
        if known is None:
            raise UsageError(
                f"--shapes is missing: {src} does not contain tensor shapes",
                hint=f"add --shapes CKPT, the checkpoint that was saved with {src}, or the index of its full weights",
            )
        tensors = known
    model = model_of(sources[0], _under_names(tensors, names, config))
    rules = learn(sources, model, dst_sizes, () if user_rules is None else user_rules.rules)
    if user_rules is not None:
        rules = _merged(user_rules, rules)
    target = _target(dst_sizes, typed)
    where = stated if stated is not None else "a file for --rules"
    if target.sizes.stages > 1 and target.layers_per_stage is None:
        uneven = uneven_source(sources, layer_numbers(model.weights, rules.pipeline, rules.path, where))
        if uneven is not None:
            raise UsageError(f"{uneven}, so even stages are not assumed", hint="pass --layers-per-stage N,N")
    stages = make_strategy(rules, model, target, where)
    more = {
        "sources": [{"strategy": one.strategy.path, "sizes": dict(one.sizes.named)} for one in sources],
        "rules_file": stated,
        **({} if names is None else {"names": names}),
    }
    made_of = (src, *also, shapes, stated, names, config)
    _write("derive", out, stages, rules, model, target, more, made_of, typed["overwrite"])


def _source(path: str, sizes: AxisSizes) -> SourceRun:
    from reshard.strategies.read import read_recorded
    from reshard.strategies.rules.derive import SourceRun

    strategy, recorded = read_recorded(path)
    show_notes(strategy.notes)
    return SourceRun(strategy, recorded, sizes)


def _merged(user_rules: LayoutRules, derived: LayoutRules) -> LayoutRules:
    """Rules of --rules, which replace derived rules per weight, and the derived ones."""
    pipeline, shown = user_rules.pipeline, derived.pipeline
    stated = matcher((*pipeline.first, *pipeline.last))
    return replace(
        derived,
        rules=(*user_rules.rules, *derived.rules),
        pipeline=pipeline._replace(
            first=(*pipeline.first, *(name for name in shown.first if not stated(name))),
            last=(*pipeline.last, *(name for name in shown.last if not stated(name))),
        ),
        optimizer_states=user_rules.optimizer_states,
        text=user_rules.text,
    )


@command(
    "rules",
    """
reshard strategy rules
reshard strategy rules llama > model.toml
""",
)
@click.argument("name", metavar="[NAME]", required=False)
@option("Output", "--list", "as_list", is_flag=True, help="List the built-in rules, as without NAME.")
@options.common
def strategy_rules(name: str | None, as_list: bool) -> None:
    """Print the built-in rules NAME, to start from, or list all of them."""
    from reshard.strategies.rules import builtin_names, rules_named

    names = builtin_names()
    if name is None or as_list:
        width = max(map(len, names))
        # The first line of each is a comment with the models that it is for.
        titles = {each: rules_named(each).text.partition("\n")[0].lstrip("# ") for each in names}
        say("\n".join(f"{each:{width}}  {title}" for each, title in titles.items()))
    elif name in names:
        click.echo(rules_named(name).text, nl=False)
    else:
        raise UsageError(
            f"{name}: no built-in rules have this name.{nearest(name, names)}",
            hint="the rules that a strategy shows are used by: reshard strategy derive SRC OUT",
        )


def _target(sizes: AxisSizes, typed: Mapping[str, Any]) -> TargetRun:
    from reshard.strategies.rules import DEFAULT_THRESHOLD, ShardSetting, TargetRun

    threshold = typed["optimizer_threshold"]
    setting = ShardSetting(typed["optimizer_shards"] or 0, DEFAULT_THRESHOLD if threshold is None else threshold)
    return TargetRun(sizes, setting, typed["layers_per_stage"], typed["weights_only"])


def _read_shapes(path: str, strategy: Strategy | None) -> ModelTensors:
    from reshard.checkpoints import FileHandles
    from reshard.forms.model_shapes import read_shapes
    from reshard.forms.request import Means
    from reshard.text.messages import Report

    with FileHandles() as handles:
        return read_shapes(path, strategy, Means(handles, Report()))


def _under_names(tensors: ModelTensors, table: str | None, config: str | None) -> ModelTensors:
    """The tensors that a table makes of a model's.

    Raises:
        UsageError: a configuration without a table.
        NamesError: the table does not fit.
    """
    if table is None:
        if config is not None:
            raise UsageError("--config needs --names", hint="name a table: `reshard names list`")
        return tensors
    # Loaded only here: most strategies are made for names as they are.
    from reshard.asked import Edits
    from reshard.forms.registry import form_named
    from reshard.plan.edits import edit_rules
    from reshard.plan.tables import path_of

    place = tensors.path if is_directory(tensors.path) else os.path.dirname(tensors.path)
    edits = edit_rules(place, Edits(names=table, config=config), form_named("ranks"))
    for rules, reverse in path_of(edits, {name: tensor.shape for name, tensor in tensors.weights.items()}):
        tensors = _under_table(tensors, rules, edits.config, reverse)
    return tensors


def _under_table(
    tensors: ModelTensors, rules: NameRules, sizes: Mapping[str, object] | None, reverse: bool | None
) -> ModelTensors:
    from reshard.names import apply_rules
    from reshard.strategies.rules import FullTensor, model_tensors

    shapes = {name: tensor.shape for name, tensor in tensors.weights.items()}
    # Packing that changes only elements is of no consequence here.
    applied = apply_rules(rules, shapes, sizes, reverse, contents=False)
    renamed = []
    states: dict[str, tuple[str, ...]] = {}
    for name, sources, view in applied.views():
        (dtype, *more_dtypes) = {tensors.weights[source].dtype for source in sources}
        renamed.append(FullTensor(name, view.shape, None if more_dtypes else dtype))
        # A tensor of several weights has the state that all of them have, as with convert --optimizer keep.
        of_sources = [tensors.states.get(source, ()) for source in sources]
        states[name] = tuple(prefix for prefix in of_sources[0] if all(prefix in each for each in of_sources))
    states = {name: prefixes for name, prefixes in states.items() if prefixes}
    made = model_tensors(tensors.path, renamed, tensors.item_sizes)
    return replace(made, states=states, other_shapes=tensors.other_shapes)


def _write(
    command: str,
    out: str,
    stages: Sequence[MadeStage],
    rules: LayoutRules,
    tensors: ModelTensors,
    target: TargetRun,
    more: Mapping[str, Any],
    made_of: Sequence[str | None],
    overwrite: bool,
) -> None:
    """Write a strategy and its record, and print what it is; refuses to overwrite its own input."""
    from reshard.strategies.written import record_path, write_strategy

    sizes, (shards, threshold) = target.sizes, target.shards
    record = {
        "reshard": __version__,
        "command": command,
        "sizes": dict(sizes.named),
        "shapes": tensors.path,
        "layers_per_stage": target.layers_per_stage,
        "optimizer_shards": shards or "off",
        "optimizer_threshold": threshold,
        "weights_only": target.weights_only,
        "rules": rules.text,
        **more,
    }
    _, notes = write_strategy(out, stages, record, overwrite, [path for path in made_of if path is not None])
    show_notes(notes)
    if is_quiet():
        return
    parameters = {name for stage in stages for name in stage.layouts}
    counts = plural(sizes.stage_devices * sizes.stages, "device"), plural(len(stages), "stage")
    say(f"{out}: {counts[0]} in {counts[1]}, {plural(len(parameters), 'parameter')}")
    for stage in stages:
        ranks = rank_ranges(range(stage.first_rank, stage.first_rank + sizes.stage_devices))
        sharded = sum(layout.shard_size != 0 for layout in stage.layouts.values())
        suffix = f", {sharded} with optimizer shards" if sharded else ""
        say(f"  stage {stage.number}: {ranks}, {plural(len(stage.layouts), 'parameter')}{suffix}")
    number = "as many as replicas" if shards < 2 else shards
    say(f"optimizer shards: {f'{number} for tensors of {threshold} KiB and more' if shards else 'off'}")
    say(f"how it was made: {record_path(out)}")
