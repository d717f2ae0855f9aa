"""merge-lora: an adapter into the weights that it was trained beside."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from typing import Any, Optional

from reshard.cli import completion, options
from reshard.cli.command import argument, command, option
from reshard.cli.conversion import carry_out
from reshard.cli.convert import summary_lines
from reshard.cli.opened import effort_of
from reshard.cli.output import listener
from reshard.convert.ends import options_of, request_between
from reshard.errors import UsageError
from reshard.forms import DEFAULT_FORM
from reshard.forms.ranks.tree import PEFT_ADAPTER
from reshard.forms.registry import form_named, form_of
from reshard.opened import open_requested, reading_request
from reshard.plan.edits import TypedEdits, edits_to_model
from reshard.storage import is_regular_file, real
from reshard.strategies import NONE, SAME
from reshard.text.globs import Filters
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
@argument("base", shell_complete=completion.paths)
@argument("adapter", shell_complete=completion.paths)
@argument("out", shell_complete=completion.paths)
@options.strategies
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
@options.target_form("that of BASE; ranks with --dst-strategy")
@options.target_files
@options.source
@options.without_ranks
@options.fallback
@options.allow_missing
@options.writing
@options.proof("Compute every tensor again from BASE and ADAPTER after writing, in Float64, and compare.")
@options.output
def merge_lora(
    base: str,
    adapter: str,
    out: str,
    adapter_strategy: Optional[str],
    adapter_step: str,
    alpha: Optional[float],
    **typed: Any,
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

    if _is_peft(base) and not _is_peft(adapter):
        words = " ".join(map(shlex.quote, (adapter, base, out)))
        raise UsageError(
            f"{base}: is an adapter, and {adapter} is none; the first argument is BASE, the second ADAPTER",
            hint=f"exchange them: reshard merge-lora {words}",
        )
    _choose_target(base, typed)
    # NaN is between no numbers.
    if alpha is not None and not MIN_ALPHA <= alpha <= MAX_ALPHA:
        raise UsageError(f"--alpha {alpha:g}: is not a number between {MIN_ALPHA:g} and {MAX_ALPHA:g}")
    report = Report(listener())
    request = request_between(base, out, None, {**typed, **TypedEdits()._asdict(), "optimizer": None}, report)
    scale = scale_of(adapter, alpha, report)
    infinite: Counter[str] = Counter()

    def overflowed(name: str, count: int) -> None:
        infinite[name] += count

    place, strategy = _place_of(adapter, adapter_strategy)
    option = "--adapter-strategy "
    matrix_names = edits_to_model(form_of(place))
    reading = reading_request(place, strategy, None, None, adapter_step, None, Filters(), report, matrix_names, option)
    with open_requested(reading, effort_of(typed, 4), report) as tensors:
        additions = Adapter(tensors, adapter, scale, overflowed)
        # A wrong alpha gives valid files and a model that computes nonsense.
        report.note(f"alpha is {scale.alpha:g}, {'as typed' if alpha is not None else f'of {scale.path}'}")
        for alpha_of_modules, modules in additions.other_alphas().items():
            report.note(f"alpha is {alpha_of_modules:g} by alpha_pattern of {scale.path}: " + listing(modules))
        if real(base) != real(place) or typed["step"] != adapter_step:
            base_reading = reading_request(
                base,
                typed["src_strategy"],
                None,
                None,
                typed["step"],
                typed["file_suffix"],
                Filters(),
                Report(),
                edits_to_model(form_of(base)),
                without_ranks=typed["without_ranks"] or (),
            )
            with open_requested(base_reading, effort_of(typed, 4)) as weights:
                check_beside(tensors, adapter, weights)
        how = options_of(typed)
        request = request._replace(edits=request.edits._replace(additions=additions, typed=None))
        added = MergedAdapter(reading, scale)
        carry_out(request, report, typed, how, summary_lines(request, typed, how), adapter=added)
        tensors.check_unchanged()
    if infinite:
        report.warn(
            f"{plural(sum(infinite.values()), 'element')} became infinite, being too large for the weight's type: "
            + listing(sorted(infinite))
        )


def _choose_target(base: str, typed: dict[str, Any]) -> None:
    """The form of the target, if it is not typed, and the strategy of BASE, if the form needs one."""
    form = form_of(base)
    if typed["to"] is None:
        typed["to"] = form if typed["dst_strategy"] is None else DEFAULT_FORM
    if form_named(typed["to"]).options.cut and typed["dst_strategy"] is None:
        if not form_named(form).options.cut:
            raise UsageError(
                f"--to {typed['to']}: --dst-strategy is missing", hint="pass a strategy file, a directory, or none"
            )
        typed["dst_strategy"] = SAME


def _is_peft(directory: str) -> bool:
    """Whether a directory is an adapter that PEFT saved."""
    return is_regular_file(os.path.join(directory, PEFT_ADAPTER))


def _place_of(adapter: str, strategy: Optional[str]) -> tuple[str, Optional[str]]:
    """The place of an adapter's matrices, and their strategy: PEFT's directories have one whole file."""
    place = os.path.join(adapter, PEFT_ADAPTER) if _is_peft(adapter) else adapter
    return place, NONE if strategy is None and is_regular_file(place) else strategy
