"""strategy make: a strategy from rules alone; its options and output are shared with derive."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import click

from reshard._version import __version__
from reshard.cli import completion, options
from reshard.cli.command import Parsed, command, option
from reshard.cli.output import echo_json, is_quiet, say, show_notes
from reshard.errors import InputError, StrategyError, UsageError
from reshard.storage import is_directory
from reshard.strategies import Strategy
from reshard.text.messages import listing, plural, rank_ranges

if TYPE_CHECKING:
    from reshard.names import Configuration
    from reshard.strategies.rules import LayoutRules, MadeStage, ModelTensors, TargetRun

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


def sizes_option(group: str, *names: str, text: str, **attributes: Any) -> Callable[[F], F]:
    """An option for the sizes of a run."""
    return option(group, *names, type=Parsed("sizes", _parse_sizes), metavar="dp=N,mp=N", help=text, **attributes)


making = options.together(
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
    options.json_output,
    options.verbose("Name every parameter in messages."),
    options.common,
)
"""Options of the target."""

names = options.together(
    option(
        "Source",
        "--names",
        metavar="TABLE",
        shell_complete=completion.tables,
        show_default="unchanged",
        help="Apply this table of names to --shapes first, as convert --names does.",
    ),
    option(
        "Source",
        "--config",
        metavar="FILE|DIR",
        shell_complete=completion.paths,
        show_default="config.json beside --shapes",
        help="File with the sizes that the table of names needs.",
    ),
)
"""--names and --config, for `under_names`."""


def shapes(text: str) -> Callable[[F], F]:
    """--shapes."""
    return option("Source", "--shapes", metavar="CKPT|INDEX|STRATEGY.json", shell_complete=completion.paths, help=text)


def target_of(sizes: Any, typed: dict[str, Any]) -> TargetRun:
    """The run that the options describe."""
    from reshard.strategies.rules import DEFAULT_THRESHOLD, ShardSetting, TargetRun

    threshold = typed["optimizer_threshold"]
    setting = ShardSetting(typed["optimizer_shards"] or 0, DEFAULT_THRESHOLD if threshold is None else threshold)
    return TargetRun(sizes, setting, typed["layers_per_stage"], typed["weights_only"])


def shapes_of(path: str, strategy: Optional[Strategy], typed: dict[str, Any]) -> ModelTensors:
    """The tensors that --shapes names."""
    from reshard.checkpoints import FileHandles
    from reshard.forms.model_shapes import read_shapes
    from reshard.text.messages import Report

    with FileHandles() as handles:
        return read_shapes(path, strategy, handles, Report())


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
@click.argument("rules", metavar="RULES", shell_complete=completion.paths)
@click.argument("out", metavar="OUT", shell_complete=completion.paths)
@shapes("Full shapes: a checkpoint of any form, the index of one, or a JSON strategy.")
@option(
    "Source",
    "--src-strategy",
    metavar="FILE|DIR",
    shell_complete=completion.paths,
    help="Strategy of --shapes, if that is a rank tree.",
)
@names
@option(
    "Parameters",
    "--set",
    "stated",
    multiple=True,
    metavar="NAME=VALUE",
    help="A switch of the model's configuration that RULES declare, such as vocab_emb_dp=false (repeatable).",
)
@sizes_option("Target", "--sizes", text="Devices: dp, mp, pp, cp, ep; 1 where left out.")
@making
def strategy_make(
    rules: str,
    out: str,
    shapes: Optional[str],
    src_strategy: Optional[str],
    names: Optional[str],
    config: Optional[str],
    stated: tuple[str, ...],
    sizes: Any,
    **typed: Any,
) -> None:
    """Make the strategy of a cluster from rules, without the cluster.

    RULES is a TOML file or the name of built-in rules: how parameters are cut, in named axes. OUT is what
    a compile on that cluster would write: a file, .ckpt or .json, of all stages, a path with {rank} in
    it, or a directory for a file per stage. If RULES are incomplete, an error prints the missing lines.
    OUT.made records how OUT was made.
    """
    from reshard.strategies import read_strategy
    from reshard.strategies.rules import make_strategy
    from reshard.strategies.rules.toml_file import is_builtin, rules_named

    missing = [name for name, value in (("--shapes", shapes), ("--sizes", sizes)) if value is None]
    if missing or shapes is None:
        raise UsageError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            hint="pass the tensors' full shapes with --shapes, and the devices with --sizes: --sizes dp=2,mp=4",
        )
    switches = dict(_switch(text) for text in stated)
    model_rules = rules_named(rules, switches)
    source = None if src_strategy is None else read_strategy(src_strategy)
    show_notes(source.notes if source is not None else ())
    tensors = under_names(shapes_of(shapes, source, typed), names, config)
    if names is None:
        check_named(model_rules, tensors, config)
    target = target_of(sizes, typed)
    where = f"a copy of {rules} (reshard strategy rules {rules} > model.toml)" if is_builtin(rules) else rules
    stages = make_strategy(model_rules, tensors, target, where)
    more = {
        "rules_file": rules,
        **({"set": switches} if switches else {}),
        **({} if names is None else {"names": names}),
    }
    finish("make", out, stages, model_rules, tensors, target, more, (rules, shapes, src_strategy, names, config), typed)


def _switch(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise UsageError(f"--set {text}: is not NAME=VALUE, for example vocab_emb_dp=false")
    return name, value


def under_names(tensors: ModelTensors, table: Optional[str], config: Optional[str]) -> ModelTensors:
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
    from reshard.names import apply_rules, rules_named
    from reshard.strategies.rules import FullTensor, model_tensors

    sizes = _configuration(tensors, config)
    shapes = {name: tensor.shape for name, tensor in tensors.weights.items()}
    # Packing that changes only elements is of no consequence here.
    applied = apply_rules(rules_named(table), shapes, sizes, contents=False)
    renamed = []
    states: dict[str, tuple[str, ...]] = {}
    for name, result in applied.views.items():
        (dtype, *more_dtypes) = {tensors.weights[source].dtype for source in result.sources}
        renamed.append(FullTensor(name, result.view.shape, None if more_dtypes else dtype))
        # A tensor of several weights has the state that all of them have, as with convert --optimizer keep.
        of_sources = [tensors.states.get(source, ()) for source in result.sources]
        states[name] = tuple(prefix for prefix in of_sources[0] if all(prefix in each for each in of_sources))
    states = {name: prefixes for name, prefixes in states.items() if prefixes}
    made = model_tensors(tensors.path, renamed, tensors.item_sizes)
    return replace(made, states=states, other_shapes=tensors.other_shapes)


def _configuration(tensors: ModelTensors, config: Optional[str]) -> Optional[Configuration]:
    """The file of --config, or the config.json of the checkpoint's directory."""
    from reshard.names import config_beside, read_config

    place = tensors.path if is_directory(tensors.path) else os.path.dirname(tensors.path)
    return config_beside(place) if config is None else read_config(config)


