"""What commands that convert have in common: from options to a request, from a summary to JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Optional

from reshard.cli import options
from reshard.cli.output import listener, totals_json, totals_words
from reshard.convert import Options, Summary, usable_cpus
from reshard.convert.ends import read_ends
from reshard.forms.registry import counted_as
from reshard.forms.target import FileId
from reshard.plan.request import Request
from reshard.plan.typed_edits import edits_of
from reshard.strategies import Strategy
from reshard.text.messages import listing
from reshard.text.name_filters import Filters
from reshard.text.names import KINDS, kind_of
from reshard.text.report import Report
from reshard.text.wording import plural, rank_ranges

# Shorter phases, in seconds, are not shown.
MIN_SHOWN = 0.1


def request_between(
    src: str, dst: str, ranks: Optional[tuple[int, ...]], typed: Mapping[str, Any]
) -> tuple[Request, Report]:
    """What the options of a conversion ask for, and a report that has been told what was noted of strategies.

    Raises:
        ReshardError: options are missing or contradict each other, or a strategy cannot be read.
    """
    report = Report(listener())
    ends = read_ends(src, typed, report)
    request = request_of(
        src,
        dst,
        ends.source,
        ends.target,
        ranks,
        typed,
        form=ends.form,
        to=ends.to,
        max_shard_size=typed["max_shard_size"],
        edits=edits_of(src, typed, ends.to),
    )
    return request, report


def request_of(
    src: str,
    dst: str,
    source: Strategy,
    target: Strategy,
    ranks: Optional[tuple[int, ...]],
    typed: Mapping[str, Any],
    **others: Any,
) -> Request:
    """What the options ask for; `recover` does not have all of them."""
    return Request(
        src=src,
        dst=dst,
        source=source,
        target=target,
        files=None if ranks is None else tuple(map(FileId, ranks)),
        prefix=typed["prefix"],
        format=typed.get("format", "same"),
        step=typed["step"],
        fallback=not typed["no_fallback"],
        file_suffix=typed["file_suffix"],
        filters=Filters(typed.get("include", ()), typed.get("exclude", ())),
        strict=typed.get("strict", False),
        **others,
    )


def options_of(typed: Mapping[str, Any], **others: Any) -> Options:
    """How the options want it done; ``others`` are attributes of `Options` that have no option."""
    return Options(
        jobs=typed["jobs"] or usable_cpus(),
        max_memory=typed["max_memory"],
        io=typed["io"],
        crc=typed["crc"],
        check_replicas=typed["check_replicas"],
        checksum=typed["checksum"],
        overwrite=typed["overwrite"],
        accept_changed_source=typed["accept_changed_source"],
        verify=typed.get("verify", False),
        decryption=options.decryption_of(typed["decrypt_key_file"], typed["decrypt_mode"]),
        **{"dry_run": typed["dry_run"], **others},
    )


def summary_json(summary: Summary) -> dict[str, Any]:
    """A summary as `--json` prints it."""
    said = {**dataclasses.asdict(summary), "kinds": totals_json(summary.kinds)}
    del said["target_files"], said["known"]
    return said


def contents_words(summary: Summary) -> str:
    """What the targets hold, by kind, and how many parameters of each kind they lack."""
    words = [totals_words(summary.kinds) or "no tensors"]
    for names, where in (
        (summary.left_out, "not in the target strategy, left out"),
        (summary.missing, "not in the source"),
    ):
        if names:
            counts = Counter(kind_of(name, 2, summary.known) for name in names)
            words.append(f"{where}: " + ", ".join(f"{kind} {counts[kind]}" for kind in KINDS if kind in counts))
    return "; ".join(words)


def detail_lines(summary: Summary, request: Request, verifying: float = 0.0) -> list[str]:
    """What -v adds to a summary: where the time went, what was read, and every name that was not converted.

    Args:
        summary: of a conversion.
        request: what was asked for.
        verifying: seconds that were spent on verification afterwards.
    """
    seconds = {**dataclasses.asdict(summary.phases), "verifying": verifying}
    shown = [f"{phase} {taken:.1f} s" for phase, taken in seconds.items() if taken >= MIN_SHOWN]
    lines = [", ".join(shown)] if len(shown) > 1 else []
    lines.append(f"headers read: source {rank_ranges(summary.source_ranks, counted_as(request.form))}")
    lines.append(f"{plural(summary.parameters, 'parameter')} resharded")
    for names, what in (
        (summary.copied, "copied unchanged"),
        (summary.excluded, "left out by --include and --exclude"),
        (summary.left_out, "left out, not in the target strategy"),
        (summary.missing, "in the target strategy, but not in the source"),
        (summary.unholdable, "left out, the target format cannot hold text"),
    ):
        if names:
            lines.append(f"{len(names)} {what}: {listing(names).full}")
    if summary.replicas is not None:
        lines.append(str(summary.replicas))
    if summary.manifest:
        lines.append(f"manifest: {summary.manifest}")
    return lines
