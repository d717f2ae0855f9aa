"""What commands that convert have in common: from options to a request, from a summary to JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional

from reshard.cli import options
from reshard.cli.edits import edits_of
from reshard.cli.forms import read_ends
from reshard.cli.output import listener, totals_json, totals_words
from reshard.convert import Options, Summary, usable_cpus
from reshard.plan.request import Request
from reshard.strategies import Strategy
from reshard.target import FileId
from reshard.text.messages import listing
from reshard.text.name_filters import Filters
from reshard.text.report import Report
from reshard.text.wording import plural

# Where the time went is told of conversions that took so long, in seconds; and which phases took any.
LEAST_TOTAL = 2.0
LEAST_SHOWN = 0.1


def request_between(
    src: str, dst: str, ranks: Optional[tuple[int, ...]], typed: Mapping[str, Any]
) -> tuple[Request, Report]:
    """What the options of a conversion ask for, and a report that has been told what was noted of strategies.

    Raises:
        ReshardError: options are missing or contradict each other, or a strategy cannot be read.
    """
    report = Report(listener(typed["quiet"]))
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
        edits=edits_of(src, typed),
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


def phases_line(summary: Summary, verifying: float = 0.0) -> list[str]:
    """Where the time went, as a line, if it took long and more than one phase took any.

    Args:
        summary: of a conversion.
        verifying: seconds that were spent on verification afterwards.
    """
    seconds = {**dataclasses.asdict(summary.phases), "verifying": verifying}
    shown = [f"{phase} {taken:.1f} s" for phase, taken in seconds.items() if taken >= LEAST_SHOWN]
    return [", ".join(shown)] if len(shown) > 1 and sum(seconds.values()) >= LEAST_TOTAL else []


def replicas_line(summary: Summary) -> list[str]:
    """How well the source strategy was tested against the files, as a line, if it says anything."""
    return [] if summary.replicas is None else [f"replicas: {summary.replicas}"]


def summary_json(summary: Summary) -> dict[str, Any]:
    """A summary as `--json` prints it."""
    said = {**dataclasses.asdict(summary), "kinds": totals_json(summary.kinds)}
    del said["target_files"]
    return said


def kinds_line(summary: Summary) -> list[str]:
    """What the files hold by kind, as a line, if they hold anything."""
    return [f"kinds: {totals_words(summary.kinds)}"] if summary.kinds else []


def summary_lines(summary: Summary, verbose: bool, files: str) -> list[str]:
    """What became, or would become, of the parameters, and where the manifest is.

    Args:
        summary: of a conversion.
        verbose: name every parameter.
        files: what the numbers of target files count: ``rank`` or ``file``.
    """
    lines = [f"{plural(summary.parameters, 'parameter')} resharded", *kinds_line(summary)]
    for names, what in (
        (summary.copied, "copied unchanged"),
        (summary.left_out, "left out, not in the target strategy"),
        (summary.missing, "missing, in the target strategy but in no source file"),
        (summary.unholdable, "left out, the target format cannot hold it"),
    ):
        if names:
            listed = listing(names, 3)
            lines.append(f"{len(names)} {what}: {listed.full if verbose else listed}")
    lines += replicas_line(summary)
    if summary.manifest:
        lines.append(f"all {files}s are there: {summary.manifest}")
    return lines
