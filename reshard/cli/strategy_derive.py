"""strategy derive: the strategy of another run; strategy rules: the built-in rules of make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import click

from reshard.cli import completion, options
from reshard.cli.command import command, nearest, option
from reshard.cli.output import say, show_notes
from reshard.cli.strategy_make import finish, making, names, shapes, shapes_of, sizes_option, target_of, under_names
from reshard.errors import UsageError

if TYPE_CHECKING:
    from reshard.strategies.rules import LayoutRules, ModelTensors
    from reshard.strategies.rules.shown import SourceRun

F = TypeVar("F", bound=Callable[..., Any])

_SHAPES = "Full shapes, if SRC does not list them: a checkpoint of any form, the index of one, or a JSON strategy."


_also = options.together(
    option(
        "Source",
        "--also",
        multiple=True,
        metavar="FILE|DIR",
        shell_complete=completion.paths,
        help="One more strategy of the model (repeatable, with --also-sizes).",
    ),
    sizes_option("Source", "--also-sizes", text="Devices of --also's run.", multiple=True),
)


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
@click.argument("src", metavar="SRC", shell_complete=completion.paths)
@click.argument("out", metavar="OUT", shell_complete=completion.paths)
@sizes_option("Source", "--src-sizes", text="Devices of SRC's run: dp, mp, pp, cp, ep.")
@_also
@shapes(_SHAPES)
@names
@option(
    "Parameters",
    "--rules",
    "stated",
    metavar="FILE",
    shell_complete=completion.paths,
    help="Rules for parameters that the strategies leave open.",
)
@sizes_option("Target", "--dst-sizes", text="Devices of OUT's run.")
@making
def strategy_derive(
    src: str,
    out: str,
    src_sizes: Any,
    also: tuple[str, ...],
    also_sizes: tuple[Any, ...],
    shapes: Optional[str],
    names: Optional[str],
    config: Optional[str],
    stated: Optional[str],
    dst_sizes: Any,
    **typed: Any,
) -> None:
    """Derive the strategy of another run from that of one at hand.

    SRC is the strategy of a run with --src-sizes; OUT is what a compile with other sizes would write,
    as with make. Only facts shown by SRC, and the strategies of --also, are used: everything they leave open
    is an error that prints the lines that would settle it, for a file that --rules names.
    """
    from reshard.strategies.rules import make_strategy, read_rules
    from reshard.strategies.rules.learn import check_explained, learn, uneven_source
    from reshard.strategies.rules.pipeline import layer_numbers

    missing = [name for name, value in (("--src-sizes", src_sizes), ("--dst-sizes", dst_sizes)) if value is None]
    sources = _sources(src, src_sizes, also, also_sizes, missing)
    sharded = [source.strategy.path for source in sources if source.has_shards]
    if typed["optimizer_shards"] is None and not typed["weights_only"] and sharded:
        raise UsageError(
            f"--optimizer-shards is missing: {sharded[0]} has optimizer shards, the target may have others",
            hint="pass --optimizer-shards off, -1 for all replicas, or N",
        )
    user_rules = read_rules(stated, partial=True) if stated is not None else None
    if shapes is None and (names is not None or config is not None):
        raise UsageError("--shapes is missing", hint="--names and --config apply to the tensors of --shapes")
    tensors = _shapes(sources, shapes, typed)
    if tensors is None:
        raise UsageError(
            f"--shapes is missing: {src} does not contain tensor shapes",
            hint=f"add --shapes CKPT, the checkpoint that was saved with {src}, or the index of its full weights",
        )
    from reshard.strategies.rules.shown import model_of

    model = model_of(sources[0], under_names(tensors, names, config))
    learned = learn(sources, model, dst_sizes)
    check_explained(learned, user_rules.rules if user_rules is not None else (), sources)
    rules = learned.rules
    if user_rules is not None:
        rules = _merged(user_rules, rules)
    target = target_of(dst_sizes, typed)
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
    finish("derive", out, stages, rules, model, target, more, (src, *also, shapes, stated, names, config), typed)


def _merged(user_rules: LayoutRules, derived: LayoutRules) -> LayoutRules:
    """Rules of --rules, which replace derived rules per weight, and the derived ones."""
    from dataclasses import replace

    pipeline, last = user_rules.pipeline, derived.pipeline
    first = (*pipeline.first, *pipeline.last)
    return replace(
        derived,
        rules=(*user_rules.rules, *derived.rules),
        pipeline=replace(
            pipeline,
            first=(*pipeline.first, *_others(last.first, first)),
            last=(*pipeline.last, *_others(last.last, first)),
        ),
        dtype=user_rules.dtype,
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
def strategy_rules(name: Optional[str], as_list: bool) -> None:
    """Print the built-in rules NAME, to start from, or list all of them."""
    from reshard.strategies.rules.toml_file import builtin_names, builtin_title, rules_named

    names = builtin_names()
    if name is None or as_list:
        width = max(map(len, names))
        say("\n".join(f"{each:{width}}  {builtin_title(each)}" for each in names))
    elif name in names:
        click.echo(rules_named(name).text, nl=False)
    else:
        raise UsageError(
            f"{name}: no built-in rules have this name.{nearest(name, names)}",
            hint="the rules that a strategy shows are used by: reshard strategy derive SRC OUT",
        )


def _others(names: Sequence[str], stated: Sequence[str]) -> tuple[str, ...]:
    """The names that no pattern fits."""
    from reshard.text.globs import Globs

    globs = Globs(stated)
    return tuple(name for name in names if not globs.match(name))


def _sources(
    src: str, sizes: Any, also: Sequence[str], also_sizes: Sequence[Any], missing: list[str]
) -> list[SourceRun]:
    """The strategies with their sizes."""
    from reshard.strategies.read import read_recorded
    from reshard.strategies.rules.shown import SourceRun

    if len(also) != len(also_sizes):
        missing.append("--also" if len(also) < len(also_sizes) else "--also-sizes")
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            hint="device counts do not separate data from model parallelism; pass the sizes of each run: dp=4,mp=2",
        )
    runs = []
    for path, of_run in zip((src, *also), (sizes, *also_sizes)):
        strategy, recorded = read_recorded(path)
        show_notes(strategy.notes)
        runs.append(SourceRun(strategy, recorded, of_run))
    return runs


def _shapes(sources: Sequence[SourceRun], path: Optional[str], typed: dict[str, Any]) -> Optional[ModelTensors]:
    """Full shapes of --shapes or of the strategies; None if unknown."""
    from reshard.forms.model_shapes import strategy_shapes

    if path is not None:
        return shapes_of(path, sources[0].strategy, typed)
    return next((tensors for source in sources if (tensors := strategy_shapes(source.strategy)) is not None), None)