def check_named(rules: LayoutRules, tensors: ModelTensors, config: Optional[str]) -> None:
    """Refuse parameters without a rule where built-in tables of names give all of them names that rules fit.

    Raises:
        StrategyError: names the option that does so.
    """
    from reshard.names.tables import builtin_names

    without = _without_rule(rules, tensors)
    if not without:
        return
    fitting = []
    for table in builtin_names():
        with contextlib.suppress(InputError):
            if not _without_rule(rules, under_names(tensors, table, config)):
                fitting.append(table)
    if fitting:
        sizes = _configuration(tensors, config)
        model_type = None if sizes is None else sizes.get("model_type")
        options = [f"--names {table}" for table in fitting if table == model_type or model_type not in fitting]
        raise StrategyError(
            f"{rules.path}: no rule fits {len(without)} of {plural(len(tensors.weights), 'parameter')} of "
            f"{tensors.path}, which has names of another model code: " + listing(without),
            file=tensors.path,
            parameter=without[0],
            hint=f"add {' or '.join(options)}",
        )


def _without_rule(rules: LayoutRules, tensors: ModelTensors) -> list[str]:
    return [name for name in tensors.weights if not any(rule.matches(name) for rule in rules.rules)]


def finish(
    command: str,
    out: str,
    stages: Sequence[MadeStage],
    rules: LayoutRules,
    tensors: ModelTensors,
    target: TargetRun,
    more: dict[str, Any],
    made_of: Sequence[Optional[str]],
    typed: dict[str, Any],
) -> None:
    """Write a strategy and its record; refuses to overwrite its own input."""
    from reshard.strategies.one_file import record_path
    from reshard.strategies.rules import write_strategy

    sizes, shards = target.sizes, target.shards
    assumed = []
    if typed["optimizer_shards"] is None and not target.weights_only:
        assumed.append("the optimizer does not shard, since --optimizer-shards is not given")
    record = {
        "reshard": __version__,
        "command": command,
        "sizes": {name: size for name, size in sizes.named.items()},
        "shapes": tensors.path,
        "layers_per_stage": None if target.layers_per_stage is None else list(target.layers_per_stage),
        "optimizer_shards": shards.size or "off",
        "optimizer_threshold": shards.threshold,
        "weights_only": target.weights_only,
        "rules": rules.text,
        **more,
        "assumed": assumed,
    }
    files, notes = write_strategy(
        out, stages, record, typed["overwrite"], [path for path in made_of if path is not None]
    )
    show_notes(notes)
    parameters = {name for stage in stages for name in stage.layouts}
    sharded = [sum(layout.shard_size != 0 for layout in stage.layouts.values()) for stage in stages]
    devices = sizes.stage_devices * sizes.stages
    if typed["as_json"]:
        echo_json(
            {
                "files": files,
                "record": record_path(out),
                "devices": devices,
                "sizes": record["sizes"],
                "parameters": len(parameters),
                "stages": [
                    {
                        "stage": stage.number,
                        "first_rank": stage.first_rank,
                        "devices": sizes.stage_devices,
                        "parameters": len(stage.layouts),
                        "optimizer_sharded": count,
                    }
                    for stage, count in zip(stages, sharded)
                ],
                "assumed": assumed,
            }
        )
    elif not is_quiet():
        counts = [plural(devices, "device"), plural(len(stages), "stage"), plural(len(parameters), "parameter")]
        lines = ["{}: {} in {}, {}".format(out, *counts)]
        for stage, count in zip(stages, sharded):
            ranks = rank_ranges(range(stage.first_rank, stage.first_rank + sizes.stage_devices))
            line = f"  stage {stage.number}: {ranks}, {plural(len(stage.layouts), 'parameter')}"
            lines.append(line + (f", {count} with optimizer shards" if count else ""))
        lines.append(f"optimizer shards: {_shards_in_words(target)}")
        lines += [f"assumed: {assumption}" for assumption in assumed]
        say("\n".join([*lines, f"how it was made: {record_path(out)}"]))


def _shards_in_words(target: TargetRun) -> str:
    size, threshold = target.shards
    if not size:
        return "off"
    return f"{'as many as replicas' if size < 2 else size} for tensors of {threshold} KiB and more"
