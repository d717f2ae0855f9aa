"""strategy make: the strategy of a run that never was, from rules."""

from __future__ import annotations

from typing import Any, Optional

import click

from reshard.cli import completion
from reshard.cli.command import command, option
from reshard.cli.output import show_notes
from reshard.cli.strategy_making import SIZES, SizesType, finish, making, shapes, shapes_of, target_of
from reshard.cli.strategy_names import check_named, names, under_names
from reshard.errors import UsageError


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
    shell_complete=completion.strategies,
    help="Strategy of --shapes, where that is ranks' checkpoints.",
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
@option("Target", "--sizes", type=SizesType(), metavar=SIZES, help="Devices: dp, mp, pp, cp, ep; 1 where left out.")
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
    found = rules_named(rules).with_switches(switches)
    source = None if src_strategy is None else read_strategy(src_strategy)
    show_notes(source.notes if source is not None else ())
    tensors = under_names(shapes_of(shapes, source, typed), names, config)
    if names is None:
        check_named(found, tensors, config)
    target = target_of(sizes, typed)
    where = f"a copy (reshard strategy rules {rules} > model.toml)" if is_builtin(rules) else rules
    stages = make_strategy(found, tensors, target, f"{where}, before its first [[parameter]]")
    more = {
        "rules_file": rules,
        **({"set": switches} if switches else {}),
        **({} if names is None else {"names": names}),
    }
    finish("make", out, stages, found, tensors, target, more, (rules, shapes, src_strategy, names, config), typed)


def _switch(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise UsageError(f"--set {text}: is not NAME=VALUE, for example vocab_emb_dp=false")
    return name, value
