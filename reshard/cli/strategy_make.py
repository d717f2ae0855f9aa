"""Strategies without a compile: strategy make, from rules; strategy derive, from another run's; strategy rules."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reshard._version import __version__
from reshard.asked import Edits, has_changes
from reshard.cli import options
from reshard.cli.command import Parsed, argument, command, nearest, option, paths
from reshard.cli.output import is_quiet, say, show_notes
from reshard.errors import StrategyError, UsageError
from reshard.storage import is_directory, is_regular_file
from reshard.strategies import Strategy
from reshard.text.globs import matcher
from reshard.text.messages import plural, rank_ranges

if TYPE_CHECKING:
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

_edits = options.group(
    Edits,
    "names",
    "config",
    "dequantize",
    "exclude",
    names={
        "section": "Source",
        "metavar": "TABLE",
        "help": "Apply this table of names to --shapes first, as convert --names does.",
    },
    config={
        "section": "Source",
        "shown": "config.json beside --shapes",
        "help": "File with the sizes that the table of names needs.",
    },
    dequantize={
        "section": "Source",
        "help": "Take quantised weights of --shapes as this type, as convert --dequantize does.",
    },
    exclude={
        "section": "Source",
        "help": "Leave out weights of --shapes that match GLOB and that the table does not list (repeatable).",
    },
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
@_edits
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
    stated: tuple[str, ...],
    sizes: AxisSizes,
    edits: Edits,
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

    switches: dict[str, str] = {}
    for name, value in map(_switch, stated):
        if name in switches:
            raise UsageError(f"--set: {name} is stated twice", hint="leave one of them out")
        switches[name] = value
    model_rules = rules_named(rules, switches)
    source = None if src_strategy is None else read_strategy(src_strategy)
    show_notes(source.notes if source is not None else ())
    tensors = _read_shapes(shapes, source, edits, typed["weights_only"])
    target = _target(sizes, typed)
    where = f"a copy of {rules} (reshard strategy rules {rules} > model.toml)" if is_builtin(rules) else rules
    try:
        stages = make_strategy(model_rules, tensors, target, where)
    except StrategyError as error:
        if not _has_rules(model_rules, tensors):
            error.add_hint(_other_rules(tensors, edits))
        raise
    more = {"rules_file": rules, **({"set": switches} if switches else {}), **_recorded(edits)}
    made_of = (rules, shapes, src_strategy, edits.names, edits.config)
    _write("make", out, stages, model_rules, tensors, target, more, made_of, typed["overwrite"])


def _has_rules(rules: LayoutRules, tensors: ModelTensors) -> bool:
    """Whether every weight has a rule with its cuts."""
    return all(rules.rule_for(name).has_cuts for name in tensors.weights)


def _other_rules(tensors: ModelTensors, edits: Edits) -> str | None:
    """The built-in rules that have a rule for every weight, or another way to such names."""
    from reshard.strategies.rules import builtin_names, rules_named

    fitting = [name for name in builtin_names() if _has_rules(rules_named(name), tensors)]
    if fitting:
        return f"these built-in rules have a rule for every parameter: {', '.join(fitting)}"
    return "if the model has another code's names: --names TABLE" if edits.names is None else None


def _recorded(edits: Edits) -> dict[str, str]:
    typed = {"names": edits.names, "dequantize": edits.dequantize}
    return {name: value for name, value in typed.items() if value is not None}


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
@_edits
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
    stated: str | None,
    dst_sizes: AxisSizes,
    edits: Edits,
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
        tensors = _read_shapes(shapes, sources[0].strategy, edits, typed["weights_only"])
    else:
        listed = (strategy_shapes(source.strategy) for source in sources)
        known = next((each for each in listed if each is not None), None)
        if edits != Edits():
            raise UsageError(
                "--shapes is missing",
                hint="--names, --config, --dequantize and --exclude apply to the tensors of --shapes",
            )
        if known is None:
            raise UsageError(
                f"--shapes is missing: {src} does not contain tensor shapes",
                hint=f"add --shapes CKPT, the checkpoint that was saved with {src}, or the index of its full weights",
            )
        tensors = known
    model = model_of(sources[0], tensors)
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
        **_recorded(edits),
    }
    made_of = (src, *also, shapes, stated, edits.names, edits.config)
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


def _read_shapes(path: str, strategy: Strategy | None, asked: Edits, weights_only: bool) -> ModelTensors:
    """The tensors of a model, as a conversion to ranks with these edits names, packs and types them.

    Raises:
        UsageError: a configuration without its use.
        InputError: the shapes cannot be read, or the edits do not fit them.
    """
    from reshard.checkpoints import FileHandles
    from reshard.checkpoints.formats.dtypes import ITEM_SIZES
    from reshard.forms.model_shapes import read_shapes
    from reshard.forms.registry import form_named
    from reshard.forms.request import Means
    from reshard.plan.editing import Editing
    from reshard.plan.edits import edit_rules
    from reshard.strategies.rules import FullTensor, model_tensors
    from reshard.text.messages import Report

    unused = "--exclude" if asked.exclude else "--config" if asked.config and asked.dequantize is None else None
    if asked.names is None and unused is not None:
        raise UsageError(f"{unused} needs --names", hint="name a table: `reshard names list`")
    beside = os.path.join(os.path.dirname(path), "config.json")
    if asked.config is None and has_changes(asked) and not is_directory(path) and is_regular_file(beside):
        asked = replace(asked, config=beside)
    if asked.names is not None and not weights_only:
        asked = replace(asked, optimizer="keep")
    with FileHandles() as handles:
        means = Means(handles, Report())
        checkpoint = read_shapes(path, strategy, means)
        edits = edit_rules(path, asked, form_named("ranks"))
        if not edits.is_empty:
            checkpoint = Editing(checkpoint, edits, means.report, contents=False, handles=handles).edited()
        tensors = (FullTensor(name, each.shape, each.dtype or None) for name, each in checkpoint.tensors.items())
        return model_tensors(path, tensors, ITEM_SIZES)


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
