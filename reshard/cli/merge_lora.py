"""merge-lora: an adapter into the weights that it was trained beside."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from dataclasses import replace

from reshard.asked import Conversion, Edits, Effort, Source, Target, Task
from reshard.cli import options
from reshard.cli.command import argument, command, option
from reshard.cli.convert import carry_out, summary_lines
from reshard.cli.opened import opened
from reshard.cli.output import listener
from reshard.convert.ends import request_of
from reshard.errors import UsageError
from reshard.forms import DEFAULT_FORM
from reshard.forms.ranks.tree import PEFT_ADAPTER
from reshard.forms.registry import form_named, form_of
from reshard.plan.edits import edits_to_model
from reshard.storage import is_regular_file, real
from reshard.strategies import NONE, SAME
from reshard.text.messages import Report, listing, plural


@command(
    "merge-lora",
    """
reshard merge-lora base/ adapter/ merged/

Of rank directories, cut as they are:
reshard merge-lora base/ adapter/ merged/ \\
    --src-strategy base.ckpt --adapter-strategy adapter.ckpt --alpha 32
""",
)
@argument("base")
@argument("adapter")
@argument("out")
@options.group(Source, path="base")
@options.strategy("Strategy that the adapter's ranks were saved with.", flag="--adapter-strategy")
@option("Source", "--adapter-step", default="latest", show_default=True, metavar="STEP|latest", help="Step of ADAPTER.")
@option(
    "Source",
    "--alpha",
    type=float,
    metavar="NUMBER",
    show_default="adapter_config.json beside ADAPTER",
    help="LoRA alpha; the product of the matrices is scaled by alpha / r.",
)
@options.group(Target, path="out", form={"shown": "that of BASE; ranks with --dst-strategy"})
@options.group(Edits, "allow_missing")
@options.group(Effort)
@options.dry_run
@options.proof("Compute every tensor again from BASE and ADAPTER after writing, in Float64, and compare.")
@options.output
def merge_lora(
    source: Source,
    adapter: str,
    target: Target,
    adapter_strategy: str | None,
    adapter_step: str,
    alpha: float | None,
    edits: Edits,
    effort: Effort,
    dry_run: bool,
    verify: bool,
) -> None:
    """Merge the LoRA adapter in ADAPTER into the weights in BASE, and write the result to OUT.

    Each weight with two matrices A and B in ADAPTER gets alpha / r * B A, computed in Float32 and rounded
    once to the weight's type; everything else is copied. Names are PEFT's (lora_A.weight, lora_B.weight) or
    MindFormers' (lora_a, lora_b). BASE and ADAPTER may be of any form. OUT has the form of BASE unless --to
    or --dst-strategy is given.
    """
    # Loaded only here: the others do without.
    from reshard.lora import MAX_ALPHA, MIN_ALPHA, Adapter, check_beside, scale_of
    from reshard.verification.end_to_end import MergedAdapter

    base, out = source.path, target.path
    if _is_peft(base) and not _is_peft(adapter):
        words = " ".join(map(shlex.quote, (adapter, base, out)))
        raise UsageError(
            f"{base}: is an adapter, and {adapter} is none; the first argument is BASE, the second ADAPTER",
            hint=f"exchange them: reshard merge-lora {words}",
        )
    target = _with_form(base, target)
    # NaN is between no numbers.
    if alpha is not None and not MIN_ALPHA <= alpha <= MAX_ALPHA:
        raise UsageError(f"--alpha {alpha:g}: is not a number between {MIN_ALPHA:g} and {MAX_ALPHA:g}")
    report = Report(listener())
    asked = Conversion(source, target, edits, effort)
    request = request_of(asked, report, Task(dry_run=dry_run, verify=verify, merge=True))
    scale = scale_of(adapter, alpha, report)
    infinite: Counter[str] = Counter()

    def overflowed(name: str, count: int) -> None:
        infinite[name] += count

    place, strategy = _place_of(adapter, adapter_strategy)
    option = "--adapter-strategy "
    read = Source(place, strategy=strategy, step=adapter_step)
    matrix_names = edits_to_model(form_of(place))
    with opened(read, Edits(), effort, report, 4, option, rules=matrix_names) as tensors:
        additions = Adapter(tensors, adapter, scale, overflowed)
        # A wrong alpha gives valid files and a model that computes nonsense.
        report.note(f"alpha is {scale.alpha:g}, {'as typed' if alpha is not None else f'of {scale.path}'}")
        for alpha_of_modules, modules in additions.other_alphas().items():
            report.note(f"alpha is {alpha_of_modules:g} by alpha_pattern of {scale.path}: " + listing(modules))
        if real(base) != real(place) or source.step != adapter_step:
            with opened(source, Edits(), effort, Report(), 4, rules=edits_to_model(form_of(base))) as weights:
                check_beside(tensors, adapter, weights)
        request = request._replace(edits=request.edits._replace(additions=additions))
        added = MergedAdapter(tensors.request, scale)
        carry_out(request, report, summary_lines(request), adapter=added)
        tensors.check_unchanged()
    if infinite:
        report.warn(
            f"{plural(sum(infinite.values()), 'element')} became infinite, being too large for the weight's type: "
            + listing(sorted(infinite))
        )


def _with_form(base: str, target: Target) -> Target:
    """The target with a form, if none is asked for, and the strategy of BASE, if the form needs one."""
    form = form_of(base)
    cut = target.strategy is not None or target.shards is not None
    to = target.form or (DEFAULT_FORM if cut else form.name)
    if not form_named(to).options.cut or cut:
        return replace(target, form=to)
    if not form.options.cut:
        raise UsageError(f"--to {to}: --dst-strategy is missing", hint="pass a strategy file, a directory, or none")
    return replace(target, form=to, strategy=SAME)


def _is_peft(directory: str) -> bool:
    """Whether a directory is an adapter that PEFT saved."""
    return is_regular_file(os.path.join(directory, PEFT_ADAPTER))


def _place_of(adapter: str, strategy: str | None) -> tuple[str, str | None]:
    """The place of an adapter's matrices, and their strategy: PEFT's directories have one whole file."""
    place = os.path.join(adapter, PEFT_ADAPTER) if _is_peft(adapter) else adapter
    return place, NONE if strategy is None and is_regular_file(place) else strategy
